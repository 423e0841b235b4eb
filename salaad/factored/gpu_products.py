"""The products of the factored layers on a GPU: the choice of one of two ways by the number of rows, and the launches.

With few rows of x, as in decoding, the time depends on the bytes of U, V and S: two launches of `gpu_kernels` read each
once. With many, U·V + S is made as a dense matrix and multiplied by the vendor's library. The matrix is allocated by
torch at every call and freed at its end: the allocator gives the same memory to the next layer, separately for every
stream, and inside a CUDA graph.

A CUDA graph can be captured after one call outside of it, which compiles the kernels; a launch gets all its arguments
by value.
"""

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from salaad.common import native
from salaad.common.gpus import Gpu, gpu_of
from salaad.factored.autocast import without_autocast
from salaad.factored.slr_tensors import SlrTensors, contiguous

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 8  # rows of x that a program multiplies at once
MOST_ROWS = 65535 * _MOST  # largest number of rows of x in a launch: the third axis of its grid has 16 bits
# Bandwidth of the caches over that of the memory, and bytes that a cache moves for one number (a sector): see below.
_CACHES, _SECTOR = 4, 32


def fewest_rows_for_dense(shape: tuple[int, int], rank: int, nnz: int, dtype: torch.dtype, gpu: Gpu) -> float:
    """The number of rows of x from which on making U·V + S (n×m) dense takes less time, at most `MOST_ROWS` + 1.

    Both ways are modelled as bytes over bandwidth plus operations over peak, and are assumed to attain the same
    fraction of both. The time by parts (U, V and S as stored) is proportional to the rows, and the time by the dense
    matrix linear with a fixed part, so they cross once if at all.

    By parts, a program handles eight rows of x, so U, V and S are read from memory once for every eight rows. Each
    program for a row of V also reads eight rows of x, each for a row of U eight rows of `hidden` in float32; for every
    entry of S a program reads a number of x, which moves a sector of a cache, or the whole row where that is less.
    These further reads are of few different bytes, so they are assumed to come from caches with four times the memory's
    bandwidth: the L2 of the GPUs in the table has two to five times, their L1 six to forty. None of this was measured.

    Args:
        shape: (n, m).
        rank: r of U·V.
        nnz: entries of S.
        dtype: dtype of U, V and the values of S.
        gpu: the data sheet of the GPU.
    """
    n, m = shape
    element, dense, plain = dtype.itemsize, gpu.peak(dtype), gpu.peak(torch.float32)
    entry = element + 2
    stored = element * rank * (n + m) + entry * nnz
    again = element * rank * m + 4 * rank * n + min(_SECTOR * nnz, element * n * m)
    by_parts = (stored / _MOST + again / _CACHES) / gpu.bandwidth + 2 * (rank * (n + m) + nnz) / plain
    by_dense = 2 * n * m / dense
    making = 2 * rank * n * m / dense + (2 * element * n * m + (element + entry) * nnz) / gpu.bandwidth
    return min(making / (by_parts - by_dense), MOST_ROWS + 1) if by_parts > by_dense else MOST_ROWS + 1


class Products:
    """Products with U·V + S (n×m) on a GPU, for fixed sizes and dtypes; the tensors come with every call.

    No tensor is kept here, so taking the tensors out of a layer, as offloading does, frees their memory.

    Args:
        shape: (n, m).
        rank: r of U·V.
        nnz: entries of S.
        kinds: dtype of U, V and the values of S, and dtype of the columns of S.
        device: where the tensors lie.
    """

    on_cpu, joins = False, True  # several layers can share launches

    def __init__(
        self, shape: tuple[int, int], rank: int, nnz: int, kinds: tuple[torch.dtype, torch.dtype], device: torch.device
    ) -> None:
        self.n, self.m, self.rank, self.kinds, self.device = *shape, rank, kinds, device
        self._fewest_for_dense = fewest_rows_for_dense(shape, rank, nnz, kinds[0], gpu_of(device))

    def takes(self, x: Tensor) -> bool:
        """Whether x is on the device of the weights and, unless it holds row numbers, has their dtype."""
        return x.device == self.device and (x.dtype == self.kinds[0] or not x.is_floating_point())

    def linear(self, x: Tensor, bias: Tensor | None, tensors: SlrTensors) -> Tensor:
        """y (…×n) = x·Vᵀ·Uᵀ + x·Sᵀ + b of x (…×m), in the dtype of x.

        Raises:
            RuntimeError: the last dimension of x is not m.
        """
        if self.has_few(x) and (bias is None or bias.device == x.device):
            [y] = linear_of_several([self], [tensors], x, [bias])
            return y
        with without_autocast(self.device):
            return F.linear(x, self.dense(tensors), bias if bias is None else bias.to(x.dtype))

    def has_few(self, x: Tensor) -> bool:
        """Whether x (…×m) has so few rows that U, V and S are used as stored, without a dense weight."""
        return x.numel() < self._fewest_for_dense * self.m

    def dense(self, tensors: SlrTensors) -> Tensor:
        """U·V + S (n×m); no second matrix of its size is made."""
        U, V, *S = tensors
        with without_autocast(self.device):
            return self._with_rows_of_S(U @ V, None, S)

    def rows(self, ids: Tensor, tensors: SlrTensors) -> Tensor:
        """Rows (…×m) of U·V + S at `ids` (…, int64)."""
        U, V, *S = tensors
        with without_autocast(self.device):
            return self._with_rows_of_S(F.embedding(ids, U) @ V, ids.contiguous(), S)

    def _with_rows_of_S(self, y: Tensor, ids: Tensor | None, S: Sequence[Tensor]) -> Tensor:
        count = y.numel() // self.m if self.m else 0
        if count and len(S[-1]):
            with native.device_context(self.device):
                _kernels().add_rows_of_S[(count,)](y, ids, *S, self.m, CHOSEN=ids is not None, K=128, num_warps=1)
        return y


def products(shape: tuple[int, int], tensors: SlrTensors) -> Products | None:
    """The products with U·V + S (n×m) on a GPU; None where the kernels cannot be used or do not know the dtype."""
    device = tensors[0].device
    if not native.uses_triton(device):
        return None
    unfit = _unfit(*tensors)
    if unfit:
        native.warn_of_torch(f"a layer of {shape[0]}×{shape[1]} has {unfit}", device)
        return None
    U, V, _, columns, values = tensors
    return _products_like(shape, len(V), len(values), (U.dtype, columns.dtype), device)


# Cached, since a compiled model asks for the products in every call of a layer.
_products_like = functools.lru_cache(maxsize=4096)(Products)


def _unfit(U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> str | None:
    """The property of a layer's tensors that keeps the kernels from reading them; None if there is none."""
    tensors = (U, V, starts, columns, values)
    if U.dtype not in DTYPES or not U.dtype == V.dtype == values.dtype:
        return f"numbers in {', '.join(sorted({str(part.dtype) for part in (U, V, values)}))}"
    if starts.dtype != torch.int32 or columns.dtype not in (torch.int16, torch.int32):
        return "more entries or columns than 32 bits can count"
    if any(tensor.device != U.device for tensor in tensors):
        return "tensors on several devices"
    return None if all(tensor.is_contiguous() for tensor in tensors) else "tensors that are not contiguous"


def linear_of_several(
    layers: Sequence[Products], tensors: Sequence[SlrTensors], x: Tensor, biases: Sequence[Tensor | None]
) -> list[Tensor]:
    """y (…×n) of every layer for the same x (…×m), in two launches, since a row of U needs all of x·Vᵀ.

    Each result has memory of its own, so the caller may write into it.

    Raises:
        RuntimeError: the last dimension of x is not m.
    """
    m, kernels = layers[0].m, _kernels()
    if x.shape[-1] != m:
        raise RuntimeError(f"the shape of x is {tuple(x.shape)}, but its rows must have {m} numbers")
    x = contiguous(x)
    rows, widest, tallest = x.shape[:-1].numel(), max(one.rank for one in layers), max(one.n for one in layers)
    results = [x.new_empty(*x.shape[:-1], layer.n) for layer in layers]
    if not (rows and tallest):
        return results
    hidden = x.new_empty(len(layers) * rows * widest, dtype=torch.float32)
    unit = kernels.SIZE_UNIT.value
    given = tuple(
        (V, U, *S, None if bias is None else bias.contiguous(), y, unit * layer.rank, unit * layer.n)
        for layer, (U, V, *S), bias, y in zip(layers, tensors, biases, results, strict=True)
    )
    B = min(_MOST, kernels.triton.next_power_of_2(rows))
    tiles = -(-rows // B)
    with native.device_context(x.device):
        if widest:
            grid, K = (widest, len(layers), tiles), max(256, 1024 // B)
            kernels.multiply_by_V[grid](given, x, hidden, rows, m, widest, LAYERS=len(layers), B=B, K=K, num_warps=4)
        grid, K = (tallest, len(layers), tiles), max(128, 512 // B)
        kernels.multiply_by_U_and_S[grid](given, x, hidden, rows, m, widest, LAYERS=len(layers), B=B, K=K, num_warps=1)
    return results


@functools.cache
def _kernels() -> ModuleType:
    """The module of the kernels, imported at its first use, since Triton may be missing."""
    from salaad.factored import gpu_kernels

    return gpu_kernels
