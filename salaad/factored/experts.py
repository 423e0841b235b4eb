"""Experts whose weights are one 3-D parameter, split into a module per expert and joined again.

A stack of modules takes the place of the parameter. The model's own code works unchanged: `F.linear` with an expert of
the stack calls this expert's layer, and every other function of torch gets dense weights.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from salaad.model.weights import place_of

_BEFORE = "_experts_before"  # the attribute of a model that holds its implementation of experts without stacks


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
        """The number of experts."""
        return len(self._modules)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (experts, n, m), as a tensor has it."""
        return len(self), *self.matrix

    def dense(self) -> Tensor:
        """The weights of all experts (experts × n × m), new at every call."""
        return torch.stack([dense_weight(layer) for layer in self._modules.values()])

    def __getitem__(self, index: int | Tensor) -> "Expert":
        """Return one expert, as a model's code indexes the parameter; negative numbers count from the end."""
        return Expert(self._modules[str(range(len(self))[int(index)])])

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dense weights, such as `transpose`, where a module has none of this name."""
        # Private names are those of modules; a copy, for one, would be made by the tensor's method.
        if name.startswith("_") or not hasattr(Tensor, name):
            return super().__getattr__(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call any function of torch with dense weights in place of stacks and experts."""
        return func(*map(_as_tensor, args), **{name: _as_tensor(value) for name, value in (kwargs or {}).items()})


class Expert:
    """One expert's layer, in the place where a model's code expects the expert's matrix (n×m).

    Args:
        layer: the expert's linear layer, without a bias.
    """

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the dense matrix, such as its shape."""
        return getattr(dense_weight(self.layer), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute `F.linear` by the layer itself, and any other function with the dense matrix."""
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
    """The matrix (n×m) of an expert's layer as a plain tensor."""
    return layer.weight.as_subclass(Tensor)


def open_stacks(model: nn.Module, names: Iterable[str]) -> None:
    """Split 3-D parameters, in place, so that every named block is a module of its own.

    Args:
        model: the model with the parameters.
        names: names of blocks; one that is a module already, or that the model lacks, is skipped.
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
    # The implementations of experts other than eager pass the whole parameter to a kernel.
    if opened and isinstance(model, PreTrainedModel) and model._can_set_experts_implementation():
        vars(model).setdefault(_BEFORE, model.get_experts_implementation())
        model.set_experts_implementation("eager")


def close_stacks(model: nn.Module) -> None:
    """Join, in place, every stack of `open_stacks` whose experts are all dense into one 3-D parameter again.

    Without a stack the model computes its experts by the implementation that it had before.
    """
    for module in list(model.modules()):
        for key, stack in list(module._modules.items()):
            if isinstance(stack, ExpertStack) and all(type(layer) is nn.Linear for layer in stack._modules.values()):
                trained = any(parameter.requires_grad for parameter in stack.parameters())
                weights = nn.Parameter(stack.dense().detach(), trained)
                del module._modules[key]
                module.register_parameter(key, weights)
    if not stacks(model) and (before := vars(model).pop(_BEFORE, None)):
        model.set_experts_implementation(before)


def stacks(model: nn.Module) -> dict[str, ExpertStack]:
    """Name → stack of all expert stacks in a model."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ExpertStack)}
