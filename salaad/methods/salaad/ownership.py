"""Which rank owns which block, by the modelled cost of its update.

`round_robin` assigns the blocks in order of cost, the most expensive first, and reverses the order of ranks after each
turn, so that no rank is first in every turn. `balanced` assigns each block to the rank with the least cost so far; this
also makes up for a block that costs more than many others together, such as an embedding.
"""

import heapq
from collections.abc import Mapping
from typing import Literal

from torch import Tensor

Dealing = Literal["round_robin", "balanced"]


def update_cost(n: int, m: int) -> float:
    """Modelled cost of the ADMM update of an n×m block: two products with the Gram matrix and one eigh of it.

    Modelled and not measured, so that every start of a run arrives at the same owners. The eigh of an s×s matrix has
    9·s³ operations (`update_operations`) and counts like 22·s³ of a product, as it goes column by column and is slower.
    """
    short, long = sorted((n, m))
    return short**2 * (4 * long + 22 * short)


def update_operations(n: int, m: int) -> tuple[float, float]:
    """Operations of an n×m block's update through ZZᵀ: those of two products, those of an eigensolver with vectors."""
    short, long = sorted((n, m))
    return 4 * long * short**2, 9 * short**3


def costs_of(blocks: Mapping[str, Tensor]) -> dict[str, float]:
    """Block → cost of the update of its weight (n×m)."""
    return {name: update_cost(*X.shape) for name, X in blocks.items()}


def dearest_first(costs: Mapping[str, float]) -> list[str]:
    """The blocks sorted by cost, the largest first, ties by name."""
    return sorted(costs, key=lambda name: (-costs[name], name))


def assign_owners(costs: Mapping[str, float], ranks: int, how: Dealing = "round_robin") -> dict[str, int]:
    """Return block → owner, in the order of `costs`; the same on every rank and in every start of a run."""
    owners, loads = {}, [(0.0, rank) for rank in range(ranks)]
    for i, name in enumerate(dearest_first(costs)):
        if how == "round_robin":
            place = i % (2 * ranks)
            owners[name] = place if place < ranks else 2 * ranks - 1 - place
        else:
            load, rank = loads[0]
            owners[name] = rank
            heapq.heapreplace(loads, (load + costs[name], rank))
    return {name: owners[name] for name in costs}


def owners_of(blocks: Mapping[str, Tensor], ranks: int, how: Dealing = "round_robin") -> dict[str, int]:
    """Return block → owner for the weights (n×m) of a model's blocks."""
    return assign_owners(costs_of(blocks), ranks, how)


def loads(amounts: Mapping[str, float], owners: Mapping[str, int], ranks: int) -> list[float]:
    """Return the sum of the amounts of each rank's blocks, in rank order."""
    sums: list[float] = [0] * ranks
    for name, amount in amounts.items():
        sums[owners[name]] += amount
    return sums


def imbalance(costs: Mapping[str, float], owners: Mapping[str, int], ranks: int) -> float:
    """The most loaded rank's cost over the mean cost of a rank; 1 is perfect balance."""
    of_ranks = loads(costs, owners, ranks)
    return max(of_ranks) * ranks / sum(of_ranks)
