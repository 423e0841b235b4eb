"""Cross-entropy of logits and its gradient in Triton: the logits are read twice and overwritten once by the gradient.

torch needs about six passes over a chunk of logits, half of them over a float32 copy. The library liger-kernel has such
a kernel too, but its loss waits for the device in every call to count the tokens, and by default sums the head's
gradient in the weights' dtype. `loss` does neither, so only the kernel could be taken from there, and it is short.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from salaad.common import native

_BLOCK = 4096  # logits at a time


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, vocabulary, ignored, WITH_GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):
    """Write −log softmax(logits) at the targets into `losses`, 0 for ignored tokens; program i handles token i.

    Args:
        logits: tokens×vocabulary; if WITH_GRADIENT, overwritten by the gradient: softmax(logits), less 1 at the target.
        targets: token ids (tokens), int64; an id outside the vocabulary gives the loss NaN.
        losses: the output (tokens), float32.
        vocabulary: number of logits of a token.
        ignored: the target that marks a token without a loss.
        WITH_GRADIENT: whether to overwrite the logits.
        BLOCK: logits at a time, a power of 2.
    """
    token = tl.program_id(0).to(tl.int64)
    row, target = logits + token * vocabulary, tl.load(targets + token)
    # Read the target's logit before the reductions, where the program's warps wait for each other: after them another
    # warp may have overwritten it.
    counts = target != ignored
    at_target = tl.load(row + target, mask=(target >= 0) & (target < vocabulary), other=float("nan")).to(tl.float32)
    # In every lane separately, the largest logit so far and the sum of the exponentials relative to it. The largest
    # begins with a finite number, so that a lane without logits never subtracts infinities. NaN stays NaN.
    largest = tl.full((BLOCK,), -3.0e38, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocabulary, BLOCK):
        k = start + tl.arange(0, BLOCK)
        z = tl.load(row + k, mask=k < vocabulary, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(largest, z)
        total = total * tl.exp(largest - larger) + tl.exp(z - larger)
        largest = larger
    top = tl.max(largest, 0)
    logarithm = top + tl.log(tl.sum(total * tl.exp(largest - top), 0))
    tl.store(losses + token, tl.where(counts, logarithm - at_target, 0.0))
    if WITH_GRADIENT:
        for start in range(0, vocabulary, BLOCK):
            k = start + tl.arange(0, BLOCK)
            z = tl.load(row + k, mask=k < vocabulary, other=-float("inf")).to(tl.float32)
            gradient = tl.where(counts, tl.exp(z - logarithm) - (k == target).to(tl.float32), 0.0)
            tl.store(row + k, gradient.to(logits.dtype.element_ty), mask=k < vocabulary)


def cross_entropy_(logits: Tensor, targets: Tensor, ignored: int, with_gradient: bool) -> Tensor:
    """Return the cross-entropies (tokens, float32) of `logits` (tokens×vocabulary); optionally overwrite the logits.

    Args:
        logits: contiguous, of any floating dtype of at most 32 bits.
        targets: token ids (tokens, int64); an id outside the vocabulary gives the loss NaN.
        ignored: the target that marks a token without a loss.
        with_gradient: whether to overwrite the logits by the gradient of the sum.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    with native.device_context(logits.device):
        cross_entropy_kernel[(len(logits),)](
            logits, targets, losses, logits.shape[1], ignored, WITH_GRADIENT=with_gradient, BLOCK=_BLOCK, num_warps=8
        )
    return losses
