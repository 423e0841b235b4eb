"""The decoupled pull: after the optimizer's step X −= lr·λ(X − T), as AdamW decouples weight decay from the moments.

Where the penalty is a part of the gradient, Adam divides it by the size of the gradient: it is strong where gradients
are small. Here every entry is pulled by the same share of its distance. Every rank moves its own copy of X, so it needs
the T of every block, which the owner sends after each update.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from salaad.common import distributed
from salaad.methods.salaad.rounding import add_rounded
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.weak_hooks import weakly
from salaad.model.weights import Weights


class DecoupledPull:
    """The pull of the weights of all blocks towards T, after every step of any optimizer that trains them.

    Args:
        weights: the weights of the blocks.
        surrogates: block → surrogate, for the blocks that this rank owns.
        owners: block → rank that owns it.
        rates: block → λ.

    Attributes:
        steps: optimizer steps, set from outside; step and block give the seed with which bfloat16 is rounded.
        active: whether the weights are pulled.
    """

    def __init__(
        self,
        weights: Weights,
        surrogates: Mapping[str, Surrogate],
        owners: Mapping[str, int],
        rates: Mapping[str, float],
    ) -> None:
        self._weights, self._surrogates, self._owners, self._rates = weights, surrogates, owners, dict(rates)
        self._others: dict[str, Tensor] = {}  # T of the blocks of other ranks
        self._is_stale = True  # nothing was sent yet, or the surrogates were changed since
        self.steps, self.active = 0, True
        self._hook = register_optimizer_step_post_hook(weakly(self._pull))

    def end(self) -> None:
        """Stop pulling."""
        self._hook.remove()

    def forget(self) -> None:
        """Let the next step of the optimizer, which is then collective, send every T: the surrogates were changed."""
        self._is_stale = True

    def send(self, names: Iterable[str]) -> None:
        """Send the current T of these blocks to every rank; collective."""
        if distributed.world_size() == 1:
            return
        for name in names:
            T = self._T(name)
            if T is None:
                T = self._others[name] = torch.empty_like(self._weights[name], dtype=torch.float32)
            distributed.broadcast(T, self._owners[name])

    def _T(self, name: str) -> Tensor | None:
        return self._surrogates[name].T if name in self._surrogates else self._others.get(name)

    @torch.no_grad()
    def _pull(self, optimizer: Optimizer, *_: Any) -> None:
        rates = {id(X): group["lr"] for group in optimizer.param_groups for X in group["params"]}
        trained = {name: rates.get(id(X)) for name, X in self._weights.parameters.items()}
        if not self.active or all(rate is None for rate in trained.values()):
            return
        if self._is_stale:
            self.send(self._weights)
            self._is_stale = False
        # 1 if a fused optimizer has skipped a step whose gradient was not finite.
        left_out: Any = getattr(optimizer, "found_inf", None)
        for i, (name, rate) in enumerate(trained.items()):
            if rate is None:
                continue
            X, T = self._weights[name], self._T(name)
            share = rate * self._rates[name]
            share = share if left_out is None else share * (1 - left_out)
            change = (T - X.float()).mul_(share)
            if X.dtype == torch.bfloat16:
                add_rounded(X, change, self.steps * len(self._rates) + i)
            else:
                X.add_(change)
