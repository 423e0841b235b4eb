"""Where the matrices of a model are: the weight of a module, or one matrix of a 3-D parameter, as experts have them."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd


class Place(NamedTuple):
    """Where a matrix of a model is stored.

    Args:
        module: the module that holds the parameter.
        key: name of the parameter in this module.
        index: which matrix of a 3-D parameter; None where the parameter is the matrix.
    """

    module: nn.Module
    key: str
    index: int | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter as it is now."""
        return self.module._parameters[self.key]

    @property
    def weight(self) -> Tensor:
        """The matrix (n×m): the parameter itself, or a view that shares its memory and is outside of autograd."""
        return self.parameter if self.index is None else self.parameter.detach()[self.index]

    @property
    def gradient(self) -> Tensor | None:
        """The gradient of the matrix (n×m): the parameter's gradient or a view of it; None if there is none."""
        whole = self.parameter.grad
        return whole if self.index is None or whole is None else whole[self.index]


class Weights(Mapping[str, Tensor]):
    """Name → matrix (n×m), read from the model at every access.

    Args:
        places: name → where the matrix is.
    """

    def __init__(self, places: Mapping[str, Place]) -> None:
        self.places = dict(places)

    def __getitem__(self, name: str) -> Tensor:
        """The matrix of this name."""
        return self.places[name].weight

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.places)

    def __len__(self) -> int:
        """The number of matrices."""
        return len(self.places)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Name → the parameter that the matrix is, or is a part of."""
        return {name: place.parameter for name, place in self.places.items()}


def matrices(model: nn.Module) -> dict[str, Place]:
    """Name → place of every matrix that could be a block, in the model's own order.

    A module's 2-D weight has the module's name; the third matrix of a 3-D parameter `experts.down_proj` is
    `experts.down_proj.2`.
    """
    found = {}
    for name, module in model.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            if key == "weight" and parameter.ndim == 2 and parameter.numel():
                found[name] = Place(module, key)
            elif parameter.ndim == 3 and not isinstance(module, _ConvNd):
                for i in range(len(parameter)):
                    found[f"{name}.{key}.{i}" if name else f"{key}.{i}"] = Place(module, key, i)
    return found


def place_of(model: nn.Module, name: str) -> Place | None:
    """Return the place of the matrix called `name`; None if the model has no such matrix."""
    try:
        module = model.get_submodule(name)
    except AttributeError:
        pass
    else:
        return Place(module, "weight") if getattr(module._parameters.get("weight"), "ndim", 0) == 2 else None
    holder, _, index = name.rpartition(".")
    path, _, key = holder.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return None
    parameter = module._parameters.get(key)
    whole = parameter is not None and parameter.ndim == 3 and index.isdigit() and int(index) < len(parameter)
    return Place(module, key, int(index)) if whole else None


def weights_of(model: nn.Module, names: Mapping[str, object] | list[str]) -> Weights:
    """The matrices of these names; a KeyError if the model lacks one."""
    places = {name: place_of(model, name) for name in names}
    if missing := [name for name, place in places.items() if place is None]:
        raise KeyError(missing[0])
    return Weights(places)


def tied_modules(model: nn.Module) -> set[str]:
    """Names of the modules that share a weight with another module, or that a model of transformers says to tie."""
    declared = getattr(model, "all_tied_weights_keys", {})
    holders: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(name.rpartition(".")[0])
    shared = {name for names in holders.values() if len(names) > 1 for name in names}
    return shared | {name.rpartition(".")[0] for pair in declared.items() for name in pair}
