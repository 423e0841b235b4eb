"""The solver `subspace`: leading eigenvectors of A = ZZᵀ from those of the last update, and a bound of their error.

Apart from A it computes with n×q matrices only, q a little above the kept rank. A filter of degree d multiplies the
error in the subspace by about 1/cosh(d·acosh(2τ²/b − 1)), b being the first eigenvalue left out. The error of the old
subspace is measured first, and d is chosen from it.

The bound: let Û (n×k) be Ritz vectors of A with σ² = diag(ÛᵀAÛ) > τ², V̂ = ZᵀÛ/σ, and

    E = (I − ÛÛᵀ) Z V̂ = (AÛ − Ûσ²)/σ,        F = (I − ÛÛᵀ) Z (I − V̂V̂ᵀ).

Z − E has (Û, σ, V̂) among its singular triplets, and F is the remaining part of it. So if ‖F‖₂ ≤ τ,
L̂ = Û diag(1 − τ/σ) ÛᵀZ is exactly SVT_τ(Z − E). A proximal operator is non-expansive, hence

    ‖L̂ − SVT_τ(Z)‖_F ≤ ‖E‖_F.

To first order the error is smaller. Along a singular vector of F with the value s, column i of E moves L by its length
times the weight

    g(σᵢ, s) = (σᵢ − τ)·√(σᵢ² + s²)/(σᵢ² − s²)  if s ≤ τ,        √((σᵢ + s − τ)² + τ²)/(σᵢ + s)  if s > τ,

which grows with s. E maps out of the span of all Ritz vectors, kept or not, where Z has no singular value above s. So
vectors near the threshold, which a filter resolves worst, hardly count. A singular vector of F with a larger value sⱼ
may lie in part outside that span too; with its share cⱼ there, the square of the weight is at most

    g(σᵢ, s)² + Σⱼ cⱼ·(g(σᵢ, sⱼ)² − g(σᵢ, s)²).

The second-order part stays below ‖E‖_F‖E‖₂ over the gap σₖ − s. The bound is the smaller of ‖E‖_F and the sum of both
parts, plus what is missing where ‖F‖₂ > τ: there L̂ lacks SVT_τ(F), whose length is at most (‖F‖₂ − τ)·√p, as no more
than p = ‖F‖_F²/τ² singular values of F exceed τ, and ‖F‖_F² ≤ ‖Z‖_F² − Σσ².

E is computed, and s is estimated in a small Krylov space. A singular vector that is new since the last update may lie
half inside and half outside the span, each half below τ. Therefore sⱼ² and cⱼ are taken from everything outside the
span of Û, as eigenvalues and their vectors' shares: the Ritz values that are not kept, the residuals that couple them
to the rest, and s². The largest sⱼ bounds ‖F‖₂. If the bound exceeds the tolerance, a second filter is applied, then
the next solver takes over and reuses A.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.spectral.results import ROUNDING, TOLERANCE

MOST_FILTERS, HIGHEST_DEGREE = 2, 16
LEAST_SIGMA = 1e-2  # singular value over the largest: below, squaring in A loses too many of its digits
_EASE = 0.25  # part of the needed reduction that sets a filter's degree: the bound falls faster than E's worst column
_LOWEST_EDGE, _HIGHEST_EDGE = 1e-3, 0.8  # limits of `edge` over τ²; a filter damps [0, edge]
_WELL_CONDITIONED = 0.1  # least diagonal entry of R, for columns of length 1, for which one Cholesky-QR is enough
_PROBES, _PROBE_STEPS, _PROBE_MARGIN = 4, 5, 1.05


class Leading(NamedTuple):
    """Leading Ritz vectors of A.

    Args:
        U: the vectors, n×q, of which the first `kept` are kept.
        sigma: the roots of their Ritz values, q, descending.
        kept: how many of these are above τ.
        bound: upper bound of the error in L, relative to ‖Z‖_F.
    """

    U: Tensor
    sigma: Tensor
    kept: int
    bound: float


def leading(A: Tensor, tau: float, basis: Tensor) -> Leading | None:
    """Find the leading singular vectors of the short side from the basis of the last update (n×q).

    None if the bound stays above `TOLERANCE` or the rank outgrows the basis.
    """
    whole = float(A.diagonal().sum(dtype=torch.float64))  # ‖Z‖_F², which a sum in float32 would miss by up to 1 %
    size, rounding = whole**0.5, ROUNDING * torch.finfo(A.dtype).eps
    # A few random vectors beside the basis let the filter find singular vectors that are new. Ritz vectors are used, as
    # the vectors of the basis itself are mixtures, in which a filter would let the largest term hide the others.
    fresh = random_columns(len(A), _PROBES, A, seed=1)
    fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh))[0]
    U, AU, squares = _ritz(A, torch.cat([basis, fresh], 1))
    for filters in range(MOST_FILTERS + 1):
        sigma = squares.clamp_min(0).sqrt()
        k = int(torch.count_nonzero(sigma > tau))
        if k + _PROBES >= len(sigma) or not k or float(sigma[0]) * LEAST_SIGMA > tau:
            return None
        E = (AU[:, :k] - U[:, :k] * squares[:k]) / sigma[:k]
        bound = _bound(E, sigma[:k], tau, float(sigma[-1 - _PROBES])) / size
        if bound <= TOLERANCE:
            outside = _outside(A, U)
            beside, shares = _beside(AU[:, k:] - U[:, k:] * squares[k:], squares[k:], outside)
            rest = max(0.0, whole - float(squares[:k].sum(dtype=torch.float64))) + rounding * whole
            missed = max(0.0, float(beside[-1]) - tau) * min(len(A) - k, rest / tau**2 + 1) ** 0.5
            bound = max((_bound(E, sigma[:k], tau, outside, beside, shares) + missed) / size, rounding)
            if bound <= TOLERANCE:
                return Leading(U, sigma, k, bound)
        if filters == MOST_FILTERS:
            return None
        edge = min(max(float(squares[-1 - _PROBES]), _LOWEST_EDGE * tau**2), _HIGHEST_EDGE * tau**2)
        rate = math.acosh(2 * tau**2 / edge - 1)
        degree = max(2, math.ceil(math.acosh(max(_EASE * bound / TOLERANCE, 1.5)) / rate))
        if degree > HIGHEST_DEGREE:
            return None
        U, AU, squares = _ritz(A, _orthonormal(_filtered(A, U, AU, edge, float(squares[0]), degree)))
    return None


def _ritz(A: Tensor, V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ritz vectors of A in the span of V (n×q, orthonormal), A times them, and the Ritz values, descending."""
    AV = A @ V
    values, W = torch.linalg.eigh(V.mT @ AV)
    W = W.flip(1)
    return V @ W, AV @ W, values.flip(0)


def _filtered(A: Tensor, V: Tensor, AV: Tensor, edge: float, top: float, degree: int) -> Tensor:
    """Apply to V (n×q) the Chebyshev polynomial of A that is least on [0, edge] relative to its value 1 at `top`."""
    half = edge / 2
    scale = first = half / (top - half)
    before, now = V, (AV - half * V) * (scale / half)
    for _ in range(degree - 1):
        following = 1 / (2 / first - scale)
        before, now = (
            now,
            torch.addmm(now, A, now, beta=-half, alpha=1) * (2 * following / half) - scale * following * before,
        )
        scale = following
    return now


def _orthonormal(Y: Tensor) -> Tensor:
    """An orthonormal basis of the columns of Y (n×q), by Cholesky-QR, twice where once is not exact enough."""
    for _ in range(2):
        Y = Y / torch.linalg.vector_norm(Y, dim=0).clamp_min(torch.finfo(Y.dtype).tiny)
        R, failed = torch.linalg.cholesky_ex(Y.mT @ Y, upper=True)
        if failed:
            return torch.linalg.qr(Y)[0]
        Y = torch.linalg.solve_triangular(R, Y, upper=True, left=False)
        if float(R.diagonal().min()) > _WELL_CONDITIONED:
            break
    return Y


def _bound(
    E: Tensor,
    sigma: Tensor,
    tau: float,
    outside: float,
    beside: Tensor | None = None,
    shares: Tensor | None = None,
) -> float:
    """The bound of ‖L̂ + SVT_τ(F) − SVT_τ(Z)‖_F from E (n×k), σ (k), s outside the span, and sⱼ and cⱼ of F (each p)."""
    lengths = torch.linalg.vector_norm(E, dim=0)
    size, weights = float(torch.linalg.vector_norm(lengths)), _weights(sigma, sigma.new_full((1,), outside), tau)[:, 0]
    if beside is not None:
        more = _weights(sigma, beside, tau).square() - weights.square()[:, None]
        weights = (weights.square() + more.clamp_min(0) @ shares).sqrt()
    largest = float(torch.linalg.vector_norm(E.mT @ E)) ** 0.5
    gap = max(float(sigma[-1]) - outside, torch.finfo(E.dtype).tiny)
    return min(size, float(torch.linalg.vector_norm(weights * lengths)) + size * largest / gap)


def _weights(sigma: Tensor, s: Tensor, tau: float) -> Tensor:
    """The weights g(σᵢ, sⱼ) (k×p) of σ (k, all above τ) and s (p)."""
    sigma = sigma[:, None]
    below = (sigma - tau) * (sigma**2 + s**2).sqrt() / (sigma**2 - s.clamp_max(tau) ** 2)
    above = ((sigma + s - tau) ** 2 + tau**2).sqrt() / (sigma + s)
    return torch.where(s <= tau, below, above)


def _beside(residuals: Tensor, squares: Tensor, outside: float) -> tuple[Tensor, Tensor]:
    """Bounds sⱼ of the singular values of F, ascending, and their vectors' shares cⱼ outside the span (each 2p).

    Args:
        residuals: those of the Ritz vectors that are not kept (n×p).
        squares: their Ritz values (p).
        outside: s.
    """
    coupling = torch.linalg.qr(residuals, mode="r")[1]
    rest = torch.eye(len(coupling), dtype=squares.dtype, device=squares.device) * outside**2
    block = torch.cat([torch.cat([squares.diag(), coupling.mT], 1), torch.cat([coupling, rest], 1)])
    values, vectors = torch.linalg.eigh(block)
    return values.clamp_min(0).sqrt(), vectors[len(squares) :].square().sum(0)


def _outside(A: Tensor, U: Tensor) -> float:
    """The largest singular value s of Z outside the span of U (n×q), estimated in a small Krylov space, plus 5 %."""
    g = random_columns(len(A), _PROBES, A, seed=2).mT  # as rows: a product with few columns is several times slower
    space = []
    for _ in range(_PROBE_STEPS):
        g = g - (g @ U) @ U.mT
        g = g / torch.linalg.vector_norm(g, dim=1, keepdim=True).clamp_min(torch.finfo(A.dtype).tiny)
        space.append(g)
        g = g @ A
    Q = torch.linalg.qr(torch.cat(space).mT)[0].mT
    Q = Q - (Q @ U) @ U.mT
    largest = float(torch.linalg.eigvalsh(Q @ A @ Q.mT)[-1])
    return _PROBE_MARGIN * max(0.0, largest) ** 0.5


def random_columns(n: int, q: int, like: Tensor, seed: int = 0) -> Tensor:
    """A fixed Gaussian matrix (n×q) with the dtype and device of `like`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, q, generator=generator, dtype=like.dtype, device="cpu").to(like.device)
