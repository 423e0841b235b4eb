"""The schedule of pull and updates; the ADMM updates of the blocks that a rank owns, in progress and on record."""

import math
import sys
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain

import torch
from torch import Tensor

from salaad.common import distributed
from salaad.common.errors import NotFiniteError, UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.float32 import true_float32
from salaad.methods.salaad.ownership import dearest_first
from salaad.methods.salaad.round import Round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import SOLVERS, UpdateRecord


def pulled_steps(config: SalaadConfig, total_steps: int | None) -> range:
    """Return the steps, counted from 0, in which the weights are pulled towards L + S.

    Args:
        config: the parts of the run without a pull: `onset` and `release`.
        total_steps: optimizer steps of the whole run, if known; without `release` the pull has no end.

    Raises:
        UserError: a part is given of a run whose length is not known.
    """
    for name in ("onset", "release"):
        if getattr(config, name) and total_steps is None:
            raise UserError(
                f"{name} is {getattr(config, name)}, a part of the training, whose length is not known; give "
                "total_steps, to Salaad(model, config, …) or Salaad.load(model, folder, …)"
            )
    begin = round(config.onset * total_steps) if config.onset else 0
    return range(begin, round((1 - config.release) * total_steps) if config.release else sys.maxsize)


class Schedule:
    """When the blocks of all ranks are updated and the weights pulled, in optimizer steps of the whole run.

    Synchronous: all blocks, every K steps. Staggered: the i-th of an owner's n blocks has the offset ⌊iK/n⌋ in K steps.

    Args:
        config: K (`every`), the schedule, and the parts of the run without a pull.
        owners: block → rank that owns it.
        costs: block → cost of its update, by which an owner's blocks are ordered, the most expensive first.
        total_steps: optimizer steps of the whole run, if known.

    Attributes:
        pulled: the steps, counted from 0, in which the weights are pulled.

    Raises:
        UserError: as for `pulled_steps`.
    """

    def __init__(
        self, config: SalaadConfig, owners: Mapping[str, int], costs: Mapping[str, float], total_steps: int | None
    ) -> None:
        self.pulled = pulled_steps(config, total_steps)
        self._every, self._blocks = config.every, list(owners)
        owned: dict[int, list[str]] = {rank: [] for rank in sorted(set(owners.values()))}
        for name in dearest_first(costs):
            owned[owners[name]].append(name)
        self._at: dict[int, list[str]] = {}  # offset → blocks
        for blocks in owned.values():
            for i, name in enumerate(blocks):
                offset = i * config.every // len(blocks) if config.schedule == "staggered" else 0
                self._at.setdefault(offset, []).append(name)

    def due(self, steps: int) -> list[str]:
        """Return the blocks that are updated after `steps` optimizer steps."""
        if steps == self.pulled.start:  # the pull begins towards X itself
            return self._blocks
        return self._at.get(steps % self._every, [])


class Updates:
    """The updates of this rank's blocks, in rounds that a device may still compute while the host goes on.

    Args:
        surrogates: block → surrogate, for the blocks of this rank.
        weights: block → X, for the blocks of all ranks.
        overlap: whether a GPU computes a round at the same time as the work that it is given until `end`.
        most_records: how many of the newest updates of each block are kept for `drain`; None keeps all.

    Attributes:
        last: block of this rank → optimizer steps after which it was last updated.
    """

    def __init__(
        self,
        surrogates: Mapping[str, Surrogate],
        weights: Mapping[str, Tensor],
        overlap: bool,
        most_records: int | None,
    ) -> None:
        self._surrogates, self._weights, self._overlap = surrogates, weights, overlap
        self.last: dict[str, int] = dict.fromkeys(surrogates, 0)
        self._begun: tuple[int, list[str], Round] | None = None
        most = None if most_records is None else most_records * len(surrogates)
        self._records: deque[tuple[int, str, Tensor]] = deque(maxlen=most)

    def reset_to_weights(self, names: Iterable[str], steps: int) -> list[str]:
        """Let L be X after `steps` optimizer steps, which is not recorded, in blocks in `names` that this rank owns.

        Returns:
            The other blocks of this rank in `names`: those with a threshold, as where a run goes on with a later onset.

        Raises:
            NotFiniteError: a weight holds NaN or infinity; then no block has changed.
        """
        mine = self._mine(names)
        free = [name for name in mine if not self._surrogates[name].thresholded]
        finite = torch.stack([self._weights[name].float().isfinite().all() for name in free]).tolist() if free else []
        for name in (name for name, is_finite in zip(free, finite, strict=True) if not is_finite):
            raise NotFiniteError(name, steps)
        for name in free:
            self._surrogates[name].reset_to(self._weights[name])
            self.last[name] = steps
        return [name for name in mine if name not in free]

    def begin(self, names: Iterable[str], steps: int) -> None:
        """Begin to update the blocks in `names` that this rank owns, after `steps` optimizer steps."""
        self.end()
        if mine := self._mine(names):
            blocks = [(self._surrogates[name], self._weights[name]) for name in mine]
            with true_float32(blocks[0][1].device):
                self._begun = steps, mine, Round(blocks, self._overlap)

    def _mine(self, names: Iterable[str]) -> list[str]:
        return [name for name in names if name in self._surrogates]

    def end(self) -> None:
        """Wait for the round that was begun, if there is one, and record its updates.

        Raises:
            NotFiniteError: a weight holds NaN or infinity.
        """
        if self._begun is None:
            return
        (steps, names, begun), self._begun = self._begun, None
        with true_float32(self._weights[names[0]].device):
            rows = begun.end()
        for name, statistics in zip(names, rows, strict=True):
            if self._surrogates[name].kept and not self._weights[name].float().isfinite().all():
                raise NotFiniteError(name, steps)
            self.last[name] = steps
            self._records.append((steps, name, statistics))

    def load(self, last: Mapping[str, int]) -> None:
        """Go on from a state whose blocks of this rank were last updated after these steps; forget the records."""
        self.last = dict(last)
        self._records.clear()

    def drain(self, order: Iterable[str], steps: int) -> list[tuple[int, str, UpdateRecord]]:
        """Return all ranks' updates since the last call as (step, block, record), sorted; the same on every rank.

        Args:
            order: all blocks, in the order by which the updates of one step are sorted.
            steps: optimizer steps so far, for error messages.

        Raises:
            NotFiniteError: on every rank, if a weight of these updates or any surrogate holds NaN or infinity.
        """
        self.end()
        finite = [surrogate.finite() for surrogate in self._surrogates.values()]
        fine = torch.stack(finite).tolist() if finite else []
        broken = [name for name, is_fine in zip(self._surrogates, fine, strict=True) if not is_fine]
        for name in chain.from_iterable(distributed.gather(broken)):
            raise NotFiniteError(name, steps)
        rows = torch.stack([values for *_, values in self._records]).tolist() if self._records else []
        mine = [(step, name, row) for (step, name, _), row in zip(self._records, rows, strict=True)]
        self._records.clear()
        place = {name: i for i, name in enumerate(order)}
        records = sorted(
            chain.from_iterable(distributed.gather(mine)), key=lambda record: (record[0], place[record[1]])
        )
        for step, name, row in records:
            if not all(map(math.isfinite, row)):
                raise NotFiniteError(name, step)
        return [(step, name, UpdateRecord(*row, SOLVERS[int(solver)])) for step, name, (*row, solver) in records]
