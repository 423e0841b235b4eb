"""A kernel of three lines, run once per GPU to know whether Triton works there."""

import triton
import triton.language as tl
from torch import Tensor

from salaad.common import native


@triton.jit
def _double(x, y, count, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < count) * 2, mask=i < count)


def doubled(x: Tensor) -> Tensor:
    """2·x (at most 16 numbers)."""
    y = x.new_empty(x.shape)
    with native.device_context(x.device):
        _double[(1,)](x, y, x.numel(), BLOCK=16)
    return y
