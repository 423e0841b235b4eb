"""The experts of a layer whose weights are one 3-D parameter, taken apart into a module per expert, and put together.

A stack of modules stands where the parameter was. The model's own code goes on as before: an expert taken out of the
stack multiplies by its own layer, and whatever else is done with the stack or an expert sees dense weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.model.weights import place_of


class ExpertStack(nn.Module):
    """A stack of linear layers in place of a parameter (experts × n × m).

    Args:
        weights: the parameter; each expert gets a copy of its matrix.
    """

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.matrix = tuple(weights.shape[1:])
        for i, weight in enumerate(weights.detach()):
            layer = nn.Linear(*self.matrix[::-1], bias=False, device="meta", dtype=weight.dtype)
            layer.weight = nn.Parameter(weight.clone(), requires_grad=weights.requires_grad)
            self.add_module(str(i), layer)

    def __len__(self) -> int:
        """How many experts there are."""
        return len(self._modules)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Experts × n × m, as of a tensor."""
        return len(self), *self.matrix

    def dense(self) -> Tensor:
        """The weights of all experts (experts × n × m), new at every call."""
        return torch.stack([dense_weight(layer) for layer in self._modules.values()])

    def __getitem__(self, index: int | Tensor) -> "Expert":
        """One expert, as the code of a model takes it out of the parameter."""
        return Expert(self._modules[str(int(index))])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch, with dense weights."""
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})


class Expert:
    """One expert's layer where a model's code expects its matrix (n×m).

    Args:
        layer: linear, without a bias.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        """Whatever a matrix has, such as its shape."""
        return getattr(dense_weight(self.layer), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """`linear` by the layer itself; any other function with the dense matrix."""
        if func is F.linear and len(args) > 1 and isinstance(args[1], Expert) and isinstance(args[0], Tensor):
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
            y = args[1].layer(args[0])
            return y if bias is None else y + bias
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})


def _as_tensor(value: Any) -> Any:
    if isinstance(value, ExpertStack):
        return value.dense()
    return dense_weight(value.layer) if isinstance(value, Expert) else value


def dense_weight(layer: nn.Module) -> Tensor:
    """The matrix (n×m) of an expert's layer, a plain tensor."""
    return layer.weight.as_subclass(Tensor)


def open_stacks(model: nn.Module, names: Iterable[str]) -> None:
    """Take 3-D parameters apart, in place, so that every named block is a module of its own.

    Args:
        model: with the parameters.
        names: of blocks; what is a module already, or is none, is passed over.
    """
    opened = False
    for name in names:
        place = place_of(model, name)
        if place is None or place.index is None:
            continue
        weights = place.parameter
        del place.module._parameters[place.key]
        place.module.add_module(place.key, ExpertStack(weights))
        opened = True
    # The other implementations of experts hand the whole parameter to a kernel.
    if opened and isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
        model.set_experts_implementation("eager")


def close_stacks(model: nn.Module) -> None:
    """Put together, in place, what `open_stacks` took apart and is all dense: one 3-D parameter of all experts."""
    for module in list(model.modules()):
        for key, stack in list(module._modules.items()):
            if isinstance(stack, ExpertStack) and all(type(layer) is nn.Linear for layer in stack._modules.values()):
                weights = nn.Parameter(stack.dense().detach())
                del module._modules[key]
                module.register_parameter(key, weights)


def stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """Name → every stack of a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertStack)}
