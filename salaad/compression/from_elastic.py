"""The deployment of an elastic folder, of which a size reads the first units; nothing is computed."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from salaad import hpa
from salaad.common.errors import UserError
from salaad.compression.deployment import (
    Deployment,
    OpenedVariant,
    SizedModel,
    as_dense,
    best_device,
    option_that_cuts,
)
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.energy_allocation import implied_kappa, least_parameters
from salaad.factored.any_size import ElasticConfig
from salaad.factored.elastic_file import ElasticFile
from salaad.model.weight_headers import weight_files
from salaad.runs.model_on_disk import ModelOnDisk


class ElasticDeployment(Deployment):
    """The deployment of an elastic folder, of which a size reads the first units; nothing is computed.

    Args:
        source: the folder on disk.
    """

    kind: ClassVar[str] = "elastic"
    default_variants: ClassVar[str] = "L+S"

    def __init__(self, source: ModelOnDisk) -> None:
        self.source = source
        self.entry = ElasticConfig(**source.folder.config.quantization_config)
        self.dense, self.fixed = self.entry.dense, self.entry.fixed

    @property
    def largest(self) -> int:
        """Parameters of the largest size."""
        blocks = {name: tuple(sizes) for name, sizes in self.entry.blocks.items()}
        return self.fixed + least_parameters(blocks, {name: sizes[2:] for name, sizes in blocks.items()})

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError for a variant that would change the units, or whose size is not in the folder."""
        for variant in variants:
            if variant.budget is not None and not variant.stored:
                size = variant.name.partition("@")[0]
                raise UserError(
                    f"{self.source.name} keeps its units in one order, so {variant.name} cannot be cut from it; give "
                    f"{size} alone, or the checkpoint it was made of"
                )
            if variant.refine or variant.calibrated:
                raise UserError(
                    f"{self.source.name} keeps its units as they are, so nothing can be refined or calibrated; leave "
                    "--refine and --calibrate out, or give the checkpoint it was made of"
                )
            self._kept(variant)

    def variant_for(self, options: CompressOptions, budget: int | None) -> Variant:
        """Return the variant of the requested size; a UserError for an option that would change the units."""
        wrong = option_that_cuts(options)
        if wrong is not None:
            raise UserError(
                f"{self.source.name} is an elastic folder, which is cut as it is, without {wrong}; leave that out, or "
                "give the checkpoint the folder was made of"
            )
        return Variant(options.budget or "L+S", budget, stored=budget is not None)

    @contextmanager
    def opened(self, variant: Variant, dtype: torch.dtype) -> Iterator[OpenedVariant]:
        """Context manager that gives the model of the variant's size, on the GPU if there is one.

        X and L+S are both the model of all units.
        """
        model = self.source.folder.load(dtype, best_device(), variant.budget)
        index, kept = self._kept(variant)
        blocks = {name: tuple(sizes) for name, sizes in self.entry.ranges[index].items()}
        whole = {name: tuple(sizes) for name, sizes in self.entry.blocks.items()}
        kappa = implied_kappa(whole, kept) if variant.budget is not None else None
        yield OpenedVariant(model, self.fixed + least_parameters(blocks, kept), kappa)

    def sized(self, variant: Variant, dtype: torch.dtype, factored: bool) -> SizedModel:
        """Return the model of the variant's size, with blocks in parts, or dense if not `factored`."""
        with self.opened(variant, dtype if factored else torch.float32) as (model, parameters, kappa):
            model = model if factored else as_dense(model, dtype)
            return SizedModel(model, parameters, len(self.entry.blocks), kappa)

    def _kept(self, variant: Variant) -> tuple[int, hpa.Kept]:
        with ElasticFile.opened(weight_files(self.source.folder.path)) as file:
            return self.entry.keep(file, variant.budget)
