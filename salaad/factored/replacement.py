"""A dense layer and a layer of U·V + S in its place: which layers can be replaced, by what, and how one goes back."""

import torch
from accelerate.hooks import add_hook_to_module
from torch import nn
from transformers.pytorch_utils import Conv1D

from salaad.common.errors import UserError
from salaad.factored.layers import BY_ACTIVATION, SlrEmbedding
from salaad.factored.slr_weight import SlrWeight
from salaad.model.weights import tied_modules

# Linear layers that write their forward anew, by name, since importing their models takes seconds.
_LINEAR = {"FalconLinear"}


def always_dense(model: nn.Module) -> set[str]:
    """Names of the modules whose weight cannot be replaced by a layer of U·V + S.

    These are modules with a tied weight, which another module reads as a whole, and those that do more with it than a
    linear layer or a table.
    """
    return {*tied_modules(model), *(name for name, module in model.named_modules() if _does_more(module))}


def _does_more(module: nn.Module) -> bool:
    """Whether a module with a matrix computes something else than x·Wᵀ or a row of W, as Gemma's scaled embedding."""
    if isinstance(module, SlrWeight) or getattr(module._parameters.get("weight"), "ndim", 0) != 2:
        return False
    if isinstance(module, nn.Embedding):
        return type(module).forward is not nn.Embedding.forward or module.max_norm is not None
    return type(module).__name__ not in _LINEAR and type(module).forward not in (nn.Linear.forward, Conv1D.forward)


def outline_of(
    module: nn.Module, rank: int, nnz: int, in_int8: bool = False, activation: str | None = None
) -> SlrWeight:
    """Return a layer of U·V + S, perhaps with an activation between U and V, to replace `module`; it is not filled."""
    if _does_more(module):
        raise UserError(
            f"{type(module).__name__} is more than a linear layer or a table, and stays dense; compress the model anew"
        )
    if isinstance(module, nn.Embedding):
        if activation is not None:
            raise UserError("config.json has an embedding with an activation, which is none; give a whole folder")
        return SlrEmbedding(module.num_embeddings, module.embedding_dim, rank, nnz, in_int8)
    m, n = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
    return BY_ACTIVATION[activation](m, n, rank, nnz, module.bias is not None, in_int8)


def put_dense(model: nn.Module, name: str, usual: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace a layer of U·V + S by a dense layer, whose weight is summed in float32.

    Args:
        model: the model with the layer, changed in place.
        name: name of the layer; its bias is kept.
        usual: the dense layer, without its weight.
        dtype: dtype of the weight; that of the layer of U·V + S unless given.
    """
    layer = model.get_submodule(name)
    weight = layer.float_weight().to(dtype or layer.U.dtype)
    trained = layer.U.requires_grad
    usual.weight = nn.Parameter(weight.mT.contiguous() if isinstance(usual, Conv1D) else weight, trained)
    if getattr(layer, "bias", None) is not None:
        usual.bias = layer.bias
    model.set_submodule(name, usual.train(layer.training))
    if hasattr(layer, "_hf_hook"):  # the hook of a device map
        add_hook_to_module(usual, layer._hf_hook)
