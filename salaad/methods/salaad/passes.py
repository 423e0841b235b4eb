"""The elementwise part of ADMM updates of blocks of one shape, and the penalty: in torch, or in one pass on a GPU.

With the letters of `surrogate`, and L found by the singular-value threshold, the rest of an update is

    R ← X − L + dual      (R − dual where τ_L = 0: L is then X − S + dual)
    dual ← clip(R, τ_S)    T ← L + R − 2·dual

and four sums over the entries. In torch these are some twenty reads of matrices of the block's size; in `gpu_kernels`
three reads and two writes. Where torch and the kernels round alike, R and T agree to the bit.
"""

import torch
from torch import Tensor

from salaad.common import native
from salaad.methods.salaad.rounding import add_rounded

STATISTICS = ("nnz", "change", "norm", "total")


def divide(X: Tensor, L: Tensor, R: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """The second half of an ADMM update of b blocks (eqs. 4 and 5); R is overwritten.

    Args:
        X: weights (b×n×m), float32 or bfloat16.
        L: what the singular-value threshold found (b×n×m, float32).
        R: of the last update (b×n×m, float32); at the end of this one.
        thresholds: τ_L, τ_S, and the τ_S of the last update, which divides the old R (b×3, float32).

    Returns:
        T (b×n×m, float32) and `STATISTICS` (b×4, float64): entries of S, ‖X − L − S‖² (the change of the dual), ‖X‖²,
        and the sum of T, which is finite only if T is.
    """
    if _takes(X, L, R, thresholds):
        from salaad.methods.salaad import gpu_kernels

        return gpu_kernels.divide(X, L, R, thresholds)
    return divide_in_torch(X, L, R, thresholds)


def divide_in_torch(X: Tensor, L: Tensor, R: Tensor, thresholds: Tensor) -> tuple[Tensor, Tensor]:
    """As `divide`, in torch."""
    tau_L, tau_S, tau_R = thresholds[:, :, None, None].unbind(1)
    X, before = X.float(), R.clamp(-tau_R, tau_R)
    R.copy_(torch.where(tau_L > 0, (X - L).add_(before), R - before))
    dual = R.clamp(-tau_S, tau_S)
    T = (L + R).sub_(dual, alpha=2)
    sums = (dual != R, (dual - before).square(), X.square(), T)
    return T, torch.stack([part.sum((1, 2), dtype=torch.float64) for part in sums], 1)


def add_penalty(gradient: Tensor, X: Tensor, T: Tensor, factor: float, seed: int) -> None:
    """Add factor·(X − T), which with factor ρ is the gradient of ℓ_ρ (eq. 6), to `gradient` (n×m) in place.

    To one in bfloat16 it is added by a rounding up or down at random, which `seed` fixes on each kind of device.

    Args:
        gradient: n×m, float32 or bfloat16.
        X: n×m, float32 or bfloat16.
        T: n×m, float32.
        factor: ρ times the scale of the loss.
        seed: of the rounding.
    """
    if _takes(gradient, X, T):
        from salaad.methods.salaad import gpu_kernels

        gpu_kernels.add_penalty(gradient, X, T, factor, seed)
    else:
        add_penalty_in_torch(gradient, X, T, factor, seed)


def add_penalty_in_torch(gradient: Tensor, X: Tensor, T: Tensor, factor: float, seed: int) -> None:
    """As `add_penalty`, in torch."""
    if gradient.dtype == torch.bfloat16:
        add_rounded(gradient, (X.float() - T).mul_(factor), seed)
    else:
        gradient.add_(X, alpha=factor).sub_(T, alpha=factor)


def _takes(first: Tensor, *others: Tensor) -> bool:
    """Whether the kernels can be used: they read tensors one entry after the other."""
    known = {torch.float32, torch.bfloat16}
    plain = all(tensor.is_contiguous() and tensor.dtype in known for tensor in (first, *others))
    return plain and native.uses_triton(first.device)
