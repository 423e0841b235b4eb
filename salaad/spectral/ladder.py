"""Singular-value thresholding SVT_τ(Z) (the L-update, eq. 3) by the cheapest of four solvers that is accurate enough.

    subspace     the leading eigenvectors of the Gram matrix A = ZZᵀ, improved from those of the last update by one
                 Chebyshev filter
    gram         all eigenvectors of A, in float64 where the threshold is below what squaring in float32 resolves; the
                 eigenvalues alone without a threshold
    exact        a full SVD
    regularised  a full SVD in float64 of Z plus a little noise, for a Z on which the others do not converge

A is the Gram matrix of the short side of Z. Apart from A and L, `subspace` computes with n×q matrices only, q a little
above the kept rank. A filter of degree d multiplies the error in the subspace by about 1/cosh(d·acosh(2τ²/b − 1)), b
being the first eigenvalue left out. The error of the old subspace is measured first, and d is chosen from it.

`subspace` computes a bound of its own error. Let Û (n×k) be Ritz vectors of A with σ² = diag(ÛᵀAÛ) > τ², V̂ = ZᵀÛ/σ, and

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
the next solver takes over and reuses A. The noise N of `regularised` moves L by at most ‖N‖_F, again because a proximal
operator is non-expansive.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from salaad.spectral.results import LEAST_SQUARE, ROUNDING, TOLERANCE, gram_bound

# Both measured on a CPU, for which these solvers are meant: they branch on computed values, for which the host would
# have to wait on another device.
SMALLEST_SIDE = 256  # least short side for `subspace`: below, its many small calls cost more than all eigenvectors
LARGEST_SHARE = 0.4  # largest dimension of a subspace, over the short side, that is cheaper than all eigenvectors
MOST_FILTERS, HIGHEST_DEGREE = 2, 16
_NOISE = 1e-6  # norm of the noise of `regularised`, relative to ‖Z‖_F
_EASE = 0.25  # part of the needed reduction that sets a filter's degree: the bound falls faster than E's worst column
_LOWEST_EDGE, _HIGHEST_EDGE = 1e-3, 0.8  # limits of `edge` over τ²; a filter damps [0, edge]
_STRIPES = 4  # number of stripes of rows in which A is computed
_WELL_CONDITIONED = 0.1  # least diagonal entry of R, for columns of length 1, for which one Cholesky-QR is enough
_PROBES, _PROBE_STEPS, _PROBE_MARGIN = 4, 5, 1.05
_SMALLEST_SQUARE = 1e-5  # eigenvalue over the largest: below, eigenvectors of a Gram matrix in float32 are noise
_LEAST_SIGMA = 1e-2  # singular value over the largest: below, squaring in A loses too many of its digits


@dataclass(frozen=True)
class SvtResult:
    """SVT_τ(Z) and how it was found.

    Args:
        L: SVT_τ(Z), n×m.
        sigma: the min(n, m) singular values of L, descending, with 0 for those that are not kept.
        basis: leading singular vectors of the short side (min(n, m) × q) from which the next update may start; None
            where `subspace` would not be cheaper.
        solver: `exact`, `gram`, `subspace` or `regularised`.
        bound: upper bound of the error in L relative to ‖Z‖_F: computed by `subspace`; for the other solvers the
            largest rounding error that was measured, or with `gram` that of squaring if it is larger (`gram_bound`).
    """

    L: Tensor
    sigma: Tensor
    basis: Tensor | None
    solver: str
    bound: float


@torch.no_grad()
def threshold(Z: Tensor, tau: float, basis: Tensor | None = None, solver: str = "auto") -> SvtResult:
    """Shrink the singular values of Z (n×m, float32 or float64) by `tau` ≥ 0.

    Args:
        Z: the matrix.
        tau: the threshold; 0 returns Z itself, to the bit.
        basis: `SvtResult.basis` of the last update of the same block.
        solver: `exact`, `gram`, `subspace`, or `auto`, the cheapest that keeps to `TOLERANCE`. `auto` uses the
            subspace solver from `SMALLEST_SIDE` on, `subspace` at any size. If a solver fails, the next more expensive
            one is tried.

    Raises:
        ValueError: the solver is unknown.
        torch.linalg.LinAlgError: no solver converges, or Z is not finite.
    """
    if solver not in ("auto", "exact", "gram", "subspace"):
        raise ValueError(f"solver {solver!r} is unknown; give auto, exact, gram or subspace")
    if Z.shape[0] > Z.shape[1]:
        found = threshold(Z.mT, tau, basis, solver)
        return replace(found, L=found.L.mT.contiguous())
    for attempt in _attempts(Z, tau, basis, solver):
        with suppress(torch.linalg.LinAlgError):
            found = attempt()
            if found is None:
                continue
            if math.isfinite(float(found.sigma.sum())):  # a decomposition can fail without raising
                return found
        if not bool(Z.isfinite().all()):
            break
    raise torch.linalg.LinAlgError(f"no singular values of a {Z.shape[0]}×{Z.shape[1]} matrix can be found")


def _attempts(Z: Tensor, tau: float, basis: Tensor | None, solver: str) -> Iterator[Callable[[], SvtResult | None]]:
    """Yield the requested solver, then the more expensive ones; a failing one returns None or raises LinAlgError."""
    if solver != "exact":
        squared = cache(lambda: _squared(Z))
        least = SMALLEST_SIDE if solver == "auto" else 0
        if solver != "gram" and basis is not None and tau > 0:
            yield lambda: _subspace(Z, squared(), tau, basis, least)
        yield lambda: _gram(Z, squared(), tau, least) if tau > 0 else _unshrunk(Z)
    yield lambda: _exact(Z, tau)
    yield lambda: _regularised(Z, tau)


def _squared(Z: Tensor) -> Tensor:
    """ZZᵀ with five eighths of the work: by symmetry, blocks above the diagonal are copied below it."""
    n = len(Z)
    if n < SMALLEST_SIDE:
        return Z @ Z.mT
    A = Z.new_empty(n, n)
    edges = [n * i // _STRIPES for i in range(_STRIPES + 1)]
    for low, high in pairwise(edges):
        torch.matmul(Z[low:high], Z[low:].mT, out=A[low:high, low:])
        A[high:, low:high] = A[low:high, high:].mT
    return A


def _exact(Z: Tensor, tau: float) -> SvtResult:
    U, sigma, Vh = torch.linalg.svd(Z, full_matrices=False)
    shrunk = (sigma - tau).clamp_min(0)
    L = Z if tau == 0 else (U * shrunk) @ Vh
    return SvtResult(L, shrunk, None, "exact", ROUNDING * torch.finfo(Z.dtype).eps)


def _regularised(Z: Tensor, tau: float) -> SvtResult:
    found = _exact(_noisy(Z), tau)
    L = Z if tau == 0 else found.L.to(Z)
    return SvtResult(L, found.sigma.to(Z), None, "regularised", _NOISE + ROUNDING * torch.finfo(Z.dtype).eps)


def _noisy(Z: Tensor) -> Tensor:
    noise = _random(*Z.shape, Z.double())
    size = _NOISE * torch.linalg.vector_norm(Z.double())
    return Z.double() + noise * (size / torch.linalg.vector_norm(noise))


def left_vectors(Z: Tensor) -> Tensor:
    """All left singular vectors (n×n) of Z (n×m, n ≤ m) in no particular order, as exact as those of `threshold`.

    Raises:
        torch.linalg.LinAlgError: no decomposition converges, or Z is not finite.
    """
    return _first_sound(
        Z,
        lambda: torch.linalg.eigh(Z @ Z.mT)[1],
        lambda: torch.linalg.svd(Z, full_matrices=False)[0],
        lambda: torch.linalg.svd(_noisy(Z), full_matrices=False)[0].to(Z),
    )


def leading_left_vectors(Z: Tensor, rank: int) -> Tensor:
    """The `rank` leading left singular vectors (n×rank) of Z (n×m, n ≤ m), in order, from eigenvectors of ZZᵀ.

    Where the last of them has a singular value below 3e-3 of the largest, which squaring in float32 would not resolve,
    ZZᵀ is made in float64.

    Raises:
        torch.linalg.LinAlgError: no decomposition converges, or Z is not finite.
    """
    return _first_sound(
        Z,
        lambda: _leading_eigenvectors(Z, rank),
        lambda: torch.linalg.svd(Z, full_matrices=False)[0][:, :rank],
        lambda: torch.linalg.svd(_noisy(Z), full_matrices=False)[0][:, :rank].to(Z),
    )


def _first_sound(Z: Tensor, *finders: Callable[[], Tensor]) -> Tensor:
    """Return the first result that is finite; a finder that raises LinAlgError is skipped."""
    for find in finders:
        with suppress(torch.linalg.LinAlgError):
            vectors = find()
            if bool(vectors.isfinite().all()):
                return vectors
    raise torch.linalg.LinAlgError(f"no singular vectors of a {Z.shape[0]}×{Z.shape[1]} matrix can be found")


def _leading_eigenvectors(Z: Tensor, rank: int) -> Tensor:
    eigenvalues, U = torch.linalg.eigh(_squared(Z))
    if Z.dtype != torch.float64 and float(eigenvalues[-rank]) < _SMALLEST_SQUARE * float(eigenvalues[-1]):
        U = torch.linalg.eigh(_squared(Z.double()))[1].to(Z)
    return U.flip(1)[:, :rank]


def _unshrunk(Z: Tensor) -> SvtResult:
    """Z itself and its singular values, for which float64 needs no vectors: squaring in it loses none that count."""
    eigenvalues = torch.linalg.eigvalsh(_squared(Z.double()))
    sigma = eigenvalues.clamp_min(0).sqrt().flip(0).to(Z)
    return SvtResult(Z, sigma, None, "gram", ROUNDING * torch.finfo(Z.dtype).eps)


def _gram(Z: Tensor, A: Tensor, tau: float, least: int) -> SvtResult | None:
    eigenvalues, U = torch.linalg.eigh(A)
    error = gram_bound(eigenvalues.clamp_min(0).sqrt(), eigenvalues.new_full((1,), tau))
    bound, least_square, square = torch.stack([error, eigenvalues[0], eigenvalues[-1]]).tolist()  # in one read
    if square < LEAST_SQUARE * torch.finfo(Z.dtype).tiny and Z.any():
        return None
    # Vectors of singular values between τ and what float32 resolves are mixed with those of the noise below.
    is_lost = max(tau**2, least_square) < _SMALLEST_SQUARE * square
    if Z.dtype != torch.float64 and (is_lost or bound > TOLERANCE):
        eigenvalues, U = (found.to(Z) for found in torch.linalg.eigh(_squared(Z.double())))
        bound = ROUNDING * torch.finfo(Z.dtype).eps
    sigma, U = eigenvalues.clamp_min(0).sqrt().flip(0), U.flip(1)
    if tau < _LEAST_SIGMA * square**0.5:
        # The row lengths of UᵀZ keep the digits of small singular values that squaring in A has lost.
        projected = U.mT @ Z
        sigma, order = torch.linalg.vector_norm(projected, dim=1).sort(descending=True)
        U, projected = U[:, order], projected[order]
    else:
        projected = None
    k = int(torch.count_nonzero(sigma > tau))
    if projected is None:
        L = _shrunk(Z, U[:, :k], sigma[:k], tau)
    else:
        L = _product(U[:, :k] * (1 - tau / sigma[:k]), projected[:k], Z)
    return SvtResult(L, (sigma - tau).clamp_min(0), _basis(U, k, least), "gram", bound)


def _shrunk(Z: Tensor, U: Tensor, sigma: Tensor, tau: float) -> Tensor:
    """U diag(1 − τ/σ) UᵀZ (n×m) in the order of products that takes fewer operations."""
    (n, m), k = Z.shape, len(sigma)
    left = U * (1 - tau / sigma)
    return _product(left, U.mT @ Z, Z) if 2 * k * m <= n * (k + m) else _product(left @ U.mT, Z, Z)


def _product(left: Tensor, right: Tensor, Z: Tensor) -> Tensor:
    """left·right with the strides of Z: a tall Z is a transposed view here, and a copy costs as much as a product."""
    return torch.mm(left, right, out=torch.empty_like(Z))


def _basis(U: Tensor, k: int, least: int) -> Tensor | None:
    """The k kept vectors and half as many more, so that the rank may grow and a filter converges; None if too many."""
    n = len(U)
    q = k + max(8, k // 2)
    return U[:, :q].clone() if n >= least and q <= LARGEST_SHARE * n else None


def _subspace(Z: Tensor, A: Tensor, tau: float, basis: Tensor, least: int) -> SvtResult | None:
    """Solve from the basis of the last update; None if the bound stays too large or the rank outgrows the basis."""
    whole = float(A.diagonal().sum(dtype=torch.float64))  # ‖Z‖_F², which a sum in float32 would miss by up to 1 %
    size, rounding = whole**0.5, ROUNDING * torch.finfo(Z.dtype).eps
    # A few random vectors beside the basis let the filter find singular vectors that are new. Ritz vectors are used, as
    # the vectors of the basis itself are mixtures, in which a filter would let the largest term hide the others.
    fresh = _random(len(A), _PROBES, A, seed=1)
    fresh = torch.linalg.qr(fresh - basis @ (basis.mT @ fresh))[0]
    U, AU, squares = _ritz(A, torch.cat([basis, fresh], 1))
    for filters in range(MOST_FILTERS + 1):
        sigma = squares.clamp_min(0).sqrt()
        k = int(torch.count_nonzero(sigma > tau))
        if k + _PROBES >= len(sigma) or not k or float(sigma[0]) * _LEAST_SIGMA > tau:
            return None
        E = (AU[:, :k] - U[:, :k] * squares[:k]) / sigma[:k]
        bound = _bound(E, sigma[:k], tau, float(sigma[-1 - _PROBES])) / size
        if bound <= TOLERANCE:
            outside = _outside(A, U)
            beside, shares = _beside(AU[:, k:] - U[:, k:] * squares[k:], squares[k:], outside)
            rest = max(0.0, whole - float(squares[:k].sum(dtype=torch.float64))) + rounding * whole
            missed = max(0.0, float(beside[-1]) - tau) * min(len(Z) - k, rest / tau**2 + 1) ** 0.5
            bound = max((_bound(E, sigma[:k], tau, outside, beside, shares) + missed) / size, rounding)
            if bound <= TOLERANCE:
                L = _shrunk(Z, U[:, :k], sigma[:k], tau)
                shrunk = torch.zeros(len(Z), dtype=Z.dtype, device=Z.device)
                shrunk[: len(sigma)] = (sigma - tau).clamp_min(0)
                return SvtResult(L, shrunk, _basis(U, k, least), "subspace", bound)
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
    g = _random(len(A), _PROBES, A, seed=2).mT  # as rows: a product with few columns is several times slower
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


def _random(n: int, q: int, like: Tensor, seed: int = 0) -> Tensor:
    """A fixed Gaussian matrix (n×q) with the dtype and device of `like`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, q, generator=generator, dtype=like.dtype, device="cpu").to(like.device)
