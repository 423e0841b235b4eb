"""What all SVT solvers share: their names, the error tolerance, and the result type of the solvers of a stack."""

from dataclasses import dataclass

from torch import Tensor

TOLERANCE = 5e-4  # largest error in L relative to ‖Z‖_F
ROUNDING = 50  # largest rounding error measured in L from solvers of the whole spectrum, in machine epsilons
SOLVERS = ("exact", "gram", "subspace", "regularised", "products")


@dataclass(frozen=True)
class StackResult:
    """SVT_τ(Z) of a stack of b matrices n×m (n ≤ m), computed without reading a value on the host.

    Args:
        L: SVT_τ(Z), b×n×m.
        sigma: b×n singular values of L, descending; None from a solver that does not find them.
        rank: effective rank of L (Definition 4.1), b.
        kept: number of singular values above τ, b.
        bound: upper bound of the error in L relative to ‖Z‖_F, b; `products` says what its bound leaves out.
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
