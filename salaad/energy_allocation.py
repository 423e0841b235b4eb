"""One threshold for the whole model: what every block keeps by energy per parameter. Arithmetic only.

A unit is one singular value of a block, which costs n + m parameters and is worth σ²/(n + m), or one entry of its S,
which costs one and is worth its square. All units of a model stand in one line, the most worth first, and a budget
keeps the beginning of the line: so a smaller budget keeps a part of what a larger one keeps, and κ is a result.

Worth is compared by its leading five bits, in steps of 3 to 6 %; of equal worth the earlier block comes first. So a
table of a few hundred lines says exactly what any budget keeps, and a file can carry it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.hpa import Blocks, Kept, parameters

Spectra = Mapping[str, tuple[int, int, Tensor, Tensor]]

_DROPPED_BITS = 48  # of a float64, all but the exponent and the first four bits behind the leading one
_LEVELS = 2 ** (63 - _DROPPED_BITS)


@dataclass(frozen=True)
class Line:
    """The units of a model in order of worth, counted level by level.

    Args:
        costs: name → parameters of one of its singular values, n + m.
        counts: levels × blocks × 2 (int64), the best level first: singular values and entries of S at each level.
    """

    costs: Mapping[str, int]
    counts: Tensor

    @classmethod
    def of(cls, spectra: Spectra) -> "Line":
        """The line of name → (n, m, singular values of L, magnitudes of S's entries)."""
        sides = [values for _, _, sigma, S in spectra.values() for values in (sigma, S)]
        costs = [cost for n, m, *_ in spectra.values() for cost in (n + m, 1)]
        counts = torch.zeros(len(sides), _LEVELS, dtype=torch.int64)
        for i, (values, cost) in enumerate(zip(sides, costs, strict=True)):
            counts[i] = torch.bincount(_level(values, cost), minlength=_LEVELS)
        counts = counts[:, counts.any(0)].flip(1).T
        return cls({name: n + m for name, (n, m, *_) in spectra.items()}, counts.reshape(len(counts), len(spectra), 2))

    @property
    def parameters(self) -> int:
        """Parameters of all units together."""
        return int((self.counts.sum(0) * self._unit_costs).sum())

    @property
    def _unit_costs(self) -> Tensor:
        return torch.tensor([(cost, 1) for cost in self.costs.values()], dtype=torch.int64).view(-1, 2)

    def keep(self, most: int) -> Kept:
        """Name → (rank kept, entries kept): the longest beginning of the line with at most `most` parameters."""
        unit = self._unit_costs.flatten()
        counts = self.counts.flatten(1)
        spent = (counts @ unit).cumsum(0)
        whole = int(torch.count_nonzero(spent <= most))
        kept = counts[:whole].sum(0)
        if whole < len(counts):
            room = most - int(spent[whole - 1]) if whole else most
            before = (counts[whole] * unit).cumsum(0) - counts[whole] * unit
            # The first side that does not fit ends the line, so every side behind it gets nothing.
            kept += torch.minimum(counts[whole], ((room - before) // unit).clamp_min(0))
        pairs = kept.view(-1, 2).tolist()
        return {name: (rank, entries) for name, (rank, entries) in zip(self.costs, pairs, strict=True)}


def _level(values: Tensor, cost: int) -> Tensor:
    """Of units of this size and cost a number below `_LEVELS` that rises with their worth."""
    return (values.cpu().double().square() / cost).view(torch.int64) >> _DROPPED_BITS


def allocate_by_energy(spectra: Spectra, *, remove: int) -> Kept:
    """Ranks and entries to keep so that at least `remove` parameters go, and less than one unit more.

    Args:
        spectra: name → (n, m, singular values of L, magnitudes of S's entries).
        remove: parameters to remove, from 0 to all that the blocks hold.

    Returns:
        Name → (rank kept, entries kept), the largest ones.

    Raises:
        UserError: `remove` is out of range.
    """
    line = Line.of(spectra)
    if not 0 <= remove <= line.parameters:
        raise UserError(f"{remove:,} parameters cannot be removed from {line.parameters:,}; give 0 to all of them")
    return line.keep(line.parameters - remove)


def implied_kappa(blocks: Blocks, kept: Kept) -> float | None:
    """κ: the part of what is removed that the low-rank side gives; None where nothing is removed.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        kept: name → (rank kept, entries kept).
    """
    removed = parameters(blocks) - parameters(blocks, kept)
    from_L = sum((rank - kept[name][0]) * (n + m) for name, (n, m, rank, _) in blocks.items())
    return from_L / removed if removed else None
