"""Models that compute with U·V + S as it is stored, and open with plain `from_pretrained`.

A folder keeps its architecture: `config.json` is that of the dense model plus an entry under `quantization_config`,
which names the blocks stored in parts, with their ranks and entries. transformers reads it through its quantizer
registry, in which importing this module enters the class below.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from salaad.common.errors import UserError
from salaad.factored import packing
from salaad.factored.layers import SlrEmbedding, SlrLinear, SlrWeight
from salaad.factored.slr import Slr
from salaad.model.weight_headers import (
    check_block,
    check_entry,
    check_layers,
    check_room,
    check_tensors,
    headers_for,
    shape_and_types,
)

METHOD = "salaad"
FORMAT = 1
T = TypeVar("T")


@register_quantization_config(METHOD)
class SlrConfig(QuantizationConfigMixin):
    """The entry in config.json: block → [rank, nnz] of the blocks stored in parts; all others are dense."""

    def __init__(self, blocks: dict[str, list[int]] | None = None, format: int = FORMAT, **_: Any) -> None:
        self.quant_method = METHOD
        self.format = format
        self.blocks = check_entry(blocks or {}, 2)


class CheckedQuantizer(HfQuantizer):
    """What the quantizers of our folders share: a format, and a check before anything is built."""

    FORMAT: int

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a folder of another format."""
        found = self.quantization_config.format
        if found != self.FORMAT:
            raise UserError(f"the folder has format {found}, this version {self.FORMAT}; use the version that wrote it")

    def update_attn_implementation(self, config: PreTrainedConfig) -> PreTrainedConfig:
        """Change nothing: of the hooks that see the configuration it is the one before the model is built from it."""
        check_layers(config)
        return config


@register_quantizer(METHOD)
class SlrQuantizer(CheckedQuantizer):
    """What transformers calls when it opens or saves such a folder."""

    FORMAT = FORMAT

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        blocks = self.quantization_config.blocks
        headers = headers_for(model, checkpoint_files)
        ignore_guards(model, blocks)
        for own, name in names_inside(model, {name: name for name in blocks}).items():
            rank, nnz = blocks[name]
            check_block(model, own, rank, nnz, headers)
            layer = outline_of(model.get_submodule(own), rank, nnz)
            stored = {key: tensor for key, tensor in layer.state_dict().items() if key != "bias"}
            check_tensors({f"{name}.{key}": shape_and_types(tensor) for key, tensor in stored.items()}, headers)
            model.set_submodule(own, layer)
        check_room(model, headers)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, module in slr_modules(model).items():
            try:
                module.requires_grad_(False).unpack()
            except ValueError as error:
                raise UserError(f"{name}.S_packed is broken ({error}); give a whole copy of the folder") from None
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict]:
        """The model's tensors as they go to the file, where the places of S's entries are packed."""
        state = model.state_dict()
        for name, module in slr_modules(model).items():
            del state[f"{name}.S_starts"], state[f"{name}.S_columns"]
            state[f"{name}.S_packed"] = module.packed()
            # Without our quantizer transformers would fill the weight it misses with noise; at this one it stops.
            state[f"{name}.weight"] = torch.empty(0)
        return state, {}

    def is_serializable(self) -> bool:
        """Yes: save_pretrained works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No: U, V and S are for inference."""
        return False


def ignore_guards(model: PreTrainedModel, blocks: Iterable[str]) -> None:
    """Let the loader pass over what stands where the named blocks' dense weights would be."""
    guards = {rf"^{re.escape(name)}\.weight$" for name in blocks}
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *guards}


def names_inside(model: PreTrainedModel, blocks: Mapping[str, T]) -> dict[str, T]:
    """The blocks under their names in this model: AutoModel has no head, and its names begin inside the base model."""
    if model.base_model is not model:
        return dict(blocks)
    inside = {name.removeprefix(f"{model.base_model_prefix}."): value for name, value in blocks.items()}
    return {name: value for name, value in inside.items() if hasattr(model, name.partition(".")[0])}


def factor(model: PreTrainedModel, blocks: dict[str, Slr]) -> PreTrainedModel:
    """Replace the named blocks of a dense model by their parts, in place, wherever those take less memory.

    Args:
        model: a causal LM; its dtype is that of the result.
        blocks: module name → U·V + S of its weight as the module holds it.

    A tied weight stays dense, since the module it is tied to reads it as a whole.
    """
    tied = tied_modules(model)
    for name, slr in blocks.items():
        module = model.get_submodule(name)
        X = module.weight
        slr = slr.to(X.device, X.dtype)
        if name in tied or is_smaller_dense(slr, X.element_size()):
            X.data.copy_(slr.dense())
        else:
            model.set_submodule(name, _layer(module, slr).train(module.training))
    mark_factored(model)
    return model


def tied_modules(model: PreTrainedModel) -> set[str]:
    """Names of the modules that share a weight with another."""
    return {name.rpartition(".")[0] for pair in model.all_tied_weights_keys.items() for name in pair}


def mark_factored(model: PreTrainedModel) -> None:
    """Tell transformers, and `save_pretrained` by it, which blocks are stored in parts."""
    stored = slr_modules(model)
    if stored:
        entry = SlrConfig({name: [module.rank, module.nnz] for name, module in stored.items()})
        model.hf_quantizer = SlrQuantizer(entry)
        model.is_quantized, model.quantization_method = True, METHOD
        model.hf_quantizer.postprocess_model(model)


def outline_of(module: nn.Module, rank: int, nnz: int) -> SlrWeight:
    """The layer that stands for `module`, without its numbers."""
    if isinstance(module, nn.Embedding):
        return SlrEmbedding(module.num_embeddings, module.embedding_dim, rank, nnz)
    m, n = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
    return SlrLinear(m, n, rank, nnz, bias=module.bias is not None)


def _layer(module: nn.Module, slr: Slr) -> SlrWeight:
    """The layer that computes what `module` computes, with `slr` in place of its weight."""
    if isinstance(module, nn.Embedding):
        return SlrEmbedding.from_slr(slr)
    # GPT-2's Conv1D keeps its weight as in×out.
    return SlrLinear.from_slr(slr.transposed() if isinstance(module, Conv1D) else slr, module.bias)


def _resident_bytes(slr: Slr, element: int) -> int:
    """Memory of a block in parts, its row starts and columns included."""
    return slr.parameters * element + 4 * (slr.nnz + max(slr.shape) + 1)


def is_smaller_dense(slr: Slr, element: int) -> bool:
    """Whether a block takes no less memory in parts than dense, with numbers of `element` bytes."""
    n, m = slr.shape
    return _resident_bytes(slr, element) >= n * m * element


def memory_bytes(slr: Slr, element: int) -> int:
    """Memory of a block in the form `factor` gives it, with numbers of `element` bytes."""
    n, m = slr.shape
    return min(_resident_bytes(slr, element), n * m * element)


def resident_bytes(model: nn.Module) -> int:
    """Memory of a model's weights, row starts and columns included."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def disk_bytes(slr: Slr, element: int) -> int:
    """Bytes of a block in a file, in the form `factor` gives it, with numbers of `element` bytes."""
    n, m = slr.shape
    if is_smaller_dense(slr, element):
        return n * m * element
    return slr.parameters * element + packing.encoded_size(slr.nnz, n * m)


def slr_modules(model: nn.Module) -> dict[str, SlrWeight]:
    """Name → module of every block stored in parts."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SlrWeight)}
