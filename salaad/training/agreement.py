"""What the ranks tell each other at every step without waiting: tokens, a request to stop, numbers gone wrong."""

import torch
from torch import Tensor

from salaad.common import distributed


class Agreement:
    """One small sum over the ranks per step. Its answer is read a step later, so that no GPU is waited for.

    Attributes:
        stop: a rank was asked to stop, as of the step before.
        broken: a gradient was not finite, as of the step before that.
    """

    def __init__(self, device: torch.device) -> None:
        self.stop = False
        self.broken = False
        self._device = device
        self._answer: Tensor | None = None
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def exchange(self, tokens: int, stop: bool, broken: Tensor) -> Tensor:
        """Give this rank's token count, its request to stop and whether its last gradient was broken (1 or 0).

        Returns:
            The tokens of the global batch, without dimensions, on the device.
        """
        values = torch.tensor([tokens, stop, 0.0], dtype=torch.float64).to(self._device, non_blocking=True)
        values[2] = broken
        distributed.all_sum(values)
        self._answer = values.to("cpu", non_blocking=True)
        if self._arrived:
            self._arrived.record()
        return values[0]

    def read(self) -> None:
        """Take in the answer of the last exchange."""
        if self._answer is not None:
            if self._arrived:
                self._arrived.synchronize()
            _, stop, broken = self._answer.tolist()
            self.stop, self.broken = stop > 0, broken > 0
