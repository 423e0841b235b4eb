"""The report of the reproduction, from made-up results."""

import json
import re
import subprocess
from copy import deepcopy

import pytest

from scripts.reproduction import freshness, report, scale_page
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.claims import CLAIMS, claims_table
from scripts.reproduction.diagrams import overview
from scripts.reproduction.experiments import NUMBERS, by_size
from scripts.reproduction.grid import SCALES
from scripts.reproduction.items import Item
from scripts.reproduction.report import write_report
from tests.helpers.reproduced import NANO, robust


def made_up(item, rows: list[dict], picture) -> dict:
    training = {
        "name": f"run of {item.name}",
        "command": f"python train.py --seed 1 --output runs/{item.name}",
        "commit": "abc123",
        "machine": "toy machine, 1 thread",
        "tokens": 2_000_000,
        "hours": 0.5,
    }
    return {
        "item": item.name,
        "title": item.title,
        "section": item.section,
        "scale": "nano",
        "command": item.command(NANO),
        "hub": item.hub,
        "versions": "none",
        "commit": "def456",
        "machine": "the measuring machine",
        "trainings": [training, training | {"name": f"other of {item.name}"}],
        "rows": rows,
        "tables": {f"caption <of> {item.name}": "first words\n\n| name | PPL |\n| ---- | --: |\n| **a<b** | 12.34 |"},
        "pictures": {f"picture of {item.name}": picture.name},
        "notes": [f"note of {item.name} & more"],
    }


def pages(results, scales=None) -> dict[str, str]:
    """Write the report, and return the text of its pages by their paths in the folder of results."""
    path = write_report(results, ITEMS, scales or list(SCALES.values()))
    assert path == results / "README.md"
    return {str(page.relative_to(results)): page.read_text() for page in results.rglob("*.md")}


def link(claim: int) -> str:
    """A claim in the table of claims, as a link to its heading."""
    words = "".join(letter for letter in CLAIMS[claim].name.lower() if letter.isalnum() or letter in " -")
    return f"[{CLAIMS[claim].name}](claims.md#{words.replace(' ', '-')})"


@pytest.fixture
def results(tmp_path, rows, monkeypatch):
    """A folder of results at nano in which one item is missing, all of commits since which nothing has changed.

    The made-up trainings count as those that the items need, and as not repeated.
    """
    monkeypatch.setattr(freshness, "changed_since", lambda commit: [])
    monkeypatch.setattr(Item, "outdated", lambda *_: False)
    monkeypatch.setattr(Item, "is_of_others", lambda *_: False)
    folder = tmp_path / "results" / "nano" / "reproduce"
    folder.mkdir(parents=True)
    rows |= {
        "kappa_share": [{"share": 0.5, "kappa": 0.5}],
        "rpca_limit": [robust("true", (0.1, 0.1), (0.1, 0.1))],
        "embedding_why": [{"setting": "as in Table 1", "rank_ratio": 0.6, "density": 0.5, "X": 100.0}],
    }
    for item in ITEMS:
        picture = folder / f"{item.name}.png"
        picture.touch()
        if item.name != "downstream":
            kept = made_up(item, deepcopy(rows.get(item.name, [])), picture)
            (folder / f"{item.name}.json").write_text(json.dumps(kept))
    return tmp_path / "results"


def test_the_report_holds_everything_that_was_measured(results):
    written = pages(results)
    assert written.keys() == {"README.md", "claims.md", "nano/reproduce/README.md"}
    text = written["nano/reproduce/README.md"]
    for item in ITEMS:
        assert item.title in text and item.command(NANO) in text
        if item.name != "downstream":
            for said in ("caption <of> {}", "picture of {}", "run of {}", "--output runs/{}"):
                assert said.format(item.name) in text
            assert (f"note of {item.name} & more" in text) == (item.name not in NUMBERS)
    assert "| their κ* | 0.5 |" in text
    for claim in CLAIMS:
        assert all(said in written["claims.md"] for said in (claim.name, claim.statement, claim.measure, claim.paper))
        assert claim.name in text and claim.name in written["README.md"]
    assert "| PPL of L + S | 99.35 ± 0.65 |" in text
    for said in ("needs a model from the hub", "def456", "the measuring machine", "2 runs, 4.0 M tokens, 1.00 h"):
        assert said in text
    assert text.count("12.34") == len(ITEMS) - 1
    assert text.index(CLAIMS[0].name) < text.index("caption <of>")


def test_a_training_behind_several_items_is_listed_once(results):
    folder = results / "nano" / "reproduce"
    table, embedding = (json.loads((folder / f"{name}.json").read_text()) for name in ("table1", "embedding"))
    again = table["trainings"][0] | {"commit": "repeated"}
    (folder / "embedding.json").write_text(json.dumps(embedding | {"trainings": [table["trainings"][0], again]}))
    listed = pages(results)["nano/reproduce/README.md"].split("## The trainings")[1].splitlines()
    lines = [line for line in listed if line.startswith("| run of table1 |")]
    assert [line.split(" | ")[1] for line in lines] == ["table1, embedding", "embedding"]
    assert "abc123" in lines[0] and "repeated" in lines[1]


def test_the_report_says_what_changed_since_an_item_was_measured(results, monkeypatch):
    kept = json.loads((results / "nano" / "reproduce" / "table1.json").read_text())
    changed = {kept["commit"]: ["train.py", "salaad/data"], kept["trainings"][0]["commit"]: ["salaad/common"]}
    monkeypatch.setattr(freshness, "changed_since", lambda commit: changed.get(commit, []))
    text = pages(results)["nano/reproduce/README.md"]
    assert "- changed since its commit or one of its trainings': train.py, salaad (common, data)\n" in text
    assert "table1" in text.split("were measured before some of the code")[1]
    del changed[kept["commit"]]  # an item whose trainings alone are old says so too
    text = pages(results)["nano/reproduce/README.md"]
    assert "- changed since its commit or one of its trainings': salaad (common)\n" in text
    changed.clear()
    text = pages(results)["nano/reproduce/README.md"]
    assert "changed since" not in text and "All items were measured with the code as it is." in text
    monkeypatch.setattr(Item, "outdated", lambda item, *_: item.name in ("kappa", "time"))
    text = pages(results)["nano/reproduce/README.md"]
    assert "Trainings were repeated since, on another machine or commit: time, kappa." in text


def test_an_older_item_with_perplexities_says_that_they_are_of_the_whole_text(results, monkeypatch):
    for name, row in (("frequency", {"X": 1}), ("lm_head", {"X": 1}), ("hpa", {"rank": 1})):
        path = results / "nano" / "reproduce" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": [row], "commit": f"of {name}"}))
    monkeypatch.setattr(scale_page, "is_older", lambda commit, change: commit in ("of frequency", "of hpa"))
    told = pages(results)["nano/reproduce/README.md"].split("\n## ")
    of_all = [part.splitlines()[0] for part in told if "perplexities are over the whole validation text" in part]
    assert of_all == ["ADMM update frequency K/J (appendix)"]


def test_a_result_of_other_trainings_than_the_item_needs_is_marked(results, monkeypatch):
    """The settings of an item's trainings can change after it was measured, and their names with them."""
    monkeypatch.undo()
    monkeypatch.setattr(freshness, "changed_since", lambda commit: [])
    folder = results / "nano" / "reproduce"
    for item in ITEMS:
        path = folder / f"{item.name}.json"
        names = [run.name(NANO) for run in item.runs(NANO)]
        if item.name == "bf16":
            names = [name.replace("rho=", "rho=1") for name in names]
        if path.exists():
            kept = json.loads(path.read_text())
            kept["trainings"] = [kept["trainings"][0] | {"name": name} for name in names] if names else []
            path.write_text(json.dumps(kept))
    written = pages(results)
    sentence = "Measured on trainings with other settings than the item has now (§): bf16."
    assert sentence in written["nano/reproduce/README.md"]
    marked = [line for line in written["README.md"].splitlines() if line.startswith("| [") and "§" in line]
    assert len(marked) == 1 and "bfloat16" in marked[0]


def test_the_code_that_computes_a_number_is_looked_at():
    assert all((freshness.ROOT / place).exists() for place in freshness.BEHIND)
    for module in {item.measure.__module__ for item in ITEMS}:
        assert f"{module.replace('.', '/')}.py" in freshness.BEHIND


def test_a_verdict_from_a_training_with_uncommitted_changes_is_marked(results):
    path = results / "nano" / "reproduce" / "table1.json"
    kept = json.loads(path.read_text())
    kept["trainings"][0]["commit"] += "-dirty"
    path.write_text(json.dumps(kept))
    written = pages(results)
    text = written["README.md"]
    assert f"| {link(0)} | yes ‡ | not measured |" in text and f"| {link(3)} | yes | not" in text
    assert "\n\n‡: measured or trained with changes that were not committed.\n" in text and "†" not in text
    text = written["nano/reproduce/README.md"]
    assert (
        "of 22 items" not in text
        and "not committed (‡): table1." in text
        and f"| **{CLAIMS[0].name}**: yes ‡ |" in text
    )


def test_where_everything_is_older_than_the_code_a_sentence_stands_for_the_marks():
    old, new, dirty = "†", "", "‡"
    told = ["†: measured before some of the code behind it changed."]
    assert freshness.with_legend([old, new], "row") == ([" †", ""], told)
    [sentence] = (found := freshness.with_legend([old, old], "row"))[1]
    assert found[0] == ["", ""] and sentence == freshness.ALL_CHANGED.format("row")
    marks, [first, second] = freshness.with_legend([old, old + dirty], "row")
    assert marks == ["", " ‡"] and first == sentence and second.startswith("‡: measured or trained with changes")
    marks, [first] = freshness.with_legend([dirty, dirty], "row")  # of code that may have changed, or not
    assert marks == [" ‡", " ‡"] and first == second
    assert freshness.with_legend([new, new], "row") == (["", ""], []) and freshness.with_legend([], "row") == ([], [])


def test_only_what_computes_something_else_counts_as_changed(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    def committed(text: str, config: str) -> str:
        (tmp_path / "train.py").write_text(text)
        (tmp_path / "configs" / "nano.yaml").write_text(config)
        (tmp_path / "salaad" / "common" / "budgets.py").write_text(text)
        git("add", ".")
        git("commit", "-qm", "more")
        freshness.changed_since.cache_clear()
        freshness._meaning.cache_clear()
        return git("rev-parse", "--short", "HEAD").strip()

    monkeypatch.setattr(freshness, "ROOT", tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "salaad" / "common").mkdir(parents=True)
    git("init", "-q")
    first = committed('def f():\n    """Old."""\n    return 1\n', "lr: 1\n")
    second = committed('def f():\n    """New."""\n    return 1  # one\n', "lr: 1  # of Adam\n")
    assert freshness.mark_of([first, second]) == "" and freshness.mark_of([second, f"{second}-dirty"]) == "‡"
    committed('def f():\n    """New."""\n    return 2\n', "lr: 2\n")
    assert freshness.changed_since(first) == ["train.py", "configs", "salaad/common"]
    assert freshness.mark_of([second]) == "†"
    assert freshness.changed_since("no-such-commit") == [freshness.UNKNOWN]
    assert freshness.mark_of(["no-such-commit"]) == "†"
    assert freshness.is_older(first, second) and freshness.is_older(f"{first}-dirty", second)
    assert not freshness.is_older(second, second) and not freshness.is_older("no-such-commit", second)
    freshness.changed_since.cache_clear()
    freshness._meaning.cache_clear()


def test_pictures_and_links_of_the_report_are_where_it_points(results):
    written = pages(results, [NANO])
    for path, text in written.items():
        folder = (results / path).parent
        shown = [folder / one for one in re.findall(r"^!\[.*\]\((.*)\)$", text, re.MULTILINE)]
        assert len(shown) == (len(ITEMS) - 1 if path.startswith("nano") else 0) and all(one.exists() for one in shown)
    opened = re.findall(r"^- \[.*\]\((.*)\)", written["README.md"], re.MULTILINE)
    assert set(opened) == {*written, *report.PAGES} - {"README.md"}


def test_two_scales_have_a_page_each_and_one_table_of_claims(results, rows):
    folder = results / "micro" / "reproduce"
    folder.mkdir(parents=True)
    (folder / "table1.json").write_text((results / "nano" / "reproduce" / "table1.json").read_text())
    written = pages(results)
    text, micro = written["README.md"], written["micro/reproduce/README.md"]
    assert text.index("(nano/reproduce/README.md)") < text.index("(micro/reproduce/README.md)")
    assert f"| {link(0)} | yes | not measured | yes | not measured |" in text  # nano, nano-20, micro, micro-20
    assert f"| {link(3)} | yes | not measured | not measured | not measured |" in text
    assert "not measured yet | `python scripts/reproduce.py --scale micro flexible`" in micro
    missing = micro[micro.index("## Not measured yet") :]
    assert "--scale micro kappa`" in missing and "--scale micro cost`" not in missing  # `cost` trains nothing


def test_sentences_without_anything_to_name_are_left_out(results):
    text = pages(results, [NANO])["README.md"]
    assert "one seed at" not in text and "we recommend too.\n\n## What" in text  # nano has three seeds
    assert "among the blocks; so has Table 1 at nano. The paper's" in text
    (results / "nano").rename(results / "350m")
    text = pages(results, [SCALES["350m"]])["README.md"]
    assert "The claims rest on one seed at 350m; those on" in text
    assert "*SALAAD, as in the paper* has the embedding among the blocks. The paper's" in text


def test_every_line_of_the_table_of_claims_has_as_many_cells(results):
    lines = claims_table(NANO, results / "nano" / "reproduce").splitlines()
    assert sum(line.startswith("| **") for line in lines) == len(CLAIMS)
    assert {line.count(" | ") for line in lines} == {4}


def test_the_overviews_are_diagrams_that_github_draws():
    tables = overview(NANO).tables
    assert list(tables) == ["pretraining", "deployment"]
    for text in tables.values():
        kind, *lines, end = text.splitlines()
        assert (kind, end) == ("```mermaid", "```") and lines[0].startswith("flowchart")
        assert sum(line.strip().startswith("subgraph") for line in lines) == lines.count("  end")


def test_a_size_above_l_plus_s_is_left_out_of_the_table_by_size():
    """At the paper's scales L + S is smaller than the largest budgets, which then cut nothing."""
    rows = [
        {"label": label, "parameters": parameters, "perplexity": perplexity}
        for label, parameters, perplexity in (("SALAAD", 100, 9.0), ("SALAAD", 80, 9.5), ("dense", 90, 9.2))
    ]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in by_size(rows, [100, 90, 80]).splitlines()]
    assert [line[1:] for line in lines[2:]] == [["9.00", "–"], ["–", "9.20"], ["9.50", "–"]]
