"""The products of the factored layers on a CPU in float32, compiled for this machine at first use.

torch's sparse products read S entry by entry for every row of x, and the overhead of a call exceeds the work of a small
layer. Without a C++ compiler, or with `SALAAD_NATIVE=0`, torch's products are used.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from salaad.common import native
from salaad.common.cache_folder import cache_folder, made_once
from salaad.common.errors import UserError
from salaad.factored.autocast import without_autocast
from salaad.factored.slr_tensors import SlrTensors, contiguous, positions

SOURCE = Path(__file__).with_suffix(".cpp")
# Sums may be reordered, since no loop could be vectorised otherwise; NaN and infinity keep their meaning.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
    # Python's functions are found when the library is loaded.
    *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
)
_COMPILE_SECONDS = 120
# Multiplications by U and V up to which calls of torch's dense products cost more than they gain: for `linear`, and for
# `rows`, where our loop reads V again for every row.
_FEW, _FEW_IN_ROWS = 2**26, 2**18
PLAIN = (Tensor, nn.Parameter)


class Weight(ctypes.Structure):
    """Sizes and addresses of U·V + S (n×m), as cpu_kernels.cpp reads them; it does not keep the tensors alive."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("n", "m", "rank")),
        *((name, ctypes.c_void_p) for name in ("U", "V", "starts", "columns", "values")),
    )


class Products:
    """Products with U·V + S (n×m) for tensors of fixed sizes at fixed addresses, which come with every call.

    A call of a small layer takes microseconds, so everything that does not change between calls is prepared here. No
    tensor is kept, so taking the tensors out of a layer, as offloading does, frees their memory.

    Args:
        shape: (n, m).
        rank: r of U·V.
        addresses: addresses of the tensors that come with the calls.
    """

    on_cpu, joins = True, False  # no launches that several layers could share
    __slots__ = ("_S_alone", "_linear", "_rows", "_weights", "_whole", "_work", "m", "n", "rank")

    def __init__(self, shape: tuple[int, int], rank: int, *addresses: int) -> None:
        self.n, self.m, self.rank, self._work = *shape, rank, rank * sum(shape)
        self._weights = Weight(*shape, rank, *addresses), Weight(*shape, 0, *addresses)
        self._whole, self._S_alone = map(ctypes.addressof, self._weights)
        self._linear, self._rows = library()

    def takes(self, x: Tensor) -> bool:
        """Whether x, of a dtype that this module supports, is on the CPU, where the weights are."""
        return x.is_cpu

    def linear(self, x: Tensor, bias: Tensor | None, tensors: SlrTensors) -> Tensor:
        """y (…×n) = x·Vᵀ·Uᵀ + x·Sᵀ + b of x (…×m).

        Raises:
            RuntimeError: the last dimension of x is not m.
        """
        *outer, width = x.shape
        if width != self.m:
            raise RuntimeError(f"the shape of x is {tuple(x.shape)}, but its rows must have {self.m} numbers")
        x, rows, weight, add = contiguous(x), x.numel() // width, self._whole, True
        if rows * self._work > _FEW and rows > 1:
            weight = self._S_alone
            U, V, *_ = tensors
            with without_autocast(x.device):
                y = F.linear(F.linear(x, V), U)
            y = y if bias is None else y.add_(bias)
        elif bias is not None:
            y = x.new_empty(*outer, self.n).copy_(bias)
        else:
            y, add = x.new_empty(*outer, self.n), False
        if rows:
            self._linear(weight, rows, x.data_ptr(), y.data_ptr(), add, torch.get_num_threads())
        return y

    def dense(self, tensors: SlrTensors) -> Tensor:
        """U·V + S (n×m); no second matrix of its size is made."""
        U, V, starts, columns, values = tensors
        with without_autocast(U.device):
            W = U @ V
        W.view(-1).index_add_(0, positions(starts, columns, self.m), values)
        return W

    def rows(self, ids: Tensor, tensors: SlrTensors) -> Tensor:
        """Rows (…×m) of U·V + S at `ids` (…, int64).

        Raises:
            IndexError: an id is not that of a row.
        """
        ids, count = ids.contiguous(), ids.numel()
        add = count * self.rank * self.m > _FEW_IN_ROWS
        if add:
            U, V, *_ = tensors
            with without_autocast(ids.device):
                y = F.embedding(ids, U) @ V
        else:
            y = tensors[1].new_empty(*ids.shape, self.m)
        weight = self._S_alone if add else self._whole
        if not self._rows(weight, count, ids.data_ptr(), y.data_ptr(), add, torch.get_num_threads()):
            raise IndexError(f"an index is outside the {self.n} rows of the embedding")
        return y


def products(shape: tuple[int, int], tensors: SlrTensors) -> Products | None:
    """The compiled products with U·V + S (n×m).

    None where they cannot be used: tensors that are not on the CPU, not contiguous, not float32 with int32 indices, or
    of a subclass such as fake tensors; no compiler.
    """
    if any(type(tensor) not in PLAIN for tensor in tensors):
        return None
    U, V, starts, columns, values = tensors
    numbers = U.dtype == V.dtype == values.dtype == torch.float32 and starts.dtype == columns.dtype == torch.int32
    if not (numbers and all(tensor.is_cpu and tensor.is_contiguous() for tensor in tensors) and library()):
        return None
    return _products_at(shape, len(V), *(tensor.data_ptr() for tensor in tensors))


# Cached, since a compiled model asks for the products in every call of a layer.
_products_at = functools.lru_cache(maxsize=4096)(Products)


def is_transformed() -> bool:
    """Whether torch.func, a tracer or forward-mode differentiation is at work, which know no sparse tensors."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_tracing()
        or forward_ad._current_level >= 0
    )


def is_intercepted() -> bool:
    """Whether torch records or replaces operations, which it could not do with our compiled calls.

    That is the case under torch.compile, `is_transformed`, and a dispatch mode such as torch's FLOP counter.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0 or is_transformed()


@functools.cache
def library() -> tuple[Callable[..., bool], Callable[..., bool]] | None:
    """The functions `linear` and `rows` of cpu_kernels.cpp; None without a compiler or with `SALAAD_NATIVE=0`.

    Raises:
        UserError: `SALAAD_NATIVE` is neither 0 nor 1.
    """
    wanted, compiler = native.is_wanted(), _compiler()
    if not wanted or not (shutil.which(compiler[0]) or os.environ.get("CXX")):
        return None
    try:
        functions = ctypes.PyDLL(str(_compiled(compiler))).products
    except (OSError, subprocess.SubprocessError, AttributeError, UserError) as error:
        # An AttributeError says that the library lacks our function, a UserError that there is no cache folder.
        [reason, *_] = (getattr(error, "stderr", None) or str(error)).strip().splitlines() or [type(error).__name__]
        problem = f"{shlex.join(compiler)} cannot compile {SOURCE.name}, or the library cannot be loaded ({reason})"
        warnings.warn(f"{problem}; torch's products are used", stacklevel=2)
        return None
    functions.restype = ctypes.py_object
    return functions()


def _compiler() -> list[str]:
    named = os.environ.get("CXX", "").strip() or "c++"
    try:
        return shlex.split(named)
    except ValueError as error:
        raise UserError(f"CXX is {named!r}, which is no command ({error}); give one such as g++, or nothing") from None


def _compiled(compiler: list[str]) -> Path:
    """The shared library, compiled once per source, compiler, flags and kind of processor."""
    inputs = (SOURCE.read_text(), *compiler, *FLAGS, _processor())
    folder = cache_folder() / f"native-{hashlib.sha256(repr(inputs).encode()).hexdigest()[:16]}"
    with made_once(folder) as make:
        if make:
            command = [*compiler, *FLAGS, str(SOURCE), "-o", str(make / "native.so")]
            subprocess.run(
                command, check=True, capture_output=True, text=True, errors="replace", timeout=_COMPILE_SECONDS
            )
    return folder / "native.so"


def _processor() -> str:
    """The properties of the processor that `-march=native` depends on; machines may share one cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    kinds = [line for line in lines if line.startswith(("vendor_id", "cpu family", "model\t", "flags", "Features"))]
    return "\n".join([platform.machine(), platform.processor(), *dict.fromkeys(kinds)])
