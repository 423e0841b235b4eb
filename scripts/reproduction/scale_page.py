"""The page of one scale: the numbers behind its verdicts, its items with tables and pictures, and its trainings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.reproduction.claims import claims_table, text_table
from scripts.reproduction.experiments import NUMBERS
from scripts.reproduction.freshness import CHANGED, OTHERS, UNCOMMITTED, changes_text, commits_of, is_older, mark_of
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Item

Result = Mapping[str, Any]
HALVES = "25bcf70"  # the commit since which perplexities are of half of the validation text
PERPLEXITIES = {"perplexity", "X", "L+S"}  # names of the columns that have them


def scale_page(
    results: Path, scale: Scale, measured: Mapping[str, Result], items: Sequence[Item], anywhere: frozenset[str]
) -> str:
    """The page of one scale as Markdown.

    Args:
        results: folder of all results.
        scale: the scale.
        measured: item → result, of the items that have one here.
        items: the items of the paper.
        anywhere: names of the items that have a result at any scale; one that trains nothing holds for all scales.
    """
    parts = [
        f"# The paper, table by table: {scale.name}",
        "[All results](../../README.md) tells how to read this page.",
    ]
    parts += [outdated_note(scale, measured, items), "## The claims", "[What each says and needs](../../claims.md)."]
    parts.append(claims_table(scale, scale.results_in(results)))
    for result in measured.values():
        parts += markdown_item(result)
    missing = [item for item in items if item.name not in (measured if item.runs(scale) else anywhere)]
    if missing:
        commands = [f"- {item.title}: `{item.command(scale)}`" for item in missing]
        parts += ["## Not measured yet", "\n".join(commands)]
    if any(result["trainings"] for result in measured.values()):
        parts += ["## The trainings", trainings_table(measured)]
    return "\n\n".join(parts) + "\n"


def markdown_item(result: Result) -> list[str]:
    """Return the Markdown of one item: heading, tables, pictures, notes and origin."""
    parts = [f"## {result['title']} ({result['section']})"]
    for caption, table in result["tables"].items():
        parts += [f"**{plain(caption)}**", table]
    for caption, name in result["pictures"].items():
        parts += [f"![{plain(caption)}]({name})", plain(caption)]
    if result["item"] in NUMBERS:
        numbers = NUMBERS[result["item"]](result["rows"])
        parts.append(text_table(("summary", "ours"), [(number.what, number.ours) for number in numbers]))
    elif result["notes"]:
        parts.append("\n".join(f"- {note}" for note in result["notes"]))
    parts.append("\n".join(f"- {fact}" for fact in facts(result)))
    return parts


def facts(result: Result) -> list[str]:
    """Return the origin of an item's numbers, a line each: commands, commit and machine, trainings, later changes."""
    trainings = result["trainings"]
    told = [f"made by: `{result['command']}`"]
    told += [f"for the paper's model (needs a model from the hub): `{result['hub']}`"] if result["hub"] else []
    told.append(f"measured at: commit {result['commit']}, {result['machine']}")
    if is_older(result["commit"], HALVES) and any(PERPLEXITIES & row.keys() for row in result["rows"]):
        told.append("perplexities are over the whole validation text, on which any κ* was chosen too")
    if trainings:
        tokens, hours = (sum(one[key] for one in trainings) for key in ("tokens", "hours"))
        machines = "; ".join(dict.fromkeys(one["machine"] for one in trainings))
        runs = "1 run" if len(trainings) == 1 else f"{len(trainings)} runs"
        told.append(f"trained: {runs}, {tokens / 1e6:,.1f} M tokens, {hours:.2f} h, on {machines}")
    if changed := changes_text(commits_of(result)):
        since = "its commit or one of its trainings'" if trainings else "its commit"
        told.append(f"changed since {since}: {changed}")
    return told


def outdated_note(scale: Scale, measured: Mapping[str, Result], items: Sequence[Item]) -> str:
    """Return sentences that name the items with numbers from code, or of trainings, that are not those of today."""
    marks = {name: mark_of(commits_of(result)) for name, result in measured.items()}
    old, uncommitted = ([name for name in marks if mark in marks[name]] for mark in (CHANGED, UNCOMMITTED))
    told = [
        f"{len(old)} of {len(measured)} items, or trainings behind them, were measured before some of the code behind "
        f"them changed: {', '.join(old)}. Every item lists what has changed."
    ]
    told = told if old else []
    if uncommitted:
        told.append(
            f"Measured or trained with changes that were not committed ({UNCOMMITTED}): {', '.join(uncommitted)}."
        )
    mine = [item for item in items if item.name in measured]
    others = [item.name for item in mine if item.is_of_others(scale, measured[item.name])]
    repeated = [item.name for item in mine if item.name not in others and item.outdated(scale, measured[item.name])]
    if repeated:
        told.append(f"Trainings were repeated since, on another machine or commit: {', '.join(repeated)}.")
    if others:
        told.append(f"Measured on trainings with other settings than the item has now ({OTHERS}): {', '.join(others)}.")
    return " ".join(told) or "All items were measured with the code as it is."


def trainings_table(measured: Mapping[str, Result]) -> str:
    """Return a Markdown table with a line per training: the items behind which it is, its length, commit and command.

    A training that was repeated has a line per record of it.
    """
    behind: dict[tuple[str, ...], list[str]] = {}
    for item, result in measured.items():
        for one in result["trainings"]:
            length = (f"{one['tokens'] / 1e6:,.2f} M", f"{one['hours']:.2f} h")
            behind.setdefault((one["name"], *length, one["commit"], f"`{one['command']}`"), []).append(item)
    lines = [(name, ", ".join(behind[name, *rest]), *rest) for name, *rest in behind]
    return text_table(("training", "items", "tokens", "wall time", "commit", "command"), lines)


def plain(caption: str) -> str:
    """Return a caption with its stars, as in κ*, escaped for Markdown."""
    return caption.replace("*", r"\*")
