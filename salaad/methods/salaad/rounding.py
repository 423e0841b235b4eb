"""Adding what bfloat16 cannot resolve to a gradient in bfloat16, so that any optimizer sees it in the mean."""

import torch
from torch import Tensor


@torch.no_grad()
def add_rounded(gradient: Tensor, change: Tensor, seed: int) -> None:
    """Add `change` (float32) to a `gradient` in bfloat16 in place, up or down at random so that the mean is exact.

    The penalty is about 1e-4 of the gradient, of which bfloat16 resolves 4e-3: rounded to nearest, it would be lost.
    float32 and bfloat16 share their exponents, so the lower 16 bits are what is to be rounded. `seed` fixes the choice.
    """
    generator = torch.Generator(gradient.device).manual_seed(seed)
    bits = gradient.float().add_(change).view(torch.int32)
    noise = torch.randint(0, 2**16, bits.shape, generator=generator, device=bits.device, dtype=torch.int32)
    gradient.copy_((bits + noise).bitwise_and_(-(2**16)).view(torch.float32))
