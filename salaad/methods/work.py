"""What a method computes, counted from shapes for predictions: passes, evaluations, and what comes every K steps."""

from collections.abc import Mapping
from dataclasses import dataclass

from salaad.spectral.cost import COLUMN_KERNELS, Rates


@dataclass(frozen=True)
class Work:
    """What a method computes on a rank.

    Args:
        passes: parameters that take part in each forward and backward pass of a micro-batch.
        variants: parameters of each model that an evaluation runs.
        periodic: seconds of what comes every so many steps, of the rank that has most of it.
        every: those steps.
        beside: the device computes it beside the next step's first forward pass.
        notes: sentences on what is not counted.
    """

    passes: tuple[float, ...]
    variants: tuple[float, ...]
    periodic: float = 0.0
    every: int = 1
    beside: bool = False
    notes: tuple[str, ...] = ()


def most_loaded(seconds: Mapping[str, float], owners: Mapping[str, int], ranks: int) -> float:
    """The largest sum of the seconds of what one rank owns."""
    loads = [0.0] * ranks
    for name, own in seconds.items():
        loads[owners[name]] += own
    return max(loads)


def svd_seconds(n: int, m: int, rates: Rates) -> float:
    """Predicted seconds of a full SVD with vectors (n×m, n ≤ m): 6·n²·m + 20·n³ operations, and n columns twice.

    It is made column by column as eigenvectors are, so that it reaches as much of the peak and waits at each column.
    """
    return (6 * n * n * m + 20 * n**3) / (rates.peak * rates.eigenvectors) + _columns(2 * n, rates)


def qr_seconds(n: int, r: int, rates: Rates) -> float:
    """Predicted seconds of a QR decomposition with Q (n×r, r ≤ n): 4·n·r² operations, column by column."""
    return 4 * n * r * r / (rates.peak * rates.eigenvectors) + _columns(r, rates)


def _columns(count: int, rates: Rates) -> float:
    return count * COLUMN_KERNELS * rates.launch if rates.waits else 0.0
