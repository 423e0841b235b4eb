"""Which GPU's data sheet a device goes by."""

import functools
import warnings

import torch

KNOWN = ("h100", "h200", "a100", "4090")


@functools.cache
def known_as(device: torch.device) -> str:
    """The one of `KNOWN` that a GPU's own name holds; a100 for any other, which a warning says once.

    Without a GPU, as for Triton's interpreter on the CPU, it is a100 too.
    """
    if device.type != "cuda":
        return "a100"
    name = torch.cuda.get_device_name(device)
    found = next((known for known in KNOWN if known in name.lower()), None)
    if found is None:
        choice = "kernels and solvers are chosen as for an A100, which may be slower"
        warnings.warn(
            f"{name} is not among the GPUs whose rates are known ({', '.join(KNOWN)}); {choice}", stacklevel=2
        )
    return found or "a100"
