"""The totals for the next line of metrics.jsonl, summed on the device so that no step waits for them."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from salaad.common import distributed


class StepTotals:
    """Loss, steps taken and tokens since the last logged line.

    Args:
        device: the device on which they are summed.
        earlier: what `own` returned on every rank, from a checkpoint. Another number of ranks goes on from the sum of
            their losses, which differs from an uninterrupted run's by rounding.
    """

    def __init__(self, device: torch.device, earlier: Sequence[Sequence[float]] = ()) -> None:
        losses = [loss for loss, *_ in earlier]
        if len(losses) != distributed.world_size():
            losses = [math.fsum(losses)] + [0.0] * (distributed.world_size() - 1)
        _, *others = earlier[0] if earlier else (0.0, 0.0, 0.0)  # only the loss differs between the ranks
        self._sums = torch.tensor([losses[distributed.rank()], *others], dtype=torch.float64).to(device)

    def add(self, loss: Tensor, tokens: Tensor, broken: Tensor) -> None:
        """Add a step: this rank's share of its loss, the tokens of all ranks, and 1 if it was discarded, else 0."""
        self._sums += torch.stack([torch.where(broken > 0, 0, loss), 1 - broken, tokens])

    def own(self) -> list[float]:
        """Return this rank's share of the loss summed over the steps taken, their number, and tokens of all ranks."""
        return self._sums.tolist()

    def read(self) -> list[float]:
        """Return the loss summed over the steps taken, their number, and tokens; waits for the device, collective."""
        _, *others = self._sums.tolist()
        return [float(distributed.all_sum(self._sums[0].clone())), *others]

    def clear(self) -> None:
        """Set all totals to zero."""
        self._sums.zero_()
