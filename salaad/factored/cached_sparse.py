"""S as a sparse tensor of torch, made once for the products of many forwards."""

import weakref

import torch
from torch import Tensor

from salaad.factored import operators


class CachedSparse:
    """S (n×m) as a sparse tensor, which shares the memory of its values and is kept until they leave their layer.

    Making one takes as long as a small product. It keeps that memory, so no other tensor can get its address; but no
    longer than the layer's parameter lives, which offloading takes away after a forward.
    """

    def __init__(self) -> None:
        self._kept: tuple[tuple, Tensor, weakref.ref] | None = None

    def get(self, values: Tensor, starts: Tensor, columns: Tensor, m: int) -> Tensor:
        """S of a layer's own values (nnz), row starts (n+1) and columns (nnz)."""
        if torch.is_grad_enabled() and values.requires_grad:
            return operators.sparse_rows(starts, columns, values, m)
        key = (values.data_ptr(), starts.data_ptr(), values.device)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        with torch.inference_mode(False), torch.no_grad():  # an inference tensor is of no use to autograd later
            S = operators.sparse_rows(starts, columns, values.detach(), m)
        if S.dtype == values.dtype:  # else it would be a copy
            this = weakref.ref(self)
            self._kept = key, S, weakref.ref(values, lambda _: this() and this().drop())
        return S

    def drop(self) -> None:
        """Keep nothing."""
        self._kept = None
