"""The interface for cutting a model on disk to a size, which `from_checkpoint`, `from_elastic`, `from_nested` fill in.

A checkpoint (or any dense model, split after the fact) is cut anew for every size; an elastic folder holds its units
(singular terms of L, entries of S) in one order, and a size reads the first of them; a MatFormer has narrower models
inside.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from salaad.compression.calibration import CalibrationText
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.config.run import DataConfig
from salaad.factored.elastic_file import SizeRange
from salaad.model.build import require_positions
from salaad.model.parameters import cast
from salaad.runs.model_on_disk import ModelOnDisk


class OpenedVariant(NamedTuple):
    """An opened variant: its model, its parameters as the allocation counts, the κ that its cut amounts to, if any."""

    model: PreTrainedModel
    parameters: int
    kappa: float | None


class SizedModel(NamedTuple):
    """A model of one size, ready to be written to a folder.

    Args:
        model: the model, with its blocks as U·V + S wherever that is smaller in a file, or all dense.
        parameters: the parameters as the allocation counts: HPA as the paper, energy no block as more than dense.
        blocks: number of blocks that were cut; of a MatFormer, of feed-forward layers.
        kappa: the κ that the cut amounts to, if any.
        note: a sentence for the user that replaces the one on how many blocks are stored in parts.
    """

    model: PreTrainedModel
    parameters: int
    blocks: int
    kappa: float | None
    note: str | None = None


class FittedOnText(NamedTuple):
    """How much text a cut model is fitted on, by matching and by distillation.

    Args:
        match: number of sequences that layers are matched on; 0 leaves matching out.
        tokens: number of tokens of distillation; 0 leaves distillation out.
        text_share: share of the text's own next token in the target of distillation, from 0 to 1.
    """

    match: int
    tokens: int
    text_share: float


class TuningCost(NamedTuple):
    """The cost of fitting on text.

    Args:
        tokens: positions of text that are read; every range of sizes reads all of them.
        operations: floating-point operations.
    """

    tokens: int
    operations: float


class Deployment:
    """A model on disk that can be cut to sizes.

    A subclass defines `check`, `variant_for`, `opened` and `sized`. It leaves out the others if its sizes are neither
    weighed nor fitted on text, and its `check` and `variant_for` refuse what would need that.

    Attributes:
        source: the model on disk.
        kind: name of where L + S come from; part of the key of cached results.
        dense: parameters of the dense model.
        fixed: parameters that are never compressed.
        default_variants: the variants that are evaluated when the user names none.
        calibration: the text that calibrated variants are weighed on; None until `calibrate` has set it.
        activation: what stands between the factors of a model whose blocks are no matrices L + S; None for all others.
    """

    source: ModelOnDisk
    kind: str
    dense: int
    fixed: int
    default_variants: str
    calibration: CalibrationText | None = None
    activation: str | None = None

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError if this model cannot give one of the variants, before anything is computed."""

    def variant_for(self, options: CompressOptions, budget: int | None) -> Variant:
        """Return the variant that options of `compress.py` ask for; a UserError if this deployment cannot give it."""

    def settled(self, variant: Variant, options: CompressOptions) -> Variant:
        """Return the variant with what can only be known once L + S are there, after all options are checked."""
        return variant

    def opened(self, variant: Variant, dtype: torch.dtype) -> AbstractContextManager[OpenedVariant]:
        """Context manager that gives the variant as a model for inference, on the GPU if there is one."""

    def sized(self, variant: Variant, dtype: torch.dtype, factored: bool) -> SizedModel:
        """Return the variant as a model to store; with `factored`, blocks are in parts where `factor` makes them so."""

    def all_sizes(self, variants: Sequence[Variant]) -> list[SizeRange]:
        """Return a range of sizes per variant, the largest first: all its units and their order by value per parameter.

        A range begins at its variant's size, to which its units are fitted if the variant is refined.
        """

    def of(self, variant: Variant) -> "Deployment":
        """Return the deployment that gives the variant: this, or for `+head` one that splits head and embedding too."""
        return self

    def calibrate(self, data: DataConfig, sequences: int) -> None:
        """Read the text that calibrated variants are weighed on; the gradients on it are computed at the first cut."""

    def tune(self, data: DataConfig, how: FittedOnText) -> None:
        """Make `sized` and `all_sizes` fit cuts on text by matching and distillation; the text is checked here."""

    def tuning_cost(self, ranges: int | None) -> TuningCost | None:
        """Return the cost of fitting that many ranges of sizes, or one size for None; None without fitting."""

    def written(self) -> None:
        """Delete the state that an interrupted command would resume from: the folder has been written."""


def own_text(source: ModelOnDisk, data: DataConfig) -> DataConfig:
    """Return `data` with the model's own tokenizer, unless `data` names another.

    Raises:
        UserError: the model has fewer positions than rows have tokens.
    """
    require_positions(source.folder.config, data.sequence_length, source.name)
    return replace(data, tokenizer=data.tokenizer or str(source.folder.path))


def option_that_cuts(options: CompressOptions) -> str | None:
    """Return the first given option that needs L + S to be cut anew; None if there is none."""
    asked = {
        "--kappa": options.kappa is not None,
        f"--allocation {options.allocation}": options.allocation is not None,
        "--refine": options.refine,
        "--calibrate": options.calibrate,
        "--elastic": options.elastic,
        "--match": options.match,
        "--distill": options.distill,
        "--embedding": options.embedding,
        "--lm-head": options.lm_head,
    }
    return next((name for name, given in asked.items() if given), None)


def best_device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def take_over(model: PreTrainedModel, others: Mapping[str, Tensor]) -> None:
    """Copy fitted values into the parameters of a model, by name."""
    for name, value in others.items():
        model.get_parameter(name).copy_(value)


def as_dense(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Return an opened model with every weight dense, in `dtype`."""
    return model.dequantize(dtype) if getattr(model, "hf_quantizer", None) else cast(model, dtype)
