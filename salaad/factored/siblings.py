"""Layers that are given the same x one after the other (q, k and v; gate and up): the first computes all results.

When x has few rows, launching the kernels of a layer takes longer than their work, so the results of a group's other
layers are computed by the same launches and kept until these layers are called. The model's own code stays unchanged.
"""

import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from salaad.factored import gpu_products
from salaad.factored.layers import SlrLinear
from salaad.factored.slr_weight import SlrWeight
from salaad.model.roles import role_of

# Role → name of the input that all layers with this name in one module share if their input widths are equal.
_GIVEN = {"q": "attention", "k": "attention", "v": "attention", "gate": "feed-forward", "up": "feed-forward"}
_MOST_WASTED = 8  # times that kept results were not used, after which a group is given up


@dataclass
class _Waiting:
    """Kept results for one x that their layers have not used yet, valid as long as neither x nor a weight changes."""

    x: weakref.ref
    versions: tuple[int, ...]
    results: dict[SlrLinear, Tensor]


class _OfThread(threading.local):
    """What a thread keeps of a group: its results, which no other thread may take, and how often it wasted some."""

    waiting: _Waiting | None = None
    wasted: int = 0


class Siblings:
    """A group of layers of one input width that are given the same x.

    Args:
        layers: the layers of the group; each refers to the group.
    """

    def __init__(self, layers: tuple[SlrLinear, ...]) -> None:
        self.layers = layers
        self._own = _OfThread()

    def linear(self, layer: SlrLinear, x: Tensor) -> Tensor | None:
        """y (…×n) of one layer for x (…×m); None where the group cannot be computed together."""
        # Another thread may give the group up, so what it consists of is read once.
        layers, own = self.layers, self._own
        waiting, versions = own.waiting, _versions(layers, x)
        if versions is None:
            return None
        if waiting is not None and waiting.results:
            if waiting.x() is x and waiting.versions == versions and layer in waiting.results:
                return waiting.results.pop(layer)
            own.wasted += 1
            if own.wasted > _MOST_WASTED:
                layers = self.layers = ()
        found = [each._native(x) for each in layers]
        if not found or None in found:
            return None
        products, tensors = zip(*found, strict=True)
        if not _fit(products, x):
            return None
        biases = [each.bias for each in layers]
        if any(bias is not None and bias.device != x.device for bias in biases):
            return None
        results = gpu_products.linear_of_several(products, tensors, x, biases)
        waiting = dict(zip(layers, results, strict=True))
        y = waiting.pop(layer)
        own.waiting = _Waiting(weakref.ref(x), versions, waiting)
        return y

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle, without kept results."""
        return {"layers": self.layers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take the state of `__getstate__`."""
        self.__init__(**state)


def _versions(layers: tuple[SlrLinear, ...], x: Tensor) -> tuple[int, ...] | None:
    """The numbers of writes to x and to each weight; None where writes are not counted.

    That is of inference tensors, and of weights that are computed anew in each pass, as pruning does.
    """
    weights = [each._parameters.get(name) for each in layers for name in ("U", "V", "S_values")]
    if any(weight is None for weight in weights):
        return None
    tensors = (x, *weights, *(each.bias for each in layers if each.bias is not None))
    return None if any(t.is_inference() for t in tensors) else tuple(t._version for t in tensors)


def _fit(products: Sequence, x: Tensor) -> bool:
    """Whether all layers have GPU kernels for the same dtypes, and x counts as having few rows for each of them."""
    if not all(isinstance(each, gpu_products.Products) and each.has_few(x) for each in products):
        return False
    return len({each.kinds for each in products}) == 1


def join_siblings(layers: Mapping[str, SlrWeight]) -> None:
    """Make groups of the layers (by module name) whose roles say that they are given the same x.

    A layer with an empty S stays alone: two thin products are all that it needs.
    """
    groups = defaultdict(list)
    for name, layer in layers.items():
        parent, _, own = name.rpartition(".")
        given = None if own.isdigit() else _GIVEN.get(role_of(name))  # numbered experts each have their own x
        if given and isinstance(layer, SlrLinear) and layer.nnz:
            groups[parent, given, layer.in_features].append(layer)
    for together in groups.values():
        siblings = Siblings(tuple(together)) if len(together) > 1 else None
        for layer in together:
            layer.siblings = siblings
