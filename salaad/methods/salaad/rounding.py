"""Stochastic rounding: adds to a bfloat16 gradient what bfloat16 cannot resolve; any optimizer sees it in the mean."""

import torch
from torch import Tensor


@torch.no_grad()
def add_rounded(gradient: Tensor, change: Tensor, seed: int) -> None:
    """Add `change` (float32) to a bfloat16 `gradient` in place, rounded up or down at random with an exact mean.

    The penalty is about 1e-4 of the gradient, of which bfloat16 resolves 4e-3: rounding to nearest would lose the
    penalty. float32 and bfloat16 have the same exponent, so rounding concerns the lower 16 bits of the sum.
    `seed` fixes the random numbers.
    """
    generator = torch.Generator(gradient.device).manual_seed(seed)
    total = gradient.float().add_(change)
    bits = total.view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    noise.masked_fill_(total.isnan(), 0)  # the NaN that a GPU computes has the largest bits, which would become -0
    gradient.copy_((bits + noise).bitwise_and_(-(2**16)).view(torch.float32))
