"""The kernels of the factored layers on a GPU, in Triton: y = U(Vx) + Sx for few rows of x, and S added to a matrix.

A program computes one row of a matrix (with one warp; with four for V), S is in compressed sparse rows with columns of
16 bits, or 32 where S is too wide, and all sums are in float32. The sizes of a launch come from shapes alone, so the
host never waits for the device and a CUDA graph can contain the launch.

How others store unstructured sparsity for decoding, and which of their ideas are used here:

- MACKO-SpMV (arXiv 2511.13061) gives a row to a warp, which reads values and columns side by side and the vector
  through the caches, and stores a column as the step from the last one in 4 bits, with zeros inserted where a step is
  too long. Used: one warp for a row, no tensor cores, no work before the product. Not used: 4-bit steps. They pay
  from a density of 0.06 on; at the 0.05 of the paper nearly every second step is longer than 16, and an entry in
  bfloat16 would take 36 bits with the inserted zeros, where 16 + 16 are 32. Steps of 8 bits would take 24, but S is a
  quarter of what a layer reads at rank ratio 0.15, so a layer would gain 6 % at the cost of a running sum before every
  read of x.
- SpInfer (EuroSys 2025) stores a bit for every entry of a dense tile, present or not, and feeds tensor cores. One bit
  for every entry of a tile is 20 bits per nonzero at density 0.05, more than the column, and less only above a density
  of 1/16. Not used.
- Flash-LLM (VLDB 2023) loads sparse and computes dense: tiles are made dense in shared memory, for tensor cores. Used
  for many rows of x, with the whole weight in place of a tile: U·V must be made anyway, which a product of the vendor's
  library does best; then S is added in place, and the dense product follows (`gpu_products`).

Layers that share x (q, k, v; gate, up) share one launch. Their tensors and sizes are arguments of the launch, as
tuples: a table in the device's memory would have to outlive every CUDA graph that was captured with it.
"""

import triton
import triton.language as tl

# The fields of a layer's tuple: tensors (of which the bias may be None), then sizes times `SIZE_UNIT`. Triton compiles
# separate kernels for the integer 1 and for multiples of 16; with this unit all sizes are multiples of 16.
V, U, STARTS, COLUMNS, VALUES, BIAS, Y, RANK, N = map(tl.constexpr, range(9))
SIZE_UNIT = tl.constexpr(16)


@triton.jit
def _own(layers, FIELD: tl.constexpr, LAYERS: tl.constexpr):
    """Return a field of this program's layer of `LAYERS`; the layer's index is the program's number on axis 1."""
    found = layers[0][FIELD]
    for k in tl.static_range(1, LAYERS):
        found = tl.where(tl.program_id(1) == k, layers[k][FIELD], found)
    return found


@triton.jit
def _add_row(sums, matrix, i, width, vectors, batch, B: tl.constexpr, K: tl.constexpr):
    """sums (B×K) += row i of `matrix` (…×width) times each of the first B `vectors` (batch×width), K columns a time."""
    b = tl.arange(0, B)[:, None]
    for start in range(0, width, K):
        k = start + tl.arange(0, K)
        row = tl.load(matrix + i * width + k, mask=k < width, other=0.0).to(tl.float32)
        vector = tl.load(vectors + b * width + k[None, :], mask=(b < batch) & (k < width)[None, :], other=0.0)
        sums += row[None, :] * vector.to(tl.float32)
    return sums


@triton.jit
def _add_entries_of_row(sums, starts, columns, values, i, x, m, batch, B: tl.constexpr, K: tl.constexpr):
    """sums (B×K) += row i of S times each of the first B rows of x (batch×m), K entries at a time."""
    b = tl.arange(0, B)[:, None]
    first, last = tl.load(starts + i), tl.load(starts + i + 1)
    for start in range(first, last, K):
        e = start + tl.arange(0, K)
        value = tl.load(values + e, mask=e < last, other=0.0).to(tl.float32)
        column = tl.load(columns + e, mask=e < last, other=0).to(tl.int32)
        found = tl.load(x + b * m + column[None, :], mask=(b < batch) & (e < last)[None, :], other=0.0)
        sums += value[None, :] * found.to(tl.float32)
    return sums


@triton.jit(do_not_specialize=["widest"])
def multiply_by_V(layers, x, hidden, rows, m, widest, LAYERS: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    """Compute hidden = x·Vᵀ of every layer, in float32.

    Program (k, l, c) multiplies row k of V of layer l by the c-th B rows of x. Where every V lies at a multiple of 16
    bytes, which Triton detects by itself, 16 bytes are read at once.

    Args:
        layers: a tuple for each layer, with the fields above.
        x: rows×m.
        hidden: layers × rows·widest, where layer l has the first rows·rank numbers of line l.
        rows: number of rows of x.
        m: width of x.
        widest: the largest rank.
        LAYERS: number of layers; Triton 3.6 cannot take the length of a tuple with None in it.
        B: number of rows of x per program, a power of 2.
        K: number of columns at a time, a power of 2.
    """
    k, first = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64) * B
    rank = _own(layers, RANK, LAYERS) // SIZE_UNIT
    if k < rank:
        sums = tl.zeros((B, K), tl.float32)
        sums = _add_row(sums, _own(layers, V, LAYERS), k, m, x + first * m, rows - first, B, K)
        b = first + tl.arange(0, B)
        own = hidden + tl.program_id(1).to(tl.int64) * rows * widest
        tl.store(own + b * rank + k, tl.sum(sums, 1), mask=b < rows)


@triton.jit(do_not_specialize=["widest"])
def multiply_by_U_and_S(layers, x, hidden, rows, m, widest, LAYERS: tl.constexpr, B: tl.constexpr, K: tl.constexpr):
    """Compute y = hidden·Uᵀ + x·Sᵀ + b of every layer.

    Program (i, l, c) multiplies row i of U and S of layer l by the c-th B rows of `hidden` and x.

    Args:
        layers: a tuple for each layer, with the fields above.
        x: rows×m.
        hidden: x·Vᵀ as `multiply_by_V` wrote it.
        rows: number of rows of x.
        m: width of x.
        widest: the largest rank.
        LAYERS: number of layers; Triton 3.6 cannot take the length of a tuple with None in it.
        B: number of rows of x per program, a power of 2.
        K: number of columns or entries at a time, a power of 2.
    """
    i, first = tl.program_id(0).to(tl.int64), tl.program_id(2).to(tl.int64) * B
    n = _own(layers, N, LAYERS) // SIZE_UNIT
    if i < n:
        starts, columns = _own(layers, STARTS, LAYERS), _own(layers, COLUMNS, LAYERS)
        values = _own(layers, VALUES, LAYERS)
        sums = tl.zeros((B, K), tl.float32)
        sums = _add_entries_of_row(sums, starts, columns, values, i, x + first * m, m, rows - first, B, K)
        rank = _own(layers, RANK, LAYERS) // SIZE_UNIT
        vectors = hidden + tl.program_id(1).to(tl.int64) * rows * widest + first * rank
        sums = _add_row(sums, _own(layers, U, LAYERS), i, rank, vectors, rows - first, B, K)
        total = tl.sum(sums, 1)
        for k in tl.static_range(LAYERS):
            # Not read by `_own`: a bias may be None or of another dtype. Triton compiles the first condition away.
            if layers[k][BIAS] is not None:  # noqa: SIM102
                if tl.program_id(1) == k:
                    total += tl.load(layers[k][BIAS] + i).to(tl.float32)
        y, b = _own(layers, Y, LAYERS), first + tl.arange(0, B)
        tl.store(y + b * n + i, total.to(y.dtype.element_ty), mask=b < rows)


@triton.jit
def add_rows_of_S(y, ids, starts, columns, values, m, CHOSEN: tl.constexpr, K: tl.constexpr):
    """Add rows `ids` of S to y (count×m), or unless CHOSEN the rows of S in order; program i is for row i of y.

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
