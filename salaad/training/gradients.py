"""Clipping of the coupled gradient and, without waiting for the device, a record of where it was first not finite."""

import torch
from torch import nn


class Gradients:
    """The gradients of a model between backward and the optimizer.

    Args:
        model: the model; gradients are those of its trainable parameters.
        limit: largest norm of all gradients together; 0 turns clipping off.

    Attributes, all 0-d and on the device:
        norm: norm of the last gradient before clipping.
        broken: 1 if this norm was not finite, so that no optimizer step may follow, else 0 (float32).
        discarded: number of gradients whose norm was not finite (int64).
    """

    def __init__(self, model: nn.Module, limit: float) -> None:
        self._weights = dict(model.named_parameters())
        self._named = {name: p for name, p in self._weights.items() if p.requires_grad}
        self._limit = limit or float("inf")
        device = next(iter(self._named.values())).device
        self.norm = torch.zeros((), device=device)
        self.broken = torch.zeros((), device=device)
        self.discarded = torch.zeros((), dtype=torch.int64, device=device)
        self._first_step = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.zeros(len(self._named), dtype=torch.bool, device=device)

    def clip(self, step: int) -> None:
        """Clip the gradient of this step (counted from 1)."""
        zero = torch.zeros((), device=self.norm.device)
        gradients = [zero if p.grad is None else p.grad for p in self._named.values()]
        norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32))
        self.norm = torch.linalg.vector_norm(norms)
        broken = ~self.norm.isfinite()
        first = (self._first_step == 0) & broken
        # If all norms are finite and only the sum of their squares is too large, the largest norm is to blame.
        self._first = torch.where(first, ~norms.isfinite() | (norms == norms.max()), self._first)
        self._first_step = torch.where(first, step, self._first_step)
        self.broken = broken.float()
        self.discarded += broken
        torch.nn.utils.clip_grads_with_norm_(self._named.values(), self._limit, self.norm)

    def first_broken(self) -> tuple[int, str] | None:
        """Return step and name of the first gradient since the last call that was not finite; waits for the device.

        A loss that is not finite breaks every gradient at once; then no weight is to blame more than another.
        """
        if self._first_step == 0:
            return None
        names = [name for name, broken in zip(self._named, self._first.tolist(), strict=True) if broken]
        where = "the loss" if len(names) == len(self._named) else f"the gradient of {names[0]}"
        step = int(self._first_step)
        self._first_step.zero_()
        return step, where

    def broken_weight(self) -> str | None:
        """Return the name of the first weight that is not finite, if any, frozen or not; waits for the device."""
        finite = torch.stack([p.isfinite().all() for p in self._weights.values()]).tolist()
        return next((name for name, whole in zip(self._weights, finite, strict=True) if not whole), None)
