"""The two proximal operators of the second stage and the effective rank (paper, section 4.1 and Definition 1).

    prox of τ|·|₁:   T_τ(Z)_ij = sign(Z_ij)·(|Z_ij| − τ)₊
    prox of τ|·|_*:  SVT_τ(Z)  = U diag((σ − τ)₊) Vᵀ,   Z = U diag(σ) Vᵀ

A threshold of 0 returns Z itself, to the bit, so that rounding never reaches the sparse part.
"""

import torch
from torch import Tensor

from salaad.spectral import left_vectors, threshold


def soft_threshold(Z: Tensor, tau: float | Tensor) -> Tensor:
    """Shrink every entry of Z (any shape) towards zero by `tau` ≥ 0.

    By Moreau's identity this is Z minus its projection on [−τ, τ], which is exactly zero inside the band.
    """
    return Z - clip(Z, tau)


def clip(Z: Tensor, tau: float | Tensor) -> Tensor:
    """The projection of every entry of Z (any shape) on [−τ, τ], τ ≥ 0 without dimensions; no gradient reaches τ."""
    if Z.is_cpu:
        tau = float(tau)  # torch is several times slower with bounds that are tensors; on other devices float() waits
    return Z.clamp(-tau, tau)


def svt(Z: Tensor, tau: float | Tensor, method: str = "auto") -> tuple[Tensor, Tensor]:
    """Shrink the singular values of Z (n×m) by `tau` ≥ 0.

    Args:
        Z: matrix, float32 or float64.
        tau: threshold, a number or a tensor without dimensions.
        method: `exact` (full SVD), `gram` (eigenvectors of the Gram matrix of the short side, a few times faster) or
            `auto`, which is `gram`. In float32 the error of `gram` relative to ‖Z‖ is about 1e-6, and grows to 1e-4
            where the threshold falls among singular values a thousand times smaller than the largest.

    Returns:
        L (n×m) and its singular values (min(n, m), descending): those of Z, less `tau`, never below 0.
    """
    found = threshold(Z, float(tau), method=method)
    return found.L, found.sigma


def _gram_spectrum(Z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q (n×n) of ZZᵀ = QΣ²Qᵀ, QᵀZ (n×m) and σ (n, descending) of a short and wide Z.

    The singular values are the lengths of the rows of QᵀZ. The eigenvalues themselves would not do: squaring has
    already lost what lies below the square root of the rounding error.
    """
    Q = left_vectors(Z)
    projected = Q.mT @ Z
    sigma, order = torch.linalg.vector_norm(projected, dim=1).sort(descending=True)
    return Q[:, order], projected[order], sigma


def effective_rank(sigma: Tensor, gamma: float = 0.999, energy: str = "nuclear") -> int:
    """Definition 1: the least k whose k largest singular values hold the share γ of the energy.

    Args:
        sigma: singular values, descending.
        gamma: share of the energy to cover, in (0, 1].
        energy: `nuclear` is Σσ, as the paper defines it; `squared` is Σσ².

    Returns:
        k between 1 and len(sigma), or 0 for the zero matrix.
    """
    values = sigma.double()
    covered = (values if energy == "nuclear" else values.square()).cumsum(0)
    total = covered[-1]
    k = int(torch.count_nonzero(covered < gamma * total)) + 1
    return min(k, len(sigma)) if total > 0 else 0


def truncate(X: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The best approximation of X (n×m) of at most the given rank, by projection on its leading singular vectors.

    Returns:
        The approximation (n×m), and min(n, m) singular values in descending order, zeros from `rank` on.
    """
    if X.shape[0] > X.shape[1]:
        approximation, sigma = truncate(X.mT, rank)
        return approximation.mT.contiguous(), sigma
    Q, projected, sigma = _gram_spectrum(X)
    return Q[:, :rank] @ projected[:rank], torch.where(torch.arange(len(sigma), device=X.device) < rank, sigma, 0)


def low_rank_factors(X: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """U (n×r) and V (r×m) whose product is X (n×m) truncated to `rank`; the first r' terms truncate it to r' < r."""
    if X.shape[0] > X.shape[1]:
        V, U = low_rank_factors(X.mT, rank)
        return U.mT.contiguous(), V.mT.contiguous()
    Q, projected, _ = _gram_spectrum(X)
    return Q[:, :rank].contiguous(), projected[:rank].contiguous()
