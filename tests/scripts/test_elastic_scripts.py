"""The scripts behind results/elastic: the split of a budget against all splits, and a comparison that resumes."""

import copy
import itertools
import json
import math
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from salaad.model.parameters import count_parameters
from scripts import bench_training, compare_elastic, elastic_trainings, elastic_ways
from scripts.compare_methods import Rates
from scripts.measured_text import MeasuredText
from scripts.outlines import outline_of
from scripts.research.probe_allocation import dealt
from scripts.results_tables import RESULTS, row_commands
from scripts.results_tables.measured import REPORTED, rows_of
from scripts.shares import NAMED
from tests.helpers.deploying import compress
from tests.helpers.training import train_here


@pytest.mark.parametrize("seed", range(5))
def test_a_budget_is_dealt_as_well_as_by_trying_everything(seed):
    draw = random.Random(seed)
    costs = {name: [(p, draw.random() / p) for p in (10, 20, 40, 80)] for name in "abcd"}
    budget = draw.choice((60, 151, 203))
    found = dealt(costs, budget)
    assert sum(costs[name][i][0] for name, i in found.items()) <= budget
    room = 0.97 * budget  # `dealt` rounds every probe's parameters up to whole 400ths of the budget
    tried = (dict(zip(costs, choice, strict=True)) for choice in itertools.product(range(4), repeat=4))
    fitting = [c for c in tried if sum(costs[name][i][0] for name, i in c.items()) <= room]
    loss = {id(c): sum(costs[name][i][1] for name, i in c.items()) for c in (*fitting, found)}
    assert loss[id(found)] <= min(loss[id(c)] for c in fitting) + 1e-12


def test_a_comparison_measures_every_size_and_keeps_what_is_there(toy, text_files, tmp_path, monkeypatch, capsys):
    output = tmp_path / "elastic.json"
    words = ["compare_elastic.py", "--config=nano", "--rows=SALAAD;matformer", f"--runs={tmp_path / 'runs'}"]
    words += [f"--output={output}", "--tokens=2000", "--salaad=--salaad.release=0.5"]
    words.append(f"--other-text={text_files['validation'][0]}")
    monkeypatch.setattr(sys, "argv", [*words, *toy(train__steps=4, salaad__embedding="true")])
    monkeypatch.setattr(elastic_ways, "MATCH", 8)
    train_here(monkeypatch)
    compare_elastic.main()
    rows = {row["label"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {"SALAAD", "matformer"}
    ways = rows["SALAAD"]["ways"]
    for way in ("cut", "cut, head", "head, tuned"):
        assert [row["share"] for row in ways[way]] == elastic_ways.all_shares()
        assert ways[way][-1]["parameters"] <= 1.02 * ways["cut"][-1]["parameters"]  # about as large in every way
        for size in ways[way]:  # the same text whole, and its second half
            assert ("other_perplexity" in size) == (size["share"] in NAMED)
            assert size.get("other_perplexity", size["perplexity"]) == pytest.approx(size["perplexity"], rel=0.2)
            assert ("in_context" in size) == (size["share"] in NAMED)
            if "in_context" in size:  # both kinds of tokens together are all tokens
                kinds = [size["in_context"][kind] for kind in ("copied", "other")]
                mean = sum(loss * count for loss, count in kinds) / sum(count for _, count in kinds)
                assert math.exp(mean) == pytest.approx(size["perplexity"], rel=1e-5)
    for way, cut in (("tuned, each", "cut"), ("head, tuned, each", "cut, head")):
        assert [row["share"] for row in ways[way]] == list(NAMED)
        counted = {row["share"]: row["bytes"] for row in ways[cut]}
        for row in ways[way]:  # a file of the same ranks and counts, with a longer header
            assert counted[row["share"]] < row["bytes"] < counted[row["share"]] + 20_000
    for row in (row for row in ways["head, tuned"] if row["share"] in NAMED):  # one of the sizes of a folder, alone
        folder, alone = tmp_path / "runs" / "SALAAD-0" / "elastic-head", tmp_path / f"alone-{row['share']}"
        compress(folder, alone, budget=row["parameters"], dtype="float32")
        assert row["bytes"] == (alone / "model.safetensors").stat().st_size
    widths = json.loads((tmp_path / "runs" / "matformer-0" / "summary.json").read_text())["variants"]
    narrower = {row["parameters"] for name, row in widths.items() if name != "X" and "+" not in name}
    assert narrower <= {size["parameters"] for size in rows["matformer"]["ways"]["nested"]}
    costs = rows["SALAAD"]["costs"]
    # Two folders of one size; one of three ranges, each of which reads the same text and learns two sizes per step.
    assert costs["head, tuned, each"]["tokens"] == 2 * costs["head, tuned"]["tokens"] > 0
    assert costs["head, tuned"]["operations"] > 1.5 * costs["head, tuned, each"]["operations"]
    small, large = rows["SALAAD"]["samples"]["head, tuned"]
    assert small["text"].startswith(elastic_ways.BEGINNING) and large["text"].startswith(elastic_ways.BEGINNING)
    assert "--salaad.release=0.5" in rows["SALAAD"]["command"] and "release" not in rows["matformer"]["command"]
    model = elastic_ways.TrainedModel(tmp_path / "runs" / "SALAAD-0", 2000, 0)
    monkeypatch.setattr(elastic_ways, "KAPPAS", (0.3, 0.7))
    for (share, whole), (_, split) in zip(*map(elastic_ways.by_hpa, (model, model), (False, True)), strict=True):
        budget = dict(elastic_ways.budgets_of(model))[share]  # counts the head whole in both
        assert 0.98 * budget < min(whole["parameters"], split["parameters"])
        assert max(whole["parameters"], split["parameters"]) <= budget
        assert split["variant"] == f"{budget}@{split['kappa']:g}" and split["perplexity"] != whole["perplexity"]
    run = subprocess.run  # also git's, for the provenance
    monkeypatch.setattr(
        subprocess, "run", lambda words, **how: pytest.fail("trained") if "train.py" in words else run(words, **how)
    )
    compare_elastic.main()
    kept = json.loads(output.read_text())
    assert {row["label"]: row for row in kept["rows"]} == rows
    for row in kept["rows"]:  # a way that is missing is measured on the run that is there
        row["ways"].pop("cut", None)
    output.write_text(json.dumps(kept))
    compare_elastic.main()
    again = {row["label"]: row["ways"] for row in json.loads(output.read_text())["rows"]}
    assert again == {label: row["ways"] for label, row in rows.items()}
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--train.eval_every=2"])  # evaluated at other steps, trained the same
    compare_elastic.main()
    for row in kept["rows"]:
        row["ways"].pop("head, tuned", None)
    output.write_text(json.dumps(kept))
    listing = [*sys.argv, "--list", "--seeds=0,1", "--repeated=SALAAD"]
    monkeypatch.setattr(sys, "argv", listing)
    capsys.readouterr()
    compare_elastic.main()
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[2:]]
    assert [line[:3] for line in lines] == [
        ["SALAAD", "0", "cut; head, tuned"],
        ["SALAAD", "1", "; ".join(["train", *rows["SALAAD"]["ways"]])],
        ["matformer", "0", "–"],
    ]
    monkeypatch.setattr(sys, "argv", listing[:-3])
    output.write_text(json.dumps(kept))
    monkeypatch.setattr(elastic_ways, "MATCH", 9)
    with pytest.raises(UserError, match="elastic-head was made with another match; move it away"):
        compare_elastic.main()
    monkeypatch.setattr(sys, "argv", [word.replace("release=0.5", "release=0.25") for word in sys.argv])
    with pytest.raises(
        UserError, match=r"SALAAD was measured with --config nano .*release=0.5.*; give another --output"
    ):
        compare_elastic.main()


def test_dense_models_have_the_sizes_of_methods_that_store_factors():
    """nano has width 128, feed-forward width 344, 4 layers, 4096 tokens; the rank is 32, SLTrain's density 0.03."""
    every = elastic_trainings.trainings("nano", (), elastic_trainings.Settings((), {}, (), {}))
    sizes = {one.label: one.words[-1] for one in every if one.label.startswith("dense")}
    whole = 2 * 4096 * 128 + 9 * 128
    factors = 4 * 32 * (4 * (128 + 128) + 3 * (128 + 344))
    entries = 4 * (4 * int(0.03 * 128 * 128) + 3 * int(0.03 * 128 * 344))
    assert sizes["dense, as loro"] == f"--model.parameters={whole + factors}"
    assert sizes["dense, as sltrain"] == f"--model.parameters={whole + factors + entries}"


def test_small_dense_models_can_have_settings_of_their_own():
    own = {"dense, 0.5": ("--optimizer.lr=2e-3",)}
    settings = elastic_trainings.Settings(("--optimizer.lr=1e-3",), own, (), {})
    every = elastic_trainings.trainings("nano", (), settings)
    of_dense = {
        one.label: read_command_line(["--config=nano", *one.words])[0].optimizer.lr
        for one in every
        if one.label.startswith(("dense", "SALAAD")) or one.label == "full-rank"
    }
    assert len(of_dense) == 9
    assert of_dense == {label: 2e-3 if label == "dense, 0.5" else 1e-3 for label in of_dense}


def test_full_rank_training_has_a_row_with_the_rates_of_its_search_too():
    rates = {name: Rates(0.01 + i, 0.5) for i, name in enumerate(("full_rank", "salaad", "galore"))}
    settings = elastic_trainings.Settings(("--optimizer.lr=1e-3",), {}, (), rates)
    every = {one.label: one.words for one in elastic_trainings.trainings("nano", (), settings)}
    config, _ = read_command_line(["--config=nano", *every["full-rank, as searched"]])
    assert (config.method, config.optimizer.lr, config.optimizer.projection_lr) == ("full_rank", 0.01, 0.5)
    assert {"galore"} == every.keys() & rates.keys()


def test_a_full_rank_model_is_split_in_two_ways_and_cut_to_the_same_sizes(toy, tmp_path, monkeypatch):
    output, ways = tmp_path / "elastic.json", ("rpca, head", "godec, head", "godec, head, tuned, each")
    words = ["compare_elastic.py", "--config=nano", "--rows=full-rank", f"--ways={';'.join(ways)}"]
    monkeypatch.setattr(elastic_ways, "MATCH", 8)
    monkeypatch.setattr(
        sys,
        "argv",
        [*words, f"--runs={tmp_path / 'runs'}", f"--output={output}", "--tokens=2000", *toy(train__steps=4)],
    )
    train_here(monkeypatch)
    compare_elastic.main()
    [row] = json.loads(output.read_text())["rows"]
    assert set(row["commits"]) == set(ways) and set(row["commits"].values()) == {row["commit"]}
    assert list(row["ways"]) == list(ways) and set(row["costs"]) == {"train", "godec, head, tuned, each"}
    sizes = [{size["share"]: size["parameters"] for size in row["ways"][way]} for way in ways]
    for share, parameters in sizes[0].items():
        for other in sizes[1:]:
            assert other.get(share, parameters) == pytest.approx(parameters, rel=0.02)


@pytest.fixture
def comparison(tmp_path, monkeypatch) -> compare_elastic.Comparison:
    """A comparison whose trainings are there, of commit "new", and cannot be measured."""
    about = {"command": "--config nano", "commit": "new", "machine": "here"}
    monkeypatch.setattr(compare_elastic, "trained", lambda *_: (about, {"tokens": 9}))
    monkeypatch.setattr(compare_elastic, "config_of", lambda folder: {})
    (tmp_path / "full-rank-0").mkdir()
    (tmp_path / "full-rank-0" / "config.yaml").write_text("# commit: new\n# machine: here\n")
    (tmp_path / "full-rank-0" / "summary.json").write_text("{}")
    return compare_elastic.Comparison("nano", tmp_path, (), tokens=2000)


@pytest.mark.parametrize(
    ("there", "other"), [(True, {"commit": "old"}), (True, {"machine": "there"}), (True, {}), (False, {})]
)
def test_a_row_of_another_run_is_not_completed_and_said_to_be_before_anything_is_trained(comparison, there, other):
    row = {"label": "full-rank", "seed": 0, "commit": "new", "machine": "here", "ways": {"rpca": []}} | other
    if not there:
        (comparison.runs / "full-rank-0" / "summary.json").unlink()
    rows = {("full-rank", 0): row}
    for ways, left in ((("rpca", "godec"), True), (("rpca",), False)):
        todo = [(elastic_trainings.Training("full-rank", (), ways), seed) for seed in (0, 1)]
        said = compare_elastic.measured_elsewhere(comparison, todo, rows)
        if left and (other or not there):
            assert said.startswith("there are ways left of full-rank (seed 0), but") and "other --rows" in said
        else:
            assert said is None


def test_the_script_refuses_a_row_of_another_run_and_its_list_says_so(tmp_path, monkeypatch, capsys):
    recorded = compare_elastic.ROOT / "results" / "elastic" / "nano.json"
    (tmp_path / "nano.json").write_text(recorded.read_text())
    monkeypatch.setattr(compare_elastic, "trained", lambda *_: pytest.fail("trained"))
    dense = "--dense=--optimizer.lr=1.2e-2 --optimizer.projection_lr=0.2 --optimizer.betas=[0.9,0.999]"
    words = ["compare_elastic.py", dense, f"--runs={tmp_path}", f"--output={tmp_path / 'nano.json'}"]
    rows = json.loads(recorded.read_text())["rows"]
    rows[0]["ways"].pop("rpca")
    (tmp_path / "nano.json").write_text(json.dumps({**json.loads(recorded.read_text()), "rows": rows}))
    monkeypatch.setattr(sys, "argv", [*words, "--list"])
    compare_elastic.main()
    [line] = [line for line in capsys.readouterr().out.splitlines() if "rpca (of a run that is not here)" in line]
    assert line.startswith("| full-rank ")
    monkeypatch.setattr(sys, "argv", [*words, "--ways=rpca;hpa"])
    with pytest.raises(UserError, match=r"there are ways left of full-rank \(seed 0\), but"):
        compare_elastic.main()


def test_rows_of_another_text_or_of_another_number_of_its_tokens_are_refused(toy, text_files, tmp_path):
    def text_of(tokens: int, other_text: str, **overrides: str) -> MeasuredText:
        return MeasuredText.of(read_command_line(["--config=nano", *toy(**overrides)])[0], tokens, other_text)

    first, second = text_files["train"][:2]
    ours = text_of(2000, first)
    row = {"label": "SALAAD", "seed": 0, "X": {"tokens": ours.tokens}, "text": ours.digests}
    ours.require_behind([row, row | {"text": {}}])
    with pytest.raises(
        UserError, match=r"SALAAD of seed 0 was measured on [\d,]+ tokens, but .* --tokens make [\d,]+;"
    ):
        text_of(1000, first).require_behind([row | {"text": {}}])  # as in rows of older versions
    with pytest.raises(UserError, match="SALAAD of seed 0 has other second text than are given"):
        text_of(2000, second).require_behind([row])
    changed = tmp_path / Path(text_files["validation"][0]).name  # of the same name, size and number of tokens
    changed.write_text("\n".join(reversed(Path(text_files["validation"][0]).read_text().splitlines())) + "\n")
    with pytest.raises(UserError, match="SALAAD of seed 0 has other validation files than"):
        text_of(2000, first, data__validation_files=f"['{changed}']").require_behind([row | {"X": {"tokens": 0}}])


def test_a_row_whose_measurement_breaks_off_is_left_empty(comparison, monkeypatch):
    """Another job may write all rows in the meantime, and a row that is there counts as measured."""

    def killed(*_) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare_elastic.Comparison, "figures", killed)
    row = {}
    with pytest.raises(KeyboardInterrupt):
        comparison.complete(elastic_trainings.Training("full-rank", (), ()), 0, row, pytest.fail)
    assert row == {}


def test_a_way_whose_measurement_breaks_off_is_not_there(comparison, monkeypatch):
    """The samples come last; a way that were there without them would count as measured."""

    def killed(*_) -> None:
        raise KeyboardInterrupt

    size = {"perplexity": 9.0, "parameters": 5}
    monkeypatch.setattr(compare_elastic, "WAYS", {"head, tuned": lambda model: [(0.5, size)]})
    monkeypatch.setattr(compare_elastic.TrainedModel, "costs_of", lambda *_: {})
    monkeypatch.setattr(compare_elastic, "budgets_of", lambda model: [(0.2, 5)])
    monkeypatch.setattr(compare_elastic, "samples", killed)
    comparison = replace(comparison, ways=("head, tuned",))
    row = {"label": "full-rank", "seed": 0, "commit": "new", "machine": "here", "ways": {}, "minutes": {"train": 1.0}}
    kept, training = copy.deepcopy(row), elastic_trainings.Training("full-rank", (), ("head, tuned",))
    with pytest.raises(KeyboardInterrupt):
        comparison.complete(training, 0, row, pytest.fail)
    assert row == kept
    monkeypatch.setattr(compare_elastic, "samples", lambda *_: ["a text"])
    comparison.complete(training, 0, row, dict.update)
    assert row["ways"] == {"head, tuned": [{"share": 0.5, **size}]} and row["samples"] == {"head, tuned": ["a text"]}
    assert set(row["minutes"]) == {"train", "head, tuned"} and set(row["commits"]) == {"head, tuned"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--rows=nothing"], "there is no row 'nothing'; give some of full-rank; SALAAD"),
        (["--repeated=nobody"], "there is no row 'nobody'"),
        (["--ways=cut;none"], "there is no way 'none'; give some of cut; tuned"),
        (["--seeds=a"], "--seeds is 'a'; give whole numbers"),
        (["--seeds=²"], "--seeds is '²'; give whole numbers"),
        (["--seeds="], "--seeds is ''; give whole numbers"),
        (["--search=nowhere.json"], "--search nowhere.json is no file"),
        (["--other-text=nowhere.jsonl"], "--other-text nowhere.jsonl is no file"),
        (["--jobs=0"], "--jobs is 0"),
    ],
)
def test_a_wrong_option_of_the_comparison_is_one_sentence_and_nothing_is_trained(monkeypatch, tmp_path, words, said):
    monkeypatch.setattr(compare_elastic, "trained", lambda *_: pytest.fail("trained"))
    monkeypatch.setattr(sys, "argv", ["compare_elastic.py", f"--output={tmp_path / 'found.json'}", *words])
    with pytest.raises(UserError, match=re.escape(said)):
        compare_elastic.main()


@pytest.mark.parametrize(
    "content",
    [
        [1],
        {"rows": []},
        {"config": "nano", "rows": [{"label": "SALAAD", "seed": 0}]},
        {"config": "nano", "methods": {"lora": {"over_full_rank": 1.0}}},
        {"config": "nano", "methods": ["lora"]},
    ],
)
def test_a_file_of_another_script_is_one_sentence_and_is_kept(monkeypatch, tmp_path, content):
    file = tmp_path / "other.json"
    file.write_text(json.dumps(content))
    for words, said in (
        ([f"--output={file}"], "other.json has no results of compare_elastic.py; give another --output"),
        ([f"--output={tmp_path / 'new.json'}", f"--search={file}"], "other.json has no results of compare_methods.py"),
    ):
        monkeypatch.setattr(sys, "argv", ["compare_elastic.py", "--list", *words])
        with pytest.raises(UserError, match=re.escape(said)):
            compare_elastic.main()
    assert json.loads(file.read_text()) == content


def test_rows_of_another_configuration_are_refused(monkeypatch, tmp_path):
    file = tmp_path / "micro.json"
    file.write_text(json.dumps({"config": "micro", "rows": []}))
    monkeypatch.setattr(sys, "argv", ["compare_elastic.py", "--list", f"--output={file}"])
    with pytest.raises(UserError, match=r"micro.json has results of --config micro; give another --output"):
        compare_elastic.main()


def test_a_training_costs_what_its_method_passes_through(tmp_path):
    words = ["--config", "nano", "--method", "cola", "--cola.rank", "16"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(read_command_line(words)[0].to_dict()))
    layer = 16 * (4 * (128 + 128) + 3 * (128 + 344))  # two factors of each of the seven projections
    passed = 4 * layer + 2 * 4096 * 128 + 9 * 128  # and embedding, head and norms
    per_token = 6 * passed + 12 * 4 * 128 * 256  # and the products of attention
    cost = elastic_ways.TrainedModel(tmp_path, tokens=1, text_tokens=1).training_cost(1000)
    assert cost == {"tokens": 1000, "operations": pytest.approx(1000 * per_token)}


def test_names_may_have_spaces_around_their_semicolons_as_in_the_list_of_what_is_left(tmp_path, monkeypatch, capsys):
    listed = []
    for between in (";", " ; "):
        rows, ways = between.join(("SALAAD", "full-rank")), between.join(("rpca, head", "head, tuned"))
        words = ["compare_elastic.py", f"--rows={rows}", f"--ways={ways}", f"--repeated={rows}", "--list"]
        monkeypatch.setattr(sys, "argv", [*words, f"--runs={tmp_path}", f"--output={tmp_path / 'elastic.json'}"])
        compare_elastic.main()
        listed.append(capsys.readouterr().out)
    assert listed[0] == listed[1]
    assert "rpca, head" in listed[1] and "head, tuned" in listed[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--small=--optimizer.lr=1", "--small-rows=full-rank"], "--small-rows names 'full-rank'"),
        (["--small=--optimizer.lr=1", "--small-rows=dense, 0.6"], "there is no row 'dense, 0.6'"),
        (["--small=--optimizer.lr=1"], "--small-rows ''; give both, or neither"),
    ],
)
def test_options_of_small_dense_models_need_their_labels(words, said, tmp_path, monkeypatch):
    output = f"--output={tmp_path / 'elastic.json'}"
    monkeypatch.setattr(sys, "argv", ["compare_elastic.py", *words, f"--runs={tmp_path}", output, "--list"])
    with pytest.raises(UserError, match=said):
        compare_elastic.main()


def test_the_command_of_each_row_trains_and_measures_what_the_row_has(tmp_path, monkeypatch, capsys):
    """Given the recorded rows, each command finds them trained with the settings it asks for, and nothing left."""
    recorded = RESULTS / "elastic" / f"{REPORTED}.json"
    rows, measured = rows_of(recorded), set()
    for label, (_, script, *words) in row_commands.commands(rows, REPORTED):
        assert script == "scripts/compare_elastic.py"
        words[words.index("--output") + 1] = str(recorded)
        monkeypatch.setattr(sys, "argv", [script, *words, "--list"])
        compare_elastic.main()
        lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
        assert lines[2:] and all(name == label and left == "–" for name, _, left, _ in lines[2:])
        asked = words[words.index("--ways") + 1].split(";") if "--ways" in words else []
        measured |= {(label, int(line[1]), way) for line in lines[2:] for way in [None, *asked]}
    assert measured == {(row["label"], row["seed"], way) for row in rows for way in [None, *row["ways"]]}


def test_the_command_of_step_times_builds_every_row_that_no_method_names(tmp_path, monkeypatch):
    """Each shape has the parameters that its row recorded, and SALAAD's settings are its row's."""
    rows = rows_of(RESULTS / "elastic" / f"{REPORTED}.json")
    found = {}
    monkeypatch.setattr(bench_training, "measure", lambda configs, *_: found.update(configs) or {"left_out": "a test"})
    _, _, *words, _, _ = row_commands.timing_command(rows, REPORTED)
    monkeypatch.setattr(sys, "argv", ["bench_training.py", *words])
    bench_training.main()
    asked = {row["label"]: row for row in rows if row["label"] == "SALAAD" or row["label"].startswith("dense, ")}
    assert found.keys() == {*SETTINGS, *asked}
    for label, row in asked.items():
        section = "salaad" if label == "SALAAD" else "model"
        assert found[label].to_dict()[section] == row["config"][section]
        assert count_parameters(outline_of(found[label])) == row["X"]["parameters"]
    assert not any(config.train.compile for config in found.values())
