"""The elastic folder format: units in descending order of value per parameter, of which a size reads the first ones.

`AutoModelForCausalLM.from_pretrained(folder, budget="194M")` opens the model of that size. Beside the parameters that
are never compressed, the file holds for each block NAME

    elastic.NAME.U (r × n), .V (r × m)               its singular terms, one per row, the highest value first
    elastic.NAME.S_values (nnz), .S_places (nnz × b)  the entries of S, the highest value first, and their row-major
                                                      positions in b bytes each, the lowest byte first

and `elastic.line` (levels × blocks × 2), the counts of the queue of units (`salaad.energy_allocation.UnitQueue`). From
the queue and a budget follows how many rows of each tensor are read. Positions in this order take more bytes than
increasing ones, so the folder is larger than one of a fixed size with the same units.
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
from transformers.utils.quantization_config import QuantizationConfigMixin

from salaad.common.budgets import format_count, parse_budget, to_remove
from salaad.common.errors import UserError
from salaad.energy_allocation import UnitQueue
from salaad.factored.experts import open_stacks
from salaad.factored.fixed_size import (
    CheckedQuantizer,
    ignore_guards,
    is_smaller_dense,
    mark_factored,
    names_inside,
    outline_of,
    stack_guards,
)
from salaad.factored.slr import Slr, position_dtype
from salaad.hpa import Kept
from salaad.model.folder_formats import ANY_SIZE, is_any_size
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
from salaad.model.weights import tied_modules

FORMAT_VERSION = 1
_ASKED = "_asked_budget"
_DENSER = 1000  # largest ratio of the numbers in tied weights, which stay dense in memory, to those in the files


class ElasticConfig(QuantizationConfigMixin):
    """The entry `quantization_config` in config.json.

    Args:
        blocks: name → [n, m, rank, nnz], all units counted.
        order: the names in the order of the queue's counts, since transformers sorts the keys that it writes.
        fixed: parameters that are never compressed.
        dense: parameters of the dense model, of which a budget may be a fraction.
        format: version of the format.

    Raises:
        UserError: an argument is of another type, out of range, or contradicts the others.
    """

    def __init__(
        self,
        blocks: dict[str, list[int]] | None = None,
        order: Sequence[str] = (),
        fixed: int = 0,
        dense: int = 0,
        format: int = FORMAT_VERSION,
        **_: Any,
    ) -> None:
        self.quant_method = ANY_SIZE
        self.format = format
        blocks = check_entry(blocks or {}, 4)
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(blocks):
            raise UserError("config.json does not list the order of its blocks; give a whole copy of the folder")
        if not is_count(fixed) or not is_count(dense):
            raise UserError("config.json does not count its parameters; give a whole copy of the folder")
        self.blocks = {name: blocks[name] for name in order}
        self.order = list(order)
        self.fixed, self.dense = fixed, dense

    def queue(self, counts: Tensor) -> UnitQueue:
        """The queue with these counts (levels × blocks × 2, of a file).

        Raises:
            UserError: they do not add up to the units of the blocks.
        """
        counts = counts.long()
        units = torch.tensor([sizes[2:] for sizes in self.blocks.values()], dtype=torch.int64).view(-1, 2)
        sound = counts.dim() == 3 and counts.shape[1:] == units.shape
        # The range first, since a sum of counts out of range may overflow to any number.
        if not sound or ((counts < 0) | (counts > units)).any() or (counts.sum(0) != units).any():
            raise UserError("elastic.line does not count the units in config.json; give a whole copy of the folder")
        return UnitQueue({name: n + m for name, (n, m, *_) in self.blocks.items()}, counts)

    def keep(self, queue: UnitQueue, budget: int | None) -> Kept:
        """Name → (rank kept, entries kept) for a budget of the whole model; all units for None.

        Raises:
            UserError: the budget is below what is never compressed, or above what the folder holds.
        """
        largest = self.fixed + queue.parameters
        if budget is None:
            return queue.keep(queue.parameters)
        to_remove({}, fixed=self.fixed, budget=budget)  # raises where the budget is below the floor
        if budget > largest:
            raise UserError(
                f"budget {format_count(budget)} is above the {format_count(largest, up=False)} that the folder holds; "
                f"give {format_count(largest, up=False)} or less"
            )
        return queue.keep(budget - self.fixed)


class ElasticQuantizer(CheckedQuantizer):
    """The hooks that transformers calls when it opens or saves an elastic folder."""

    stored: Mapping[str, Tensor]  # tensors of the blocks for the folder to be written

    FORMAT_VERSIONS = (FORMAT_VERSION,)

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        entry = self.quantization_config
        checkpoint_files = checkpoint_files or ()
        inside = names_inside(model, {name: name for name in entry.blocks})
        headers = headers_for(model, checkpoint_files)
        dense = self._check_units(model, inside, headers)
        open_stacks(model, inside)
        asked = model.config.__dict__.pop(_ASKED, None)
        budget = None if asked is None else parse_budget(str(asked), entry.dense)
        with torch.device("cpu"), ElasticFile.opened(checkpoint_files) as file:  # within transformers' meta device
            kept = entry.keep(entry.queue(file.unit_counts()), budget)
            self._blocks = {own: file.units(name, entry.blocks[name][:2], *kept[name]) for own, name in inside.items()}
        self._modules = {name: model.get_submodule(name) for name in self._blocks}
        tied = tied_modules(model)
        for name, slr in self._blocks.items():
            if name not in tied:
                # With nnz = 0, since some architectures read a weight before it is filled.
                model.set_submodule(name, outline_of(self._modules[name], slr.rank, 0))
        check_room(model, headers, beside=dense)
        ignore_guards(model, entry.blocks)
        model._keys_to_ignore_on_load_unexpected.add(r"^elastic\.")
        missing = {rf"^{re.escape(name)}\.(weight|U|V|S_values|S_packed)$" for name in self._blocks}
        missing |= {
            rf"^{re.escape(key)}$"
            for pair in model.all_tied_weights_keys.items()
            for key in pair
            if {part.rpartition(".")[0] for part in pair} & set(self._blocks)
        }
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *missing}
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        for name, slr in self._blocks.items():
            outline, module = model.get_submodule(name), self._modules[name]
            if outline is module:  # a tied weight stays dense
                module.weight.data.copy_(slr.dense())
            elif is_smaller_dense(slr, slr.values.element_size()):
                module.weight = nn.Parameter(slr.dense().to(outline.U))
                if getattr(module, "bias", None) is not None:
                    module.bias = outline.bias
                model.set_submodule(name, module)
            else:
                slr = slr.to(outline.U.device, outline.U.dtype)
                outline.fill(slr.transposed() if isinstance(module, Conv1D) else slr)
        parameters = self.quantization_config.fixed + sum(slr.parameters for slr in self._blocks.values())
        del self._blocks, self._modules
        self.remove_quantization_config(model)
        mark_factored(model, parameters)  # in memory it is a model of a fixed size
        return model

    def _check_units(self, model: PreTrainedModel, inside: Mapping[str, str], headers: Headers) -> int:
        """Compare the tensors in the file with config.json and the model; returns the parameters of tied blocks."""
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
        # A tied weight becomes dense in memory, however few units the file holds of it.
        most = _DENSER * numbers(headers)
        if dense > most:
            raise UserError(f"tied blocks take {dense:,} numbers, a folder of this size at most {most:,}; give another")
        return dense

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict]:
        """The parameters that are never compressed, and the units."""
        tied = tied_modules(model)
        blocks = {model.get_submodule(name).weight.data_ptr() for name in self.quantization_config.blocks}
        state = {key: tensor for key, tensor in model.state_dict().items() if tensor.data_ptr() not in blocks}
        # Without our quantizer transformers fills missing weights with random numbers; an empty one it refuses.
        guards = {f"{name}.weight": torch.empty(0) for name in self.quantization_config.blocks if name not in tied}
        return {**state, **guards, **stack_guards(model), **self.stored}, {}

    def is_serializable(self) -> bool:
        """True: `save_pretrained` works."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: what is opened is a model of one size."""
        return True


class ElasticFile:
    """The units in a folder's safetensors files, of which only the slices asked for are read."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    @classmethod
    @contextmanager
    def opened(cls, files: Sequence[str | Path]) -> Iterator["ElasticFile"]:
        """Open the folder's files, reading only their headers."""
        slices = {}
        with ExitStack() as stack:
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices |= {key: file.get_slice(key) for key in file.keys() if key.startswith("elastic.")}  # noqa: SIM118
            yield cls(slices)

    def unit_counts(self) -> Tensor:
        """Counts of the queue of units (levels × blocks × 2)."""
        counts = self._tensors.get("elastic.line")
        if counts is None or len(counts.get_shape()) != 3:
            raise UserError("the files hold no elastic.line of levels × blocks × 2; give a whole copy of the folder")
        return counts[:]

    def units(self, name: str, shape: Sequence[int], rank: int, nnz: int) -> Slr:
        """The first `rank` singular terms and `nnz` entries of a block of `shape`, in the dtype of the file.

        Raises:
            UserError: a position is outside the matrix or listed twice.
        """
        U, V = (self._tensors[f"elastic.{name}.{key}"][:rank] for key in "UV")
        values, places = (self._tensors[f"elastic.{name}.{key}"][:nnz] for key in ("S_values", "S_places"))
        slr = Slr(tuple(shape), U.mT.contiguous(), V, _from_bytes(places, shape), values)
        if not slr.is_sound():
            raise UserError(f"elastic.{name}.S_places names places twice or outside; give a whole copy of the folder")
        return slr


def save_elastic(model: PreTrainedModel, blocks: Mapping[str, Slr], queue: UnitQueue, fixed: int, folder: Path) -> None:
    """Write an elastic folder.

    Args:
        model: the dense model, whose dtype the file gets; it cannot be used otherwise afterwards.
        blocks: name → all units of the block in descending order of value per parameter.
        queue: the queue of all units.
        fixed: parameters that are never compressed.
        folder: the folder to write.
    """
    open_stacks(model, blocks)
    dense = sum(parameter.numel() for parameter in model.parameters())
    sizes = {name: [*slr.shape, slr.rank, slr.nnz] for name, slr in blocks.items()}
    entry = ElasticConfig(sizes, list(sizes), fixed, dense)
    stored = {"elastic.line": queue.counts.int()}
    for name, slr in blocks.items():
        slr = slr.to("cpu", model.dtype)
        units = {"U": slr.U.mT, "V": slr.V, "S_values": slr.values, "S_places": _to_bytes(slr.positions, slr.shape)}
        stored |= {f"elastic.{name}.{key}": tensor.contiguous() for key, tensor in units.items()}
    quantizer = ElasticQuantizer(entry)
    quantizer.stored = stored
    model.hf_quantizer, model.config.quantization_config = quantizer, entry
    model.save_pretrained(folder)


def _to_bytes(positions: Tensor, shape: tuple[int, int]) -> Tensor:
    """Positions (nnz) in as few bytes each as n·m needs (nnz × b, uint8), the lowest byte first."""
    return ((positions.long()[:, None] >> (8 * torch.arange(_width(shape)))) & 255).to(torch.uint8)


def _width(shape: Sequence[int]) -> int:
    """Bytes of a position."""
    n, m = shape
    return -(-max(1, (n * m - 1).bit_length()) // 8)


def _from_bytes(positions: Tensor, shape: Sequence[int]) -> Tensor:
    whole = (positions.long() << (8 * torch.arange(positions.shape[1]))).sum(1)
    # A position outside the matrix has to stay outside when the narrower dtype cannot hold it.
    return whole.clamp(max=shape[0] * shape[1]).to(position_dtype(*shape))


def _ask_for(config: PreTrainedConfig, budget: str | float | None) -> None:
    if budget is None:
        return
    entry = getattr(config, "quantization_config", None)
    if not is_any_size(entry):
        raise UserError(
            f"budget {budget} is asked of a folder that holds one size; leave it out, or give a folder that was "
            "written with --elastic"
        )
    setattr(config, _ASKED, budget)


# `from_pretrained` passes an argument that it does not know to the configuration if that has an attribute of this name,
# and otherwise to the model's class, which fails on it. So every configuration gets the attribute `budget`, and its
# setter refuses a folder of another format.
PreTrainedConfig.budget = property(lambda config: getattr(config, _ASKED, None), _ask_for)
