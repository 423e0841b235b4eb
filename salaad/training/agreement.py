"""What the ranks tell each other at every step: tokens, a request to stop, a gradient that is not finite.

The sum over the ranks is the only value that the host reads from the device in every step, and its computation was
enqueued in the step before, ahead of that step's forward pass. So the host waits for nothing else that this step or the
one before computes: it waits only when it is more than a step ahead of the device, which then has a whole step queued.
Polling for the sum would never wait, but each rank would see it at another moment, and the ranks have to stop or to
give up at the same step.
"""

import torch
from torch import Tensor

from salaad.common import distributed


class Agreement:
    """One small sum over the ranks per step, whose result is read a step later.

    Attributes:
        stop: whether a rank was asked to stop, as of the step before.
        broken: whether a gradient was not finite, as of two steps before.
    """

    def __init__(self, device: torch.device) -> None:
        self.stop = False
        self.broken = False
        self._device = device
        self._answer: Tensor | None = None
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None

    def exchange(self, tokens: int, stop: bool, broken: Tensor) -> Tensor:
        """Add up over the ranks: token count, request to stop, and whether the last gradient was not finite (1 or 0).

        Returns:
            The number of tokens of the global batch (0-d, on the device).
        """
        values = torch.tensor([tokens, stop, 0.0], dtype=torch.float64).to(self._device, non_blocking=True)
        values[2] = broken
        distributed.all_sum(values)
        self._answer = values.to("cpu", non_blocking=True)
        if self._arrived:
            self._arrived.record()
        return values[0]

    def read(self) -> None:
        """Set `stop` and `broken` by the result of the last exchange, which belongs to the step before."""
        if self._answer is not None:
            if self._arrived:
                self._arrived.synchronize()
            _, stop, broken = self._answer.tolist()
            self.stop, self.broken = stop > 0, broken > 0
