"""Allocation by energy: what every block keeps under one threshold on energy per parameter for the whole model.

A unit is one singular value σ of a block, which costs n + m parameters and has the value per parameter σ²/(n + m), or
one entry s of its S, which costs one parameter and has the value s². All units of a model form a queue in descending
order of value per parameter, and a budget keeps the first ones: so a smaller budget keeps a subset of what a larger one
keeps, and κ is a result, not a setting.

No block costs more than the n·m parameters that it has dense: one whose first units would cost as much counts as dense,
and keeps all of its units. The others share what it does not take.

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
        shapes: name → (n, m).
        counts: levels × blocks × 2 (int64), the highest level first: singular values and entries of S at each level.
    """

    shapes: Mapping[str, tuple[int, int]]
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
        return cls({name: (n, m) for name, (n, m, *_) in spectra.items()}, counts.reshape(len(counts), len(spectra), 2))

    @property
    def parameters(self) -> int:
        """Parameters of all units together, of no block more than n·m."""
        return int((self.counts.sum(0) * self._unit_costs).sum(-1).minimum(self._dense).sum())

    @property
    def numbers(self) -> int:
        """Parameters of all units together as the paper counts them, which are the numbers in an elastic folder."""
        return int((self.counts.sum(0) * self._unit_costs).sum())

    @property
    def _unit_costs(self) -> Tensor:
        pairs = [(n + m, 1) for n, m in self.shapes.values()]
        return torch.tensor(pairs, dtype=torch.int64, device="cpu").view(-1, 2)

    @property
    def _dense(self) -> Tensor:
        return torch.tensor([n * m for n, m in self.shapes.values()], dtype=torch.int64, device="cpu")

    def keep(self, most: int) -> Kept:
        """Return name → (rank kept, entries kept) of the units that `first` returns."""
        return self.first(most).units()

    def units(self) -> Kept:
        """Return name → (rank, entries): the number of units of each block and kind in the queue."""
        pairs = self.counts.sum(0).tolist()
        return {name: (rank, entries) for name, (rank, entries) in zip(self.shapes, pairs, strict=True)}

    def first(self, most: int) -> "UnitQueue":
        """Return the longest prefix of the queue with at most `most` parameters, and all units of dense blocks."""
        return self if self.parameters <= most else self._prefix(most, self._dense)

    def first_stored(self, most: int) -> "UnitQueue":
        """Return the longest prefix of the queue that is stored in at most `most` numbers."""
        unlimited = torch.full_like(self._dense, self.numbers + 1)
        return self if self.numbers <= most else self._prefix(most, unlimited)

    def _prefix(self, most: int, limit: Tensor) -> "UnitQueue":
        """Return the longest prefix that costs at most `most`, where no block costs more than `limit`.

        With it come all units of blocks whose units in the prefix cost as much as their limit. `most` has to be below
        the cost of all units.
        """
        unit = self._unit_costs
        spent = (self.counts * unit).sum(-1).cumsum(0)
        whole = int(torch.count_nonzero(spent.minimum(limit).sum(-1) <= most))
        before = spent[whole - 1] if whole else torch.zeros_like(limit)
        last = self._first_of_level(self.counts[whole], before, most, limit)
        full = before + (last * unit).sum(-1) >= limit
        kept = self.counts.clone()
        kept[whole], kept[whole + 1 :] = last, 0
        kept[:, full] = self.counts[:, full]
        return UnitQueue(self.shapes, kept)

    def _first_of_level(self, counts: Tensor, before: Tensor, most: int, limit: Tensor) -> Tensor:
        """Return how many of the units of one level (blocks × 2) fit, if the levels above cost each block `before`."""
        unit, limits = self._unit_costs.flatten(), limit.repeat_interleave(2)
        costs = counts.flatten() * unit
        begin = before.repeat_interleave(2)
        begin[1::2] += costs[::2]
        added = (begin + costs).minimum(limits) - begin.minimum(limits)
        room = most - int(before.minimum(limit).sum()) - (added.cumsum(0) - added)
        # Units are taken in order: where one does not fit, nothing behind it is kept, not even where it would fit.
        fitting = torch.where(added <= room, counts.flatten(), room // unit)
        return torch.minimum(counts.flatten(), fitting.clamp_min(0)).view(-1, 2)


def _level(values: Tensor, cost: int) -> Tensor:
    """The levels of units σ or s that cost `cost` parameters: below `_LEVELS`, rising with the value per parameter."""
    return (values.cpu().double().square() / cost).view(torch.int64) >> _DROPPED_BITS


def allocate_by_energy(spectra: Spectra, *, most: int) -> Kept:
    """Ranks and entries to keep so that the blocks have at most `most` parameters, and less than one unit fewer.

    All are kept if they have no more.

    Args:
        spectra: name → (n, m, singular values of L, entries of S or their magnitudes).
        most: parameters of all blocks together, of which none counts more than n·m.

    Returns:
        Name → (rank kept, entries kept); the largest singular values and entries are kept.

    Raises:
        ValueError: `most` is negative.
    """
    if most < 0:
        raise ValueError(f"blocks cannot have {most:,} parameters; give 0 or more")
    return UnitQueue.of(spectra).keep(most)


def least_parameters(blocks: Blocks, kept: Kept) -> int:
    """Parameters of an allocation, Σ rank·(n + m) + nnz over the blocks, of no block more than the n·m it has dense.

    Args:
        blocks: name → (n, m, …).
        kept: name → (rank kept, entries kept).
    """
    return sum(min(kept[name][0] * (n + m) + kept[name][1], n * m) for name, (n, m, *_) in blocks.items())


def implied_kappa(blocks: Blocks, kept: Kept) -> float | None:
    """The κ of eq. 9 that an allocation amounts to: L's share of the removed parameters; None if none are removed.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        kept: name → (rank kept, entries kept).
    """
    removed = parameters(blocks) - parameters(blocks, kept)
    from_L = sum((rank - kept[name][0]) * (n + m) for name, (n, m, rank, _) in blocks.items())
    return from_L / removed if removed else None
