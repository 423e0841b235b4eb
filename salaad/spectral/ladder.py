"""Singular-value thresholding SVT_τ(Z) (the L-update, eq. 3) by the cheapest of four solvers that is accurate enough.

    subspace     the leading eigenvectors of the Gram matrix A = ZZᵀ, improved from those of the last update by one
                 Chebyshev filter
    gram         all eigenvectors of A, in float64 where the threshold is below what squaring in float32 resolves; the
                 eigenvalues alone without a threshold
    exact        a full SVD
    regularised  a full SVD in float64 of Z plus a little noise, for a Z on which the others do not converge

A is the Gram matrix of the short side of Z, which `subspace` (a module of its own) and `gram` share. The noise N of
`regularised` moves L by at most ‖N‖_F, as a proximal operator is non-expansive.
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
from salaad.spectral.subspace import LEAST_SIGMA, leading, random_columns

# Both measured on a CPU, for which these solvers are meant: they branch on computed values, for which the host would
# have to wait on another device.
SMALLEST_SIDE = 256  # least short side for `subspace`: below, its many small calls cost more than all eigenvectors
LARGEST_SHARE = 0.4  # largest dimension of a subspace, over the short side, that is cheaper than all eigenvectors
_NOISE = 1e-6  # norm of the noise of `regularised`, relative to ‖Z‖_F
_STRIPES = 4  # number of stripes of rows in which A is computed
_SMALLEST_SQUARE = 1e-5  # eigenvalue over the largest: below, eigenvectors of a Gram matrix in float32 are noise


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
    noise = random_columns(*Z.shape, Z.double())
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
    if tau < LEAST_SIGMA * square**0.5:
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
    """Solve from the basis of the last update; None if its vectors cannot be made exact enough."""
    found = leading(A, tau, basis)
    if found is None:
        return None
    L = _shrunk(Z, found.U[:, : found.kept], found.sigma[: found.kept], tau)
    shrunk = torch.zeros(len(Z), dtype=Z.dtype, device=Z.device)
    shrunk[: len(found.sigma)] = (found.sigma - tau).clamp_min(0)
    return SvtResult(L, shrunk, _basis(found.U, found.kept, least), "subspace", found.bound)
