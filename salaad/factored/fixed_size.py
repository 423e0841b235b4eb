"""The factored folder format of one fixed size, which plain `from_pretrained` opens, and its factored models.

`config.json` is that of the dense model plus an entry `quantization_config`, which lists the blocks stored as U·V + S
with their rank and number of entries. transformers opens such a folder through its quantizer registry, in which
`registration` enters `SlrQuantizer`.
"""

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from os import PathLike
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from salaad.common.errors import UserError
from salaad.factored.checked_quantizer import CheckedQuantizer, FolderEntry
from salaad.factored.experts import close_stacks, open_stacks, stacks
from salaad.factored.layers import BY_ACTIVATION, SlrEmbedding, SlrLinear
from salaad.factored.other_heads import names_inside, new_head
from salaad.factored.packed_blocks import pack_blocks
from salaad.factored.registration import OPENED_DENSE
from salaad.factored.replacement import always_dense, outline_of, put_dense
from salaad.factored.siblings import join_siblings
from salaad.factored.slr import Slr
from salaad.factored.slr_weight import SlrWeight
from salaad.factored.smaller_form import Numbers, takes_dense_form
from salaad.model.folder_formats import FIXED_SIZE
from salaad.model.parameters import cast, count_parameters
from salaad.model.weight_headers import (
    Headers,
    check_block,
    check_entry,
    check_room,
    check_tensors,
    headers_for,
    is_count,
    numbers,
    shape_and_types,
)
from salaad.model.weights import place_of, tied_modules, weights_of

FORMAT_VERSION, WITH_ACTIVATION = 1, 2


class SlrConfig(FolderEntry):
    """The entry `quantization_config` in the config.json of a folder of a fixed size.

    Args:
        blocks: name → [rank, nnz] of the blocks stored as U·V + S.
        parameters: number of parameters of the whole model by the paper's count, in which a block of U·V + S counts as
            such even if it is stored dense; in a cut by energy no block counts more than it has dense.
        numbers: how U, V and the values of S are stored: `float`, in the dtype of the model, or `int8` with scales.
        activation: the activation between the two factors of every block, for models trained with one; else None.
        format: version of the format; unless given, `WITH_ACTIVATION` if there is an activation, else `FORMAT_VERSION`.
    """

    def __init__(
        self,
        blocks: dict[str, list[int]] | None = None,
        parameters: int | None = None,
        numbers: Numbers = "float",
        activation: Literal["silu"] | None = None,
        format: int | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = FIXED_SIZE
        self.format = (FORMAT_VERSION if activation is None else WITH_ACTIVATION) if format is None else format
        if activation not in [*BY_ACTIVATION]:  # a list, as a broken file may give what has no hash
            raise UserError(f"config.json has the activation {activation!r}; give a folder with silu or with none")
        self.activation = activation
        self.numbers = numbers
        if numbers not in ("float", "int8"):
            raise UserError(f"config.json stores numbers as {numbers!r}; give a folder with float or int8")
        self.blocks = check_entry(blocks or {}, 2)
        self.parameters = parameters if is_count(parameters) else None

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as config.json holds it, without `activation` if there is none."""
        entry = super().to_dict()
        return entry if self.activation else {key: value for key, value in entry.items() if key != "activation"}


class SlrQuantizer(CheckedQuantizer):
    """The hooks that transformers calls when it opens or saves a folder of a fixed size."""

    FORMAT_VERSIONS = (FORMAT_VERSION, WITH_ACTIVATION)
    # Name → layer of the usual kind, for each block that may become dense in memory.
    _may_be_dense: Mapping[str, nn.Module] = MappingProxyType({})
    _spared = 0  # by how much the numbers stored exceed the parameters as they are counted
    _given: Mapping[str, Tensor] | None = None  # the state dict that `save_pretrained` was given

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        blocks = self.quantization_config.blocks
        headers = headers_for(model, checkpoint_files)
        inside = names_inside(model, blocks)
        head, tied, stored = new_head(model, headers), tied_modules(model), numbers(headers)
        buffers = [name for name, _ in model.named_buffers()]  # before those of layers in int8 join them
        for own, name in inside.items():
            check_block(model, own, *blocks[name], stored)
            if own in tied:
                raise UserError(
                    f"{name} is stored as U, V and S, and {type(model).__name__} shares it with another module; open "
                    "the folder with the class that saved it"
                )
        open_stacks(model, inside)
        ignore_guards(model, blocks)
        self._may_be_dense = {own: model.get_submodule(own) for own in inside}
        for own, name in inside.items():
            rank, nnz = blocks[name]
            layer = outline_of(model.get_submodule(own), rank, nnz, self.in_int8, self.quantization_config.activation)
            parts = {key: tensor for key, tensor in layer.state_dict().items() if key != "bias"}
            check_tensors({f"{name}.{key}": shape_and_types(tensor) for key, tensor in parts.items()}, headers)
            model.set_submodule(own, layer)
        check_room(model, headers, beside=head)
        self._spared = stored_parameters(headers, buffers) - (self.quantization_config.parameters or 0)
        # If the model is saved again, the entry has to list the blocks by the names in this model.
        self.quantization_config.blocks = {own: blocks[name] for own, name in inside.items()}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, module in slr_modules(model).items():
            if any(buffer.is_meta for buffer in module.buffers()):
                raise UserError(
                    f"the positions of S in {name} are offloaded and would be lost; leave offload_buffers out"
                )
            try:
                module.unpack()
            except ValueError as error:
                raise UserError(f"{name}.S_packed is broken ({error}); give a whole copy of the folder") from None
        self._make_dense(model)
        join_siblings(slr_modules(model))
        if self.quantization_config.blocks:
            model.base_model.hf_quantizer = self  # it may be saved without the head
        # transformers assumes that a quantized model has rounded weights: no half(), and training of adapters only.
        model.is_quantized = False
        return model

    def _make_dense(self, model: PreTrainedModel) -> None:
        """Replace blocks that are smaller dense by layers of their usual kind; they are also saved in that form."""
        before = count_parameters(model)
        for name, usual in self._may_be_dense.items():
            layer = model.get_submodule(name)
            if not layer.U.is_meta and takes_dense_form(layer, layer.U.element_size()):
                put_dense(model, name, usual)
                del self.quantization_config.blocks[name]
        self._may_be_dense = {}
        close_stacks(model)
        self._spared += count_parameters(model) - before
        if not self.quantization_config.blocks:
            self.remove_quantization_config(model)
            mark_dense(model)

    def remove_quantization_config(self, model: PreTrainedModel) -> None:
        """Make the model an ordinary one for transformers, and its base model, too."""
        super().remove_quantization_config(model)
        vars(model.base_model).pop("hf_quantizer", None)

    def own_save_pretrained(
        self,
        usual: Callable[..., None],
        model: PreTrainedModel,
        save_directory: str | PathLike,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Save as transformers does, which asks a quantizer for the tensors and forgets those that it was given."""
        self._given = state_dict
        try:
            usual(model, save_directory, is_main_process, None, *args, **kwargs)
        finally:
            self._given = None

    def own_resize_token_embeddings(
        self,
        usual: Callable[..., nn.Module],
        model: PreTrainedModel,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> nn.Module:
        """Make an embedding in parts dense before transformers resizes it by writing into its weight."""
        embedding = model.get_input_embeddings()
        same = pad_to_multiple_of is None and new_num_tokens in (None, embedding.num_embeddings)
        if isinstance(embedding, SlrEmbedding) and not same:
            [name] = [name for name, layer in slr_modules(model).items() if layer is embedding]
            put_dense(model, name, dense_outline(model).get_submodule(name))
        return usual(model, new_num_tokens, pad_to_multiple_of, *args, **kwargs)

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict]:
        """Return the tensors to save: positions of S's entries packed, the numbers in int8 if they still are in effect.

        Those of a folder in int8 that is open in bfloat16 may change by two roundings, as its scales are rounded.

        The entry in config.json, which is written next, lists the blocks that are in parts now, and counts parameters
        anew: another layer may have taken the place of one, as `resize_token_embeddings` puts a dense head there.
        """
        state, stored = dict(model.state_dict() if self._given is None else self._given), slr_modules(model)
        self.quantization_config.blocks = {name: [module.rank, module.nnz] for name, module in stored.items()}
        if self._given is not None and not self._given:  # as the processes give that save no tensors
            return {}, {}
        if self.quantization_config.parameters is not None:
            # By the sizes in the state dict, as those in the model may be of one process's share.
            sizes = (state.get(name, p).numel() for name, p in model.named_parameters())
            self.quantization_config.parameters = sum(sizes) - self._spared
        in_int8 = pack_blocks(state, stored, self.in_int8, rounding=not self.pre_quantized)
        self.quantization_config.numbers = "int8" if in_int8 else "float"
        # Without our quantizer transformers would fill missing weights with random numbers; empty ones it refuses.
        guards = {f"{name}.weight": torch.empty(0) for name in stored} | stack_guards(model)
        if guards:
            # transformers' conversions would rename parts of a block, which config.json lists by the model's own name,
            # and join whole weights, which are not there.
            model._weight_conversions = []
        return state | guards, {}

    @property
    def computed_on_opening(self) -> str | None:
        """What the folder holds if its U, V and S are computed when it is opened: numbers in int8."""
        return "a folder of int8" if self.in_int8 else None

    @property
    def in_int8(self) -> bool:
        """Whether the folder's numbers are int8."""
        return self.quantization_config.numbers == "int8"

    def dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Make the model dense in place, in `dtype` or in the dtype that it has."""
        # Without a dtype transformers would take that of the configuration, which is a text once the model was saved.
        return super().dequantize(model, dtype or model.dtype)

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Make the model dense in place: each layer of U·V + S, summed in float32, becomes one of its usual kind."""
        activation = self.quantization_config.activation
        if activation is not None:
            raise UserError(
                f"the layers of this model have a {activation} between their factors, so no dense weight does the same "
                "work; use it as it is"
            )
        for name, layer in slr_modules(model).items():
            if layer.U.is_meta:
                raise UserError(
                    f"U and V of {name} are offloaded, and only weights in memory can be summed; open the "
                    "folder without a device_map"
                )
        usual = dense_outline(model)
        open_stacks(usual, slr_modules(model))
        known = dict(usual.named_modules())
        for name in slr_modules(model):
            if name not in known:
                raise UserError(
                    f"{name} is inside a layer that was put there later, as adapters are; call dequantize() on the "
                    "model as it is opened, and load the saved adapter on that"
                )
        for name in slr_modules(model):
            put_dense(model, name, known[name], dtype)
        close_stacks(model)
        return cast(model, dtype)


def ignore_guards(model: PreTrainedModel, blocks: Iterable[str]) -> None:
    """Let the loader ignore the empty tensors stored under the names of the blocks' dense weights."""
    guards = [*(f"{name}.weight" for name in blocks), *stacks(model)]
    ignored = {f"^{_pattern([re.split(r'(?=[.])', name) for name in guards])}"} if guards else set()
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), *ignored}


def _pattern(names: list[list[str]]) -> str:
    """Return a regular expression for names, each split at its dots.

    transformers searches it in the name of every tensor in the files; as it branches at the dots, a search does not try
    all names in turn, which would take quadratic time.
    """
    rests = defaultdict(list)
    for first, *rest in filter(None, names):
        rests[first].append(rest)
    ends = ["$"] if [] in names else []
    return f"(?:{'|'.join([*ends, *(re.escape(first) + _pattern(rest) for first, rest in rests.items())])})"


def stack_guards(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the empty tensors that are stored under the names of expert weights which `open_stacks` split."""
    return {name: torch.empty(0) for name in stacks(model)}


def factor(model: nn.Module, blocks: dict[str, Slr]) -> nn.Module:
    """Replace the named blocks of a dense model by layers of U·V + S, in place, where those are smaller.

    Smaller means in memory, or within `form_for_file` in a file. The weight of a block that is not smaller, or that is
    `always_dense`, stays dense and is set to U·V + S.

    Args:
        model: any model; its dtype is that of the result.
        blocks: module name → U·V + S of its weight, in the orientation in which the module holds it.
    """
    dense = always_dense(model)
    parameters = count_parameters(model) + sum(slr.parameters - prod(slr.shape) for slr in blocks.values())
    element = {name: X.element_size() for name, X in weights_of(model, blocks).items()}
    in_parts = [name for name, slr in blocks.items() if not (name in dense or takes_dense_form(slr, element[name]))]
    open_stacks(model, in_parts)
    for name, slr in blocks.items():
        X = place_of(model, name).weight
        # Also where the block stays dense: an elastic folder, which opens to the same bits, holds rounded parts.
        slr = slr.to(X.device, X.dtype)
        if name not in in_parts:
            X.data.copy_(slr.to(X.device, torch.promote_types(X.dtype, torch.float32)).dense())
        else:
            module = model.get_submodule(name)
            if isinstance(module, nn.Embedding):
                layer = SlrEmbedding.from_slr(slr)
            else:  # GPT-2's Conv1D keeps its weight as in×out
                layer = SlrLinear.from_slr(slr.transposed() if isinstance(module, Conv1D) else slr, module.bias)
            layer.requires_grad_(module.weight.requires_grad)
            if getattr(module, "bias", None) is not None:
                layer.bias.requires_grad_(module.bias.requires_grad)
            model.set_submodule(name, layer.train(module.training))
    mark_factored(model, parameters)
    return model


def stored_parameters(headers: Headers, buffers: Iterable[str]) -> int:
    """The number of parameters in a folder's files: all numbers except positions of S's entries, scales and buffers."""
    others = ("S_packed", "_scales", *(f".{name}" for name in buffers))
    return numbers({name: header for name, header in headers.items() if not f".{name}".endswith(others)})


def dense_outline(model: PreTrainedModel) -> PreTrainedModel:
    """Return a dense model without weights, whose layers may take the place of those of `model`."""
    config = copy.deepcopy(model.config)
    config.dtype = model.dtype  # a text once the model was saved, which some architectures pass on to torch
    with torch.device("meta"):
        return type(model)(config)


def factored_outline(model: PreTrainedModel, blocks: Mapping[str, Slr], activation: str | None) -> PreTrainedModel:
    """Return a model that shares its tensors with `model`, except that the blocks are layers of U, V and S.

    Args:
        model: the model; its modules named in `blocks` may be of any kind, and their biases are kept.
        blocks: module name → U, V and S.
        activation: the activation between U and V, if any.
    """
    shared = dense_outline(model)
    shared.generation_config = model.generation_config
    shared.load_state_dict(dict(model.state_dict()), strict=False, assign=True)
    shared.tie_weights()
    dtype = next(model.parameters()).dtype
    for name, slr in blocks.items():
        n, m = slr.shape
        bias = getattr(model.get_submodule(name), "bias", None)
        layer = BY_ACTIVATION[activation](m, n, slr.rank, slr.nnz)
        layer.fill(slr.to(slr.U.device, dtype))
        layer.bias = bias
        shared.set_submodule(name, layer)
    mark_factored(shared, count_parameters(shared))
    return shared


class OpenedDense:
    """What a model whose blocks are all dense, otherwise an ordinary one, still understands: `dequantize`."""

    def own_dequantize(
        self, usual: Callable[..., Any], model: PreTrainedModel, dtype: torch.dtype | None = None
    ) -> PreTrainedModel:
        """Return the model as it is, in `dtype` or in the dtype that it has."""
        return model if dtype is None else cast(model, dtype)


def mark_dense(model: PreTrainedModel) -> None:
    """Let `dequantize` work, and do nothing, on a model of transformers whose blocks are all dense."""
    setattr(model, OPENED_DENSE, OpenedDense())


def mark_factored(model: nn.Module, parameters: int, in_int8: bool = False) -> None:
    """Set the quantizer by which `save_pretrained` stores layers of U·V + S, and group layers that share an input.

    Args:
        model: a model with such layers; only one of transformers gets the quantizer.
        parameters: number of parameters of the whole model, counted as in `SlrConfig`.
        in_int8: whether to store U, V and the values of S as int8.
    """
    stored = slr_modules(model)
    join_siblings(stored)
    if stored and isinstance(model, PreTrainedModel):
        blocks = {name: [module.rank, module.nnz] for name, module in stored.items()}
        [activation] = {module.activation for module in stored.values()}
        entry = SlrConfig(blocks, parameters, "int8" if in_int8 else "float", activation)
        model.hf_quantizer = SlrQuantizer(entry, pre_quantized=not in_int8)
        model.hf_quantizer._spared = count_parameters(model) - parameters
        model.quantization_method = FIXED_SIZE
        model.hf_quantizer.postprocess_model(model)


def slr_modules(model: nn.Module) -> dict[str, SlrWeight]:
    """Name → layer of every block held as U·V + S."""
    return {name: module for name, module in model.named_modules() if isinstance(module, SlrWeight)}
