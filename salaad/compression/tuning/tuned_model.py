"""A model whose blocks are U·V + S of any size, with gradients for U, V, the entries of S and some other parameters.

The modules are those of the dense model: during a call their weights are replaced by the trained ones, and outside of a
call the dense model computes as before. So teacher and student share one set of dense weights.
"""

from collections.abc import Iterator, Mapping
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

    The two vectors of every term of U·V begin with equal norms, so that relative changes of either count alike.

    Args:
        slr: the initial U, V and S.
    """

    def __init__(self, slr: Slr) -> None:
        super().__init__()
        share = (slr.V.float().norm(dim=1) / slr.U.float().norm(dim=0).clamp_min(1e-30)).clamp_min(1e-30).sqrt()
        self.shape = slr.shape
        self.U = nn.Parameter(slr.U.float() * share)
        self.V = nn.Parameter(slr.V.float() / share[:, None])
        self.values = nn.Parameter(slr.values.float().clone())
        self.register_buffer("positions", slr.positions.long(), persistent=False)  # never changed, so not saved

    def dense(self, rank: int | None = None, nnz: int | None = None) -> Tensor:
        """The n×m matrix of the first `rank` terms and `nnz` entries, or of all."""
        flat = (self.U[:, :rank] @ self.V[:rank]).flatten()
        return flat.index_add(0, self.positions[:nnz], self.values[:nnz]).view(self.shape)

    def slr(self) -> Slr:
        """Return all units with their current values, on the CPU, in the order in which they were given."""
        U, V, positions, values = (part.detach().cpu() for part in (self.U, self.V, self.positions, self.values))
        return Slr(self.shape, U, V, positions, values)


class TunedModel(nn.Module):
    """A dense model together with trained tensors, from which the weights of the cut model are computed.

    Args:
        model: the dense model, whose own parameters are frozen.
        parts: block → its units.
        others: further parameters of the model that are trained: name → initial values.
    """

    def __init__(self, model: nn.Module, parts: Parts, others: Mapping[str, Tensor]) -> None:
        super().__init__()
        model.requires_grad_(False)
        self._lent = (model,)  # in a tuple, so that torch does not register its parameters here
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
        """Yield the trainable tensors of the module named `prefix`; of the whole model if it is ""."""
        for name in self.names:
            if _is_inside(name, prefix):
                yield from self.blocks[_flat(name)].parameters()
        yield from (self.others[_flat(name)] for name in self.other_names if _is_inside(name, prefix))

    def weights(self, kept: Kept | None = None, prefix: str = "", without: str | None = None) -> dict[str, Tensor]:
        """Return the trained weights of a module: parameter, by its name there → current values, in the model's dtype.

        Args:
            kept: block → (rank, number of entries) that are used; all units for None.
            prefix: name of the module; "" is the whole model.
            without: name of a module in it whose weights are left out.
        """

        def is_asked_for(name: str) -> bool:
            return _is_inside(name, prefix) and (without is None or not _is_inside(name, without))

        dtype = next(self.model.parameters()).dtype
        chosen = [name for name in self.names if is_asked_for(name)]
        found: dict[str, Tensor] = {}
        stacks: dict[str, list[Tensor]] = {}  # 3-D parameter → its matrices
        for name, place in weights_of(self.model, chosen).places.items():
            W = self.blocks[_flat(name)].dense(*(kept[name] if kept else ()))
            key = self._keys[id(place.parameter)]
            if place.index is None:
                found[key] = W.to(dtype)
            else:
                stacks[key] = stacks.get(key) or [*place.parameter.float()]
                stacks[key][place.index] = W
        found |= {key: torch.stack(matrices).to(dtype) for key, matrices in stacks.items()}
        found |= {name: self.others[_flat(name)].to(dtype) for name in self.other_names if is_asked_for(name)}
        return {name[len(prefix) + 1 if prefix else 0 :]: W for name, W in found.items()}

    def call(self, wrapper: nn.Module, *inputs: Any, kept: Kept | None = None) -> Any:
        """Return the output of `wrapper`, whose attribute `model` is the dense model, with the current weights."""
        weights = {f"model.{name}": W for name, W in self.weights(kept).items()}
        return functional_call(wrapper, weights, inputs)

    def call_inside(self, prefix: str, *inputs: Any, without: str | None = None, **options: Any) -> Any:
        """Return the output of the module named `prefix` with the current weights, but in `without` the dense ones."""
        weights = self.weights(prefix=prefix, without=without)
        return functional_call(self.model.get_submodule(prefix), weights, inputs, options)

    def parts(self) -> Parts:
        """Return block → its units with their current values, on the CPU."""
        return {name: self.blocks[_flat(name)].slr() for name in self.names}

    def other_parameters(self) -> dict[str, Tensor]:
        """Return name → current values of the further trained parameters, on the CPU."""
        return {name: self.others[_flat(name)].detach().cpu() for name in self.other_names}


def _flat(name: str) -> str:
    return name.replace(".", "/")


def _is_inside(name: str, prefix: str) -> bool:
    return not prefix or f"{name}.".startswith(f"{prefix}.")
