"""The choice of the GPU data sheet that is used for a device."""

import functools
import re
import warnings

import torch

KNOWN = ("h100", "h200", "a100", "4090")


def known_as(device: torch.device) -> str:
    """Return the GPU in `KNOWN` whose data sheet is used for a device; a100 without CUDA (Triton's interpreter)."""
    return known_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else "a100"


@functools.cache
def known_name(name: str) -> str:
    """Return the entry of `KNOWN` that a GPU's own name contains; a100 for any other name, with a warning once."""
    # Not the A100 in an RTX A1000.
    found = next((known for known in KNOWN if re.search(rf"(?<!\d){known}(?!\d)", name.lower())), None)
    if found is None:
        choice = "kernels and solvers are chosen as for an A100, which may be slower"
        warnings.warn(
            f"{name} is not among the GPUs whose rates are known ({', '.join(KNOWN)}); {choice}", stacklevel=2
        )
    return found or "a100"
