"""What compare_elastic.py measured: its rows, and the figures in them, for every table, picture and sentence."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from salaad.common.errors import UserError
from salaad.common.files import REMAKE, read_object
from scripts.results_tables import RESULTS
from scripts.shares import SEARCHED, SMALL, shares

ELASTIC = RESULTS / "elastic"
REFERENCE = "full-rank"
REPORTED = "nano-20"  # the scale whose table of all methods opens results/README.md and is not repeated
COPIED = "a token is *copied* if it and the token before it already stood side by side in its sequence"
# Prefixes of the labels of trainings that begin to copy when full-rank training with the same seed does, since they
# begin like it; for others a common seed says nothing.
PAIRED = ("full-rank", "SALAAD")
OTHER_RATES = ("full-rank, one rate", SEARCHED)  # labels of those that do not begin like it
Row = Mapping[str, Any]


def perplexity(of: Row) -> float:
    """The perplexity over all tokens, from the figures of a model."""
    return of["perplexity"]


def not_copied(of: Row) -> float | None:
    """The perplexity over the tokens that are not `COPIED`; None if not measured."""
    return math.exp(of["in_context"]["other"][0]) if "in_context" in of else None


# Heading of a column → the perplexity that it shows relative to full-rank training, or as it is; None if not measured.
RELATIVE: Mapping[str, Callable[[Row], float | None]] = {"over full-rank": perplexity, "not copied": not_copied}


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a JSON file of compare_elastic.py.

    Raises:
        UserError: the file is damaged or has no rows.
    """
    rows = read_object(path, cure=REMAKE).get("rows")
    if not rows:
        raise UserError(f"{path} has no rows; restore it, or delete it and measure again with compare_elastic.py")
    return rows


def results() -> dict[str, Path]:
    """Return scale → JSON file of the measurements at it; a file without full-rank training is of single rows."""
    paths = sorted(ELASTIC.glob("*.json"))
    return {path.stem: path for path in paths if any(row["label"] == REFERENCE for row in rows_of(path))}


def rates_of_small(rows: Sequence[Row]) -> str:
    """Return words on the learning rates of small dense models, beside that of the large one."""
    named: dict[float, list[str]] = {}
    for label, [row, *_] in by_label(rows).items():
        if label.startswith(SMALL):
            named.setdefault(row["config"]["optimizer"]["lr"], []).append(label.removeprefix(SMALL))
    large = next(row["config"]["optimizer"]["lr"] for row in rows if row["label"] == REFERENCE)
    of_small = [f"{rate:g}" + (f" ({', '.join(labels)})" if len(named) > 1 else "") for rate, labels in named.items()]
    return f"a learning rate of {' or '.join(of_small)}; the large model's is {large:g}"


def seeds_text(rows: Sequence[Row]) -> str:
    """Return the seeds of rows as text."""
    return ", ".join(str(row["seed"]) for row in rows)


def named_seeds(seeds: Iterable[int]) -> str:
    """Return some seeds as words: "seed 2", or "seeds 1, 2"."""
    numbers = [str(seed) for seed in seeds]
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def with_seeds(told: Sequence[tuple[str, Sequence[int]]], page: str = "") -> str:
    """Return phrases with their seeds in parentheses, behind the last where all have the same, else behind each.

    Args:
        told: phrases and the seeds of each; at least one.
        page: link to the page that has the figures, which the last parentheses name.
    """
    if len({tuple(seeds) for _, seeds in told}) == 1:
        source = ", ".join(filter(None, (page, named_seeds(told[0][1]))))
        return f"{', '.join(phrase for phrase, _ in told)} ({source})"
    return ", ".join(f"{phrase} ({named_seeds(seeds)})" for phrase, seeds in told) + (f" ({page})" if page else "")


def references_of(rows: Sequence[Row], figure: Callable[[Row], float | None] = perplexity) -> dict[int, float]:
    """Return seed → perplexity of full-rank training, of the seeds with which it was measured."""
    return figure_by_seed({row["seed"]: row["X"] for row in rows if row["label"] == REFERENCE}, figure)


def figure_by_seed(of: Mapping[int, Row], figure: Callable[[Row], float | None]) -> dict[int, float]:
    """Return seed → perplexity from the figures of each seed, of the seeds with which it was measured."""
    return {seed: value for seed, one in of.items() if (value := figure(one)) is not None}


def is_paired(label: str) -> bool:
    """Return whether a training is compared with another seed by seed if that is paired too; else by their means."""
    return label.startswith(PAIRED) and label not in OTHER_RATES


def over_reference(
    label: str, of: Mapping[int, float], references: Mapping[int, float]
) -> tuple[dict[int, float], bool]:
    """Return seed → perplexity relative to full-rank training, less 1, and whether that had the same seed.

    A training that is not paired with it is relative to the mean of the references, if there are several. Of others,
    seeds without a reference are left out; if no seed has one, they too are relative to that mean: over tokens that
    are not copied seeds differ little, and full-rank training was not measured with every one of them.
    """
    paired = is_paired(label) or len(references) == 1
    same = {seed: value / references[seed] - 1 for seed, value in of.items() if paired and seed in references}
    if same or not references:
        return same, True
    mean = fmean(references.values())
    return {seed: value / mean - 1 for seed, value in of.items()}, False


def ways_of(rows: Sequence[Row]) -> list[str]:
    """The ways to smaller sizes that were measured with any seed."""
    return list(dict.fromkeys(way for row in rows for way in row["ways"]))


def by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Label → its rows, one per seed."""
    return {label: [row for row in rows if row["label"] == label] for label in dict.fromkeys(r["label"] for r in rows)}


def size_of(row: Row, way: str, share: float) -> Row | None:
    """Return the figures of a way at a share; None if it was not measured there."""
    return next((size for size in row["ways"].get(way, ()) if size["share"] == share), None)


def score(rows: Sequence[Row], row: Row, way: str) -> float | None:
    """Return the mean over the eight sizes of log(perplexity / full-rank's with this seed); None if one is missing."""
    reference = [r["X"]["perplexity"] for r in rows if r["label"] == REFERENCE and r["seed"] == row["seed"]]
    sizes = [size_of(row, way, share) for share in shares()]
    if not reference or None in sizes:
        return None
    return fmean(math.log(size["perplexity"] / reference[0]) for size in sizes)


def with_deviation(values: Sequence[float]) -> str:
    """Return the mean of some values as text, and ± their root mean square deviation; a dash without values."""
    if not values:
        return "–"
    return f"{fmean(values):.2f}" + (f" ± {pstdev(values):.2f}" if len(values) > 1 else "")
