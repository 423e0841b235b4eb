"""Which GPU's data sheet a device goes by."""

import functools
import warnings

import torch

KNOWN = ("h100", "h200", "a100", "4090")


def known_as(device: torch.device) -> str:
    """The one of `KNOWN` that a device goes by; a100 without a GPU, as for Triton's interpreter on the CPU."""
    return known_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else "a100"


@functools.cache
def known_name(name: str) -> str:
    """The one of `KNOWN` that a GPU's own name holds; a100 for any other, which a warning says once."""
    found = next((known for known in KNOWN if known in name.lower()), None)
    if found is None:
        choice = "kernels and solvers are chosen as for an A100, which may be slower"
        warnings.warn(
            f"{name} is not among the GPUs whose rates are known ({', '.join(KNOWN)}); {choice}", stacklevel=2
        )
    return found or "a100"
