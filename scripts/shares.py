"""The sizes at which an elastic curve is measured, as shares of the compressible parameters."""

SIZES, MOST, LEAST = 8, 0.75, 0.2
NAMED = (0.5, 0.2)  # the shares that tables show beside the elastic score


def shares() -> list[float]:
    """Return the eight shares of the elastic score, evenly spaced in their logarithm, the largest first."""
    return [MOST * (LEAST / MOST) ** (i / (SIZES - 1)) for i in range(SIZES)]


def all_shares() -> list[float]:
    """Return the eight shares of the elastic score and those that tables name, the largest first."""
    return sorted({*shares(), *NAMED}, reverse=True)
