"""The device of a benchmark: that it is there, and the time on it."""

import time

import torch

from salaad.common.errors import UserError


def require_device(name: str) -> None:
    """Raise a UserError unless there is such a device, cpu or cuda."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device is cuda, but torch {torch.__version__} finds no GPU here; mend the driver, or give --device cpu"
        )


def now(device: torch.device) -> float:
    """Seconds, once all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
