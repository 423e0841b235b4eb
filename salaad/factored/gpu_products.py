"""The products of the factored layers on a GPU: which of two ways a number of rows takes, and its launches.

Few rows of x, as in decoding, are bound by the bytes of U, V and S: two launches of `gpu_kernels` read each once. For
many, U·V + S is made as a dense matrix, and the product is the vendor's. Its memory is asked of torch at every call and
given back at its end: the allocator hands the same piece to the next layer, stream by stream, and inside a CUDA graph.

A graph can be captured after one call outside of it, which compiles the kernels and copies the table of layers.
"""

import functools
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from salaad.common import native
from salaad.common.gpus import Gpu, gpu_called

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MOST = 8  # rows of x that a program multiplies at once
# Time of a multiplication of an entry of S, whose x is looked up, in units of one in U or V: a guess.
_LOOKUP = 4


def fewest_rows_for_dense(shape: tuple[int, int], rank: int, nnz: int, dtype: torch.dtype, gpu: Gpu) -> float:
    """From how many rows of x on making U·V + S (n×m) dense takes less time; infinity if it never does.

    Both ways are modelled as bytes over bandwidth plus operations over peak, of which they are taken to reach the same
    part. One is linear in the rows, the other linear with a fixed part, so they cross once.

    Args:
        shape: (n, m).
        rank: r of U·V.
        nnz: entries of S.
        dtype: of the numbers.
        gpu: its data sheet.
    """
    n, m = shape
    element, dense, plain = dtype.itemsize, gpu.peak(dtype), gpu.peak(torch.float32)
    stored = element * (rank * (n + m) + nnz) + 2 * nnz
    a_row_by_parts = stored / _MOST / gpu.bandwidth + 2 * (rank * (n + m) + _LOOKUP * nnz) / plain
    a_row_dense = 2 * n * m / dense
    making = 2 * rank * n * m / dense + (2 * element * n * m + (2 * element + 2) * nnz) / gpu.bandwidth
    return making / (a_row_by_parts - a_row_dense) if a_row_by_parts > a_row_dense else float("inf")


class Products:
    """Products with U·V + S (n×m) on a GPU, valid as long as its tensors keep their addresses."""

    on_cpu, joins = False, True  # several layers can share launches

    def __init__(
        self, shape: tuple[int, int], U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor
    ) -> None:
        self.n, self.m, self.rank = *shape, len(V)
        self._U, self._V, self._S = U, V, (starts, columns, values)
        self.device, self.kinds = U.device, (U.dtype, columns.dtype)
        self.addresses = tuple(tensor.data_ptr() for tensor in (V, U, starts, columns, values))
        name = torch.cuda.get_device_name(U.device) if U.is_cuda else ""
        self._fewest_for_dense = fewest_rows_for_dense(shape, self.rank, len(values), U.dtype, gpu_called(name))

    def takes(self, x: Tensor) -> bool:
        """Whether x has the device and, unless it holds row numbers, the dtype of the weights."""
        return x.device == self.device and (x.dtype == self.kinds[0] or not x.is_floating_point())

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """y (…×n) = x·Vᵀ·Uᵀ + x·Sᵀ + b of x (…×m).

        Raises:
            RuntimeError: the last dimension of x is not m.
        """
        [y] = linear_of_several([self], x, [bias]) if self.has_few(x) else [F.linear(x, self.dense(), _as(bias, x))]
        return y

    def has_few(self, x: Tensor) -> bool:
        """Whether x (…×m) has so few rows that U, V and S are multiplied by as they are."""
        return x.numel() < self._fewest_for_dense * self.m

    def dense(self) -> Tensor:
        """U·V + S (n×m)."""
        return self._with_rows_of_S(self._U @ self._V, None)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows (…×m) of U·V + S at `ids` (…, int64)."""
        return self._with_rows_of_S(F.embedding(ids, self._U) @ self._V, ids.contiguous())

    def _with_rows_of_S(self, y: Tensor, ids: Tensor | None) -> Tensor:
        count = y.numel() // self.m if self.m else 0
        if count and len(self._S[-1]):
            with native.device_context(self.device):
                _kernels().add_rows_of_S[(count,)](y, ids, *self._S, self.m, CHOSEN=ids is not None, K=128, num_warps=1)
        return y


def products(
    shape: tuple[int, int], U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor
) -> Products | None:
    """The products with U·V + S (n×m) on a GPU; None where the kernels cannot be used or do not know the dtype."""
    if not native.uses_triton(U.device):
        return None
    unfit = _unfit(U, V, starts, columns, values)
    if unfit:
        native.warn_of_torch(f"a layer of {shape[0]}×{shape[1]} has {unfit}", U.device)
        return None
    return Products(shape, U, V, starts, columns, values)


def _unfit(U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> str | None:
    """What the kernels cannot read in the tensors of a layer, if anything."""
    tensors = (U, V, starts, columns, values)
    if U.dtype not in DTYPES or not U.dtype == V.dtype == values.dtype:
        return f"numbers in {', '.join(sorted({str(part.dtype) for part in (U, V, values)}))}"
    if starts.dtype != torch.int32 or columns.dtype not in (torch.int16, torch.int32):
        return "more entries or columns than 32 bits can count"
    if any(tensor.device != U.device for tensor in tensors):
        return "tensors on several devices"
    return None if all(tensor.is_contiguous() for tensor in tensors) else "tensors that are not contiguous"


def column_dtype(device: torch.device, m: int) -> torch.dtype:
    """The dtype of the columns of S (n×m) on a device: 16 bits where our kernels read them, else torch's 32."""
    return torch.int16 if m <= 2**15 and native.uses_triton(device) else torch.int32


def linear_of_several(layers: Sequence[Products], x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """y (…×n) of every layer for the same x (…×m), in two launches: a row of U needs all of x·Vᵀ.

    Raises:
        RuntimeError: the last dimension of x is not m.
    """
    m, kernels = layers[0].m, _kernels()
    if x.shape[-1] != m:
        raise RuntimeError(f"the shape of x is {tuple(x.shape)}, but its rows must have {m} numbers")
    x = x.contiguous()
    rows = x.numel() // m if m else 0
    n, ranks = [layer.n for layer in layers], [layer.rank for layer in layers]
    y, hidden = x.new_empty(rows * sum(n)), x.new_empty(rows * sum(ranks), dtype=torch.float32)
    parts = [part.view(*x.shape[:-1], size) for part, size in zip(y.split([rows * k for k in n]), n, strict=True)]
    if not y.numel():
        return parts
    table = _table(tuple(_lines(layers, biases, x.dtype)), layers[0].device)
    number, index = (getattr(kernels.tl, str(kind).removeprefix("torch.")) for kind in layers[0].kinds)
    B = min(_MOST, kernels.triton.next_power_of_2(rows))
    tiles = -(-rows // B)
    with native.device_context(x.device):
        if max(ranks):
            grid, K = (max(ranks), len(layers), tiles), max(256, 1024 // B)
            aligned = all(layer.addresses[0] % 16 == 0 for layer in layers)
            kernels.multiply_by_V[grid](
                table, x, hidden, rows, m, NUMBER=number, ALIGNED=aligned, B=B, K=K, num_warps=4
            )
        grid, K = (max(n), len(layers), tiles), max(128, 512 // B)
        kernels.multiply_by_U_and_S[grid](
            table, x, hidden, y, rows, m, NUMBER=number, INDEX=index, B=B, K=K, num_warps=1
        )
    return [
        part if bias is None or bias.dtype == x.dtype else part.add_(bias)
        for part, bias in zip(parts, biases, strict=True)
    ]


def _lines(layers: Sequence[Products], biases: Sequence[Tensor | None], dtype: torch.dtype) -> list[int]:
    """The table of `gpu_kernels`, line by line; a bias of another dtype than the weights is left out."""
    lines, hidden_at, y_at = [], 0, 0
    for layer, bias in zip(layers, biases, strict=True):
        added = bias.data_ptr() if bias is not None and bias.dtype == dtype else 0
        lines += [*layer.addresses, added, layer.rank, layer.n, hidden_at, y_at]
        hidden_at, y_at = hidden_at + layer.rank, y_at + layer.n
    return lines


@functools.lru_cache(maxsize=4096)
def _table(lines: tuple[int, ...], device: torch.device) -> Tensor:
    """The table on its device. It holds addresses and sizes alone, so one that was made before is right again."""
    with torch.inference_mode(False):
        return torch.tensor(lines, dtype=torch.int64).to(device)


def _as(bias: Tensor | None, x: Tensor) -> Tensor | None:
    return bias if bias is None else bias.to(x.dtype)


@functools.cache
def _kernels() -> ModuleType:
    """The kernels, imported when they are first used: Triton may be missing."""
    from salaad.factored import gpu_kernels

    return gpu_kernels
