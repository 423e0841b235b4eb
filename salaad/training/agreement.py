"""What the ranks tell each other at every step: tokens, a request to stop, numbers gone wrong.

The answer is the one thing that the host reads of the device in every step, and it was enqueued a step before, ahead of
that step's forward pass. So the host waits for nothing else that this step or the one before computes: it waits only
when it is more than a step ahead of the device, which then has a whole step queued. To look whether the answer is there
already would never wait, but each rank would look at another moment, and they have to stop and to give up at the same
step.
"""

import torch
from torch import Tensor

from salaad.common import distributed


class Agreement:
    """One small sum over the ranks per step, whose answer is read a step later.

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
        """Take in the answer of the last exchange, which belongs to the step before."""
        if self._answer is not None:
            if self._arrived:
                self._arrived.synchronize()
            _, stop, broken = self._answer.tolist()
            self.stop, self.broken = stop > 0, broken > 0
