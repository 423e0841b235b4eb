"""What all solvers share: their names, the error that is allowed, and what a solver of many matrices returns."""

from dataclasses import dataclass

from torch import Tensor

TOLERANCE = 5e-4  # largest error in L relative to ‖Z‖_F
ROUNDING = 50  # largest rounding error in L seen from a whole spectrum, in units of the machine epsilon
SOLVERS = ("exact", "gram", "subspace", "regularised", "products")


@dataclass(frozen=True)
class StackResult:
    """SVT_τ(Z) of b matrices n×m (n ≤ m), none of which the host has looked at.

    Args:
        L: SVT_τ(Z), b×n×m.
        sigma: b×n singular values of L, descending; None from a solver that does not find them.
        rank: effective rank of L (Definition 4.1), b.
        kept: singular values above τ, b.
        bound: of the error in L relative to ‖Z‖_F, b.
        holds: whether the result is finite and as exact as the bound says, b.
        solver: one of `SOLVERS`.
    """

    L: Tensor
    sigma: Tensor | None
    rank: Tensor
    kept: Tensor
    bound: Tensor
    holds: Tensor
    solver: str
