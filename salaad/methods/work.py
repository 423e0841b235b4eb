"""The work of a method, counted from shapes to predict times: passes, evaluations, and what comes every K steps."""

from dataclasses import dataclass

from salaad.spectral.cost import COLUMN_KERNELS, Rates


@dataclass(frozen=True)
class Work:
    """The work of a method on one rank, from which times are predicted.

    Args:
        passes: number of parameters in each forward and backward pass of a micro-batch.
        variants: number of parameters of each model that an evaluation runs.
        periodic: seconds of the work that is done every `every` steps, on the rank that has most of it.
        every: optimizer steps between two times of the periodic work.
        share: part of the run in which there is periodic work.
        beside: whether the device does the periodic work during the next step's first forward pass.
        notes: sentences on what is not counted.
    """

    passes: tuple[float, ...]
    variants: tuple[float, ...]
    periodic: float = 0.0
    every: int = 1
    share: float = 1.0
    beside: bool = False
    notes: tuple[str, ...] = ()


def svd_seconds(n: int, m: int, rates: Rates) -> float:
    """Predicted seconds of a full SVD with vectors (n×m, n ≤ m): 6·n²·m + 20·n³ operations, and n columns twice.

    An SVD goes column by column like an eigensolver, so it reaches the same part of the peak and waits at each column.
    """
    return (6 * n * n * m + 20 * n**3) / (rates.peak * rates.eigenvectors) + _columns(2 * n, rates)


def qr_seconds(n: int, r: int, rates: Rates) -> float:
    """Predicted seconds of a QR decomposition with Q (n×r, r ≤ n): 4·n·r² operations, column by column."""
    return 4 * n * r * r / (rates.peak * rates.eigenvectors) + _columns(r, rates)


def _columns(count: int, rates: Rates) -> float:
    return count * COLUMN_KERNELS * rates.launch if rates.waits else 0.0
