"""The totals for the next line of metrics.jsonl, summed on the device so that no step waits for them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from salaad.common import distributed


class StepTotals:
    """Loss, steps taken and tokens since the last logged line.

    Args:
        device: the device on which they are summed.
        earlier: the totals that `read` returned before, from a checkpoint.
    """

    def __init__(self, device: torch.device, earlier: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self._sums = torch.tensor(earlier, dtype=torch.float64).to(device)
        if distributed.rank():
            self._sums[0] = 0  # only the loss is summed over the ranks; the other totals are equal on all

    def add(self, loss: Tensor, tokens: Tensor, broken: Tensor) -> None:
        """Add a step: this rank's share of its loss, the tokens of all ranks, and 1 if it was discarded, else 0."""
        self._sums += torch.stack([torch.where(broken > 0, 0, loss), 1 - broken, tokens])

    def read(self) -> list[float]:
        """Return the loss summed over the steps taken, their number, and tokens; waits for the device, collective."""
        _, *others = self._sums.tolist()
        return [float(distributed.all_sum(self._sums[0].clone())), *others]

    def clear(self) -> None:
        """Set all totals to zero."""
        self._sums.zero_()
