"""Products in true float32, whatever TF32 or autocast settings the training uses."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def true_float32(device: torch.device) -> Iterator[None]:
    """Context manager under which float32 products keep all their digits: for ADMM, decompositions and merges."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [(backend, backend.fp32_precision) for backend in backends]
    lower = [(backend, precision) for backend, precision in before if precision not in ("ieee", "none")]
    try:
        for backend, _ in lower:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        for backend, precision in lower:
            backend.fp32_precision = "none"  # what was inherited, as from torch.backends, must go on following that
            if backend.fp32_precision != precision:
                backend.fp32_precision = precision


def at_least_float32(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors detached and in float32, or in their own dtype where that has more digits."""
    return [tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]
