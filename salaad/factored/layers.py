"""Layers that compute with U·V + S as it is stored: linear, linear with an activation between U and V, and embedding.

In eager mode they use the compiled products that `operators` chooses, or torch's sparse products where there are none.
torch.compile sees each layer as one operation (`operators`); torch.export, and torch.compile with gradients enabled,
see products with a dense weight that is made of U, V and S in plain operations.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from salaad.factored import cpu_kernels, operators
from salaad.factored.autocast import is_autocast_on, without_autocast
from salaad.factored.compiled_linear import CompiledLinear
from salaad.factored.slr import Slr
from salaad.factored.slr_tensors import SlrTensors
from salaad.factored.slr_weight import SlrWeight


def _knows_no_sparse(x: Tensor) -> bool:
    """Whether torch has no sparse products for a tensor of x's kind, or for what is being done with it."""
    return cpu_kernels.is_transformed() or x.is_meta or isinstance(x, FakeTensor)


class _SlrProjection(SlrWeight):
    """U·V + S with the sizes and the bias of a layer from m to n features.

    Args:
        in_features: m.
        out_features: n.
        rank: r of U·V.
        nnz: entries of S.
        bias: whether there is a bias b (n).
        in_int8: the layer is about to be read from a file whose numbers are int8.
    """

    def __init__(
        self, in_features: int, out_features: int, rank: int, nnz: int, bias: bool = False, in_int8: bool = False
    ) -> None:
        super().__init__(out_features, in_features, rank, nnz, in_int8)
        self.in_features, self.out_features = in_features, out_features
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None


class SlrLinear(_SlrProjection, nn.Linear):
    """A linear layer y = x·Vᵀ·Uᵀ + x·Sᵀ + b; an `nn.Linear`, so that adapters find it."""

    siblings: Any = None  # the `Siblings` it belongs to, if any

    @classmethod
    def from_slr(cls, slr: Slr, bias: Tensor | None = None) -> "SlrLinear":
        """The layer whose weight (n×m, out×in) is `slr`, in its dtype."""
        n, m = slr.shape
        layer = cls(m, n, slr.rank, slr.nnz, bias is not None)
        layer.fill(slr)
        if bias is not None:
            layer.bias = nn.Parameter(bias.detach().clone())
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """Return y (…×n) of x (…×m), in the dtype of the weights, without autocast, which has no sparse product."""
        # The compiled products take integers, as row numbers of an embedding; here torch refuses them.
        found = self._native(x) if self.nnz and x.is_floating_point() else None
        if found is not None:
            products, tensors = found
            if self._is_recorded(x):
                return CompiledLinear.apply(x, *tensors, self.bias, products)
            y = self.siblings.linear(self, x) if products.joins and self.siblings is not None else None
            return products.linear(x, self.bias, tensors) if y is None else y
        if x.is_floating_point() and is_autocast_on(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x.to(self.U.dtype))
        if not self.nnz:
            return self._with_empty_S(F.linear(F.linear(x, self.V), self.U, self.bias))
        if torch.compiler.is_exporting() or (torch.compiler.is_compiling() and torch.is_grad_enabled()):
            return F.linear(x, operators.dense(*self._tensors), self.bias)
        if torch.compiler.is_compiling():
            return operators.linear(x, *self._tensors, self.bias)
        if _knows_no_sparse(x):
            return F.linear(x, operators.dense(*self._tensors), self.bias)
        return operators.linear_in_torch(x, self.U, self.V, self._S(), self.bias)

    def reset_parameters(self) -> None:
        """Do nothing: U, V and S come from a trained matrix."""

    def _replicate_for_data_parallel(self) -> "SlrLinear":
        """Return a replica that belongs to no group: the layers of this one's group are on this layer's device."""
        replica = super()._replicate_for_data_parallel()
        replica.siblings = None
        return replica


class SlrActivated(_SlrProjection):
    """A layer y = U·φ(V·x) + S·x + b with SiLU (φ) between its factors: no matrix, so it has no `weight`."""

    activation = "silu"

    def forward(self, x: Tensor) -> Tensor:
        """Return y (…×n) of x (…×m), in the dtype of the weights."""
        if x.is_floating_point() and is_autocast_on(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x.to(self.U.dtype))
        y = F.linear(F.silu(F.linear(x, self.V)), self.U, self.bias)
        if not self.nnz:
            return self._with_empty_S(y)
        found = None if self._is_recorded(x) else self._native(x)
        if found is not None:
            return found[0].linear(x, None, self._tensors).add_(y)
        if torch.compiler.is_compiling() or _knows_no_sparse(x):
            return y + F.linear(x, operators.dense(*self._tensors))
        U, V, *_ = self._tensors
        return y + operators.linear_in_torch(x, U, V, self._S(), None)

    def _read(self, held: Mapping[str, Tensor]) -> SlrTensors:
        """Return the tensors of S with empty U (n×0) and V (0×m): an activation separates the layer's own U and V."""
        U, V, *S = super()._read(held)
        return U.detach()[:, :0], V.detach()[:0], *S

    @property
    def weight(self) -> Tensor:
        """Raise an AttributeError: there is no weight.

        Raises:
            AttributeError: always.
        """
        raise AttributeError("a layer with an activation between its factors has no weight")


BY_ACTIVATION = {None: SlrLinear, SlrActivated.activation: SlrActivated}


class SlrEmbedding(SlrWeight):
    """An embedding whose table (n×m) is U·V + S, of which only the rows asked for are computed.

    It is no `nn.Embedding`, whose rows can be written: what PEFT trains in an embedding (LoRA on it, single tokens, a
    prompt that begins with words) needs `model.dequantize()` first.

    Args:
        num_embeddings: n.
        embedding_dim: m.
        rank: r of U·V.
        nnz: entries of S.
        in_int8: the layer is about to be read from a file whose numbers are int8.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, rank: int, nnz: int, in_int8: bool = False) -> None:
        super().__init__(num_embeddings, embedding_dim, rank, nnz, in_int8)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    @classmethod
    def from_slr(cls, slr: Slr) -> "SlrEmbedding":
        """The embedding whose table (vocabulary×width) is `slr`, in its dtype."""
        layer = cls(*slr.shape, slr.rank, slr.nnz)
        layer.fill(slr)
        return layer

    def forward(self, ids: Tensor) -> Tensor:
        """Rows (…×m) of the table at `ids` (…)."""
        compiling = torch.compiler.is_compiling()
        if compiling and not torch.is_grad_enabled() and not torch.compiler.is_exporting():
            return operators.rows(ids, *self._tensors)
        found = None if compiling or self._is_recorded(ids) else self._native(ids)
        if found is not None and ids.dtype == torch.int64:
            products, tensors = found
            return products.rows(ids, tensors)
        # The sizes in `rows_in_torch` depend on values, which the host can read without waiting only on a CPU, and not
        # at all under torch.func.
        readable = ids.is_cpu and not compiling and not cpu_kernels.is_transformed()
        rows = operators.rows_in_torch if readable else operators.plain_rows
        with without_autocast(ids.device):
            y = rows(ids, *self._tensors)
        return y if self.nnz else self._with_empty_S(y)
