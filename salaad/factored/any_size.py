"""One folder, any size: units in one order of worth, of which every size reads the beginning.

`AutoModelForCausalLM.from_pretrained(folder, budget="194M")` opens the size it names. In the file, beside what is never
compressed, a block NAME has

    elastic.NAME.U (r × n), .V (r × m)               its singular terms, a row each, the most worth first
    elastic.NAME.S_values (nnz), .S_places (nnz × b)  the entries of S in order of worth, and their row-major places in
                                                      b bytes each, the lowest first

and `elastic.line` (levels × blocks × 2) counts the units of every block at each level of worth. A budget is a place on
that line, and the place says how many rows of each tensor to read. Places in order of worth cannot be packed as closely
as rising ones, so the folder is larger than one of a fixed size that holds the same.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from salaad.common.budgets import format_count, parse_budget
from salaad.common.errors import UserError
from salaad.energy_allocation import Line
from salaad.factored.fixed_size import (
    CheckedQuantizer,
    ignore_guards,
    is_smaller_dense,
    mark_factored,
    names_inside,
    outline_of,
    tied_modules,
)
from salaad.factored.slr import Slr, place_dtype
from salaad.hpa import Kept, to_remove
from salaad.model.weight_headers import (
    BYTES,
    FLOATS,
    INTEGERS,
    Headers,
    check_block,
    check_entry,
    check_room,
    check_tensors,
    headers_for,
    is_count,
    numbers,
)

METHOD = "salaad-elastic"
FORMAT = 1
_ASKED = "_asked_budget"
_DENSER = 1000  # times more numbers than a file holds may be in the tied weights, which stay dense


@register_quantization_config(METHOD)
class ElasticConfig(QuantizationConfigMixin):
    """The entry in config.json.

    Args:
        blocks: name → [n, m, rank, nnz] of all its units.
        order: the names as the line counts them; transformers sorts the keys of what it writes.
        fixed: parameters of what is never compressed.
        dense: parameters of the dense model, of which a budget may be a fraction.
        format: of the file.
    """

    def __init__(
        self,
        blocks: dict[str, list[int]] | None = None,
        order: Sequence[str] = (),
        fixed: int = 0,
        dense: int = 0,
        format: int = FORMAT,
        **_: Any,
    ) -> None:
        self.quant_method = METHOD
        self.format = format
        blocks = check_entry(blocks or {}, 4)
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(blocks):
            raise UserError("config.json does not list the order of its blocks; give a whole copy of the folder")
        if not is_count(fixed) or not is_count(dense):
            raise UserError("config.json does not count its parameters; give a whole copy of the folder")
        self.blocks = {name: blocks[name] for name in order}
        self.order = list(order)
        self.fixed, self.dense = fixed, dense

    def line(self, counts: Tensor) -> Line:
        """The line whose counts (levels × blocks × 2) the file holds.

        Raises:
            UserError: they do not add up to the units of the blocks.
        """
        counts = counts.long()
        units = torch.tensor([sizes[2:] for sizes in self.blocks.values()], dtype=torch.int64).view(-1, 2)
        sound = counts.dim() == 3 and counts.shape[1:] == units.shape
        # Each alone first: a sum of counts out of range comes round to anything.
        if not sound or ((counts < 0) | (counts > units)).any() or (counts.sum(0) != units).any():
            raise UserError("elastic.line does not count the units in config.json; give a whole copy of the folder")
        return Line({name: n + m for name, (n, m, *_) in self.blocks.items()}, counts)

    def keep(self, line: Line, budget: int | None) -> Kept:
        """Name → (rank, entries) that a budget of the whole model keeps; all units without one.

        Raises:
            UserError: the budget is below what is never compressed, or above what the folder holds.
        """
        largest = self.fixed + line.parameters
        if budget is None:
            return line.keep(line.parameters)
        to_remove({}, fixed=self.fixed, budget=budget)  # refuses what is below the floor
        if budget > largest:
            raise UserError(
                f"budget {format_count(budget)} is above the {format_count(largest, up=False)} that the folder holds; "
                f"give {format_count(largest, up=False)} or less"
            )
        return line.keep(budget - self.fixed)


@register_quantizer(METHOD)
class ElasticQuantizer(CheckedQuantizer):
    """What transformers calls when it opens or saves such a folder."""

    content: Mapping[str, Tensor]  # what a folder to be written holds of the blocks

    FORMAT = FORMAT

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        entry = self.quantization_config
        checkpoint_files = checkpoint_files or ()
        inside = names_inside(model, {name: name for name in entry.blocks})
        headers = headers_for(model, checkpoint_files)
        dense = self._check(model, inside, headers)
        asked = model.config.__dict__.pop(_ASKED, None)
        budget = None if asked is None else parse_budget(str(asked), entry.dense)
        with torch.device("cpu"), ElasticFile.opened(checkpoint_files) as file:  # transformers builds on no device
            kept = entry.keep(entry.line(file.line()), budget)
            self._parts = {own: file.units(name, entry.blocks[name][:2], *kept[name]) for own, name in inside.items()}
        self._modules = {name: model.get_submodule(name) for name in self._parts}
        tied = tied_modules(model)
        for name, slr in self._parts.items():
            if name not in tied:
                # Without entries: some architectures look at a weight before it is filled.
                model.set_submodule(name, outline_of(self._modules[name], slr.rank, 0))
        check_room(model, headers, beside=dense)
        ignore_guards(model, entry.blocks)
        model._keys_to_ignore_on_load_unexpected.add(r"^elastic\.")
        missing = {rf"^{re.escape(name)}\.(weight|U|V|S_values|S_packed)$" for name in self._parts}
        missing |= {
            rf"^{re.escape(key)}$"
            for pair in model.all_tied_weights_keys.items()
            for key in pair
            if {part.rpartition(".")[0] for part in pair} & set(self._parts)
        }
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *missing}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, slr in self._parts.items():
            outline, module = model.get_submodule(name), self._modules[name]
            if outline is module:  # tied, so dense
                module.weight.data.copy_(slr.dense())
            elif is_smaller_dense(slr, slr.values.element_size()):
                module.weight = nn.Parameter(slr.dense().to(outline.U), requires_grad=False)
                if getattr(module, "bias", None) is not None:
                    module.bias = outline.bias
                model.set_submodule(name, module)
            else:
                slr = slr.to(outline.U.device, outline.U.dtype)
                outline.fill(slr.transposed() if isinstance(module, Conv1D) else slr)
        del self._parts, self._modules
        self.remove_quantization_config(model)
        mark_factored(model)  # what is in memory has one size
        return model

    def _check(self, model: PreTrainedModel, inside: Mapping[str, str], headers: Headers) -> int:
        """Compare the units in the file with config.json and the model; returns the numbers of its tied blocks."""
        blocks = self.quantization_config.blocks
        levels = headers["elastic.line"].shape[:1] if "elastic.line" in headers else ()
        check_tensors({"elastic.line": ((*levels, len(blocks), 2), INTEGERS)}, headers)
        tied, dense = tied_modules(model), 0
        for own, name in inside.items():
            n, m, rank, nnz = blocks[name]
            if check_block(model, own, rank, nnz, headers) != (n, m):
                raise UserError(f"config.json gives {name} two shapes, one of them {n}×{m}; give a whole folder")
            units = {"U": (rank, n), "V": (rank, m), "S_values": (nnz,), "S_places": (nnz, _width((n, m)))}
            types = {key: BYTES if key == "S_places" else FLOATS for key in units}
            check_tensors({f"elastic.{name}.{key}": (shape, types[key]) for key, shape in units.items()}, headers)
            dense += n * m if own in tied else 0
        # A tied weight is dense in memory, of whatever rank it is in the file.
        most = _DENSER * numbers(headers)
        if dense > most:
            raise UserError(f"tied blocks take {dense:,} numbers, a folder of this size at most {most:,}; give another")
        return dense

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict]:
        """The tensors of what is never compressed, and the units."""
        tied = tied_modules(model)
        blocks = {model.get_submodule(name).weight.data_ptr() for name in self.quantization_config.blocks}
        state = {key: tensor for key, tensor in model.state_dict().items() if tensor.data_ptr() not in blocks}
        # Without our quantizer transformers would fill the weights it misses with noise; at one of these it stops.
        guards = {f"{name}.weight": torch.empty(0) for name in self.quantization_config.blocks if name not in tied}
        return {**state, **guards, **self.content}, {}

    def is_serializable(self) -> bool:
        """Yes: it is how these folders are written."""
        return True

    @property
    def is_trainable(self) -> bool:
        """No: U, V and S are for inference."""
        return False


class ElasticFile:
    """The units in a folder's safetensors files, read as far as they are asked for."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    @classmethod
    @contextmanager
    def opened(cls, files: Sequence[str | Path]) -> Iterator["ElasticFile"]:
        """Open the files that hold them; nothing but their headers is read yet."""
        slices = {}
        with ExitStack() as stack:
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices |= {key: file.get_slice(key) for key in file.keys() if key.startswith("elastic.")}  # noqa: SIM118
            yield cls(slices)

    def line(self) -> Tensor:
        """Counts of the line (levels × blocks × 2)."""
        line = self._tensors.get("elastic.line")
        if line is None or len(line.get_shape()) != 3:
            raise UserError("the files hold no elastic.line of levels × blocks × 2; give a whole copy of the folder")
        return line[:]

    def units(self, name: str, shape: Sequence[int], rank: int, nnz: int) -> Slr:
        """The first units of a block, in the dtype of the file."""
        U, V = (self._tensors[f"elastic.{name}.{key}"][:rank] for key in "UV")
        values, places = (self._tensors[f"elastic.{name}.{key}"][:nnz] for key in ("S_values", "S_places"))
        slr = Slr(tuple(shape), U.mT.contiguous(), V, _from_bytes(places, shape), values)
        if not slr.is_sound():
            raise UserError(f"elastic.{name}.S_places names places twice or outside; give a whole copy of the folder")
        return slr


def save_elastic(model: PreTrainedModel, parts: Mapping[str, Slr], line: Line, fixed: int, folder: Path) -> None:
    """Write the folder.

    Args:
        model: the dense model, whose dtype is that of the file; it is of no other use afterwards.
        parts: every block's units in order of worth.
        line: how they stand in one line.
        fixed: parameters of what is never compressed.
        folder: where to.
    """
    dense = sum(parameter.numel() for parameter in model.parameters())
    blocks = {name: [*slr.shape, slr.rank, slr.nnz] for name, slr in parts.items()}
    entry = ElasticConfig(blocks, list(blocks), fixed, dense)
    content = {"elastic.line": line.counts.int()}
    for name, slr in parts.items():
        slr = slr.to("cpu", model.dtype)
        units = {"U": slr.U.mT, "V": slr.V, "S_values": slr.values, "S_places": _to_bytes(slr.positions, slr.shape)}
        content |= {f"elastic.{name}.{key}": tensor.contiguous() for key, tensor in units.items()}
    quantizer = ElasticQuantizer(entry)
    quantizer.content = content
    model.hf_quantizer, model.config.quantization_config = quantizer, entry
    model.save_pretrained(folder)


def _to_bytes(places: Tensor, shape: tuple[int, int]) -> Tensor:
    """Places (nnz) as so few bytes each as hold n·m of them (nnz × b, uint8), the lowest first."""
    return ((places.long()[:, None] >> (8 * torch.arange(_width(shape)))) & 255).to(torch.uint8)


def _width(shape: Sequence[int]) -> int:
    """Bytes of a place."""
    n, m = shape
    return -(-max(1, (n * m - 1).bit_length()) // 8)


def _from_bytes(places: Tensor, shape: Sequence[int]) -> Tensor:
    whole = (places.long() << (8 * torch.arange(places.shape[1]))).sum(1)
    # One outside stays outside, also where the narrower type would not hold it.
    return whole.clamp(max=shape[0] * shape[1]).to(place_dtype(*shape))


def _ask_for(config: PreTrainedConfig, budget: str | float | None) -> None:
    if budget is None:
        return
    entry = getattr(config, "quantization_config", None)
    if not isinstance(entry, dict) or entry.get("quant_method") != METHOD:
        raise UserError(
            f"budget {budget} is asked of a folder that holds one size; leave it out, or give a folder that was "
            "written with --elastic"
        )
    setattr(config, _ASKED, budget)


# `from_pretrained` hands an argument it does not know to the configuration if that has an attribute of this name, and
# otherwise to the model's class, which fails on it: so any configuration has this one, and refuses it if it is no use.
PreTrainedConfig.budget = property(lambda config: getattr(config, _ASKED, None), _ask_for)
