"""The proximal operators of the L- and S-updates (eqs. 3 and 4, section 4.1) and the effective rank (Definition 4.1).

    prox of τ|·|₁:   T_τ(Z)_ij = sign(Z_ij)·(|Z_ij| − τ)₊
    prox of τ|·|_*:  SVT_τ(Z)  = U diag((σ − τ)₊) Vᵀ,   Z = U diag(σ) Vᵀ

A threshold of 0 returns Z itself, to the bit, so that rounding errors never become entries of S.
"""

import math

import torch
from torch import Tensor

from salaad.spectral import left_vectors, threshold


def soft_threshold(Z: Tensor, tau: float | Tensor) -> Tensor:
    """T_τ(Z): shrink every entry of Z (any shape) towards zero by `tau` ≥ 0.

    By Moreau's identity this is Z minus its projection on [−τ, τ], so entries inside the interval become exactly 0.

    Raises:
        ValueError: Z holds no real numbers, or `tau`, unless it is on a GPU or has dimensions, is negative or NaN.
    """
    if not Z.is_floating_point():
        raise ValueError(f"Z is {Z.dtype}; give a tensor of real numbers, such as Z.float()")
    if not isinstance(tau, Tensor) or (tau.is_cpu and not tau.ndim):
        _require_threshold(float(tau))
    return Z - clip(Z, tau)


def _require_threshold(tau: float) -> None:
    if not tau >= 0:
        raise ValueError(f"tau is {tau}, and a threshold is at least 0; give 0 or more")


def clip(Z: Tensor, tau: float | Tensor) -> Tensor:
    """Project every entry of Z (any shape) on [−τ, τ], τ ≥ 0 a number, or a tensor that gets no gradient."""
    if Z.is_cpu and not (isinstance(tau, Tensor) and tau.ndim):
        tau = float(tau)  # clamp is several times faster with numbers; on a GPU float() would wait for the device
    return Z.clamp(-tau, tau)


def svt(Z: Tensor, tau: float | Tensor, method: str = "auto") -> tuple[Tensor, Tensor]:
    """SVT_τ(Z): shrink the singular values of Z (n×m) by `tau` ≥ 0.

    Args:
        Z: matrix, float32 or float64.
        tau: threshold, a number or a tensor without dimensions.
        method: the solver: `exact` (full SVD), `gram` (eigenvectors of the Gram matrix of the short side, a few times
            faster) or `auto`, which is `gram` here. In float32 the error of `gram` relative to ‖Z‖ is about 1e-6, and
            grows to 3e-4 where the threshold falls among many singular values 300 times smaller than the largest.

    Returns:
        L (n×m) and its singular values (min(n, m), descending): those of Z minus `tau`, never below 0. Neither has a
        gradient.

    Raises:
        ValueError: Z is no matrix of these dtypes or is empty, `tau` is negative or NaN, or the method is unknown.
        torch.linalg.LinAlgError: no solver converges, or Z is not finite.
    """
    if Z.ndim != 2 or not Z.numel() or Z.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"Z is {Z.dtype} of shape {tuple(Z.shape)}; give a matrix in float32 or float64")
    tau = float(tau)
    _require_threshold(tau)
    found = threshold(Z.detach(), tau, solver=method)
    return found.L, found.sigma


def _gram_spectrum(Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q (n×n) of ZZᵀ = QΣ²Qᵀ, QᵀZ (n×m) and σ (n, descending) of Z (n×m, n ≤ m).

    The singular values are the row lengths of QᵀZ. The eigenvalues are not used, since squaring loses singular values
    below the square root of the machine epsilon. Z is first divided by a power of two, which rounds nothing, as squares
    of entries like 1e-25 or 1e20 have no place in float32.
    """
    limit = math.frexp(torch.finfo(Z.dtype).max)[1] - 2  # beyond it the power or its inverse has no place either
    exponent = torch.linalg.vector_norm(Z, torch.inf).frexp().exponent.clamp(-limit, limit)
    scale = exponent.to(Z.dtype).exp2()
    Z = Z / scale
    Q = left_vectors(Z)
    projected = Q.mT @ Z
    sigma, order = torch.linalg.vector_norm(projected, dim=1).sort(descending=True)
    return Q[:, order], projected[order].mul_(scale), sigma.mul_(scale)


def effective_ranks(sigma: Tensor, gamma: float = 0.999, energy: str = "nuclear") -> Tensor:
    """The effective ranks (…) of spectra (…, n), defined as in `effective_rank`; does not wait for the device."""
    values = sigma.double()
    covered = (values if energy == "nuclear" else values.square()).cumsum(-1)
    total = covered[..., -1:]
    return torch.count_nonzero(covered < gamma * total, dim=-1) + (total[..., 0] > 0)


def effective_rank(sigma: Tensor, gamma: float = 0.999, energy: str = "nuclear") -> int:
    """Effective rank (Definition 4.1): the least k whose k largest singular values hold the share γ of the energy.

    Args:
        sigma: min(n, m) singular values, descending.
        gamma: share γ of the energy to cover, in (0, 1].
        energy: `nuclear` is Σσ, as the paper defines it; `squared` is Σσ², as the authors' training code has it.

    Returns:
        k between 1 and len(sigma), or 0 for the zero matrix; k / len(sigma) is the ratio Γ.

    Raises:
        ValueError: the singular values are none or no finite numbers from 0, or γ or the energy is none of these.
    """
    if sigma.ndim != 1 or not len(sigma) or not sigma.is_floating_point():
        raise ValueError(f"sigma is {sigma.dtype} of shape {tuple(sigma.shape)}; give a vector of singular values")
    if not (sigma.isfinite() & (sigma >= 0)).all():
        raise ValueError("sigma has entries that are negative or not finite; give singular values")
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}, outside (0, 1]; give the share of the energy to cover")
    if energy not in ("nuclear", "squared"):
        raise ValueError(f"energy is {energy!r}; give nuclear or squared")
    return int(effective_ranks(sigma, gamma, energy))


def truncate(X: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of X (n×m) of at most the given rank.

    Returns:
        The approximation (n×m) and its min(n, m) singular values, descending, zeros from `rank` on.
    """
    if X.shape[0] > X.shape[1]:
        approximation, sigma = truncate(X.mT, rank)
        return approximation.mT.contiguous(), sigma
    Q, projected, sigma = _gram_spectrum(X)
    return Q[:, :rank] @ projected[:rank], torch.where(torch.arange(len(sigma), device=X.device) < rank, sigma, 0)


def low_rank_factors(X: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (n×r) and V (r×m) with U·V = X (n×m) truncated to `rank` r; the first r' < r terms truncate X to rank r'."""
    if X.shape[0] > X.shape[1]:
        V, U = low_rank_factors(X.mT, rank)
        return U.mT.contiguous(), V.mT.contiguous()
    Q, projected, _ = _gram_spectrum(X)
    return Q[:, :rank].contiguous(), projected[:rank].contiguous()
