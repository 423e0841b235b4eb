"""Clipping the coupled gradient, and knowing where it first went wrong without waiting for the device."""

import torch
from torch import nn


class Gradients:
    """The gradients of a model between backward and the optimizer.

    Args:
        model: whose parameters are trained.
        limit: largest norm of all gradients together; 0 leaves them alone.

    Attributes:
        norm: norm of the last gradient before clipping, without dimensions, on the device.
    """

    def __init__(self, model: nn.Module, limit: float) -> None:
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._limit = limit or float("inf")
        device = next(iter(self._named.values())).device
        self.norm = torch.zeros((), device=device)
        self._broken_step = torch.zeros((), dtype=torch.int64, device=device)
        self._broken = torch.zeros(len(self._named), dtype=torch.bool, device=device)

    def clip(self, step: int) -> None:
        """Clip the gradient of this step (counted from 1)."""
        zero = torch.zeros((), device=self.norm.device)
        gradients = [zero if p.grad is None else p.grad for p in self._named.values()]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        self.norm = torch.linalg.vector_norm(norms)
        broken = ~norms.isfinite()
        first = (self._broken_step == 0) & broken.any()
        self._broken = torch.where(first, broken, self._broken)
        self._broken_step = torch.where(first, step, self._broken_step)
        torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._limit, self.norm)

    def first_broken(self) -> tuple[int, str] | None:
        """Step and name of the first gradient, or else the name of the first weight, that is not finite; waits.

        A loss that is not finite breaks every gradient at once; then no weight is to blame more than another.
        """
        if self._broken_step > 0:
            names = [name for name, broken in zip(self._named, self._broken.tolist(), strict=True) if broken]
            where = "the loss" if len(names) == len(self._named) else f"the gradient of {names[0]}"
            return int(self._broken_step), where
        finite = torch.stack([p.isfinite().all() for p in self._named.values()]).tolist()
        return next(((0, name) for name, whole in zip(self._named, finite, strict=True) if not whole), None)
