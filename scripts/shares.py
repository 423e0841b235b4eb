"""The sizes of an elastic curve, as shares of the compressible parameters, and what counts as one size."""

SIZES, MOST, LEAST = 8, 0.75, 0.2
SMALL = "dense, "  # prefix of the labels of dense models that are trained at a smaller size
SEARCHED = "full-rank, as searched"  # label of full-rank training at the best rates of its search
NAMED = (0.5, 0.2)  # the shares that tables show beside the elastic score
# Relative difference of parameters below which two models are of one size: a cut may be off by a unit, a dense model by
# half a step of its width, and the dense model of a share of 0.35 stands beside the cut to 0.352 on the curve, 0.6 % of
# the parameters away where nearly all of them are compressible (350m and 1b).
SAME_SIZE = 0.007


def shares() -> list[float]:
    """Return the eight shares of the elastic score, evenly spaced in their logarithm, the largest first."""
    return [MOST * (LEAST / MOST) ** (i / (SIZES - 1)) for i in range(SIZES)]


def all_shares() -> list[float]:
    """Return the eight shares of the elastic score and those that tables name, the largest first."""
    return sorted({*shares(), *NAMED}, reverse=True)


def is_same_size(parameters: float, other: float) -> bool:
    """Return whether models of so many parameters count as being of one size."""
    return abs(parameters / other - 1) < SAME_SIZE
