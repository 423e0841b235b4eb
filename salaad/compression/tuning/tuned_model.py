"""A model whose blocks are U·V + S of any size, with gradients for U, V, the entries of S and some other parameters.

The dense model lends its modules: in a call its weights are replaced by what the trained numbers amount to, and outside
of it the model computes as before. So teacher and student are one set of dense weights.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from salaad.compression.split import Parts
from salaad.factored.slr import Slr
from salaad.hpa import Kept
from salaad.model.weights import weights_of


class TunedBlock(nn.Module):
    """U, V and the values of S of one block in float32; the positions of S stay.

    Every term of U·V is shared evenly by its two vectors, so that relative changes of either count alike.

    Args:
        slr: to begin with.
    """

    def __init__(self, slr: Slr) -> None:
        super().__init__()
        share = (slr.V.float().norm(dim=1) / slr.U.float().norm(dim=0).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
        self.shape = slr.shape
        self.U = nn.Parameter(slr.U.float() * share)
        self.V = nn.Parameter(slr.V.float() / share[:, None])
        self.values = nn.Parameter(slr.values.float().clone())
        self.register_buffer("positions", slr.positions.long())

    def dense(self, rank: int | None = None, nnz: int | None = None) -> Tensor:
        """The n×m matrix of the first `rank` terms and `nnz` entries, or of all."""
        flat = (self.U[:, :rank] @ self.V[:rank]).flatten()
        return flat.index_add(0, self.positions[:nnz], self.values[:nnz]).view(self.shape)

    def slr(self) -> Slr:
        """All units as they are now, on the CPU, in the order in which they were given."""
        U, V, positions, values = (part.detach().cpu() for part in (self.U, self.V, self.positions, self.values))
        return Slr(self.shape, U, V, positions, values)


class TunedModel(nn.Module):
    """What is trained of a model, and the model that it amounts to.

    Args:
        model: the dense model, whose own parameters are frozen.
        parts: block → its units.
        others: further parameters of the model that are trained, by name, each with the numbers to begin with.
    """

    def __init__(self, model: nn.Module, parts: Parts, others: Mapping[str, Tensor] = MappingProxyType({})) -> None:
        super().__init__()
        model.requires_grad_(False)
        self._lent = (model,)  # in a tuple, so that its parameters are not counted among ours
        self._keys = {id(p): name for name, p in model.named_parameters()}
        # Names of modules may hold no dots.
        self.blocks = nn.ModuleDict({_flat(name): TunedBlock(slr) for name, slr in parts.items()})
        self.names = tuple(parts)
        self.others = nn.ParameterDict({_flat(name): value.detach().float().clone() for name, value in others.items()})
        self.other_names = tuple(others)
        self.to(next(model.parameters()).device)

    @property
    def model(self) -> nn.Module:
        """The dense model."""
        return self._lent[0]

    def trained(self, prefix: str = "") -> Iterator[nn.Parameter]:
        """All that is trained of the module called `prefix`, of the whole model for ""."""
        for name in self.names:
            if _is_inside(name, prefix):
                yield from self.blocks[_flat(name)].parameters()
        yield from (self.others[_flat(name)] for name in self.other_names if _is_inside(name, prefix))

    def weights(self, kept: Kept | None = None, prefix: str = "") -> dict[str, Tensor]:
        """Parameter of the module called `prefix`, by its name there → the weight it has now, in the model's dtype.

        Args:
            kept: block → (rank, entries) that count; all units for None.
            prefix: of the module; "" is the whole model.
        """
        chosen = [name for name in self.names if _is_inside(name, prefix)]
        found: dict[str, Tensor] = {}
        for name, place in weights_of(self.model, chosen).places.items():
            W = self.blocks[_flat(name)].dense(*(kept[name] if kept else ()))
            key = self._keys[id(place.parameter)]
            if place.index is not None:  # one matrix of a 3-D parameter
                whole = found.get(key, place.parameter.float())
                W = torch.cat([whole[: place.index], W[None], whole[place.index + 1 :]])
            found[key] = W
        found |= {name: self.others[_flat(name)] for name in self.other_names if _is_inside(name, prefix)}
        dtype = next(self.model.parameters()).dtype
        return {name[len(prefix) + 1 if prefix else 0 :]: W.to(dtype) for name, W in found.items()}

    def call(self, wrapper: nn.Module, *inputs: Any, kept: Kept | None = None) -> Any:
        """What `wrapper`, whose attribute `model` is the dense model, gives with the weights of now."""
        weights = {f"model.{name}": W for name, W in self.weights(kept).items()}
        return functional_call(wrapper, weights, inputs)

    def call_inside(self, prefix: str, *inputs: Any, **options: Any) -> Any:
        """What the module called `prefix` gives with the weights of now."""
        return functional_call(self.model.get_submodule(prefix), self.weights(prefix=prefix), inputs, options)

    def parts(self) -> Parts:
        """All blocks as they are now."""
        return {name: self.blocks[_flat(name)].slr() for name in self.names}

    def other_parameters(self) -> dict[str, Tensor]:
        """The further parameters as they are now, on the CPU."""
        return {name: self.others[_flat(name)].detach().cpu() for name in self.other_names}


def _flat(name: str) -> str:
    return name.replace(".", "/")


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or f"{name}.".startswith(f"{prefix}.")
