"""The kernels of the factored layers on a GPU, in Triton: y = U(Vx) + Sx for few rows of x, and S added to a matrix.

One row of a matrix is one program of one warp, S is in compressed sparse rows with columns of 16 bits, and all sums are
in float32. The sizes of a launch come from shapes alone, so nothing waits for the device and a CUDA graph can hold it.

How others store unstructured sparsity for decoding, what was taken and what not:

- MACKO-SpMV (arXiv 2511.13061) gives a row to a warp, which reads values and places side by side and the vector through
  the caches, and stores a place as the step from the last one in 4 bits, with zeros put in where a step is too long.
  Taken: the row of a warp, no tensor cores, no work before the product. Not taken: 4-bit steps. They pay from a density
  of 0.06 on; at the 0.05 of the paper nearly every second step is longer than 16, and an entry in bfloat16 would take
  36 bits with its zeros, where 16 + 16 are 32. Steps of 8 bits would take 24, but S is a quarter of what a layer reads
  at rank ratio 0.15, so the whole would gain 6 %, for a running sum before every read of x.
- SpInfer (EuroSys 2025) stores a bit for every entry of a dense tile, present or not, and feeds tensor cores. A bit an
  entry is 20 bits a nonzero at density 0.05, more than the column itself, and gains above 1/16 only. Not taken.
- Flash-LLM (VLDB 2023) loads sparse and computes dense: tiles are made dense in shared memory, for tensor cores. Taken
  for many rows of x, with the whole weight in place of a tile: U·V must be made anyway, which a product of the vendor's
  library does best, S is added to it in place, and the dense product follows (`gpu_products`).

Layers that share x (q, k, v; gate, up) are rows of one launch. A table in the device's memory holds a line per layer,
so that a kernel does not depend on their number; its columns are the constants below.
"""

import triton
import triton.language as tl

# A line of the table of layers: addresses, then sizes. `*_AT` count the numbers of a row of x before this layer's.
LINE = tl.constexpr(10)
V, U, STARTS, COLUMNS, VALUES, BIAS, RANK, N, HIDDEN_AT, Y_AT = map(tl.constexpr, range(10))


@triton.jit
def _add_row(sums, matrix, i, width, vectors, batch, B: tl.constexpr, K: tl.constexpr):
    """sums (B×K) += row i of `matrix` (…×width) times each of `batch` ≤ B vectors (batch×width), K columns a time."""
    b = tl.arange(0, B)[:, None]
    for start in range(0, width, K):
        k = start + tl.arange(0, K)
        row = tl.load(matrix + i * width + k, mask=k < width, other=0.0).to(tl.float32)
        vector = tl.load(vectors + b * width + k[None, :], mask=(b < batch) & (k < width)[None, :], other=0.0)
        sums += row[None, :] * vector.to(tl.float32)
    return sums


@triton.jit
def _add_entries_of_row(sums, starts, columns, values, i, x, m, batch, B: tl.constexpr, K: tl.constexpr):
    """sums (B×K) += row i of S times each of `batch` ≤ B rows of x (batch×m), K entries at a time."""
    b = tl.arange(0, B)[:, None]
    first, last = tl.load(starts + i), tl.load(starts + i + 1)
    for start in range(first, last, K):
        e = start + tl.arange(0, K)
        value = tl.load(values + e, mask=e < last, other=0.0).to(tl.float32)
        column = tl.load(columns + e, mask=e < last, other=0).to(tl.int32)
        found = tl.load(x + b * m + column[None, :], mask=(b < batch) & (e < last)[None, :], other=0.0)
        sums += value[None, :] * found.to(tl.float32)
    return sums


@triton.jit
def multiply_by_V(
    layers, x, hidden, rows, m, NUMBER: tl.constexpr, ALIGNED: tl.constexpr, B: tl.constexpr, K: tl.constexpr
):
    """hidden = x·Vᵀ of every layer, in float32: program (k, l, c) has row k of V of layer l and the c-th B rows of x.

    Args:
        layers: the table.
        x: rows×m.
        hidden: for one layer after the other rows×rank.
        rows: of x.
        m: width of x.
        NUMBER: dtype of the weights.
        ALIGNED: every V lies at a multiple of 16 bytes, so that eight numbers can be read at once.
        B: rows of x that a program has, a power of 2.
        K: columns at a time, a power of 2.
    """
    k, line, first = tl.program_id(0).to(tl.int64), layers + tl.program_id(1) * LINE, tl.program_id(2) * B
    rank = tl.load(line + RANK)
    if k < rank:
        matrix = tl.load(line + V).to(tl.pointer_type(NUMBER))
        if ALIGNED:
            matrix = tl.multiple_of(matrix, 16)
        sums = tl.zeros((B, K), tl.float32)
        sums = _add_row(sums, matrix, k, m, x + first.to(tl.int64) * m, rows - first, B, K)
        b = first + tl.arange(0, B)
        tl.store(hidden + rows * tl.load(line + HIDDEN_AT) + b * rank + k, tl.sum(sums, 1), mask=b < rows)


@triton.jit
def multiply_by_U_and_S(
    layers, x, hidden, y, rows, m, NUMBER: tl.constexpr, INDEX: tl.constexpr, B: tl.constexpr, K: tl.constexpr
):
    """y = hidden·Uᵀ + x·Sᵀ + b of every layer: program (i, l, c) has row i of layer l and the c-th B rows of x.

    Args:
        layers: the table.
        x: rows×m.
        hidden: what `multiply_by_V` wrote.
        y: for one layer after the other rows×n.
        rows: of x.
        m: width of x.
        NUMBER: dtype of the weights and of y.
        INDEX: dtype of the columns of S.
        B: rows of x that a program has, a power of 2.
        K: columns or entries at a time, a power of 2.
    """
    i, line, first = tl.program_id(0).to(tl.int64), layers + tl.program_id(1) * LINE, tl.program_id(2) * B
    n = tl.load(line + N)
    if i < n:
        rank = tl.load(line + RANK)
        starts = tl.load(line + STARTS).to(tl.pointer_type(tl.int32))
        columns = tl.load(line + COLUMNS).to(tl.pointer_type(INDEX))
        values = tl.load(line + VALUES).to(tl.pointer_type(NUMBER))
        sums = tl.zeros((B, K), tl.float32)
        sums = _add_entries_of_row(sums, starts, columns, values, i, x + first.to(tl.int64) * m, m, rows - first, B, K)
        matrix = tl.load(line + U).to(tl.pointer_type(NUMBER))
        vectors = hidden + rows * tl.load(line + HIDDEN_AT) + first * rank
        sums = _add_row(sums, matrix, i, rank, vectors, rows - first, B, K)
        total = tl.sum(sums, 1)
        bias = tl.load(line + BIAS)
        if bias != 0:
            total += tl.load(bias.to(tl.pointer_type(NUMBER)) + i).to(tl.float32)
        b = first + tl.arange(0, B)
        tl.store(y + rows * tl.load(line + Y_AT) + b * n + i, total.to(NUMBER), mask=b < rows)


@triton.jit
def add_rows_of_S(y, ids, starts, columns, values, m, CHOSEN: tl.constexpr, K: tl.constexpr):
    """y (count×m) += rows `ids` of S, or its rows in order unless CHOSEN; program i has row i of y.

    The entries of a row have different columns, so no two are added to the same place.
    """
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(ids + i) if CHOSEN else i
    first, last = tl.load(starts + row), tl.load(starts + row + 1)
    for start in range(first, last, K):
        e = start + tl.arange(0, K)
        value = tl.load(values + e, mask=e < last, other=0.0).to(tl.float32)
        place = y + i * m + tl.load(columns + e, mask=e < last, other=0).to(tl.int32)
        before = tl.load(place, mask=e < last, other=0.0).to(tl.float32)
        tl.store(place, (before + value).to(y.dtype.element_ty), mask=e < last)
