"""results/README.md: claims, tables and figures of every scale that has results, from the stored JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from scripts.reproduction.claims import CLAIMS, claims_tables, text_table, verdicts
from scripts.reproduction.conclusions import conclusions
from scripts.reproduction.experiments import NUMBERS
from scripts.reproduction.freshness import BEHIND, LEGEND, changed_since, commits_of, is_fresh
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Item
from scripts.results_tables.elastic import bench_of, fair_table

TITLE = "The paper, table by table"
ABOUT = (
    "scripts/reproduce.py makes this page from the JSON files under results/; no number is typed by hand. Every item "
    "has its command, with which `--again` repeats the measurement.",
    "nano, nano-20, micro and micro-20 are small models with a text and a length of training (configs/); with -20, "
    "they see twenty training tokens per parameter.",
    "X stands for the dense weights as trained, L + S for their low-rank plus sparse surrogate, and L̃ + S̃ for that "
    "surrogate cut to a budget of parameters. *Vanilla* is full-rank training without SALAAD; *RPCA* (robust PCA) "
    "splits its weights into L + S after training. κ is the fraction of the removed parameters that is taken from L, "
    "and κ* the best κ of those tried.",
    "Perplexity (PPL) is exp of the mean loss over the second half of the validation text; κ* is chosen on the first "
    "half. Items measured before commit 25bcf70 use the whole text, and choose κ* on it too; notes below the tables "
    "tell the number of tokens. Tables of κ, and the demo's and nano's own pages, are of the text that chose κ*.",
    "*Legacy* perplexity, as older tables of the field have it, is exp of the batches' mean losses, summed and divided "
    "by the number of batches + 1. The fewer the batches, the lower it is. Batches have 32 rows in the items and 16 in "
    "the first table.",
    "A claim agrees only if all parts of its measure hold. It is *not shown* where a part was not recorded, or holds "
    "only because the thing that it is about is missing.",
    "The limits (scripts/reproduction/criteria.py) are the paper's own numbers wherever it prints one. They were set, "
    "or made stricter, when the results of nano and micro, and some of nano-20, were known.",
    "At nano and micro all weights have one learning rate, as is usual in the field. Later searches found that a lower "
    "rate for the projections is far better for full-rank training and SALAAD alike (elastic/README.md), so the "
    "comparisons at nano and micro hold for a single rate only.",
    "Cuts by energy weight every entry by the optimizer's second moments. Checkpoints before commit 42d0652 did not "
    "store these moments, so cuts measured before it weight all entries of a block equally.",
)
PAGES = {
    "demo/README.md": "the demo: a model trained and cut in minutes",
    "nano/README.md": "nano: the search for its settings, and its models cut in every way",
    "micro/README.md": "micro: what L + S costs at every size",
    "elastic/README.md": "one training cut to every size, compared with small dense models and all other methods",
    "methods/README.md": "all training methods compared",
    "admm/README.md": "the ADMM update: solvers of the singular-value threshold, balance over ranks",
    "bench/README.md": "time and memory of training, inference and compression",
    "gpu/nvidia-h200/README.md": "an H200: whether it computes what the CPU does",
    "kernels/README.md": "the GPU kernels: errors and registers, found without a GPU",
    "scaling/README.md": "predicted hours of the paper's trainings on GPUs",
    "reliability.md": "faults that a training run survives, and the time to recover",
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
    told = [f"made by: `{result['command']}`"]
    told += [f"for the paper's model (needs a model from the hub): `{result['hub']}`"] if result["hub"] else []
    changed = changed_since(result["commit"])
    what = "all code in the list of freshness.py" if len(changed) == len(BEHIND) else ", ".join(changed)
    since = f"; since then changed: {what}" if changed else ""
    told.append(f"measured at: commit {result['commit']}, {result['machine']}{since}")
    if trainings:
        tokens, hours = (sum(one[key] for one in trainings) for key in ("tokens", "hours"))
        machines = "; ".join(dict.fromkeys(one["machine"] for one in trainings))
        runs = "1 run" if len(trainings) == 1 else f"{len(trainings)} runs"
        told.append(f"trained: {runs}, {tokens / 1e6:,.1f} M tokens, {hours:.2f} h, on {machines}")
    return told


def outdated_note(measured: Mapping[str, Result]) -> str:
    """Return a sentence that names the items with numbers from code that has changed since or was not committed."""
    old = [name for name, result in measured.items() if not is_fresh(commits_of(result))]
    if not old:
        return "All items were measured with the code as it is."
    return (
        f"{len(old)} of {len(measured)} items, or trainings behind them, were measured before some of the code behind "
        "them changed, or with changes that were not committed: "
        f"{', '.join(old)}. Every item lists what has changed."
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
        "The claims are judged on trainings that, as in the paper, pull X towards L + S until the end. The first table "
        f"and the conclusions cover the settings that we recommend too. One seed at {', '.join(once)}. {LEGEND}"
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
    parts += ["## How to read it", "\n".join(f"- {line}" for line in ABOUT), "Other pages:"]
    parts.append("\n".join(f"- [{path}]({path}): {what}" for path, what in PAGES.items()))
    anywhere = set().union(*found.values())  # where an item that trains nothing is measured, it holds for all scales
    for scale, measured in found.items():
        parts += [f"## {scale.name}", outdated_note(measured)]
        parts += [f"### {scale.name}: the claims", claims_tables(scale, folder_of(results, scale))]
        for result in measured.values():
            parts += markdown_item(result, scale)
        missing = [item for item in items if item.name not in (measured if item.runs(scale) else anywhere)]
        if missing:
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
        parts.append(text_table(("summary", "ours"), [(number.what, number.ours) for number in numbers]))
    elif result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    parts.append("\n".join(f"- {fact}" for fact in facts(result)))
    if result["trainings"]:
        parts.append(f"<details><summary>the trainings</summary>\n\n{trainings_table(result)}\n\n</details>")
    return parts


def plain(caption: str) -> str:
    """Return a caption with its stars, as in κ*, escaped for Markdown."""
    return caption.replace("*", r"\*")
