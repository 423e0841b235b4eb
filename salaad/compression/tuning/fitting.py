"""Gradient steps on the trained tensors of a cut model, and their state, from which an interrupted command goes on.

The learning rate of a tensor is relative to the size of its entries, so one rate serves models of every size.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from salaad.config.run import OptimizerConfig
from salaad.methods.optimizer import warmup_and_cosine

_WARMUP = OptimizerConfig(warmup=0.1, final_lr=0.0)


class Fitting:
    """Adam over a fixed number of steps.

    Args:
        parameters: the trained tensors; a tensor of zeros stays as it is.
        steps: number of steps of the whole schedule.
        rate: peak change of an entry in a step, relative to the root mean square of its tensor at the beginning.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], steps: int, rate: float) -> None:
        groups = [{"params": [p], "lr": rate * _size(p)} for p in parameters if p.numel()]
        self.steps, self.done = steps, 0
        self.optimizer = torch.optim.Adam(groups, betas=(0.9, 0.99), fused=True)
        self.schedule = LambdaLR(self.optimizer, warmup_and_cosine(_WARMUP, steps))

    def step(self, losses: Iterable[Tensor]) -> float:
        """Take one step on the sum of `losses`, which are computed one after the other, and return that sum."""
        total = 0.0
        for loss in losses:
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.done += 1
        return total

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps."""
        return {"done": self.done, "optimizer": self.optimizer.state_dict(), "schedule": self.schedule.last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; a ValueError if its moments are those of other tensors."""
        self.optimizer.load_state_dict(state["optimizer"])
        for p, moments in self.optimizer.state.items():
            if any(moments[name].shape != p.shape for name in ("exp_avg", "exp_avg_sq")):
                raise ValueError("the moments of Adam are those of other tensors")
        self.done, self.schedule.last_epoch = int(state["done"]), int(state["schedule"])


def _size(tensor: Tensor) -> float:
    return float(tensor.detach().square().mean().sqrt())
