"""What the judges of claims compare, and how they say it: rows looked up, numbers over seeds, short texts."""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any

Row = Mapping[str, Any]


def the_row(rows: Sequence[Row], **values: Any) -> Row:
    """The one row that has these values."""
    return next(row for row in rows if all(row[key] == value for key, value in values.items()))


def distinct(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def by_seed(one: Row, other: Row) -> list[tuple[float, float]]:
    """The values of two spreads, seed by seed."""
    return list(zip(one["values"], other["values"], strict=True))


def ratios(one: Row, other: Row) -> list[float]:
    """One over the other, seed by seed."""
    return [a / b for a, b in by_seed(one, other)]


def changes(one: Row, other: Row) -> list[float]:
    """How far one is above the other, seed by seed."""
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


def span(values: Sequence[float]) -> str:
    """The smallest and the largest of the seeds, or the one value."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def is_below(one: float, other: float) -> bool:
    """Whether one is below the other; what overflowed is below nothing."""
    return finite(one) < finite(other)


def is_rising(values: Sequence[float]) -> bool:
    """Whether each is above the one before."""
    return all(a < b for a, b in pairwise(values))


def part_of(cases: Iterable[bool]) -> float:
    """Part of the cases that hold; of none, none."""
    cases = list(cases)
    return sum(cases) / len(cases) if cases else 0.0


def span_of_gaps(curve: Mapping[Any, tuple[float, float]]) -> str:
    """The least and the largest change from the second of each pair to the first."""
    gaps = [ours / theirs - 1 for ours, theirs in curve.values()]
    return f"{percent(min(gaps))} to {percent(max(gaps))}"


def spread_text(spread: Row) -> str:
    """Mean ± deviation; of a single seed the mean alone."""
    deviation = f" ± {spread['deviation']:.2f}" if len(spread["values"]) > 1 else ""
    return f"{spread['mean']:.2f}{deviation}"


def changes_text(values: Sequence[float]) -> str:
    """Mean ± deviation; of a single seed, and where one overflowed, the mean alone."""
    spread = len(values) > 1 and all(map(math.isfinite, values))
    deviation = f" ± {100 * pstdev(values):.1f}" if spread else ""
    return percent(fmean(values)).replace(" %", f"{deviation} %")


def percent(change: float) -> str:
    """A change in percent."""
    return f"{100 * change:+.1f} %".replace("-", "−")


def difference(value: float) -> str:
    """A difference, with its sign."""
    return f"{value:+.3f}".replace("-", "−")


def spaced(name: str) -> str:
    """L+S as it is read."""
    return name.replace("+", " + ")


def is_structured(row: Row) -> bool:
    """Whether a block is of low rank and sparse enough to be worth its parts."""
    return row["rank_ratio"] <= 0.3 and row["density"] <= 0.3


def structure_text(row: Row) -> str:
    """What became of a block."""
    return f"rank ratio {row['rank_ratio']:.2f}, density {row['density']:.2f}"


def found_text(rows: Sequence[Row], prefix: str = "") -> str:
    """Mean ± deviation over the matrices."""
    values = [[row[f"{prefix}{key}"] for row in rows] for key in ("rank_ratio", "density")]
    return " and ".join(
        f"{name} {fmean(v):.2f} ± {pstdev(v):.2f}" for name, v in zip(("rank", "density"), values, strict=True)
    )
