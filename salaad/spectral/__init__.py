"""Singular-value thresholding SVT_τ(Z) (the L-update, eq. 3) of one matrix, or of a stack of matrices of one shape.

Begin with `ladder`, the solvers of one matrix, each with a bound of its error; `subspace` is one of them. `stacks` and
`products` solve a stack on a device without reading a value on the host (`density` finds the effective ranks for
`products`). `cost` predicts which solver is the cheapest on a device, and `gpu_names` maps a GPU to a data sheet.
"""

from salaad.spectral.ladder import SvtResult, leading_left_vectors, left_vectors, threshold
from salaad.spectral.results import SOLVERS, TOLERANCE

__all__ = ["SOLVERS", "TOLERANCE", "SvtResult", "leading_left_vectors", "left_vectors", "threshold"]
