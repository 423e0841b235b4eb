"""Which compiled kernels may be used: ours for a processor, and Triton's for a GPU.

`SALAAD_NATIVE=0` turns both off, so that torch's own operations can be compared with them. With `TRITON_INTERPRET=1`,
Triton's switch, its kernels run on the CPU by an interpreter, which is slow and needs no GPU: the tests do so.
"""

import functools
import os
import shutil
import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec

import torch

from salaad.common.errors import UserError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton reads it when kernels are defined, so once
OLDEST = (8, 0)  # compute capability of the oldest GPU that the kernels are compiled for in the tests


def is_wanted() -> bool:
    """Whether compiled kernels may be used: `SALAAD_NATIVE` is not 0.

    Raises:
        UserError: `SALAAD_NATIVE` is neither 0 nor 1.
    """
    setting = os.environ.get("SALAAD_NATIVE", "1")
    if setting not in ("0", "1"):
        raise UserError(f"SALAAD_NATIVE is {setting!r}, but only 0 and 1 are known; give one of them, or nothing")
    return setting == "1"


@functools.cache
def uses_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device; a warning says why if they are wanted there and cannot run."""
    if not (device.type == "cuda" or (device.type == "cpu" and INTERPRETED)) or not is_wanted():
        return False
    reason = why_not(device)
    if reason:
        warn_of_torch(reason, device)
    return reason is None


def warn_of_torch(reason: str, device: torch.device) -> None:
    """Warn that torch's operations are used on `device` in place of our kernels, for the given reason."""
    warnings.warn(f"{reason}, so torch's operations are used on {device} in place of our kernels", stacklevel=3)


def why_not(device: torch.device) -> str | None:
    """Return why Triton's kernels cannot run on a GPU, or on the CPU by the interpreter; None if they can."""
    if find_spec("triton") is None:
        return "Triton is not installed (pip install -e '.[gpu]' does it)"
    if INTERPRETED:
        return None
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    found = torch.cuda.get_device_capability(device)
    if found < OLDEST:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {'.'.join(map(str, found))}, and {'.'.join(map(str, OLDEST))} is needed"
    return _trial(device)


def _trial(device: torch.device) -> str | None:
    """Return why a trial kernel fails, such as a missing compiler or too old a driver; None if it runs correctly."""
    try:
        doubled = import_module("salaad.common.triton_trial").doubled(torch.ones(3, device=device))
    except Exception as error:  # any failure of the trial is a reason not to use Triton
        [said, *_] = str(error).strip().splitlines() or [type(error).__name__]
        compiler = "" if shutil.which("cc") or os.environ.get("CC") else "; it needs a C compiler, and there is none"
        return f"Triton cannot run a kernel ({said}{compiler})"
    return None if doubled.tolist() == [2, 2, 2] else "a first kernel of Triton gave wrong numbers"


def device_context(device: torch.device) -> AbstractContextManager:
    """A context in which `device` is the current one, which Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
