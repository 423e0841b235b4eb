"""Allocation by energy: what every block keeps under one threshold on energy per parameter for the whole model.

A unit is one singular value σ of a block, which costs n + m parameters and has the value per parameter σ²/(n + m), or
one entry s of its S, which costs one parameter and has the value s². All units of a model form a queue in descending
order of value per parameter, and a budget keeps the first ones: so a smaller budget keeps a subset of what a larger one
keeps, and κ is a result, not a setting.

Values per parameter are compared by their leading five bits, in steps of 3 to 6 %; among equals the earlier block comes
first. So a table with a few hundred rows, which a file can hold, determines exactly what any budget keeps.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salaad.hpa import Blocks, Kept, parameters

Spectra = Mapping[str, tuple[int, int, Tensor, Tensor]]

_DROPPED_BITS = 48  # of a float64: all but the exponent and the first four bits of the fraction
_LEVELS = 2 ** (63 - _DROPPED_BITS)


@dataclass(frozen=True)
class UnitQueue:
    """The queue of a model's units in descending order of value per parameter, as counts per level of value.

    Args:
        costs: name → parameters of one singular value, n + m.
        counts: levels × blocks × 2 (int64), the highest level first: singular values and entries of S at each level.
    """

    costs: Mapping[str, int]
    counts: Tensor

    @classmethod
    def of(cls, spectra: Spectra) -> "UnitQueue":
        """Build the queue from name → (n, m, singular values of L, entries of S or their magnitudes)."""
        sides = [values for _, _, sigma, S in spectra.values() for values in (sigma, S)]
        costs = [cost for n, m, *_ in spectra.values() for cost in (n + m, 1)]
        # Of each side only the levels that it has are kept. A new table for each would leave its memory in pieces.
        table, one = torch.zeros(_LEVELS, dtype=torch.int64, device="cpu"), torch.tensor(1, device="cpu")
        levels, numbers = [], []
        for values, cost in zip(sides, costs, strict=True):
            level = _level(values, cost)
            table.zero_().scatter_add_(0, level, one.expand_as(level))
            levels.append(table.nonzero().flatten())
            numbers.append(table[levels[-1]])
        known = torch.cat([torch.empty(0, dtype=torch.int64, device="cpu"), *levels]).unique()
        counts = torch.zeros(len(sides), len(known), dtype=torch.int64, device="cpu")
        for row, level, number in zip(counts, levels, numbers, strict=True):
            row[torch.searchsorted(known, level)] = number
        counts = counts.flip(1).T
        return cls({name: n + m for name, (n, m, *_) in spectra.items()}, counts.reshape(len(counts), len(spectra), 2))

    @property
    def parameters(self) -> int:
        """Parameters of all units together."""
        return int((self.counts.sum(0) * self._unit_costs).sum())

    @property
    def _unit_costs(self) -> Tensor:
        return torch.tensor([(cost, 1) for cost in self.costs.values()], dtype=torch.int64, device="cpu").view(-1, 2)

    def keep(self, most: int) -> Kept:
        """Return name → (rank kept, entries kept) for the longest queue prefix of at most `most` parameters."""
        return self.first(most).units()

    def units(self) -> Kept:
        """Return name → (rank, entries): the number of units of each block and kind in the queue."""
        pairs = self.counts.sum(0).tolist()
        return {name: (rank, entries) for name, (rank, entries) in zip(self.costs, pairs, strict=True)}

    def first(self, most: int) -> "UnitQueue":
        """Return the longest prefix of the queue with at most `most` parameters."""
        unit = self._unit_costs.flatten()
        counts = self.counts.flatten(1)
        spent = (counts @ unit).cumsum(0)
        whole = int(torch.count_nonzero(spent <= most))
        kept = counts[: whole + 1].clone()
        if whole < len(counts):
            room = most - int(spent[whole - 1]) if whole else most
            before = (counts[whole] * unit).cumsum(0) - counts[whole] * unit
            # Units are taken in order: where one does not fit, nothing behind it is kept, not even where it would fit.
            kept[whole] = torch.minimum(counts[whole], ((room - before) // unit).clamp_min(0))
        return UnitQueue(self.costs, kept.view(len(kept), *self.counts.shape[1:]))


def _level(values: Tensor, cost: int) -> Tensor:
    """The levels of units σ or s that cost `cost` parameters: below `_LEVELS`, rising with the value per parameter."""
    return (values.cpu().double().square() / cost).view(torch.int64) >> _DROPPED_BITS


def allocate_by_energy(spectra: Spectra, *, remove: int) -> Kept:
    """Ranks and entries to keep so that at least `remove` parameters go, and less than one unit more.

    Args:
        spectra: name → (n, m, singular values of L, entries of S or their magnitudes).
        remove: parameters to remove, from 0 to all that the blocks hold.

    Returns:
        Name → (rank kept, entries kept); the largest singular values and entries are kept.

    Raises:
        ValueError: `remove` is out of range.
    """
    queue = UnitQueue.of(spectra)
    if not 0 <= remove <= queue.parameters:
        raise ValueError(f"{remove:,} parameters cannot be removed from {queue.parameters:,}; give 0 to all of them")
    return queue.keep(queue.parameters - remove)


def implied_kappa(blocks: Blocks, kept: Kept) -> float | None:
    """The κ of eq. 9 that an allocation amounts to: L's share of the removed parameters; None if none are removed.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        kept: name → (rank kept, entries kept).
    """
    removed = parameters(blocks) - parameters(blocks, kept)
    from_L = sum((rank - kept[name][0]) * (n + m) for name, (n, m, rank, _) in blocks.items())
    return from_L / removed if removed else None
