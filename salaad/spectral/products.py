"""SVT_τ(Z) of a stack of matrices by matrix products alone, which suit a GPU best and never make the host wait.

Let A = ZZᵀ, H = A − τ²I, and let sign H be H with every eigenvalue replaced by its sign ±1. Then

    B = τ²I + (H + H·sign H)/2,        SVT_τ(Z) = (I − τB^(−1/2)) Z,

since B has the eigenvalues max(σ², τ²): singular values below τ are multiplied by 0, the others by 1 − τ/σ. The sign
and the square roots come from the Newton–Schulz iteration x ← αx(3 − α²x²)/2, with the α that increases the smallest
value most: for values in [ℓ, 1] it is α² = 3/(1 + ℓ + ℓ²), which maps both ends of the interval to the same value.

For eigenvalues of H nearer to 0 than `_FINEST` the computed sign stays between −1 and 1. Everything commutes with A, so
the error is known: if s is the computed sign of h, B is wrong by |h|(1 − |s|)/2 ≤ |h|(1 − s²)/2, and L by at most 1/2τ
times that. Hence

    ‖L̂ − SVT_τ(Z)‖_F ≤ ‖H(I − sign²)‖_F/4τ + τ‖I − B^(1/2)B^(−1/2)‖_F + rounding.

The factor of the second term is twice what is needed to first order; the first term is multiplied by `_SECOND_ORDER`.
The bound leaves out that rounding also turns the sign away from the eigenvectors of H. That counts where τ is more than
half of σ₁ and only a few values are kept: there errors up to 1e-4 were measured, in matrices of up to 300 rows.
Relative to ‖Z‖_F all terms grow with σ₁/τ. From σ₁/τ = 84 on, rounding alone makes the bound exceed `TOLERANCE`; for
singular values that fall exponentially or as 1/i, and for noise plus one large value, the bound does so from 60 to 80
on. `MOST_SPREAD` leaves room for worse spectra; below it only a spectrum that lies as a whole within some percent of τ
fails.

The projection P = (I + sign H)/2 onto the kept singular vectors, and M = B^(1/2) − τI, whose eigenvalues are the
singular values of L, give the effective rank (`density`).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from salaad.spectral import density
from salaad.spectral.results import ROUNDING, TOLERANCE, StackResult

MOST_ENERGY = 0.9995  # largest γ for which the rounding of M is small relative to the share 1 − γ of the energy
MOST_SPREAD = 25  # largest σ₁/τ for which products are tried
_FINEST = 1e-5  # smallest eigenvalue of H, relative to the largest, whose sign is found
_SMALLEST_ROOT = 0.02  # smallest τ, relative to the largest singular value, for which the roots of B are found
_SECOND_ORDER = 1.2


def operations(n: int, m: int) -> tuple[float, int]:
    """The number of operations for one matrix (n×m, n ≤ m), and of calls of torch for a whole stack."""
    signs, roots = (len(_factors(low)) for low in (_FINEST, _SMALLEST_ROOT))
    square, (rank, calls) = 6 + 2 * signs + 3 * roots, density.operations(n)
    return 4 * n * n * m + 2 * square * n**3 + rank, square + calls


def _factors(low: float) -> list[float]:
    """The factors α of the iteration's steps, which together take all values in [low, 1] to 1."""
    return list(_steps(low))


def _steps(low: float) -> Iterator[float]:
    while low < 1 - 1e-4:  # the last step squares the distance from 1
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
    """The factor α(3 − α²XY)/2 by which one step multiplies, computed in one call."""
    return torch.baddbmm(identity, X, Y, beta=1.5 * alpha, alpha=-0.5 * alpha**3)


def _largest(A: Tensor) -> Tensor:
    """An upper bound of the largest eigenvalue λ₁ of A (b×n×n): ‖A⁴‖_F^¼, at most about n^⅛·λ₁."""
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
