"""results/README.md: claims, tables and figures of every scale that has results, from the stored JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from scripts.reproduction.claims import CLAIMS, claims_tables, text_table, verdicts
from scripts.reproduction.conclusions import conclusions
from scripts.reproduction.experiments import NUMBERS
from scripts.reproduction.freshness import LEGEND, changed_since, commits_of, is_fresh
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Item
from scripts.results_tables.elastic import bench_of, fair_table

TITLE = "The paper, table by table"
ABOUT = (
    "Made by scripts/reproduce.py from the JSON under results/: nothing is typed by hand.",
    "Perplexity is exp of the mean loss over the second half of the validation text, the first being what κ* is chosen "
    "on (over all of it in items measured before 25bcf70: a table says its tokens); beside it, where a table has it, "
    "stands the legacy figure of the field, the mean of batch means with batches + 1 in the denominator, so lower "
    "for fewer batches: those of 32 rows in the items, of 16 in the first table.",
    "A claim agrees only if all parts of its measure hold; where a part would hold by chance, as nothing is there that "
    "it is about, the claim is not shown. The limits are in scripts/reproduction/criteria.py: the paper's own numbers "
    "wherever it prints one. They were set, or made stricter, when results of nano and micro were known, and X and "
    "L + S of one seed of nano-20.",
    "At nano and micro all weights learn at one rate, the field's usual one. Later searches found slower projections "
    "far better for full-rank training and SALAAD alike (elastic/README.md): what is compared here holds at the one "
    "rate.",
    "Cuts by energy of commits before 42d0652 count every entry of a block alike, since checkpoints held no second "
    "moments of the optimizer then; those of later commits are weighed by them.",
)
BESIDE = {
    "demo/README.md": "the demo: trained and cut in minutes",
    "nano/README.md": "nano: the search for its settings, its models cut by every way to cut",
    "micro/README.md": "micro: what L + S costs at every size",
    "elastic/README.md": "one training at every size, beside small dense models and all other ways",
    "methods/README.md": "every way to train, beside one another",
    "admm/README.md": "the ADMM update: solvers of the singular-value threshold, balance over ranks",
    "bench/README.md": "training, inference and compression on the clock",
    "scaling/README.md": "predicted hours of the paper's trainings on GPUs",
    "reliability.md": "what a training run survives, and the seconds to recover",
}

FAIR = "nano-20"  # the scale whose table of all methods opens the report
# Scales at which the claims are judged; others join once there are results of them.
JUDGED = ("nano", "nano-20", "micro", "micro-20")

Result = Mapping[str, Any]


def write_report(results: Path, items: Sequence[Item], scales: Sequence[Scale]) -> Path:
    """Write README.md into the folder of all results, from the JSON that lies there; return its path."""
    found = {scale: read_results(folder_of(results, scale), items) for scale in scales}
    judged = [scale for scale in scales if found[scale] or scale.name in JUDGED]
    measured = {scale: result for scale, result in found.items() if result}
    readme = results / "README.md"
    readme.write_text(markdown(results, items, judged, measured))
    return readme


def folder_of(results: Path, scale: Scale) -> Path:
    """Return the folder of a scale's results."""
    return results / scale.name / "reproduce"


def read_results(folder: Path, items: Sequence[Item]) -> dict[str, Result]:
    """Return item → result, of the items whose result is there, in the order of `items`."""
    paths = {item.name: folder / f"{item.name}.json" for item in items}
    return {name: read_json(path) for name, path in paths.items() if path.exists()}


def facts(result: Result) -> list[str]:
    """Return the origin of an item's numbers, one line each: command, hub command, commit and machine, trainings."""
    trainings = result["trainings"]
    told = [f"made by: `{result['command']}`, anew with `--again`"]
    told += [f"needs a model from the hub: `{result['hub']}`"] if result["hub"] else []
    changed = changed_since(result["commit"])
    since = f"; since then changed: {', '.join(changed)}" if changed else ""
    told.append(f"measured at: commit {result['commit']}, {result['machine']}{since}")
    if trainings:
        tokens, hours = (sum(one[key] for one in trainings) for key in ("tokens", "hours"))
        machines = "; ".join(dict.fromkeys(one["machine"] for one in trainings))
        told.append(f"trained: {len(trainings)} runs, {tokens / 1e6:,.1f} M tokens, {hours:.2f} h, on {machines}")
    return told


def outdated_note(measured: Mapping[str, Result]) -> str:
    """Return a sentence that names the items with numbers from code that has changed since or was not committed."""
    old = [name for name, result in measured.items() if not is_fresh(commits_of(result))]
    if not old:
        return "All items were measured with the code as it is."
    return (
        f"{len(old)} of {len(measured)} items, or trainings behind them, were measured before some of the code behind "
        f"them changed (each says what; `--again` measures anew), or with changes that were not committed: "
        f"{', '.join(old)}."
    )


def trainings_table(result: Result) -> str:
    """Return a Markdown table with a line per training: tokens, wall time, commit and command."""
    lines = [
        (one["name"], f"{one['tokens'] / 1e6:,.2f} M", f"{one['hours']:.2f} h", one["commit"], f"`{one['command']}`")
        for one in result["trainings"]
    ]
    return text_table(("training", "tokens", "wall time", "commit", "command"), lines)


def glance(results: Path, scales: Sequence[Scale]) -> str:
    """Claim by scale: yes, no, not shown, or not measured; with a mark where the code has changed since."""
    columns = [verdicts(scale, folder_of(results, scale)) for scale in scales]
    lines = [
        (claim.name, *(verdict.answer for verdict in row))
        for claim, *row in zip(CLAIMS, *([verdict for _, verdict in column] for column in columns), strict=True)
    ]
    once = [scale.name for scale in scales if len(scale.seeds) == 1]
    told = (
        "Judged on trainings with the paper's way to draw X, to the end; above and below stands what we recommend too. "
        f"One seed at {', '.join(once)}. {LEGEND}"
    )
    return f"{text_table(('claim', *(scale.name for scale in scales)), lines)}\n\n{told}"


def fair(results: Path) -> list[str]:
    """The table of all methods at the paper's tokens per parameter, and its picture; nothing before it is measured."""
    measured = results / "elastic" / f"{FAIR}.json"
    if not measured.exists():
        return []
    table = fair_table(read_json(measured)["rows"], bench_of(results, FAIR), is_fresh)
    picture = f"![Perplexity over parameters of every way to a smaller model](elastic/{FAIR}.png)"
    return [f"## Methods at the paper's tokens per parameter ({FAIR})", table, picture]


def markdown(
    results: Path, items: Sequence[Item], judged: Sequence[Scale], found: Mapping[Scale, Mapping[str, Result]]
) -> str:
    """The whole report as Markdown.

    Args:
        results: folder of all results.
        items: the items of the paper.
        judged: scales that have a column in the table of claims.
        found: scale → item → result, of the scales that have any.
    """
    parts = [f"# {TITLE}", *fair(results), "## The claims at a glance", glance(results, judged)]
    if said := conclusions(results):
        parts += ["## What to conclude", "\n".join(f"- {sentence}" for sentence in said)]
    parts += ["## How to read it", " ".join(ABOUT), "Beside it:"]
    parts.append("\n".join(f"- [{path}]({path}): {what}" for path, what in BESIDE.items()))
    for scale, measured in found.items():
        parts += [f"## {scale.name}", outdated_note(measured)]
        parts += [f"### {scale.name}: the claims", claims_tables(scale, folder_of(results, scale))]
        for result in measured.values():
            parts += markdown_item(result, scale)
        if missing := [item for item in items if item.name not in measured]:
            commands = [f"- {item.title}: `{item.command(scale)}`" for item in missing]
            parts += [f"### {scale.name}: not measured yet", "\n".join(commands)]
    return "\n\n".join(parts) + "\n"


def markdown_item(result: Result, scale: Scale) -> list[str]:
    """Return the Markdown of one item: heading, tables, pictures, notes and origin."""
    parts = [f"### {scale.name}: {result['title']} ({result['section']})"]
    for caption, table in result["tables"].items():
        parts += [f"**{plain(caption)}**", table]
    for caption, name in result["pictures"].items():
        parts += [f"![{plain(caption)}]({scale.name}/reproduce/{name})", plain(caption)]
    if result["item"] in NUMBERS:
        numbers = NUMBERS[result["item"]](result["rows"])
        parts.append(text_table(("in all", "ours"), [(number.what, number.ours) for number in numbers]))
    elif result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    parts.append("\n".join(f"- {fact}" for fact in facts(result)))
    if result["trainings"]:
        parts.append(f"<details><summary>the trainings</summary>\n\n{trainings_table(result)}\n\n</details>")
    return parts


def plain(caption: str) -> str:
    """Return a caption with its stars, as in κ*, escaped for Markdown."""
    return caption.replace("*", r"\*")
