"""The effective ranks of a stack of matrices, estimated by products with a few random columns.

For Definition 4.1 let t be the largest value such that the eigenvalues m of a matrix M below t hold at most the share
1 − γ of the energy; the effective rank counts the others. The count and the energy of the eigenvalues below t are
integrals of the eigenvalue density, whose Chebyshev moments random columns X in the span of M estimate (the kernel
polynomial method):

    μ_k = tr Xᵀ T_k(Y) X,   Y = (M − centre)/half,        μ_2k = 2‖X_k‖² − μ_0,   μ_2k+1 = 2⟨X_k+1, X_k⟩ − μ_1

with X_k = T_k(Y)X, so that one product gives two moments. Jackson's factors g_k keep the density positive:

    N(t) = μ_0 φ/π + 2/π Σ_k (−1)^k g_k μ_k sin(kφ)/k,        t = centre − half·cos φ,

and this formula with the moments of m·density gives the energy below t. Little lies below t, so the error in it is
small too: with the columns and moments used here a rank of some hundreds is off by one or two. The density is resolved
to a hundredth of the largest eigenvalue; where most eigenvalues lie below that, or many are equal, the rank is off by
some per cent.
"""

import math

import torch
from torch import Tensor

COLUMNS, PRODUCTS = 64, 96
_POINTS = 1024  # intervals of φ, at whose ends N and the energy are evaluated
_ROOM = 1.002  # length of the interval over that of [0, top]: rounding must not move an eigenvalue out of it


def operations(n: int) -> tuple[int, int]:
    """The number of operations for one matrix (n×n), and of calls of torch for a whole stack."""
    return 2 * n * n * min(n, COLUMNS) * (PRODUCTS + 1), 4 * PRODUCTS


def effective_rank_of(M: Tensor, P: Tensor, kept: Tensor, top: Tensor, gamma: float, energy: str) -> Tensor:
    """The effective ranks (b) of the matrices M (b×n×n, symmetric, with eigenvalues from 0 to `top`).

    Args:
        M: the matrices, each with its columns in the span of its P.
        P: projections (b×n×n) onto `kept` dimensions.
        kept: ranks of the projections (b); where `kept` is 0, so is the effective rank.
        top: upper bounds of the eigenvalues (b×1×1).
        gamma: share γ of the energy to cover.
        energy: nuclear (Σm) or squared (Σm²).
    """
    tiny, half = torch.finfo(M.dtype).tiny, _ROOM * top.clamp_min(torch.finfo(M.dtype).tiny) / 2
    X = P @ _columns(M)
    X = X * (kept[:, None, None].sqrt() / torch.linalg.vector_norm(X, dim=(-2, -1), keepdim=True).clamp_min(tiny))
    moments = _moments((M - top / 2 * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)) / half, X)
    weighted = moments
    for _ in range(1 if energy == "nuclear" else 2):
        weighted = _times_eigenvalue(weighted, top[:, 0].double() / 2, half[:, 0].double())
    count, share = _integrals(torch.stack([moments, weighted]))
    # The whole energy is computed exactly, since random columns estimate the large eigenvalues less well.
    whole = M.diagonal(dim1=-2, dim2=-1).sum(-1) if energy == "nuclear" else M.square().sum((-2, -1))
    below = (share <= (1 - gamma) * whole[:, None].double()).sum(-1, keepdim=True) - 1
    return (kept - count.gather(1, below.clamp_min(0))[:, 0]).ceil().clamp_min(0)


def _columns(M: Tensor) -> Tensor:
    """A fixed Gaussian matrix (n×`COLUMNS`), or the identity (n×n) where n ≤ `COLUMNS`."""
    n = M.shape[-1]
    if n <= COLUMNS:
        return torch.eye(n, dtype=M.dtype, device=M.device)
    generator = torch.Generator(M.device).manual_seed(n)
    return torch.randn(n, COLUMNS, generator=generator, dtype=M.dtype, device=M.device)


def _moments(Y: Tensor, X: Tensor) -> Tensor:
    """The moments μ_k (b × 2·`PRODUCTS`, float64) of Y (b×n×n, norm at most 1) with the columns X (b×n×c)."""
    last, now, squares, beside = X, Y @ X, [], []
    for step in range(PRODUCTS):
        squares.append(torch.linalg.vector_norm(last, dim=(-2, -1)))
        beside.append((now * last).sum((-2, -1)))
        if step < PRODUCTS - 1:
            last, now = now, torch.baddbmm(last, Y, now, beta=-1, alpha=2)
    even, odd = torch.stack(squares, -1).double().square(), torch.stack(beside, -1).double()
    doubled = 1 + (torch.arange(PRODUCTS, device=X.device) > 0).double()
    even, odd = (part * doubled - (doubled - 1) * part[:, :1] for part in (even, odd))
    return torch.stack([even, odd], -1).flatten(1)


def _times_eigenvalue(moments: Tensor, centre: Tensor, half: Tensor) -> Tensor:
    """The moments of m·density, m = centre + half·x: moment k of x·density is the mean of moments k − 1 and k + 1."""
    right = torch.cat([moments[:, 1:], torch.zeros_like(moments[:, :1])], 1)
    left = torch.cat([moments[:, 1:2], moments[:, :-1]], 1)
    return centre * moments + half * (right + left) / 2


def _integrals(moments: Tensor) -> Tensor:
    """The integrals (… × points) of the density with these moments (… × K) from its lower end to each point t."""
    K = moments.shape[-1]
    k = torch.arange(1, K, dtype=torch.float64, device=moments.device)
    step = math.pi / (K + 1)
    jackson = ((K - k + 1) * (step * k).cos() + (step * k).sin() / math.tan(step)) / (K + 1)
    waves = torch.zeros(*moments.shape[:-1], 2 * _POINTS, dtype=torch.float64, device=moments.device)
    waves[..., 1:K] = moments[..., 1:] * jackson * (1 - 2 * (k % 2)) / k
    sines = -torch.fft.rfft(waves).imag  # Σ_k of each times sin(kφ), φ = 0 … π
    share = torch.linspace(0, 1, _POINTS + 1, dtype=torch.float64, device=moments.device)  # φ/π
    return moments[..., :1] * share + 2 / math.pi * sines
