"""MatFormer: one model with smaller ones in it, whose feed-forward layers are the first part of the whole (2310.07707).

    FFN_k(x) = W_down[:, :k]·(SiLU(W_gate[:k]·x) ⊙ W_up[:k]·x),   k = m, m/2, m/4, m/8

Attention, embedding and norms are shared by all. `sampled` trains one width a step, drawn by the step and the seed, as
the paper says; `summed` trains all of them in every step, as the released MatFormer-OLMo does, at several times the
cost. So with `sampled` each width is trained in a quarter of the steps. Different from the release: the gradients of
`summed` are averaged, not added, so that clipping means the same.

The weights have the names and shapes of the plain model, so `model/` of a checkpoint is a plain folder of the whole
width. In a mixed model the later layers are the wider ones.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.config.methods import MatformerConfig
from salaad.config.run import RunConfig
from salaad.methods.base import Method
from salaad.model.parameters import count_parameters, trained_parameters

_LAYERS = ("gate_proj", "up_proj", "down_proj")


class NestedMlp(nn.Module):
    """The SwiGLU layer of which the first `width` of m inner features are used.

    Args:
        mlp: a layer with `gate_proj`, `up_proj`, `down_proj` and `act_fn`, which become those of this one.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self.width = len(mlp.up_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Y (…×d) of x (…×d)."""
        k, down = self.width, self.down_proj
        gate, up = (
            F.linear(x, layer.weight[:k], None if layer.bias is None else layer.bias[:k])
            for layer in (self.gate_proj, self.up_proj)
        )
        return F.linear(self.act_fn(gate) * up, down.weight[:, :k], down.bias)


class Widths:
    """The feed-forward widths of a model with `NestedMlp` layers, and how many parameters each choice has.

    Args:
        model: whose SwiGLU layers are replaced by `NestedMlp`, unless they are already; names and weights stay.
        halvings: how often the whole width m is halved.

    Attributes:
        uniform: m, m/2, m/4, …
    """

    def __init__(self, model: PreTrainedModel, halvings: int) -> None:
        for name, module in list(model.named_modules()):
            if not isinstance(module, NestedMlp) and all(
                isinstance(getattr(module, x, None), nn.Linear) for x in _LAYERS
            ):
                model.set_submodule(name, NestedMlp(module))
        self.layers = [module for module in model.modules() if isinstance(module, NestedMlp)]
        self._model, self._whole = model, count_parameters(model)
        self.uniform = [len(self.layers[0].up_proj.weight) >> i for i in range(halvings + 1)] if self.layers else []

    def set(self, widths: Sequence[int]) -> None:
        """The width of every layer, from the first on."""
        for layer, width in zip(self.layers, widths, strict=True):
            layer.width = width

    @contextmanager
    def of(self, widths: Sequence[int]) -> Iterator[None]:
        """Within this context the layers have these widths."""
        before = [layer.width for layer in self.layers]
        self.set(widths)
        try:
            yield
        finally:
            self.set(before)

    def everywhere(self, width: int) -> list[int]:
        """The same width in all layers."""
        return [width] * len(self.layers)

    def cut_out(self, width: int) -> PreTrainedModel:
        """The model itself as a plain one of this uniform width: whatever is beyond is gone."""
        model = self._model
        for layer in self.layers:
            for part in (layer.gate_proj, layer.up_proj):
                part.weight = nn.Parameter(part.weight[:width].clone(), requires_grad=False)
                part.bias = None if part.bias is None else nn.Parameter(part.bias[:width].clone(), requires_grad=False)
            down = layer.down_proj
            down.weight = nn.Parameter(down.weight[:, :width].clone(), requires_grad=False)
            layer.gate_proj.out_features = layer.up_proj.out_features = down.in_features = layer.width = width
        model.config.intermediate_size = width
        return model

    def mixed(self, wider: int, number: int) -> list[int]:
        """The last `number` layers at the uniform width of index `wider`, the others at the next smaller one."""
        rest = len(self.layers) - number
        return [self.uniform[wider + 1]] * rest + [self.uniform[wider]] * number

    def parameters(self, widths: Sequence[int]) -> int:
        """Of the model at these widths."""
        return self._whole - sum(
            (len(layer.up_proj.weight) - width) * self._per_feature(layer)
            for layer, width in zip(self.layers, widths, strict=True)
        )

    @staticmethod
    def _per_feature(layer: NestedMlp) -> int:
        """Parameters of one inner feature."""
        biases = sum(part.bias is not None for part in (layer.gate_proj, layer.up_proj))
        return 2 * layer.up_proj.in_features + layer.down_proj.out_features + biases

    def within(self, budget: int) -> list[int]:
        """The largest choice with at most `budget` parameters, uniform or mixed of two neighbouring widths.

        Raises:
            UserError: the smallest has more.
        """
        choices = [self.everywhere(self.uniform[0])]
        for i in range(len(self.uniform) - 1):
            choices += [self.mixed(i, number) for number in range(len(self.layers) - 1, -1, -1)]
        fitting = next((widths for widths in choices if self.parameters(widths) <= budget), None)
        if fitting is None:
            least = self.parameters(self.everywhere(self.uniform[-1]))
            raise UserError(f"budget {budget:,} is below the {least:,} of the smallest width; give {least} or more")
        return fitting


class Matformer(Method):
    """Nested feed-forward widths."""

    Settings = MatformerConfig

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        super().__init__(model, config)
        self.widths, self.step = self.widths_of(model, config.settings), 0
        if config.train.compile:  # a graph per width and mixture, in training and in evaluation
            torch._dynamo.config.recompile_limit = max(
                torch._dynamo.config.recompile_limit, 8 * len(self.widths.uniform)
            )
        self._draw()

    @classmethod
    def widths_of(cls, model: PreTrainedModel, settings: MatformerConfig) -> Widths:  # noqa: D102
        return Widths(model, settings.halvings)

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
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
        if width % times:
            raise UserError(
                f"the feed-forward width {width} cannot be halved {config.settings.halvings} times; give "
                f"--model.intermediate_size {-(-width // times) * times}, or fewer --matformer.halvings"
            )

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        cls.widths_of(model, config.settings)

    @classmethod
    def plan(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> list[tuple[str, str]]:  # noqa: D102
        widths = cls.widths_of(model, config.settings)
        sizes = (f"{widths.parameters(widths.everywhere(w)) / 1e6:.2f} M at {w}" for w in widths.uniform)
        return [("feed-forward widths", ", ".join(sizes)), ("trained in a step", config.settings.train)]

    def passes(self) -> Sequence[AbstractContextManager]:  # noqa: D102
        if self.config.settings.train == "sampled":
            return super().passes()
        return [self.widths.of(self.widths.everywhere(width)) for width in self.widths.uniform]

    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:  # noqa: D102
        self.step = step
        self._draw()

    def _draw(self) -> None:
        """The width of the next step, the same on every rank and after a resume."""
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
