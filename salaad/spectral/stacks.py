"""SVT_τ(Z) of a stack of matrices of one shape by the eigenvectors of their Gram matrices; the host reads no value.

    ZZᵀ = QΛQᵀ,      σᵢ = ‖(QᵀZ)ᵢ‖,      SVT_τ(Z) = Q diag(1 − τ/σ)₊ QᵀZ

The row lengths of QᵀZ keep the digits of small singular values that squaring loses; those below about 1e-3 of the
largest are lost with their vectors, which `bound` counts. Without a threshold L is Z, and the singular values alone are
found, in float64, which loses none. A matrix that is not finite, or whose eigenvectors are not, does not disturb the
others: `holds` is False for it.
"""

import torch
from torch import Tensor

from salaad.prox import effective_ranks
from salaad.spectral.results import LEAST_SQUARE, ROUNDING, StackResult, gram_bound


def operations(n: int, m: int) -> tuple[float, float]:
    """The numbers of operations for one matrix (n×m, n ≤ m): in products, and in the eigensolver with vectors."""
    return 6 * n * n * m, 9 * n**3


@torch.no_grad()
def gram_stack(Z: Tensor, tau: Tensor | None, gamma: float = 0.999, energy: str = "nuclear") -> StackResult:
    """Shrink the singular values of Z (b×n×m, n ≤ m) by `tau` (b); with None, no threshold, L is Z itself.

    Raises:
        torch.linalg.LinAlgError: no eigenvectors of a finite matrix were found.
    """
    # Without a threshold one matrix after the other: a copy of the stack in float64 would need as much memory again.
    A = Z @ Z.mT if tau is not None else torch.stack([(each := one.double()) @ each.mT for one in Z])
    finite = A.sum((-2, -1)).isfinite()
    # One matrix that is not finite would make the solver fail for the whole stack.
    A = torch.where(finite[:, None, None], A, 0)
    if tau is None:
        L, shrunk = Z, torch.linalg.eigvalsh(A).clamp_min(0).sqrt().to(Z)
        bound = torch.full_like(shrunk[:, 0], ROUNDING * torch.finfo(Z.dtype).eps)
        resolved = finite
    else:
        Q = torch.linalg.eigh(A)[1]
        projected = Q.mT @ Z
        sigma = torch.linalg.vector_norm(projected, dim=-1)
        bound = gram_bound(sigma, tau[:, None])
        shrunk = (sigma - tau[:, None]).clamp_min(0)
        tiny = torch.finfo(Z.dtype).tiny
        L = Q @ projected.mul_((shrunk / sigma.clamp_min(tiny))[..., None])
        trace, largest = A.diagonal(dim1=-2, dim2=-1).sum(-1), torch.linalg.vector_norm(Z, torch.inf, dim=(-2, -1))
        resolved = finite & ((trace >= LEAST_SQUARE * tiny) | (largest == 0))
    shrunk = shrunk.sort(descending=True).values
    return StackResult(
        L=L,
        sigma=shrunk,
        rank=effective_ranks(shrunk, gamma, energy),
        kept=torch.count_nonzero(shrunk, dim=-1),
        bound=bound,
        holds=resolved & shrunk.sum(-1).isfinite(),
        solver="gram",
    )
