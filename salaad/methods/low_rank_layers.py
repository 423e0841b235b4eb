"""The common part of methods that train factors in place of projections: replacing, counting, merging."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.common.formats import megabytes, millions
from salaad.config.methods import MethodConfig, SalaadConfig
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.base import BYTES, Method
from salaad.methods.float32 import true_float32
from salaad.model.parameters import count_parameters, trained_parameters
from salaad.model.roles import find_blocks
from salaad.model.weights import tied_modules


class Factored(nn.Module):
    """A layer that replaces a linear layer and can return the dense weight to which it is equivalent."""

    def dense_weight(self) -> Tensor:
        """Return the dense W (out×in) in the dtype of the factors."""
        raise NotImplementedError


class SlrFactored(Factored):
    """A layer y = U·φ(V·x) + S·x that can return U, V and S; without an activation φ its weight is W = U·V + S."""

    activation: str = "linear"

    def slr(self) -> Slr:
        """Return U (out×r), V (r×in) and S, detached, in float32 at least; U·V is not sorted by singular values."""
        raise NotImplementedError

    def dense_weight(self) -> Tensor:  # noqa: D102
        slr = self.slr()
        with true_float32(slr.U.device):
            return slr.dense().to(next(self.parameters()).dtype)


def added(y: Tensor, x: Tensor, weight: Tensor, scale: float) -> Tensor:
    """Return y + scale·x·weightᵀ (…×out) of y (…×out) and x (…×r), in one call instead of three passes over y."""
    if torch.is_autocast_enabled(x.device.type):  # autocast chose the dtype of y in the product before
        x, weight = x.to(y.dtype), weight.to(y.dtype)
    rows = torch.addmm(y.flatten(0, -2), x.flatten(0, -2), weight.mT, alpha=scale)
    return rows.view(y.shape)


def no_entries(like: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions and values of an S without entries."""
    return like.new_empty(0, dtype=torch.int64), like.new_empty(0)


def projections(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Name → linear layer of every projection of a known model family (q, k, v, o, gate, up, down)."""
    places = find_blocks(model, SalaadConfig()).places
    return {name: place.module for name, place in places.items() if isinstance(place.module, nn.Linear)}


def require_projections(model: PreTrainedModel, config: RunConfig) -> None:
    """Raise a UserError unless the model has projections, none tied, and none too small for the method's rank."""
    rank = config.settings.rank
    try:
        layers = projections(model)
    except UserError:  # an unknown family, whose projections these methods cannot be told
        layers = {}
    if not layers:
        raise UserError(
            f"method {config.method} works on linear projections, of which this model has 0; give a LLaMA-like model, "
            "or method full_rank or salaad"
        )
    if others := find_blocks(model, SalaadConfig()).places.keys() - layers.keys():
        raise UserError(
            f"method {config.method} works on linear layers alone, and {min(others)} is none, such as an expert; give "
            "a model without, or method full_rank or salaad"
        )
    tied = sorted(tied_modules(model) & set(layers))
    if tied:
        raise UserError(
            f"{tied[0]} shares its weight with another module, so method {config.method} cannot replace it; give a "
            "model whose projections are not tied, or method full_rank or salaad"
        )
    name, linear = min(layers.items(), key=lambda item: min(item[1].weight.shape))
    short = min(linear.weight.shape)
    if rank > short:
        raise UserError(
            f"{config.method}.rank is {rank}, but {name} has a shorter side of {short}; give {short} or less"
        )


def factored_layers(model: nn.Module) -> dict[str, Factored]:
    """Return name → layer of all layers that `LowRankMethod.rebuild` has put into the model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Factored)}


def merged(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the state dict of the dense model that computes what `model` computes."""
    layers = factored_layers(model)
    state = {name: tensor for name, tensor in model.state_dict().items() if name.rpartition(".")[0] not in layers}
    for name, layer in layers.items():
        # One after the other to the CPU: all at once would take the memory of the dense model on the device.
        state[f"{name}.weight"] = layer.dense_weight().detach().cpu()
        if layer.bias is not None:
            state[f"{name}.bias"] = layer.bias.detach()
    return state


class LowRankMethod(Method):
    """A method that replaces projections by `Layer`, which is merged into a dense weight for export if it is linear.

    Attributes of the class:
        Layer: makes the layer that replaces a projection, from this projection and the method's settings.
        keeps_weights: whether this layer begins with the weight of the projection, and is not drawn anew.
    """

    replaces_modules = True
    Layer: ClassVar[Callable[[nn.Linear, MethodConfig], Factored]]
    keeps_weights: ClassVar[bool] = True

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        super().__init__(model, config)
        distributed.barrier()  # reading or decomposing the weights may have taken some ranks longer than a sum may take
        for layer in factored_layers(model).values():
            for places in layer.buffers():  # positions in S: the data-parallel wrapper synchronizes weights alone
                distributed.broadcast(places, 0)

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().check(model, config)
        require_projections(model, config)

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:
        """Put a `Layer` in the place of every projection, in the model's own order."""
        for name, linear in projections(model).items():
            model.set_submodule(name, cls.Layer(linear, config.settings))

    @classmethod
    def bytes_beside(cls, model: PreTrainedModel, config: RunConfig) -> int:
        """Return the bytes of the exported model, and of positions in S beside the trained weights."""
        layers = factored_layers(model).values()
        positions = sum(places.nbytes for layer in layers for places in layer.buffers())
        if any(getattr(layer, "activation", "linear") != "linear" for layer in layers):
            return cls.stored(model)["bytes"] + positions
        shapes = [layer.slr().shape if isinstance(layer, SlrFactored) else layer.weight.shape for layer in layers]
        more = sum(map(math.prod, shapes)) - sum(map(count_parameters, layers))
        return (count_parameters(model) + more) * BYTES[config.train.precision][0] + positions

    @classmethod
    def plan(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> list[tuple[str, str]]:  # noqa: D102
        stored = cls.stored(model)
        printed = stored.get("parameters_printed")
        return [
            ("layers replaced", str(len(factored_layers(model)))),
            ("parameters trained", millions(trained_parameters(model))),
            ("parameters stored after training", f"{millions(stored['parameters'])}, {megabytes(stored['bytes'])}"),
            *([("the same as its paper counts", millions(printed))] if printed else []),
            *([("weights of model.path", remark)] if (remark := cls.remark(model, config)) else []),
        ]

    @classmethod
    def remark(cls, model: PreTrainedModel, config: RunConfig) -> str:
        """Return what is lost of the model that a run goes on from, which nothing else in the run would show."""
        if cls.keeps_weights or config.model.path is None:
            return ""
        return (
            f"{config.method} draws the {len(factored_layers(model))} projections anew; of {config.model.path} only "
            "embedding, head and norms are kept"
        )

    @classmethod
    def slr_parts(cls, model: nn.Module) -> dict[str, Slr]:  # noqa: D102
        layers = {name: layer for name, layer in factored_layers(model).items() if isinstance(layer, SlrFactored)}
        return {name: layer.slr() for name, layer in layers.items() if layer.activation == "linear"}

    def export(self, folder: Path) -> None:
        """Write the merged model as a folder of the dense architecture; with an activation, write the factors."""
        layers = factored_layers(self.model)
        [activation] = {getattr(layer, "activation", "linear") for layer in layers.values()}
        if activation == "linear":
            self.model.save_pretrained(folder, state_dict=merged(self.model))
        else:
            from salaad.factored.fixed_size import factored_outline  # takes seconds to import

            blocks = {name: layer.slr().to("cpu") for name, layer in layers.items()}
            factored_outline(self.model, blocks, activation).save_pretrained(folder)
