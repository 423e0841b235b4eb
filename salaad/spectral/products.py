"""SVT_τ(Z) of a stack of matrices by matrix products alone: what a GPU does best, and what never makes the host wait.

With A = ZZᵀ, its part above the threshold, and the sign of H = A − τ²I, which takes every eigenvalue to ±1,

    B = τ²I + (H + H·sign H)/2,        SVT_τ(Z) = (I − τB^(−1/2)) Z,

since B has the eigenvalues max(σ², τ²): what lies below τ is multiplied by 0, the rest by 1 − τ/σ. Both the sign and
the square roots come from the Newton–Schulz iteration x ← αx(3 − α²x²)/2, where α grows the smallest value fastest:
on [ℓ, 1] it is α² = 3/(1 + ℓ + ℓ²), for which both ends of the interval meet.

Eigenvalues nearer to 0 than `_FINEST` stay between −1 and 1. Everything commutes with A, so the error is known: if s is
what the sign of h became, B is wrong by |h|(1 − |s|)/2 ≤ |h|(1 − s²)/2, which L feels at most 1/2τ times, hence

    ‖L̂ − SVT_τ(Z)‖_F ≤ ‖H(I − sign²)‖_F/4τ + τ‖I − B^(1/2)B^(−1/2)‖_F + rounding.

The factor of the second term is twice what is needed to first order; that of the first is raised by `_SECOND_ORDER`.
Relative to ‖Z‖_F all of them grow with σ₁/τ. From 84 on the bound is too large by rounding alone; for singular values
that fall exponentially or as 1/i, and for noise beside a large one, it is so from 60 to 80 on. `MOST_SPREAD` leaves
room for worse spectra; only one that lies within some percent of τ as a whole fails there too.

The projection P = (I + sign)/2 on what is kept, and M = B^(1/2) − τI, whose eigenvalues are the singular values of L,
give the effective rank (`density`).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from salaad.spectral import density
from salaad.spectral.results import ROUNDING, TOLERANCE, StackResult

MOST_ENERGY = 0.9995  # γ up to which the rounding of M is small beside what the effective rank may leave out
MOST_SPREAD = 25  # σ₁/τ up to which products are worth a try
_FINEST = 1e-5  # eigenvalue of H, over the largest, whose sign is found
_SMALLEST_ROOT = 0.02  # τ over the largest singular value for which the roots of B are found
_SECOND_ORDER = 1.2


def operations(n: int, m: int) -> tuple[float, int]:
    """Operations for one matrix (n×m, n ≤ m), and the number of calls of a stack."""
    signs, roots = (len(_factors(low)) for low in (_FINEST, _SMALLEST_ROOT))
    square, (rank, calls) = 6 + 2 * signs + 3 * roots, density.operations(n)
    return 4 * n * n * m + 2 * square * n**3 + rank, square + calls


def _factors(low: float) -> list[float]:
    """The α of every step that takes the values in [low, 1] to 1."""
    return list(_steps(low))


def _steps(low: float) -> Iterator[float]:
    while low < 1 - 1e-4:  # the last step squares the distance
        alpha = math.sqrt(3 / (1 + low + low**2))
        yield alpha
        low = alpha * low * (3 - (alpha * low) ** 2) / 2
    yield 1.0


@torch.no_grad()
def product_stack(Z: Tensor, tau: Tensor, gamma: float = 0.999, energy: str = "nuclear") -> StackResult:
    """Shrink the singular values of Z (b×n×m, n ≤ m) by `tau` > 0 (b)."""
    A, tau = Z @ Z.mT, tau[:, None, None]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    top = torch.maximum(_largest(A), tau**2)
    H = A.sub_(tau**2 * identity)
    scale = torch.maximum(top - tau**2, tau**2)
    sign = _sign(H / scale, _FINEST)
    above = H @ sign
    unsigned = _norm(H - above @ sign) / (4 * tau)
    B = tau**2 * identity + (H + above) / 2
    root, inverse = _roots(B / top, _SMALLEST_ROOT)
    uneven = tau * _norm(identity - inverse @ root)
    L = Z - (tau / top.sqrt()) * inverse @ Z

    M = top.sqrt() * root - tau * identity
    P = (identity + sign) / 2
    size = _norm(Z).clamp_min(torch.finfo(Z.dtype).tiny)
    rounding = ROUNDING * torch.finfo(Z.dtype).eps * top.sqrt() / tau
    bound = ((_SECOND_ORDER * unsigned + uneven) / size + rounding).flatten()
    kept = P.diagonal(dim1=-2, dim2=-1).sum(-1).round()
    rank = density.effective_rank_of(M, P, kept, top.sqrt() - tau, gamma, energy)
    holds = (L.sum((-2, -1)) + size.flatten()).isfinite() & (bound <= TOLERANCE)
    return StackResult(L, None, rank, kept, bound, holds, "products")


def _norm(X: Tensor) -> Tensor:
    return torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True)


def _step(identity: Tensor, X: Tensor, Y: Tensor, alpha: float) -> Tensor:
    """What one step multiplies by: α(3 − α²XY)/2, in one call."""
    return torch.baddbmm(identity, X, Y, beta=1.5 * alpha, alpha=-0.5 * alpha**3)


def _largest(A: Tensor) -> Tensor:
    """A bound of the largest eigenvalue of A (b×n×n), above it by a tenth at most where there are others: ‖A⁴‖^¼."""
    size = _norm(A).clamp_min(torch.finfo(A.dtype).tiny)
    squared = (A / size) @ (A / size)
    return 1.0001 * size * _norm(squared @ squared) ** 0.25


def _sign(H: Tensor, low: float) -> Tensor:
    """The sign of H (b×n×n, symmetric, of norm at most 1), exact where an eigenvalue is `low` or more from 0."""
    identity = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    for alpha in _factors(low):
        H = torch.bmm(H, _step(identity, H, H, alpha))
    return H


def _roots(B: Tensor, low: float) -> tuple[Tensor, Tensor]:
    """B^(1/2) and B^(−1/2) of B (b×n×n) with eigenvalues in [low², 1]."""
    identity = torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
    root, inverse = B, identity.expand_as(B)
    for alpha in _factors(low):
        step = _step(identity, inverse, root, alpha)
        root, inverse = torch.bmm(root, step), torch.bmm(step, inverse)
    return root, inverse
