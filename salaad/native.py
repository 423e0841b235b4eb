"""The products of the factored layers on a CPU in float32, compiled for this machine when first needed.

torch's own sparse products read S entry by entry for every x, and each call costs more than a small layer's work. Where
there is no C++ compiler, torch's are used; `SALAAD_NATIVE=0` asks for them.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from salaad.caches import cache_folder, made_once
from salaad.errors import UserError

SOURCE = Path(__file__).with_suffix(".cpp")
# Sums may be taken in any order, or no loop could use vectors; NaN and infinity stay what they are.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
_COMPILE_SECONDS = 120
# Multiplications by U and V below which two calls of torch's dense product cost more than they gain.
_FEW = 2**18


class Weight(ctypes.Structure):
    """Where U·V + S (n×m) lies in memory, as salaad/native.cpp reads it; the tensors have to be kept by others."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "m", "rank")),
        *((name, ctypes.c_void_p) for name in ("U", "V", "starts", "columns", "values")),
    )


def places(
    shape: tuple[int, int], U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor
) -> Weight | None:
    """Where U·V + S (n×m) lies; None where it cannot be read: not on the CPU, not float32 with int32, no compiler."""
    tensors = (U, V, starts, columns, values)
    numbers = U.dtype == V.dtype == values.dtype == torch.float32 and starts.dtype == columns.dtype == torch.int32
    if not (numbers and all(t.is_cpu and t.is_contiguous() for t in tensors) and library()):
        return None
    return Weight(*shape, len(V), *(tensor.data_ptr() for tensor in tensors))


def linear(weight: Weight, x: Tensor, U: Tensor, V: Tensor, bias: Tensor | None) -> Tensor:
    """y (…×n) = x·Vᵀ·Uᵀ + x·Sᵀ + b of x (…×m)."""
    n, m, rank = weight.n, weight.m, weight.rank
    rows = x.numel() // m
    x = x.contiguous()
    only_S = bias is not None or (rows > 1 and rows * rank * (n + m) > _FEW)
    if only_S:
        with torch.autocast("cpu", enabled=False):
            y = F.linear(F.linear(x, V), U, bias)
    else:
        y = x.new_empty((*x.shape[:-1], n))
    if rows:
        here, to = x.data_ptr(), y.data_ptr()
        library().slr_linear(ctypes.addressof(weight), rows, here, to, only_S, torch.get_num_threads())
    return y


def rows(weight: Weight, ids: Tensor, U: Tensor, V: Tensor) -> Tensor:
    """Rows (…×m) of U·V + S at `ids` (…, int64).

    Raises:
        IndexError: there is no such row.
    """
    ids = ids.contiguous()
    count = ids.numel()
    only_S = count * weight.rank * weight.m > _FEW
    if only_S:
        with torch.autocast("cpu", enabled=False):
            y = F.embedding(ids, U) @ V
    else:
        y = V.new_empty((*ids.shape, weight.m))
    here, to = ids.data_ptr(), y.data_ptr()
    if not library().slr_rows(ctypes.addressof(weight), count, here, to, only_S, torch.get_num_threads()):
        raise IndexError(f"an index is outside the {weight.n} rows of the embedding")
    return y


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled products; None where there is no compiler, or where they are not asked for.

    Raises:
        UserError: `SALAAD_NATIVE` is neither 0 nor 1.
    """
    asked = os.environ.get("SALAAD_NATIVE", "1")
    if asked not in ("0", "1"):
        raise UserError(f"SALAAD_NATIVE is {asked!r}, but only 0 and 1 are known; give one of them, or nothing")
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    if asked == "0" or not (shutil.which(compiler[0]) or os.environ.get("CXX")):
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        told = f"{shlex.join(compiler)} cannot compile {SOURCE.name} ({said[0]}); torch's products are used"
        warnings.warn(told, stacklevel=2)
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.slr_linear.argtypes = (pointer, number, pointer, pointer, ctypes.c_bool, ctypes.c_int)
    library.slr_linear.restype = None
    library.slr_rows.argtypes = (pointer, number, pointer, pointer, ctypes.c_bool, ctypes.c_int)
    library.slr_rows.restype = ctypes.c_bool
    return library


def _compiled(compiler: list[str]) -> Path:
    """The shared library, compiled once per source, compiler and kind of processor."""
    told = (SOURCE.read_text(), *compiler, *FLAGS, _processor())
    folder = cache_folder() / f"native-{hashlib.sha256(repr(told).encode()).hexdigest()[:16]}"
    with made_once(folder) as make:
        if make:
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(make / "native.so")]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_SECONDS)
    return folder / "native.so"


def _processor() -> str:
    """What `-march=native` depends on: a home directory may be shared by machines of several kinds."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text().splitlines() if told.exists() else []
    kinds = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model\t", "flags", "Features"))]
    return "\n".join([platform.machine(), platform.processor(), *dict.fromkeys(kinds)])
