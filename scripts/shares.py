"""The sizes at which an elastic curve is measured, as shares of the compressible parameters."""

SIZES, MOST, LEAST = 8, 0.75, 0.2
NAMED = (0.5, 0.2)  # which tables show beside the score


def shares() -> list[float]:
    """The eight of the elastic score, evenly spaced in their logarithm."""
    return [MOST * (LEAST / MOST) ** (i / (SIZES - 1)) for i in range(SIZES)]
