"""Sizes of a model with narrower ones in it, as MatFormer trains them: a budget takes the largest within it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.compression.deployment import (
    FittedOnText,
    OpenedVariant,
    SizedModel,
    best_device,
    option_that_cuts,
)
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.config.run import DataConfig
from salaad.factored.elastic_file import SizeRange
from salaad.model.nested_widths import Widths
from salaad.model.parameters import count_parameters
from salaad.runs.model_on_disk import ModelOnDisk


class NestedDeployment:
    """The uniform widths of a checkpoint, and mixtures of two neighbouring ones, layer by layer.

    Args:
        source: the checkpoint.
        widths_in: finds the widths in a model of its architecture.
    """

    kind: ClassVar[str] = "nested"
    calibration: ClassVar[None] = None

    def __init__(self, source: ModelOnDisk, widths_in: Callable[[PreTrainedModel], Widths]) -> None:
        self.source, self._widths_in = source, widths_in
        self.widths = widths_in(source.folder.outline)
        sizes = [self.widths.parameters(self.widths.everywhere(width)) for width in self.widths.uniform]
        self.dense, self.fixed = sizes[0], sizes[-1]
        self.default_variants = ",".join(["X", *map(str, sizes[1:])])

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError if a variant cannot be had: there are no L and S here, or the budget is too small."""
        for variant in variants:
            if variant.name != "X" and not variant.stored:
                size = "X" if variant.budget is None else variant.name.partition("@")[0]
                raise UserError(
                    f"{self.source.name} holds narrower models and no L and S, so {variant.name} cannot be made of it; "
                    f"give {size} alone"
                )
            if variant.budget is not None:
                self.widths.within(variant.budget)

    def of(self, variant: Variant) -> "NestedDeployment":
        """This: `check` has refused what splits the head."""
        return self

    def calibrate(self, data: DataConfig, sequences: int) -> None:
        """Nothing: `check` has refused whatever would need it."""

    def tune(self, data: DataConfig, how: FittedOnText) -> None:
        """Nothing, likewise."""

    def tuning_cost(self, ranges: int | None) -> None:
        """Nothing is fitted."""

    def written(self) -> None:
        """Nothing is kept."""

    def variant_for(self, options: CompressOptions, budget: int | None) -> Variant:
        """The widest uniform model within the budget; whatever needs L and S is refused."""
        wrong = option_that_cuts(options)
        if wrong is not None:
            raise UserError(f"{self.source.name} holds narrower models and no L and S to be cut; leave {wrong} out")
        return Variant(options.budget or "X", budget, stored=budget is not None)

    @contextmanager
    def opened(self, variant: Variant, dtype: torch.dtype) -> Iterator[OpenedVariant]:
        """The model at the widths of the variant, uniform or mixed, on the best device there is."""
        model = self.source.folder.load(dtype, best_device())
        widths = self._widths_in(model)
        chosen = widths.within(self.dense if variant.budget is None else variant.budget)
        widths.set(chosen)
        yield OpenedVariant(model, widths.parameters(chosen), None)

    def sized(self, variant: Variant, dtype: torch.dtype, factored: bool) -> SizedModel:
        """A plain model of the widest uniform width within the budget: a folder has one width for all layers."""
        model = self.source.folder.load(dtype)
        widths = self._widths_in(model)
        width = min(widths.within(self.dense if variant.budget is None else variant.budget))
        plain = widths.cut_out(width)
        note = f"The feed-forward width is {width} of {widths.uniform[0]}; it is a plain folder that needs no salaad."
        return SizedModel(plain, count_parameters(plain), len(widths.layers), None, whole=False, note=note)

    def all_sizes(self, variants: Sequence[Variant]) -> list[SizeRange]:
        """Refused: `variant_for` has said so."""
        raise UserError(f"{self.source.name} holds no L and S; leave --elastic out")
