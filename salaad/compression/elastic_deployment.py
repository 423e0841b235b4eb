"""An elastic folder, whose sizes are beginnings of what it stores, in the place of a checkpoint that is cut."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from salaad import hpa
from salaad.common.errors import UserError
from salaad.compression.deployment import Deployment, Opened, best_device
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant
from salaad.config.run import ModelConfig
from salaad.energy_allocation import Line, implied_kappa
from salaad.factored.any_size import METHOD, ElasticConfig, ElasticFile
from salaad.model.build import describe_model, load_model
from salaad.model.weight_headers import weight_files
from salaad.runs.model_on_disk import Source


class ElasticDeployment:
    """What `Deployment` is of a checkpoint; nothing is computed.

    Args:
        source: the folder.
    """

    kind = "elastic"
    calibration = None

    def __init__(self, source: Source) -> None:
        self.source = source
        config = describe_model(ModelConfig(path=str(source.model)), 0)
        self.vocab_size = config.vocab_size
        self.positions = getattr(config, "max_position_embeddings", None)
        self.entry = ElasticConfig(**config.quantization_config)
        self.dense, self.fixed = self.entry.dense, self.entry.fixed

    @cached_property
    def line(self) -> Line:
        """The line the folder keeps."""
        with ElasticFile.opened(weight_files(self.source.model)) as file:
            return self.entry.line(file.line())

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError if a variant cannot be had, before anything is computed."""
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
            self.entry.keep(self.line, variant.budget)

    @contextmanager
    def opened(self, variant: Variant, dtype: torch.dtype) -> Iterator[Opened]:
        """The model of the variant's size, on the best device there is; X and L+S are all that the folder holds."""
        model = load_model(self.source.model, dtype, best_device(), variant.budget)
        kept = self.entry.keep(self.line, variant.budget)
        blocks = {name: tuple(sizes) for name, sizes in self.entry.blocks.items()}
        kappa = implied_kappa(blocks, kept) if variant.budget is not None else None
        yield Opened(model, self.fixed + hpa.parameters(blocks, kept), kappa)


def open_deployment(source: Source, post_hoc: PostHoc | None = None) -> Deployment | ElasticDeployment:
    """Whatever lies in a folder, ready to be cut."""
    config = describe_model(ModelConfig(path=str(source.model)), 0)
    entry = getattr(config, "quantization_config", None) or {}
    if entry.get("quant_method") == METHOD and post_hoc is None:
        return ElasticDeployment(source)
    return Deployment(source, post_hoc)
