"""Products in the dtype of the tensors they are given, whatever torch's autocast says."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.amp import is_autocast_available


def is_autocast_on(device: torch.device) -> bool:
    """Whether autocast is on for a device; it never is on one, such as meta, for which torch has none."""
    return is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """A context for products in the tensors' own dtype: autocast would round them, and has no sparse product."""
    return torch.autocast(device.type, enabled=False) if is_autocast_available(device.type) else nullcontext()
