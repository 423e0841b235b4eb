"""Refinement: L + S of a fixed rank and a fixed count, brought as near to a matrix as alternating projections can.

    L ← best approximation of rank r of T − S,   S ← the k largest entries of T − L   (others zero)

Each half-step is optimal for the other part as it is, so ‖T − L − S‖_F never rises. The first low-rank step is exact;
a later one is one step of subspace iteration from the subspace before: it cannot raise the error either, costs two
matrix products instead of a decomposition, and ends at the same place (GoDec, Zhou and Tao 2011).
"""

import torch
from torch import Tensor

from salaad.factored.slr import Slr
from salaad.prox import low_rank_factors

PLATEAU = 1e-3  # an iteration that takes less than this fraction off the error is the last


@torch.no_grad()
def refine(
    T: Tensor, *, rank: int, nnz: int, iterations: int, S: Tensor | None = None, taken: Tensor | None = None
) -> Slr:
    """Return L + S near T (n×m) after up to `iterations` alternations.

    Args:
        T: the matrix to approximate.
        rank: r of L.
        nnz: k, entries of S; fewer if T − L has fewer nonzero entries outside `taken`.
        iterations: alternations at the most.
        S: the sparse part to begin with (n×m); zero if not given.
        taken: places S must leave zero (n×m, bool); none if not given.
    """
    if T.shape[0] > T.shape[1]:
        S, taken = (part if part is None else part.mT for part in (S, taken))
        return refine(T.mT, rank=rank, nnz=nnz, iterations=iterations, S=S, taken=taken).transposed()
    S = torch.zeros_like(T) if S is None else S
    Q = low_rank_factors(T - S, rank)[0]
    before = None
    for _ in range(max(1, iterations)):
        Z = T - S
        if before is not None and rank:
            Q = torch.linalg.qr(Z @ (Z.mT @ Q))[0]
        V = Q.mT @ Z
        residual = T - Q @ V
        S = _largest(residual, nnz, taken)
        error = float(torch.linalg.vector_norm(residual - S))
        if before is not None and before - error <= PLATEAU * before:
            break
        before = error
    return Slr.from_factors(Q, V, S)


def _largest(R: Tensor, count: int, taken: Tensor | None) -> Tensor:
    """R with all but its `count` largest entries outside `taken` set to zero."""
    flat = R.flatten()
    sizes, free = flat.abs(), flat.numel()
    if taken is not None:
        sizes, free = torch.where(taken.flatten(), -1, sizes), free - int(torch.count_nonzero(taken))
    places = sizes.topk(min(count, free), sorted=False).indices
    return torch.zeros_like(flat).index_put((places,), flat[places]).view_as(R)
