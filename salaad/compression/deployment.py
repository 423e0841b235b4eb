"""What a model on disk can be cut to: one protocol, which `from_checkpoint`, `from_elastic` and `from_nested` keep.

A checkpoint (or any dense model, split after the fact) is cut anew for every size; an elastic folder has its units in
one order already, and a size is how many of the first of them are read; a MatFormer has narrower models inside.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.compression.calibration import CalibrationText
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.config.run import DataConfig
from salaad.factored.elastic_file import SizeRange
from salaad.runs.model_on_disk import ModelOnDisk


class OpenedVariant(NamedTuple):
    """A variant in a model: the model, its parameters by the paper's count, and κ of what was removed."""

    model: PreTrainedModel
    parameters: int
    kappa: float | None


class SizedModel(NamedTuple):
    """A model of one size as it is to be stored.

    Args:
        model: with its blocks as U·V + S wherever that is smaller in a file, or all dense.
        parameters: by the paper's count.
        blocks: how many were cut.
        kappa: κ of the cut.
        whole: the budget was at or above L + S, so nothing was cut.
        note: what else there is to say, in place of how many blocks are in parts.
    """

    model: PreTrainedModel
    parameters: int
    blocks: int
    kappa: float | None
    whole: bool
    note: str | None = None


class FittedOnText(NamedTuple):
    """How what is cut is to be fitted on text.

    Args:
        match: sequences that layers are matched on; 0 leaves matching out.
        tokens: of distillation; 0 leaves it out.
        text_share: of what is learned in it that the text says.
    """

    match: int
    tokens: int
    text_share: float


class TuningCost(NamedTuple):
    """What fitting on text takes.

    Args:
        tokens: positions of text that are read, each by every range of sizes.
        operations: floating-point operations.
    """

    tokens: int
    operations: float


class Deployment(Protocol):
    """The sizes that a model on disk can be had in.

    Attributes:
        source: the model on disk.
        kind: where L + S come from, part of the key of what is cached.
        dense: parameters of the dense model.
        fixed: those of them that are never compressed.
        default_variants: what is evaluated when nothing is named.
        calibration: the text that calibrated variants read, once `calibrate` has named it.
    """

    source: ModelOnDisk
    kind: str
    dense: int
    fixed: int
    default_variants: str
    calibration: CalibrationText | None

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError if a variant cannot be had, before anything is computed."""

    def of(self, variant: Variant) -> "Deployment":
        """What the variant is cut from: this, or for `+head` the same with head and embedding split too."""

    def calibrate(self, data: DataConfig, sequences: int) -> None:
        """Name the text that calibrated variants read; it is opened here, and read when the first is cut."""

    def tune(self, data: DataConfig, how: FittedOnText) -> None:
        """Let `sized` and `all_sizes` fit what they cut on text, by matching and distillation; it is opened here."""

    def tuning_cost(self, ranges: int | None) -> TuningCost | None:
        """What fitting takes of one size, or of so many ranges of sizes; None where nothing is fitted on text."""

    def written(self) -> None:
        """Forget what was kept for a command that is interrupted: its folder is there."""

    def variant_for(self, options: CompressOptions, budget: int | None) -> Variant:
        """What `compress.py` is asked for; a UserError if this kind of folder cannot give it."""

    def opened(self, variant: Variant, dtype: torch.dtype) -> AbstractContextManager[OpenedVariant]:
        """Within this context the variant in a model, for inference on the best device there is."""

    def sized(self, variant: Variant, dtype: torch.dtype, factored: bool) -> SizedModel:
        """The variant as a model of its own on the CPU; `factored` stores blocks in parts where `factor` does."""

    def all_sizes(self, variants: Sequence[Variant]) -> list[SizeRange]:
        """All units and their order by value per parameter, in a range of sizes per variant, the largest first.

        A range begins with its variant's size, to which its units are fitted if that is refined.
        """


def own_text(source: ModelOnDisk, data: DataConfig) -> DataConfig:
    """The text as this model reads it: with its own tokenizer unless another is named, in rows it has positions for.

    Raises:
        UserError: rows are longer than that.
    """
    positions = getattr(source.folder.config, "max_position_embeddings", None)
    if positions is not None and data.sequence_length > positions:
        raise UserError(
            f"data.sequence_length is {data.sequence_length}, but {source.name} has {positions} positions; give "
            f"--data.sequence_length {positions} or less"
        )
    return replace(data, tokenizer=data.tokenizer or str(source.folder.path))


def option_that_cuts(options: CompressOptions) -> str | None:
    """The first option that only L + S which is cut anew can follow, if one is given."""
    asked = {
        "--kappa": options.kappa is not None,
        f"--allocation {options.allocation}": options.allocation is not None,
        "--refine": options.refine,
        "--calibrate": options.calibrate,
        "--elastic": options.elastic,
        "--match": options.match,
        "--distill": options.distill,
        "--embedding": options.embedding,
        "--lm_head": options.lm_head,
    }
    return next((name for name, given in asked.items() if given), None)


def best_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def take_over(model: PreTrainedModel, others: Mapping[str, Tensor]) -> None:
    """Give parameters of a model the numbers that were fitted, by name."""
    for name, value in others.items():
        model.get_parameter(name).copy_(value)


def as_dense(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """An opened model with every weight dense, in `dtype`."""
    return model.dequantize(dtype) if getattr(model, "hf_quantizer", None) else model.to(dtype)
