"""MatFormer: one model that contains smaller ones, with the first features of its feed-forward layers (2310.07707).

    FFN_k(x) = W_down[:, :k]·(SiLU(W_gate[:k]·x) ⊙ W_up[:k]·x),   k = m, m/2, m/4, m/8

All widths share attention, embedding and norms. `sampled` trains one width per step, drawn from the seed and the step,
as in the paper: each of four widths is trained in about a quarter of the steps. `summed` trains all widths in every
step, as the released MatFormer-OLMo does, at several times the cost. Different from the release: `summed` averages the
gradients of the widths instead of adding them, so that gradient clipping has the same meaning.

The weights have the names and shapes of the plain model, so `model/` of a checkpoint is a plain folder of the full
width. A mixed model has two neighbouring widths, the larger one in its later layers.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.config.methods import MatformerConfig
from salaad.config.run import RunConfig
from salaad.methods.base import Method
from salaad.methods.work import Work
from salaad.model.nested_widths import Widths
from salaad.model.parameters import trained_parameters
from salaad.spectral.cost import Rates


class Matformer(Method):
    """Pretraining of one model with nested feed-forward widths (MatFormer)."""

    Settings = MatformerConfig

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        super().__init__(model, config)
        self.widths, self.step = self.widths_of(model, config.settings), 0
        if config.train.compile:  # compiles a graph per width and mixture, in training and in evaluation
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, 8 * len(self.widths.uniform)
            )
        self._draw()

    @classmethod
    def widths_of(cls, model: PreTrainedModel, settings: MatformerConfig) -> Widths:  # noqa: D102
        return Widths(model, settings.halvings)

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:
        """Raise a UserError for a model without plain SwiGLU layers, or whose width cannot be halved so often."""
        super().check(model, config)
        widths, times = cls.widths_of(model, config.settings), 2**config.settings.halvings
        if not widths.layers:
            raise UserError(
                "method matformer narrows SwiGLU layers (gate_proj, up_proj, down_proj), of which this model has 0; "
                "give a LLaMA-like model, or another method"
            )
        whole = {len(layer.up_proj.weight) for layer in widths.layers}
        if len(whole) > 1:
            raise UserError(
                f"the feed-forward widths {', '.join(map(str, sorted(whole)))} of this model differ, but matformer "
                "nests one width; give a model with one, or another method"
            )
        [width] = whole
        declared = model.config.num_hidden_layers, model.config.intermediate_size
        if (len(widths.layers), width) != declared:
            raise UserError(
                f"method matformer nests {len(widths.layers)} SwiGLU layers of width {width} here, but the model's "
                f"configuration has {declared[0]} layers of width {declared[1]}, as with experts; give a LLaMA-like "
                "model, or another method"
            )
        if width % times:
            fewer = max(n for n in range(config.settings.halvings) if width % 2**n == 0)
            cures = [f"--matformer.halvings {fewer}"] if fewer else []
            if config.model.path is None:
                wider = -(-width // times) * times
                cures += [f"--model.intermediate_size {wider}", "other --model.parameters if it is like another model"]
            raise UserError(
                f"the feed-forward width {width} cannot be halved {config.settings.halvings} times; give "
                f"{', or '.join(cures) or 'another model'}"
            )

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        cls.widths_of(model, config.settings)

    @classmethod
    def plan(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> list[tuple[str, str]]:  # noqa: D102
        widths = cls.widths_of(model, config.settings)
        sizes = (f"{widths.parameters(widths.everywhere(w)) / 1e6:.2f} M at {w}" for w in widths.uniform)
        return [("feed-forward widths", ", ".join(sizes)), ("trained in a step", config.settings.train)]

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:  # noqa: D102
        widths = cls.widths_of(model, config.settings)
        sizes = [widths.parameters(widths.everywhere(width)) for width in widths.uniform]
        mixtures = [mean(pair) for pair in pairwise(sizes)]  # half of the layers at each width
        passes = sizes if config.settings.train == "summed" else [mean(sizes)]
        work = super().work(model, config, ranks, rates)
        return replace(work, passes=tuple(passes), variants=(*sizes, *mixtures))

    def passes(self) -> Sequence[AbstractContextManager]:  # noqa: D102
        if self.config.settings.train == "sampled":
            return super().passes()
        return [self.widths.of(self.widths.everywhere(width)) for width in self.widths.uniform]

    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:  # noqa: D102
        self.step = step
        self._draw()

    def _draw(self) -> None:
        """Draw and set the width of the next step, the same on every rank and after a resume."""
        if self.config.settings.train == "sampled":
            drawn = Random(f"{self.config.seed} {self.step}").choice(self.widths.uniform)
            self.widths.set(self.widths.everywhere(drawn))

    def variants(self) -> Iterator[tuple[str, AbstractContextManager, dict[str, float]]]:  # noqa: D102
        half = len(self.widths.layers) // 2
        size = next(self.model.parameters()).element_size()
        for i, width in enumerate(self.widths.uniform):
            choices = {"X" if i == 0 else f"X/{2**i}": self.widths.everywhere(width)}
            if i + 1 < len(self.widths.uniform):
                choices[f"X/{2**i}+X/{2 ** (i + 1)}".replace("X/1+", "X+")] = self.widths.mixed(i, half)
            for name, widths in choices.items():
                parameters = self.widths.parameters(widths)
                figures = {"parameters": parameters, "bytes": parameters * size}
                yield name, self.widths.of(widths), figures | {"trained": trained_parameters(self.model)}

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.step = state["step"]
        self._draw()
