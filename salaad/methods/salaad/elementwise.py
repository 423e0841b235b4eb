"""The elementwise part of ADMM updates, of a block or a stack of blocks, and the penalty: in torch, or in one pass.

With the letters of `update`, and L found by the singular-value threshold, the rest of an update is

    R ← X − L + dual      (R − dual where τ_L = 0: L is then X − S + dual)
    dual ← clip(R, τ_S)    T ← L + R − 2·dual

and four sums over the entries. In torch these are some twenty reads of matrices of the block's size; in `gpu_kernels`
three reads and two writes. Where torch and the kernels round alike, R and T agree bit for bit.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from salaad.common import native
from salaad.methods.salaad.rounding import add_rounded
from salaad.prox import clip


class Thresholds(NamedTuple):
    """The thresholds in an update of one block (each 0-d) or of a stack of b blocks (each b).

    Args:
        tau_L: the threshold with which L was found.
        tau_S: the threshold for the new S.
        tau_R: the threshold that divides the old R into S and dual.
    """

    tau_L: Tensor
    tau_S: Tensor
    tau_R: Tensor


class SparseAndDual(NamedTuple):
    """The new S and dual, as R and T, and their sums (`sparse_and_dual`); the numbers are 0-d or b.

    Args:
        R: S + dual, n×m or b×n×m.
        T: L + S − dual, n×m or b×n×m.
        nnz: number of nonzero entries of S.
        delta: ‖X − L − S‖_F, by which the dual has changed.
        norm: ‖X‖_F.
        total: the sum of T, which is finite only if T is.
    """

    R: Tensor
    T: Tensor
    nnz: Tensor
    delta: Tensor
    norm: Tensor
    total: Tensor


def sparse_and_dual(X: Tensor, L: Tensor, R: Tensor, tau: Thresholds, thresholded: bool) -> SparseAndDual:
    """Compute S and the dual (eqs. 4 and 5), as R and T, of a block or a stack whose L is found.

    Args:
        X: weight, n×m or b×n×m (float32 or bfloat16).
        L: what the singular-value threshold found (float32).
        R: the R of the last update (float32).
        tau: the thresholds (float32).
        thresholded: whether τ_L > 0, for all of a stack.
    """
    if _takes(X, L, R):
        from salaad.methods.salaad import gpu_kernels

        return SparseAndDual(*gpu_kernels.sparse_and_dual(X, L, R, tau))
    return sparse_and_dual_in_torch(X, L, R, tau, thresholded)


def sparse_and_dual_in_torch(X: Tensor, L: Tensor, R: Tensor, tau: Thresholds, thresholded: bool) -> SparseAndDual:
    """Do what `sparse_and_dual` does, in torch."""
    X, before = X.to(L.dtype), clip_each(R, tau.tau_R)
    # Without a threshold L = X − S + dual, so R = S; computed from X and L, S would fill with rounding errors.
    R = (X - L).add_(before) if thresholded else R - before
    dual = clip_each(R, tau.tau_S)
    T = (L + R).sub_(dual, alpha=2)
    delta = torch.linalg.vector_norm(dual - before, dim=(-2, -1))  # eq. 5 adds X − L − S to the dual
    norm = torch.linalg.vector_norm(X, dim=(-2, -1))
    return SparseAndDual(R, T, entries(R, dual), delta, norm, T.sum((-2, -1)))


def entries(R: Tensor, dual: Tensor) -> Tensor:
    """The number of nonzero entries of S, of a block or of each in a stack: R and the dual differ where S is not 0."""
    differ = dual != R
    return torch.count_nonzero(differ) if R.ndim == 2 else torch.count_nonzero(differ, dim=(-2, -1))


def clip_each(R: Tensor, tau: Tensor) -> Tensor:
    """R of a block, or of each of a stack, clipped to its own τ."""
    return clip(R, tau if tau.ndim == 0 else tau[:, None, None])


def add_penalty(gradient: Tensor, X: Tensor, T: Tensor, factor: float, seed: int) -> None:
    """Add factor·(X − T), which with factor ρ is the gradient of ℓ_ρ (eq. 6), to `gradient` (n×m) in place.

    In a bfloat16 gradient the sum is rounded up or down at random; `seed` fixes the numbers on each kind of device.

    Args:
        gradient: n×m, float32 or bfloat16.
        X: n×m, float32 or bfloat16.
        T: n×m, float32.
        factor: ρ times the scale of the loss.
        seed: seed of the random rounding.
    """
    if _takes(gradient, X, T):
        from salaad.methods.salaad import gpu_kernels

        gpu_kernels.add_penalty(gradient, X, T, factor, seed)
    elif gradient.dtype == torch.bfloat16:
        add_rounded(gradient, (X.float() - T).mul_(factor), seed)
    else:
        gradient.add_(X, alpha=factor).sub_(T, alpha=factor)


def add_penalties(gradients: list[Tensor], X: list[Tensor], T: list[Tensor], factor: float) -> None:
    """Do what `add_penalty` does for several gradients that are not rounded, each n×m: many at once."""
    torch._foreach_add_(gradients, X, alpha=factor)
    torch._foreach_sub_(gradients, T, alpha=factor)


def _takes(first: Tensor, *others: Tensor) -> bool:
    """Whether the Triton kernels can be used: they need contiguous tensors in float32 or bfloat16."""
    known = {torch.float32, torch.bfloat16}
    plain = all(tensor.is_contiguous() and tensor.dtype in known for tensor in (first, *others))
    return plain and native.uses_triton(first.device)
