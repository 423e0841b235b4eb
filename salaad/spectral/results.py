"""What all SVT solvers share: their names, the error tolerance, and the result type of the solvers of a stack."""

from dataclasses import dataclass

import torch
from torch import Tensor

TOLERANCE = 5e-4  # largest error in L relative to ‖Z‖_F
ROUNDING = 50  # largest rounding error measured in L from an SVD, or singular vectors as exact, in machine epsilons
LEAST_SQUARE = 1e7  # σ₁² over the least normal number: below, squares of the entries of Z lose their digits
SOLVERS = ("exact", "gram", "subspace", "regularised", "products")


def gram_bound(sigma: Tensor, tau: Tensor) -> Tensor:
    """An upper bound of the error in L, relative to ‖Z‖_F, where eigenvectors of A = ZZᵀ were found (… × 1 → …).

    If A is exact to δ, L = f(A)·Z with f(λ) = (1 − τ/√λ)₊ is exact to √k·δ·τ/s², where k singular values are above τ
    and s is the least of all, or τ if that is more: f' = τ/(2σ³). Nor is L off by more than 2τ·√n, as no more than τ is
    taken from each of the n singular values. δ is ε·σ₁²·√(n/40), whose factor was measured.

    Args:
        sigma: singular values of Z (… × n), in any order.
        tau: thresholds above 0 (… × 1).
    """
    eps, n = torch.finfo(sigma.dtype).eps, sigma.shape[-1]
    size = torch.linalg.vector_norm(sigma, dim=-1).clamp_min(torch.finfo(sigma.dtype).tiny)
    top, kept, tau = sigma.amax(-1), torch.count_nonzero(sigma > tau, dim=-1), tau[..., 0]
    least = torch.maximum(sigma.amin(-1), tau)
    squared = (kept * (n / 40)).sqrt() * eps * (top / size) * (top / least) * (tau / least)
    return torch.minimum(squared, 2 * n**0.5 * tau / size).clamp_min(ROUNDING * eps)


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
