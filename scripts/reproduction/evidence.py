"""What the judges of claims compare, and how a number is written: rows looked up, values over seeds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any, Literal

from scripts.reproduction.criteria import HEAD_STRUCTURE

Row = Mapping[str, Any]
NOT_SHOWN = "not shown"  # a limit that would be kept by chance, as what it is about is not there


@dataclass(frozen=True)
class Number:
    """One line of the evidence for a claim.

    Args:
        what: is measured, with its limit if it has one.
        ours: the number, or one per seed.
        holds: whether it keeps the limit, or NOT_SHOWN; None where it has none and decides nothing.
    """

    what: str
    ours: str
    holds: bool | Literal["not shown"] | None = None


def the_row(rows: Sequence[Row], **values: Any) -> Row:
    """The one row that has these values."""
    return next(row for row in rows if all(row[key] == value for key, value in values.items()))


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def each_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows of every seed."""
    return [[row for row in rows if row["seed"] == seed] for seed in distinct(rows, "seed")]


def ratios(one: Row, other: Row) -> list[float]:
    """One spread over the other, seed by seed."""
    return [a / b for a, b in zip(one["values"], other["values"], strict=True)]


def changes(one: Row, other: Row) -> list[float]:
    """How far one spread is above the other, seed by seed."""
    return [share - 1 for share in ratios(one, other)]


def finite(value: float) -> float:
    """A perplexity that overflowed is the worst there is, and no comparison with it may pass by accident."""
    return math.inf if math.isnan(value) else value


def mean_of(values: Sequence[float]) -> float:
    """The mean; infinite if any value overflowed."""
    return fmean(map(finite, values))


def mean_row(rows: Iterable[Row]) -> Row:
    """A row of means over seeds; of what is no number, the first row's."""
    rows = list(rows)
    return {key: value if isinstance(value, str) else fmean(row[key] for row in rows) for key, value in rows[0].items()}


def is_below(one: float, other: float) -> bool:
    """Whether one is below the other; what overflowed is below nothing."""
    return finite(one) < finite(other)


def is_rising(values: Sequence[float]) -> bool:
    """Whether each is above the one before."""
    return all(a < b for a, b in pairwise(values))


def is_structured(row: Row) -> bool:
    """Whether a block is of low rank and sparse enough to be worth its parts."""
    return max(row["rank_ratio"], row["density"]) <= HEAD_STRUCTURE


def part_of(cases: Iterable[bool]) -> float:
    """Part of the cases that hold; of none, none."""
    cases = list(cases)
    return sum(cases) / len(cases) if cases else 0.0


# How numbers are written


def span(values: Iterable[float]) -> str:
    """The smallest and the largest of the seeds, or the one value."""
    values = list(values)
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def percent(change: float) -> str:
    """A change in percent."""
    return f"{100 * change:+.1f} %".replace("-", "−")


def percents(changes: Iterable[float]) -> str:
    """Changes in percent, one per seed."""
    return ", ".join(map(percent, changes))


def shares(parts: Iterable[float], digits: int = 1) -> str:
    """Parts of a whole in percent, one per seed or case."""
    return ", ".join(f"{100 * part:.{digits}f} %" for part in parts)


def percent_span(changes: Sequence[float]) -> str:
    """The least and the largest change."""
    return f"{percent(min(changes))} to {percent(max(changes))}"


def spread_text(spread: Row) -> str:
    """Mean ± deviation; of a single seed the mean alone."""
    deviation = f" ± {spread['deviation']:.2f}" if len(spread["values"]) > 1 else ""
    return f"{spread['mean']:.2f}{deviation}"


def changes_text(values: Sequence[float]) -> str:
    """Mean ± deviation in percent; of a single seed, and where one overflowed, the mean alone."""
    spread = len(values) > 1 and all(map(math.isfinite, values))
    deviation = f" ± {100 * pstdev(values):.1f}" if spread else ""
    return percent(fmean(values)).replace(" %", f"{deviation} %")


def difference(value: float) -> str:
    """A difference, with its sign."""
    return f"{value:+.3f}".replace("-", "−")


def structure_text(row: Row) -> str:
    """Rank ratio and density of a block."""
    return f"{row['rank_ratio']:.2f}, {row['density']:.2f}"


def found_text(rows: Sequence[Row], prefix: str = "") -> str:
    """Rank ratio and density, mean ± deviation over the matrices."""
    values = [[row[f"{prefix}{key}"] for row in rows] for key in ("rank_ratio", "density")]
    return ", ".join(f"{fmean(each):.2f} ± {pstdev(each):.2f}" for each in values)
