"""What the judges of claims share: looking up rows, comparing values over seeds, and formatting numbers."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev
from typing import Any, Literal

from scripts.reproduction.criteria import HEAD_STRUCTURE

Row = Mapping[str, Any]
EVERY_SEED = "in every seed"
NOT_SHOWN = "not shown"  # of a limit that is kept by chance, because what it is about is missing


class Lacking(LookupError):
    """What a result lacks for a claim to be judged, in words."""


@dataclass(frozen=True)
class Number:
    """One line of the evidence for a claim.

    Args:
        what: what is measured.
        ours: our number as text, or one per seed.
        limit: what the number must be, as text; empty if it has no limit and decides nothing.
        holds: whether the number keeps its limit, or NOT_SHOWN; None if it has no limit.
    """

    what: str
    ours: str
    limit: str = ""
    holds: bool | Literal["not shown"] | None = None


def the_row(rows: Sequence[Row], **values: Any) -> Row:
    """Return the row that has these values; raise Lacking if there is none."""
    found = [row for row in rows if all(row[key] == value for key, value in values.items())]
    if not found:
        raise Lacking(f"the row of {', '.join(f'{key} {value}' for key, value in values.items())}")
    return found[0]


def values_of(rows: Sequence[Row], key: str) -> list[Any]:
    """The values of a column, each once, in order."""
    return list(dict.fromkeys(row[key] for row in rows))


def each_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the rows grouped by seed."""
    return [[row for row in rows if row["seed"] == seed] for seed in values_of(rows, "seed")]


def ratios(one: Row, other: Row) -> list[float]:
    """Return the values of spread `one` over those of spread `other`, seed by seed."""
    return [a / b for a, b in zip(one["values"], other["values"], strict=True)]


def changes(one: Row, other: Row) -> list[float]:
    """Return the relative changes from spread `other` to spread `one`, seed by seed."""
    return [share - 1 for share in ratios(one, other)]


def finite(value: float) -> float:
    """Return infinity for NaN, else the value: a perplexity that overflowed must pass no comparison by accident."""
    return math.inf if math.isnan(value) else value


def mean_of(values: Sequence[float]) -> float:
    """The mean; infinite if any value overflowed."""
    return fmean(map(finite, values))


def mean_row(rows: Iterable[Row]) -> Row:
    """Return one row with the means over seeds; text is taken from the first row."""
    rows = list(rows)
    return {key: value if isinstance(value, str) else fmean(row[key] for row in rows) for key, value in rows[0].items()}


def is_below(one: float, other: float) -> bool:
    """Whether one is below the other; what overflowed is below nothing."""
    return finite(one) < finite(other)


def is_rising(values: Sequence[float]) -> bool:
    """Whether each is above the one before."""
    return all(a < b for a, b in pairwise(values))


def is_structured(row: Row) -> bool:
    """Return whether rank ratio and density of a block are both low enough for L and S to be worth storing."""
    return max(row["rank_ratio"], row["density"]) <= HEAD_STRUCTURE


def part_of(cases: Iterable[bool]) -> float:
    """The fraction of the cases that hold; 0 if there are no cases."""
    cases = list(cases)
    return sum(cases) / len(cases) if cases else 0.0


# How numbers are written


def span(values: Iterable[float]) -> str:
    """Return the smallest and the largest value as text; one number if both are written alike."""
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
    """Return the least and the largest relative change as text, in percent; one if both are written alike."""
    low, high = percent(min(changes)), percent(max(changes))
    return low if low == high else f"{low} to {high}"


def mean_change(values: Sequence[float]) -> str:
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
