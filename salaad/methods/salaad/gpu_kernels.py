"""The elementwise part of an ADMM update, and the penalty, in Triton: inputs are read once, outputs written once.

`elementwise` says what is computed, and does the same computation in torch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from salaad.common import native

_BLOCK = 2048  # entries of a program


@triton.jit
def divide_kernel(X, L, old_R, R, T, thresholds, partial, size, tiles, BLOCK: tl.constexpr):
    """Write R and T; program (t, b) computes the t-th BLOCK entries of block b.

    Args:
        X: blocks×size.
        L: blocks×size, float32.
        old_R: blocks×size, float32.
        R: blocks×size, float32, written.
        T: blocks×size, float32, written.
        thresholds: blocks×3, float32: τ_L, τ_S, and the τ_S that divides the old R.
        partial: blocks×tiles×4, float32, written: each program's parts of the four sums.
        size: number of entries of a block.
        tiles: number of programs for a block.
        BLOCK: number of entries for a program, a power of 2.
    """
    # A block may have 2³¹ entries, so the first index of a program has 64 bits; offsets, to save registers, have 32.
    tile, block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    first, i = block * size + tile * BLOCK, tl.arange(0, BLOCK)
    inside = i < tl.maximum(tl.minimum(size - tile * BLOCK, BLOCK), 0).to(tl.int32)
    tau_L, tau_S, tau_R = (
        tl.load(thresholds + 3 * block),
        tl.load(thresholds + 3 * block + 1),
        tl.load(thresholds + 3 * block + 2),
    )
    x = tl.load(X + first + i, mask=inside, other=0.0).to(tl.float32)
    low_rank, old = tl.load(L + first + i, mask=inside, other=0.0), tl.load(old_R + first + i, mask=inside, other=0.0)
    before = _clip(old, tau_R)
    new = tl.where(tau_L > 0, (x - low_rank) + before, old - before)
    dual = _clip(new, tau_S)
    target = (low_rank + new) - 2 * dual
    tl.store(R + first + i, new, mask=inside)
    tl.store(T + first + i, target, mask=inside)
    change = dual - before
    to = partial + (block * tiles + tile) * 4
    tl.store(to, tl.sum((new != dual).to(tl.float32), 0))
    tl.store(to + 1, tl.sum(change * change, 0))
    tl.store(to + 2, tl.sum(x * x, 0))
    tl.store(to + 3, tl.sum(target, 0))


@triton.jit
def _clip(z, tau):
    """z projected on [−τ, τ]; NaN stays NaN."""
    return tl.clamp(z, -tau, tau, propagate_nan=tl.PropagateNan.ALL)


@triton.jit(do_not_specialize=["seed"])
def penalty_kernel(gradient, X, T, factor, size, seed, ROUNDED: tl.constexpr, BLOCK: tl.constexpr):
    """Add factor·(X − T) to gradient (size entries); with ROUNDED, round to bfloat16 up or down at random by `seed`."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    x, target = tl.load(X + i, mask=inside, other=0.0).to(tl.float32), tl.load(T + i, mask=inside, other=0.0)
    total = tl.load(gradient + i, mask=inside, other=0.0).to(tl.float32) + factor * (x - target)
    if ROUNDED:
        noise = (tl.randint(seed, i.to(tl.int32)) & 0xFFFF).to(tl.int32)
        # The NaN that a GPU computes has the largest bits: with noise they would overflow to those of -0.
        bits = total.to(tl.int32, bitcast=True) + tl.where(total == total, noise, 0)
        total = (bits & -65536).to(tl.float32, bitcast=True)
    tl.store(gradient + i, total.to(gradient.dtype.element_ty), mask=inside)


def sparse_and_dual(X: Tensor, L: Tensor, R: Tensor, tau: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Do what `elementwise.sparse_and_dual` does, by a kernel; return the fields of its result in order."""
    blocks, size = tau[0].numel(), X.shape[-2] * X.shape[-1]
    tiles = triton.cdiv(size, _BLOCK)
    after, T, partial = torch.empty_like(R), torch.empty_like(R), R.new_empty(blocks, tiles, 4)
    thresholds = torch.stack(tau, -1)
    with native.device_context(X.device):
        divide_kernel[(tiles, blocks)](X, L, R, after, T, thresholds, partial, size, tiles, BLOCK=_BLOCK, num_warps=8)
    nnz, change, norm, total = partial.sum(1, dtype=torch.float64).view(*tau[0].shape, 4).unbind(-1)
    return after, T, nnz.long(), change.sqrt().float(), norm.sqrt().float(), total.float()


def add_penalty(gradient: Tensor, X: Tensor, T: Tensor, factor: float, seed: int) -> None:
    """Do what `elementwise.add_penalty` does, by a kernel."""
    size = gradient.numel()
    rounded = gradient.dtype == torch.bfloat16
    with native.device_context(gradient.device):
        penalty_kernel[(triton.cdiv(size, _BLOCK),)](
            gradient, X, T, factor, size, seed, ROUNDED=rounded, BLOCK=_BLOCK, num_warps=8
        )
