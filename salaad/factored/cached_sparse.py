"""S as a sparse tensor of torch, made once for the products of many forward passes."""

import weakref

import torch
from torch import Tensor

from salaad.factored import operators


class CachedSparse:
    """A cache of S (n×m) as a sparse tensor that shares the memory of its values, kept until they leave their layer.

    Making the tensor takes as long as a small product. While cached, it keeps the memory of the values, so no other
    tensor can get their address; it is dropped with the layer's parameter, which offloading removes after a forward.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple, Tensor, weakref.ref] | None = None

    def get(self, values: Tensor, starts: Tensor, columns: Tensor, m: int) -> Tensor:
        """Return S (n×m) from a layer's values (nnz), row starts (n+1) and columns (nnz), cached if possible."""
        if torch.is_grad_enabled() and values.requires_grad:
            return operators.sparse_rows(starts, columns, values, m)
        key = (values.data_ptr(), starts.data_ptr(), values.device)
        kept = self._kept  # read once, since another thread may drop or replace it
        if kept is not None and kept[0] == key:
            return kept[1]
        with torch.inference_mode(False), torch.no_grad():  # autograd could not use an inference tensor later
            S = operators.sparse_rows(starts, columns, values.detach(), m)
        if S.dtype == values.dtype:  # else S holds a copy of the values
            this = weakref.ref(self)
            self._kept = key, S, weakref.ref(values, lambda _: this() and this().drop())
        return S

    def drop(self) -> None:
        """Empty the cache."""
        self._kept = None
