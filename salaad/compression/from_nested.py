"""The deployment of a model with narrower ones inside, from MatFormer: a budget takes the largest that fits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.compression.deployment import Deployment, OpenedVariant, SizedModel, best_device, option_that_cuts
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.model.nested_widths import Widths
from salaad.model.parameters import count_parameters
from salaad.runs.model_on_disk import ModelOnDisk


class NestedDeployment(Deployment):
    """The deployment of a checkpoint at its uniform widths, and at mixtures of two neighbouring ones, layer by layer.

    Args:
        source: the checkpoint.
        widths_in: function that finds the widths in a model of the checkpoint's architecture.
    """

    kind: ClassVar[str] = "nested"

    def __init__(self, source: ModelOnDisk, widths_in: Callable[[PreTrainedModel], Widths]) -> None:
        self.source, self._widths_in = source, widths_in
        self.widths = widths_in(source.folder.outline)
        sizes = [self.widths.parameters(self.widths.everywhere(width)) for width in self.widths.uniform]
        self.dense, self.fixed = sizes[0], sizes[-1]
        self.default_variants = ",".join(["X", *map(str, sizes[1:])])

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError for a variant that needs L and S or a fit, or whose budget is below the smallest width."""
        for variant in variants:
            if variant.name != "X" and not variant.stored:
                size = "X" if variant.budget is None else variant.name.partition("@")[0]
                raise UserError(
                    f"{self.source.name} holds narrower models and no L and S, so {variant.name} cannot be made of it; "
                    f"give {size} alone"
                )
            if variant.refine or variant.calibrated:
                raise UserError(
                    f"{self.source.name} holds narrower models as they were trained, so nothing can be refined or "
                    "calibrated; leave --refine and --calibrate out"
                )
            if variant.budget is not None:
                self.widths.within(variant.budget)

    def variant_for(self, options: CompressOptions, budget: int | None) -> Variant:
        """Return the variant of the requested budget, or X for none; an error for what needs L and S."""
        wrong = option_that_cuts(options)
        if wrong is not None:
            raise UserError(f"{self.source.name} holds narrower models and no L and S to be cut; leave {wrong} out")
        if options.dtype == "int8":
            raise UserError(
                f"{self.source.name} holds narrower models and no L and S, and --dtype int8 stores U, V and S; give "
                "bfloat16 or float32"
            )
        return Variant(options.budget or "X", budget, stored=budget is not None)

    @contextmanager
    def opened(self, variant: Variant, dtype: torch.dtype) -> Iterator[OpenedVariant]:
        """Context manager that gives the model at the variant's widths (uniform or mixed), on `best_device()`."""
        model = self.source.folder.load(dtype, best_device())
        widths = self._widths_in(model)
        chosen = widths.within(self.dense if variant.budget is None else variant.budget)
        widths.set(chosen)
        yield OpenedVariant(model, widths.parameters(chosen), None)

    def sized(self, variant: Variant, dtype: torch.dtype, factored: bool) -> SizedModel:
        """Return a plain model of the widest uniform width within the budget: a folder has one width for all layers."""
        model = self.source.folder.load(dtype)
        widths = self._widths_in(model)
        width = min(widths.within(self.dense if variant.budget is None else variant.budget))
        plain = widths.cut_out(width)
        note = f"The feed-forward width is {width} of {widths.uniform[0]}; it is a plain folder that needs no salaad."
        return SizedModel(plain, count_parameters(plain), len(widths.layers), None, note=note)
