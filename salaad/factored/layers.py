"""Layers that compute with U·V + S as it is stored: a linear layer and an embedding."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import is_autocast_available

from salaad.factored import cpu_kernels, packing
from salaad.factored.slr import Slr

# torch warns at the first sparse tensor of a process; a user can do nothing about it.
warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta state")

# Time of a multiplication in U·V and in S, and of transposing a number of x or y for S, in units of a multiplication in
# a dense product (measured on a CPU, widths of 128 to 2736).
_LOW_RANK_COST, _SPARSE_COST, _TURNING_COST = 1.2, 7, 60


class SlrWeight(nn.Module):
    """A weight U·V + S (n×m): parameters U (n×r), V (r×m) and S_values, S in compressed sparse rows.

    In a file the positions of S's entries are one packed buffer; `unpack` replaces it by row starts and columns, int32
    where that holds them (the smallest dtype that torch's sparse products take).
    """

    def __init__(self, n: int, m: int, rank: int, nnz: int) -> None:
        super().__init__()
        self.shape, self.rank, self.nnz = (n, m), rank, nnz
        self.U = nn.Parameter(torch.empty(n, rank), requires_grad=False)
        self.V = nn.Parameter(torch.empty(rank, m), requires_grad=False)
        self.S_values = nn.Parameter(torch.empty(nnz), requires_grad=False)
        packed = torch.empty(packing.encoded_size(nnz, n * m), dtype=torch.uint8)
        self.register_buffer("S_packed", packed)
        self._cached_S: tuple[tuple, Tensor] | None = None
        self._cached_products: tuple[tuple, cpu_kernels.Products | None] | None = None

    def fill(self, slr: Slr) -> None:
        """Copy the numbers of `slr`, in its dtype and on its device."""
        self.rank, self.nnz = slr.rank, slr.nnz
        positions, order = slr.positions.long().sort()
        self.U, self.V, self.S_values = (
            nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=False)
            for part in (slr.U, slr.V, slr.values[order])
        )
        self._set_positions(positions)

    def unpack(self) -> None:
        """Turn packed positions, if there are any, into row starts and columns; a ValueError if they are broken."""
        if "S_packed" in self._buffers:
            (n, m), packed = self.shape, self.S_packed
            positions = torch.from_numpy(packing.decode(packed.cpu().numpy(), self.nnz, n * m))
            self._set_positions(positions.to(packed.device))

    def packed(self) -> Tensor:
        """The positions of S's entries as `unpack` reads them (uint8)."""
        n, m = self.shape
        rows = torch.arange(n, device=self.S_starts.device).repeat_interleave(self.S_starts.diff())
        positions = rows * m + self.S_columns
        return torch.from_numpy(packing.encode(positions.cpu().numpy(), n * m))

    def _set_positions(self, positions: Tensor) -> None:
        n, m = self.shape
        index = torch.int32 if max(len(positions), m) < 2**31 else torch.int64
        starts = torch.searchsorted(positions, torch.arange(n + 1, device=positions.device) * m)
        self._buffers.pop("S_packed", None)
        self._cached_products = None
        self.register_buffer("S_starts", starts.to(index))
        self.register_buffer("S_columns", (positions % m).to(index))

    def _S(self, dtype: torch.dtype) -> Tensor:
        """S as a sparse tensor of torch (n×m); in its own dtype it shares the memory of S_values and is cached.

        Making one takes as long as a small product. The cached one keeps its memory, so no other tensor can get its
        address.
        """
        values, starts = self._parameters["S_values"], self._buffers["S_starts"]
        key = (values.data_ptr(), starts.data_ptr(), values.device, dtype)
        if self._cached_S is not None and self._cached_S[0] == key:
            return self._cached_S[1]
        with torch.inference_mode(False):  # an inference tensor could not be used with autograd later
            S = torch.sparse_csr_tensor(
                starts, self.S_columns, values.to(dtype), size=self.shape, check_invariants=False
            )
        self._cached_S = (key, S) if dtype == values.dtype and not values.requires_grad else None
        return S

    def _native(self, x: Tensor) -> cpu_kernels.Products | None:
        """The compiled products where they can be used: float32 on a CPU, and no parameter needs a gradient.

        Called in every forward, which takes microseconds in a small layer; so what does not change is cached.
        """
        if cpu_kernels.is_intercepted() or type(x) not in cpu_kernels.PLAIN:
            return None
        parameters, buffers = self._parameters, self._buffers
        U, V, values = parameters["U"], parameters["V"], parameters["S_values"]
        starts, columns = buffers["S_starts"], buffers["S_columns"]
        addresses = starts.data_ptr(), columns.data_ptr(), values.data_ptr(), U.data_ptr(), V.data_ptr()
        key = *addresses, U.numel(), V.numel()  # a U or V cut in place keeps its address
        if self._cached_products is None or self._cached_products[0] != key:
            self._cached_products = key, cpu_kernels.products(self.shape, U, V, starts, columns, values)
        products = self._cached_products[1]
        if products is None or not x.is_cpu:
            return None
        if torch.is_grad_enabled() and any(p is not None and p.requires_grad for p in parameters.values()):
            return None
        return products

    def __getstate__(self) -> dict[str, Any]:
        """The state without the caches, which hold addresses of this object's memory."""
        return self.__dict__ | {"_cached_S": None, "_cached_products": None}

    @property
    def weight(self) -> Tensor:
        """U·V + S (n×m), dense; computed at every call."""
        self.unpack()  # transformers reads a weight of GPT-2 before it calls the hook that unpacks
        with _without_autocast(self.U.device):
            return (self.U @ self.V).add_(self._S(self.U.dtype))

    def extra_repr(self) -> str:
        """The layer's sizes for `print`."""
        return f"{self.shape[0]}×{self.shape[1]}, rank={self.rank}, nnz={self.nnz}"


class SlrLinear(SlrWeight):
    """A linear layer y = x·Vᵀ·Uᵀ + x·Sᵀ + b.

    Args:
        in_features: m.
        out_features: n.
        rank: r of U·V.
        nnz: entries of S.
        bias: whether there is a bias b (n).
    """

    def __init__(self, in_features: int, out_features: int, rank: int, nnz: int, bias: bool = False) -> None:
        super().__init__(out_features, in_features, rank, nnz)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None

    @classmethod
    def from_slr(cls, slr: Slr, bias: Tensor | None = None) -> "SlrLinear":
        """The layer whose weight (n×m, out×in) is `slr`, in its dtype."""
        n, m = slr.shape
        layer = cls(m, n, slr.rank, slr.nnz, bias is not None)
        layer.fill(slr)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Y (…×n) of x (…×m), in the dtype of the weights; without autocast, which has no sparse product."""
        products = self._native(x) if self.nnz and x.dtype == torch.float32 else None
        if products is not None:
            return _CompiledLinear.apply(x, self, products) if x.requires_grad else products.linear(x, self.bias)
        if torch.is_autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x.to(self.U.dtype))
        if not self.nnz:
            return F.linear(F.linear(x, self.V), self.U, self.bias)
        rows = x.reshape(-1, self.in_features)
        if self._is_cheaper_whole(len(rows)):
            y = F.linear(rows, self.weight, self.bias)
        else:
            y = self._in_parts(rows)
            y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    def _in_parts(self, rows: Tensor) -> Tensor:
        # Sparse products need features in rows. The result is made contiguous: attention is slow on other layouts.
        columns = rows.mT.contiguous()
        y = self.U @ (self.V @ columns)
        if rows.device.type == "cpu" and rows.dtype.itemsize < 4:  # torch has no sparse product of these there
            y = torch.addmm(y.float(), self._S(torch.float32), columns.float()).to(rows.dtype)
        else:
            y = torch.addmm(y, self._S(rows.dtype), columns)
        return y.mT.contiguous()

    def _is_cheaper_whole(self, rows: int) -> bool:
        """Whether computing U·V + S first pays for so many rows, as it does where S is dense enough."""
        n, m = self.shape
        parts = (_LOW_RANK_COST * self.rank + _TURNING_COST) * (n + m) + _SPARSE_COST * self.nnz
        return rows * (parts - n * m) > _LOW_RANK_COST * self.rank * n * m


def _without_autocast(device: torch.device) -> AbstractContextManager:
    """A context for products in the tensors' own dtype: autocast would round them, and has no sparse product."""
    return torch.autocast(device.type, enabled=False) if is_autocast_available(device.type) else nullcontext()


class _CompiledLinear(torch.autograd.Function):
    """The compiled product with a gradient for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: SlrLinear, products: cpu_kernels.Products) -> Tensor:
        ctx.shape = layer.shape
        ctx.save_for_backward(layer.U, layer.V, layer.S_starts, layer.S_columns, layer.S_values)
        return products.linear(x, layer.bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        U, V, *S = ctx.saved_tensors
        with _without_autocast(gradient.device):
            S = torch.sparse_csr_tensor(*S, size=ctx.shape, check_invariants=False)
            return gradient @ (U @ V).add_(S), None, None


class SlrEmbedding(SlrWeight):
    """An embedding whose table (n×m) is U·V + S, of which only the rows asked for are computed.

    Args:
        num_embeddings: n.
        embedding_dim: m.
        rank: r of U·V.
        nnz: entries of S.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, rank: int, nnz: int) -> None:
        super().__init__(num_embeddings, embedding_dim, rank, nnz)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @classmethod
    def from_slr(cls, slr: Slr) -> "SlrEmbedding":
        """The embedding whose table (vocabulary×width) is `slr`, in its dtype."""
        layer = cls(*slr.shape, slr.rank, slr.nnz)
        layer.fill(slr)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """Rows (…×m) of the table at `ids` (…)."""
        products = self._native(ids)
        if products is not None and ids.dtype == torch.int64:
            return products.rows(ids)
        flat = ids.reshape(-1)
        with _without_autocast(flat.device):
            rows = F.embedding(flat, self.U) @ self.V
        starts = self.S_starts[flat].long()
        counts = self.S_starts[flat + 1].long() - starts
        row = torch.arange(len(flat), device=flat.device).repeat_interleave(counts)
        first = counts.cumsum(0) - counts
        entry = torch.arange(len(row), device=flat.device) + (starts - first)[row]
        rows = rows.index_put((row, self.S_columns[entry].long()), self.S_values[entry], accumulate=True)
        return rows.view(*ids.shape, self.embedding_dim)
