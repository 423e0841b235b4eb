"""Singular-value thresholding SVT_τ(Z) (the L-update, eq. 3) of one matrix, and of many of one shape at once.

Begin with `ladder`, the solvers of one matrix, each with a bound of its error; `stacks` and `products` are two of them
for a device that the host must not wait for (`density` finds the rank of what products keep), and `cost` says which of
all is the cheapest on a device, which `gpu_names` knows by its name.
"""

from salaad.spectral.ladder import SvtResult, leading_left_vectors, left_vectors, threshold
from salaad.spectral.results import SOLVERS, TOLERANCE

__all__ = ["SOLVERS", "TOLERANCE", "SvtResult", "leading_left_vectors", "left_vectors", "threshold"]
