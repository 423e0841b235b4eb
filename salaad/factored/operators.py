"""Products with U·V + S as functions of its tensors alone, and as custom operators, opaque to torch.compile.

S is given as compressed sparse rows: starts (n+1), columns (nnz) and values (nnz). `compiled_products` chooses the
kernels for the CPU, those for a GPU, or none, in which case torch's products are used.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from salaad.common import native
from salaad.factored import cpu_kernels, gpu_products
from salaad.factored.slr_tensors import SlrTensors, positions

# Time of a multiplication in U·V and in S, and of transposing a number of x or y for S, in units of a multiplication in
# a dense product (measured on a CPU, widths of 128 to 2736).
_LOW_RANK_COST, _SPARSE_COST, _TURNING_COST = 1.2, 7, 60

# Dtypes that compiled products on the CPU take: of x, and of an embedding's row numbers.
ON_CPU = (torch.float32, torch.int64, *(gpu_products.DTYPES if native.INTERPRETED else ()))
Products = cpu_kernels.Products | gpu_products.Products


def compiled_products(shape: tuple[int, int], tensors: SlrTensors) -> Products | None:
    """Return the compiled products with U·V + S (n×m) for its tensors' device; None if they cannot be used."""
    kernels = cpu_kernels if tensors[0].is_cpu and not native.INTERPRETED else gpu_products
    return kernels.products(shape, tensors)


def sparse_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which torch multiplies by S if all else has `dtype`: on a CPU float32 instead of shorter ones."""
    return torch.float32 if device.type == "cpu" and dtype.itemsize < 4 else dtype


def sparse_rows(starts: Tensor, columns: Tensor, values: Tensor, m: int) -> Tensor:
    """S (n×m) as a sparse tensor of torch, in the dtype of `sparse_dtype`; `values` of that dtype share its memory.

    The values are cast first, since a sparse tensor of inference tensors cannot be cast.
    """
    values = values.to(sparse_dtype(values.device, values.dtype))
    columns = columns.to(starts.dtype)  # from 16 bits, on a GPU
    return torch.sparse_csr_tensor(starts, columns, values, size=(len(starts) - 1, m), check_invariants=False)


def dense(U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """U·V + S (n×m) in plain operations, which every exporter and autograd know."""
    n, m = len(U), V.shape[1]
    flat = (U @ V).flatten()
    return flat.index_put((positions(starts, columns, m),), values, accumulate=True).view(n, m)


def linear_in_torch(x: Tensor, U: Tensor, V: Tensor, S: Tensor, bias: Tensor | None) -> Tensor:
    """y (…×n) of x (…×m) with S from `sparse_rows`: by parts, or by a dense U·V + S where that is faster."""
    rows = x.reshape(-1, V.shape[1])
    if _is_cheaper_whole(len(rows), S.shape, V.shape[0], S._nnz()):
        y = F.linear(rows, (U @ V).to(S.dtype).add(S).to(U.dtype), bias)
    else:
        y = _in_parts(rows, U, V, S)
        y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], len(U))


def _in_parts(rows: Tensor, U: Tensor, V: Tensor, S: Tensor) -> Tensor:
    # Sparse products need features in rows. The result is made contiguous: attention is slow on other layouts.
    columns = rows.mT.contiguous()
    y = torch.addmm((U @ (V @ columns)).to(S.dtype), S, columns.to(S.dtype))
    return y.to(rows.dtype).mT.contiguous()


def _is_cheaper_whole(rows: int, shape: tuple[int, int], rank: int, nnz: int) -> bool:
    """Whether making U·V + S dense first is faster for so many `rows` of x, as it is where S is dense enough."""
    n, m = shape
    in_parts = (_LOW_RANK_COST * rank + _TURNING_COST) * (n + m) + _SPARSE_COST * nnz
    return rows * (in_parts - n * m) > _LOW_RANK_COST * rank * n * m


def rows_in_torch(ids: Tensor, U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Rows (…×m) of U·V + S at `ids` (…); of S only the entries of these rows are read."""
    flat = ids.reshape(-1)
    rows = F.embedding(flat, U) @ V
    first = starts[flat].long()
    counts = starts[flat + 1].long() - first
    row = torch.arange(len(flat), device=flat.device).repeat_interleave(counts)
    entry = torch.arange(len(row), device=flat.device) + (first - (counts.cumsum(0) - counts))[row]
    rows = rows.index_put((row, columns[entry].long()), values[entry], accumulate=True)
    return rows.view(*ids.shape, V.shape[1])


def plain_rows(ids: Tensor, U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Rows as from `rows_in_torch`, by tensors whose sizes depend on no values: m places for each row's entries."""
    rows = F.embedding(ids, U) @ V
    if not len(values):
        return rows
    offsets = torch.arange(V.shape[1], device=ids.device)
    first = starts[ids].long().unsqueeze(-1)
    inside = first + offsets < starts[ids + 1].unsqueeze(-1)
    entry = (first + offsets).clamp(max=len(values) - 1)
    return rows.scatter_add(-1, columns[entry].long(), torch.where(inside, values[entry], 0))


@torch.library.custom_op("salaad::linear", mutates_args=())
def linear(
    x: Tensor, U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor, bias: Tensor | None
) -> Tensor:
    """y (…×n) = x·Vᵀ·Uᵀ + x·Sᵀ + b of x (…×m), without gradients."""
    tensors = U, V, starts, columns, values
    products = compiled_products((len(U), V.shape[1]), tensors)
    if products is not None and products.takes(x) and x.dtype == U.dtype:
        return products.linear(x, bias, tensors)
    return linear_in_torch(x, U, V, sparse_rows(starts, columns, values, V.shape[1]), bias)


@linear.register_fake
def _(x: Tensor, U: Tensor, *_: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], U.shape[0])


@torch.library.custom_op("salaad::rows", mutates_args=())
def rows(ids: Tensor, U: Tensor, V: Tensor, starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    """Rows (…×m) of U·V + S at `ids` (…), without gradients."""
    tensors = U, V, starts, columns, values
    products = compiled_products((len(U), V.shape[1]), tensors)
    if products is not None and products.takes(ids) and ids.dtype == torch.int64:
        return products.rows(ids, tensors)
    return rows_in_torch(ids, U, V, starts, columns, values)


@rows.register_fake
def _(ids: Tensor, U: Tensor, V: Tensor, *_: Tensor) -> Tensor:
    return V.new_empty(*ids.shape, V.shape[1])
