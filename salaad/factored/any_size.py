"""The elastic folder format: units in descending order of value per parameter; opening a size reads the first ones.

`AutoModelForCausalLM.from_pretrained(folder, budget="194M")` opens the model of that size. Besides the parameters that
are never compressed the files hold the units of one or more ranges of sizes (`salaad.factored.elastic_file`). The
budget determines the range, and the queue of the range determines how many rows of each of its tensors are read.
"""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from salaad.common.budgets import format_count, parse_budget, require_floor
from salaad.common.errors import UserError
from salaad.energy_allocation import UnitQueue
from salaad.factored.checked_quantizer import CheckedQuantizer, FolderEntry
from salaad.factored.elastic_file import ElasticFile, SizeRange, expected_line, expected_units, expected_vector
from salaad.factored.experts import close_stacks, open_stacks
from salaad.factored.fixed_size import ignore_guards, mark_dense, mark_factored, slr_modules, stack_guards
from salaad.factored.other_heads import names_inside, new_head, places_to_fill
from salaad.factored.registration import ASKED
from salaad.factored.replacement import always_dense, outline_of, put_dense
from salaad.factored.smaller_form import takes_dense_form
from salaad.hpa import Kept
from salaad.model.folder_formats import ANY_SIZE
from salaad.model.weight_headers import (
    Headers,
    check_block,
    check_entry,
    check_room,
    check_tensors,
    headers_for,
    is_count,
    numbers,
)

FORMAT_VERSION, WITH_RANGES = 1, 2
_DENSER = 1000  # largest ratio of the numbers in weights that are always dense in memory to those in the files
_PARTS = ("U", "V", "S_values", "S_packed")  # what a layer in parts may lack when it is opened


class ElasticConfig(FolderEntry):
    """The entry `quantization_config` in the config.json of an elastic folder.

    Args:
        blocks: name → [n, m, rank, nnz], with all units of the first range.
        order: the names in the order of the queue's counts, since transformers sorts the keys that it writes.
        fixed: number of parameters that are never compressed.
        dense: number of parameters of the dense model; a budget may be given as a fraction of them.
        smaller: the further ranges in descending order of their sizes, each with `below` (the range serves budgets
            below this number of parameters of the whole model), `blocks`, name → [rank, nnz], and `vectors`, the names
            of the norms and biases that were fitted with the range.
        format: version of the format; unless given, `WITH_RANGES` if there are further ranges, else `FORMAT_VERSION`.

    Raises:
        UserError: an argument is of another type, out of range, or contradicts the others.
    """

    def __init__(
        self,
        blocks: dict[str, list[int]] | None = None,
        order: Sequence[str] = (),
        fixed: int = 0,
        dense: int = 0,
        smaller: Sequence[Mapping[str, Any]] = (),
        format: int | None = None,
        **_: Any,
    ) -> None:
        self.quant_method = ANY_SIZE
        self.format = (WITH_RANGES if smaller else FORMAT_VERSION) if format is None else format
        blocks = check_entry(blocks or {}, 4)
        if not isinstance(order, list | tuple) or sorted(map(str, order)) != sorted(blocks):
            raise UserError("config.json does not list the order of its blocks; give a whole copy of the folder")
        if not is_count(fixed) or not is_count(dense):
            raise UserError("config.json does not count its parameters; give a whole copy of the folder")
        self.blocks = {name: blocks[name] for name in order}
        self.order = list(order)
        self.fixed, self.dense = fixed, dense
        if not isinstance(smaller, list | tuple):
            raise UserError("config.json does not list its ranges of sizes; give a whole copy of the folder")
        self.smaller = [_checked_range(one, self.blocks) for one in smaller]
        belows = [one["below"] for one in self.smaller]
        if belows != sorted(set(belows), reverse=True):
            raise UserError("config.json does not list its ranges by size; give a whole copy of the folder")

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as config.json holds it, without `smaller` if there are no further ranges."""
        entry = super().to_dict()
        return entry if self.smaller else {key: value for key, value in entry.items() if key != "smaller"}

    @property
    def ranges(self) -> list[dict[str, list[int]]]:
        """Name → [n, m, rank, nnz] for each of the ranges, the first one first."""
        further = (
            {name: [*self.blocks[name][:2], *sizes] for name, sizes in one["blocks"].items()} for one in self.smaller
        )
        return [self.blocks, *further]

    def range_of(self, budget: int | None) -> int:
        """The index of the range that serves a budget; 0 without a budget."""
        return 0 if budget is None else sum(budget < one["below"] for one in self.smaller)

    def queue(self, counts: Tensor, index: int) -> UnitQueue:
        """Return the queue of a range from its counts in a file (levels × blocks × 2).

        Raises:
            UserError: the counts do not add up to the units of the blocks.
        """
        counts = counts.long()
        blocks = self.ranges[index]
        units = torch.tensor([sizes[2:] for sizes in blocks.values()], dtype=torch.int64).view(-1, 2)
        sound = counts.dim() == 3 and counts.shape[1:] == units.shape
        # The bounds are checked first, since a sum of counts out of bounds may overflow to any number.
        if not sound or ((counts < 0) | (counts > units)).any() or (counts.sum(0) != units).any():
            raise UserError("elastic.line does not count the units in config.json; give a whole copy of the folder")
        return UnitQueue({name: (n, m) for name, (n, m, *_) in blocks.items()}, counts)

    def keep(self, file: ElasticFile, budget: int | None) -> tuple[int, Kept]:
        """Return the index of the range that serves a budget of the whole model, and name → (rank kept, entries kept).

        Without a budget that is the first range, of which everything is kept.

        Raises:
            UserError: the budget is below the parameters that are never compressed, or above both the parameters that
                the folder holds and those of the dense model.
        """
        index = self.range_of(budget)
        queue = self.queue(file.unit_counts(index), index)
        if budget is None:
            return index, queue.units()
        require_floor(self.fixed, budget)
        largest = self.fixed + queue.parameters
        # All sizes up to that of the dense model are there, also where the units have fewer parameters.
        if budget > self.dense and not index:
            raise UserError(
                f"budget {format_count(budget)} is above the {format_count(largest, up=False)} that the folder holds; "
                f"give {format_count(largest, up=False)} or less"
            )
        return index, queue.keep(budget - self.fixed)


def _checked_range(one: Any, blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Return an entry of `smaller` with its blocks in the order of `blocks`; raise a UserError if it is malformed."""
    if isinstance(one, Mapping) and is_count(one.get("below")):
        sizes, vectors = check_entry(one.get("blocks"), 2), one.get("vectors")
        named = isinstance(vectors, list | tuple) and all(isinstance(name, str) for name in vectors)
        if named and sizes.keys() == blocks.keys():
            return {"below": one["below"], "blocks": {name: sizes[name] for name in blocks}, "vectors": list(vectors)}
    raise UserError("config.json describes a range of sizes that is none; give a whole copy of the folder")


class ElasticQuantizer(CheckedQuantizer):
    """The hooks that transformers calls when it opens or saves an elastic folder."""

    stored: Mapping[str, Tensor]  # tensors of the ranges for the folder to be written

    FORMAT_VERSIONS = (FORMAT_VERSION, WITH_RANGES)
    computed_on_opening = "an elastic folder"

    def _process_model_before_weight_loading(
        self, model: PreTrainedModel, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> PreTrainedModel:
        entry = self.quantization_config
        checkpoint_files = checkpoint_files or ()
        inside = places_to_fill(model, entry.blocks)
        headers = headers_for(model, checkpoint_files)
        beside = new_head(model, headers) + self._check_units(model, inside, headers)
        open_stacks(model, inside)
        asked = model.config.__dict__.pop(ASKED, None)
        budget = None if asked is None else parse_budget(str(asked), entry.dense)
        with torch.device("cpu"), ElasticFile.opened(checkpoint_files) as file:  # transformers' default here is meta
            index, kept = entry.keep(file, budget)
            self._blocks = {
                own: file.units(index, name, entry.blocks[name][:2], *kept[name]) for own, name in inside.items()
            }
            self._vectors = {own: file.vector(index, name) for own, name in self._fitted(model, index).items()}
        self._modules = {name: model.get_submodule(name) for name in self._blocks}
        always = always_dense(model)
        for name, slr in self._blocks.items():
            if name not in always:
                # With nnz = 0, since some architectures read a weight before it is filled.
                model.set_submodule(name, outline_of(self._modules[name], slr.rank, 0))
        check_room(model, headers, beside=beside)
        ignore_guards(model, entry.blocks)
        model._keys_to_ignore_on_load_unexpected.add(r"^elastic\.")
        # The tied weights of blocks, missing or not, have their turn in `tie_weights` before they are dropped.
        missing = {
            rf"^{re.escape(key)}$"
            for pair in model.all_tied_weights_keys.items()
            for key in pair
            if {part.rpartition(".")[0] for part in pair} & set(self._blocks)
        }
        model._keys_to_ignore_on_load_missing = {*(model._keys_to_ignore_on_load_missing or ()), *missing}
        filled = frozenset(f"{name}.{part}" for name in self._blocks for part in ("weight", *_PARTS))
        model.tie_weights = partial(_tie_to_filled, model, filled)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        del model.tie_weights  # restores the method of the class
        for name, slr in self._blocks.items():
            outline, module = model.get_submodule(name), self._modules[name]
            if outline is module:  # a block that is always dense
                module.weight.data.copy_(slr.to("cpu", torch.promote_types(slr.values.dtype, torch.float32)).dense())
                continue
            slr = slr.to(outline.U.device, outline.U.dtype)
            outline.fill(slr.transposed() if isinstance(module, Conv1D) else slr)
            if takes_dense_form(outline, outline.U.element_size()):
                put_dense(model, name, module)
        close_stacks(model)
        parameters = self.quantization_config.fixed + sum(slr.least_parameters for slr in self._blocks.values())
        for name, vector in self._vectors.items():
            model.get_parameter(name).data.copy_(vector)
        del self._blocks, self._modules, self._vectors
        self.remove_quantization_config(model)
        # In memory the model is one of a fixed size, or an ordinary one.
        mark_factored(model, parameters) if slr_modules(model) else mark_dense(model)
        return model

    def _check_units(self, model: PreTrainedModel, inside: Mapping[str, str], headers: Headers) -> int:
        """Check the tensors in the file against config.json and the model; return how many parameters stay dense."""
        entry, always, dense = self.quantization_config, always_dense(model), 0
        stored = numbers(headers)
        for index, blocks in enumerate(entry.ranges):
            check_tensors(expected_line(index, len(blocks), headers), headers)
            for own, name in inside.items():
                n, m, rank, nnz = blocks[name]
                if check_block(model, own, rank, nnz, stored) != (n, m):
                    raise UserError(f"config.json gives {name} two shapes, one of them {n}×{m}; give a whole folder")
                check_tensors(expected_units(index, name, blocks[name]), headers)
                dense += n * m if own in always and not index else 0
            for own, name in self._fitted(model, index).items():
                check_tensors(expected_vector(index, name, model.get_parameter(own)), headers)
        # A weight that is always dense takes n·m numbers in memory, however few units the file holds of it.
        most = _DENSER * stored
        if dense > most:
            raise UserError(
                f"blocks that are dense in memory take {dense:,} numbers, a folder of this size at most {most:,}; give "
                "another"
            )
        return dense

    def _fitted(self, model: PreTrainedModel, index: int) -> dict[str, str]:
        """Name in the model → name in the file of the vectors that were fitted with a range.

        Raises:
            UserError: the model has no such vector.
        """
        names = self.quantization_config.smaller[index - 1]["vectors"] if index else ()
        inside, known = names_inside(model, names), dict(model.named_parameters())
        for own, name in inside.items():
            if own not in known or known[own].dim() != 1:
                raise UserError(f"config.json names the vector {name}, and the model has none; give a whole folder")
        return inside

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict[str, Tensor], dict]:
        """Return the tensors to save: the parameters that are never compressed, and the units of all ranges."""
        model._weight_conversions = []  # the names of units are those of the model's modules, and would be changed too
        always = always_dense(model)
        blocks = {model.get_submodule(name).weight.data_ptr() for name in self.quantization_config.blocks}
        state = {key: tensor for key, tensor in model.state_dict().items() if tensor.data_ptr() not in blocks}
        # Without our quantizer transformers would fill missing weights with random numbers; empty ones it refuses.
        guards = {f"{name}.weight": torch.empty(0) for name in self.quantization_config.blocks if name not in always}
        return {**state, **guards, **stack_guards(model), **self.stored}, {}


def _tie_to_filled(
    model: PreTrainedModel, filled: frozenset[str], missing_keys: set[str] | None = None, **kwargs: Any
) -> None:
    """Tie weights as the model's class does, and drop `filled` from the missing ones: other tensors fill them later."""
    if missing_keys is not None:
        missing_keys -= filled  # in place, since transformers reports what the set holds afterwards
    type(model).tie_weights(model, missing_keys, **kwargs)


def save_elastic(model: PreTrainedModel, ranges: Sequence[SizeRange], fixed: int, folder: Path) -> None:
    """Write an elastic folder.

    Args:
        model: the dense model, whose dtype the files get; it cannot be used for anything else afterwards.
        ranges: all units of every range, the largest sizes first.
        fixed: parameters that are never compressed.
        folder: the folder to write.
    """
    first, *further = ranges
    open_stacks(model, first.parts)
    dense = sum(parameter.numel() for parameter in model.parameters())
    sizes = {name: [*slr.shape, slr.rank, slr.nnz] for name, slr in first.parts.items()}
    smaller = [
        {
            "below": one.below,
            "blocks": {name: [slr.rank, slr.nnz] for name, slr in one.parts.items()},
            "vectors": list(one.vectors),
        }
        for one in further
    ]
    entry = ElasticConfig(sizes, list(sizes), fixed, dense, smaller)
    quantizer = ElasticQuantizer(entry)
    quantizer.stored = {
        name: tensor for index, one in enumerate(ranges) for name, tensor in one.stored(index, model.dtype).items()
    }
    model.hf_quantizer, model.config.quantization_config = quantizer, entry
    model.save_pretrained(folder)
