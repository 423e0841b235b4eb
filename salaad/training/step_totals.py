"""What the next line of metrics.jsonl reports, summed on the device so that no step waits for it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from salaad.common import distributed


class StepTotals:
    """Loss, steps taken and tokens since the last logged line.

    Args:
        device: where they are summed.
        earlier: what `read` gave, from a checkpoint.
    """

    def __init__(self, device: torch.device, earlier: Sequence[float] = (0.0, 0.0, 0.0)) -> None:
        self._sums = torch.tensor(earlier, dtype=torch.float64).to(device)
        if distributed.rank():
            self._sums[0] = 0  # the loss alone is a share of each rank's

    def add(self, loss: Tensor, tokens: Tensor, broken: Tensor) -> None:
        """Count a step: this rank's share of its loss, the tokens of all ranks, and 1 if it was not taken, else 0."""
        self._sums += torch.stack([torch.where(broken > 0, 0, loss), 1 - broken, tokens])

    def read(self) -> list[float]:
        """Loss summed over the steps taken, their number, and tokens; waits for the device, collective."""
        _, *others = self._sums.tolist()
        return [float(distributed.all_sum(self._sums[0].clone())), *others]

    def clear(self) -> None:
        """Begin anew."""
        self._sums.zero_()
