"""Narrower models nested in one model, whose feed-forward layers use only the first of their inner features."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.model.parameters import count_parameters

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_ROUNDING = 1e-4  # of outputs in float32, relative; a multiplier or a limit changes them by more


class NestedMlp(nn.Module):
    """A SwiGLU layer that uses the first `width` of its m inner features.

    Args:
        mlp: a layer with `gate_proj`, `up_proj`, `down_proj` and `act_fn`, which the new layer takes over.
    """

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.act_fn = mlp.act_fn
        self.width = len(mlp.up_proj.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output Y (…×d) for the input x (…×d)."""
        k, down = self.width, self.down_proj
        gate, up = (
            F.linear(x, layer.weight[:k], None if layer.bias is None else layer.bias[:k])
            for layer in (self.gate_proj, self.up_proj)
        )
        return F.linear(self.act_fn(gate) * up, down.weight[:, :k], down.bias)


def require_plain(name: str, mlp: nn.Module) -> None:
    """Raise a UserError unless the layer called `name` computes what a `NestedMlp` of it does.

    Its weights need have no values (on the meta device): a copy with a few features and random weights is compared.
    """
    parts = (mlp.named_children(), mlp.named_parameters(recurse=False), mlp.named_buffers(recurse=False))
    beyond = {own for part in parts for own, _ in part} - {*_LAYERS, "act_fn"}
    if beyond or not _is_nested_by(mlp):
        what = f"has {min(beyond)} besides" if beyond else "computes something else, such as with a multiplier or limit"
        raise UserError(
            f"method matformer narrows layers that compute down_proj(act_fn(gate_proj)·up_proj) alone, but {name} "
            f"{what}; give a LLaMA-like model, or another method"
        )


@torch.no_grad()
def _is_nested_by(mlp: nn.Module) -> bool:
    """Whether a copy of `mlp` with 8 inputs and 16 inner features gives the output of its `NestedMlp`."""
    generator = torch.Generator().manual_seed(0)
    small = {}  # what the copy has in place of the projections
    for name in _LAYERS:
        old, sizes = getattr(mlp, name), (16, 8) if name == "down_proj" else (8, 16)
        small[id(old)] = nn.utils.skip_init(nn.Linear, *sizes, bias=old.bias is not None)
    probe = copy.deepcopy(mlp, small).to_empty(device="cpu").train()  # as dropout is part of what it computes
    for values in (*probe.parameters(), *probe.buffers()):
        values.normal_(generator=generator)
    # The larger inputs are beyond any limit.
    x = torch.randn(1, 8, 8, generator=generator) * torch.logspace(-1, 4, 8)[:, None]
    try:
        found, wanted = NestedMlp(probe)(x), probe(x)
    except Exception:  # of a layer without act_fn, or one that needs further inputs: any class of error
        return False
    error, norm = (torch.linalg.vector_norm(y, dim=-1) for y in (found - wanted, wanted))
    return bool((error <= _ROUNDING * norm).all())


class Widths:
    """The feed-forward widths of a model with `NestedMlp` layers, and how many parameters each choice has.

    Args:
        model: the model, whose SwiGLU layers become `NestedMlp` unless they already are; names and weights stay.
        halvings: how often the whole width m is halved.

    Attributes:
        uniform: the uniform widths m, m/2, m/4, …

    Raises:
        UserError: a SwiGLU layer computes more than a `NestedMlp` does.
    """

    def __init__(self, model: PreTrainedModel, halvings: int) -> None:
        for name, module in list(model.named_modules()):
            if not isinstance(module, NestedMlp) and all(
                isinstance(getattr(module, x, None), nn.Linear) for x in _LAYERS
            ):
                require_plain(name, module)
                model.set_submodule(name, NestedMlp(module))
        self.layers = [module for module in model.modules() if isinstance(module, NestedMlp)]
        self._model, self._whole = model, count_parameters(model)
        self.uniform = [len(self.layers[0].up_proj.weight) >> i for i in range(halvings + 1)] if self.layers else []

    def set(self, widths: Sequence[int]) -> None:
        """Set the width of every layer, in the order of the layers."""
        for layer, width in zip(self.layers, widths, strict=True):
            layer.width = width

    @contextmanager
    def of(self, widths: Sequence[int]) -> Iterator[None]:
        """Context manager under which the layers compute with the given widths."""
        before = [layer.width for layer in self.layers]
        self.set(widths)
        try:
            yield
        finally:
            self.set(before)

    def everywhere(self, width: int) -> list[int]:
        """Return the widths of all layers if each has the same `width`."""
        return [width] * len(self.layers)

    def cut_out(self, width: int) -> PreTrainedModel:
        """Cut the model in place to a plain one of this uniform width, deleting further features, and return it."""
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
        """Return widths with `uniform[wider]` in the last `number` layers and the next smaller width in the others."""
        rest = len(self.layers) - number
        return [self.uniform[wider + 1]] * rest + [self.uniform[wider]] * number

    def parameters(self, widths: Sequence[int]) -> int:
        """Return the number of parameters of the model at these widths."""
        return self._whole - sum(
            (len(layer.up_proj.weight) - width) * self._per_feature(layer)
            for layer, width in zip(self.layers, widths, strict=True)
        )

    @staticmethod
    def _per_feature(layer: NestedMlp) -> int:
        """Return the number of parameters of one inner feature of `layer`."""
        biases = sum(part.bias is not None for part in (layer.gate_proj, layer.up_proj))
        return 2 * layer.up_proj.in_features + layer.down_proj.out_features + biases

    def within(self, budget: int) -> list[int]:
        """Return the largest widths with at most `budget` parameters, uniform or mixed from two neighbouring widths.

        Raises:
            UserError: the model of the smallest width has more parameters.
        """
        choices = [self.everywhere(self.uniform[0])]
        for i in range(len(self.uniform) - 1):
            choices += [self.mixed(i, number) for number in range(len(self.layers) - 1, -1, -1)]
        fitting = next((widths for widths in choices if self.parameters(widths) <= budget), None)
        if fitting is None:
            least = self.parameters(self.everywhere(self.uniform[-1]))
            raise UserError(f"budget {budget:,} is below the {least:,} of the smallest width; give {least} or more")
        return fitting
