"""The pull of the weights towards T = L + S − dual, as a part of the gradient (eq. 6) or beside the optimizer.

Coupled: ρ(X − T) joins the gradient of every block during backward, so that any optimizer sees that of ℓ + ℓ_ρ.

Decoupled: X −= lr·λ(X − T) after the optimizer's step, as AdamW decouples weight decay from the moments. Where the
penalty is a part of the gradient, Adam divides it by the size of the gradient: it is strong where gradients are small.
Here every entry is pulled by the same share of its distance. Every rank moves its own copy of X, so it needs the T of
every block, which the owner sends after each update.
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.methods.salaad.elementwise import add_penalties
from salaad.methods.salaad.rounding import add_rounded
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.weak_hooks import on_steps, weakly
from salaad.model.weights import Weights


class CoupledPull:
    """The gradient of the penalty, which joins the gradients of the blocks that this rank owns.

    Only the first gradient after `begin_step` is joined: with gradient accumulation ℓ_ρ still counts once. Only the
    owner adds the penalty of a block, scaled by the number of ranks: the mean over the ranks is the coupled gradient.

    Args:
        weights: the weights of the blocks of all ranks.
        owned: names of the blocks that this rank owns.
        surrogates: returns block → surrogate for these, once no round is in progress.
        scale: returns the factor of the penalty's gradient; asked once a step.

    Attributes:
        groups: the blocks that this rank owns, together those in one parameter, such as the experts of a layer.
        pending: blocks whose gradient is still to be joined.
        received_bytes: of the T that other ranks sent, of which this pull needs none.
    """

    received_bytes = 0

    def __init__(
        self,
        weights: Weights,
        owned: Iterable[str],
        surrogates: Callable[[], Mapping[str, Surrogate]],
        scale: Callable[[], float],
    ) -> None:
        self._weights, self._owned, self._surrogates, self._scale_now = weights, tuple(owned), surrogates, scale
        self._number = {name: i for i, name in enumerate(weights)}
        self.begin_step(0, active=True)
        accumulated, look = weakly(self._accumulated), weakly(self._warn_of_a_gradient_thrown_away)
        groups: dict[nn.Parameter, list[str]] = {}
        for name in self._owned:
            groups.setdefault(weights.places[name].parameter, []).append(name)
        self.groups = tuple(groups.values())
        hooks = [X.register_post_accumulate_grad_hook(partial(accumulated, names)) for X, names in groups.items()]
        hooks += [X.register_hook(partial(look, names)) for X, names in groups.items()]  # before it accumulates
        self._remove_hooks = weakref.finalize(self, lambda: [hook.remove() for hook in hooks])

    def end(self) -> None:
        """Stop pulling."""
        self._remove_hooks()

    def begin_step(self, steps: int, *, active: bool) -> None:
        """Let the penalty join the gradients that follow `steps` optimizer steps, or none of them if not `active`."""
        self._steps, self._active, self._scale = steps, active, None
        self._version: int | None = None  # of the first group's gradient, as the newest backward has left it
        self.pending: set[str] = set(self._owned) if active else set()

    def _warn_of_a_gradient_thrown_away(self, names: Sequence[str], *_: Tensor) -> None:
        """Warn if a gradient is about to begin anew after the penalty has joined that of this step.

        It is not joined by itself: a loop that adds up gradients outside of `.grad` begins anew in every micro-batch.
        """
        if not self._active or names[0] in self.pending:
            return
        gradient = self._weights.places[names[0]].parameter.grad
        # Of one group alone is it seen whether its gradient was set to 0, for which a GPU is waited for. Nothing else
        # than a thrown-away gradient is both changed after the backward and 0.
        changed = names is self.groups[0] and gradient is not None and self._version not in (None, gradient._version)
        if gradient is None or (changed and not gradient.any()):
            warnings.warn(
                "a gradient that the penalty had joined is gone, and the one that begins now gets none; call "
                "salaad.skip() after a gradient that is thrown away, as between the two backward passes of SAM; "
                "gradients that are added up outside of .grad are right as they are",
                stacklevel=2,
            )

    def _accumulated(self, names: Sequence[str], *_: Tensor) -> None:
        self.join(names)
        if names is self.groups[0]:  # an optimizer that steps in a hook of the gradient may have taken it already
            self._version = getattr(self._weights.places[names[0]].parameter.grad, "_version", None)

    @property
    def has_joined(self) -> bool:
        """Whether the penalty has joined a gradient since `begin_step`."""
        return self._scale is not None

    @torch.no_grad()
    def join(self, names: Sequence[str]) -> None:
        """Add the penalty's gradient to those of a group, if they are pending.

        Raises:
            UserError: the blocks have no gradient or a sparse one, or are not on the device of their L and S.
        """
        first = names[0]
        if first not in self.pending:
            return
        surrogates, places = self._surrogates(), [self._weights.places[name] for name in names]
        X = places[0].parameter
        if X.grad is None:
            raise UserError(
                f"block {first} has no gradient left when the penalty is to join it, as where an optimizer steps in a "
                "hook of the gradient; make the Salaad before such hooks, or let the optimizer step after the backward"
            )
        _require_one_device(first, X.grad, surrogates[first].T)
        if X.grad.is_sparse:
            raise UserError(
                f"block {first} has a sparse gradient, which the penalty cannot join; make its layer with "
                'sparse=False, or take pull="decoupled"'
            )
        if self._scale is None:
            self._scale = self._scale_now()
        self.pending.difference_update(names)
        if len(names) > 1 and X.grad.dtype != torch.bfloat16:  # one after another, the host would need far longer
            gradients, matrices = X.grad.detach().unbind(), X.detach().unbind()
            add_penalties(
                [gradients[place.index] for place in places],
                [matrices[place.index] for place in places],
                [surrogates[name].T for name in names],
                self._scale * surrogates[first].rho,  # matrices of one size have one ρ
            )
            return
        for name, place in zip(names, places, strict=True):
            seed = self._steps * len(self._number) + self._number[name]
            surrogates[name].add_penalty_gradient(place.gradient, place.weight, self._scale, seed)

    def broadcast_targets(self, names: Iterable[str]) -> None:
        """Do nothing: no other rank needs T."""

    def mark_targets_stale(self) -> None:
        """Do nothing: nothing was sent."""


class DecoupledPull:
    """The pull of the weights of all blocks after every step of any optimizer that trains them.

    Args:
        weights: the weights of the blocks.
        surrogates: block → surrogate, for the blocks that this rank owns.
        owners: block → rank that owns it.
        rho: block → ρ, to which λ is proportional.
        rate: mean λ of the blocks.
    """

    groups: Sequence[Sequence[str]] = ()  # no gradient is joined
    pending: Collection[str] = ()
    has_joined = False

    def __init__(
        self,
        weights: Weights,
        surrogates: Mapping[str, Surrogate],
        owners: Mapping[str, int],
        rho: Mapping[str, float],
        rate: float,
    ) -> None:
        self._weights, self._surrogates, self._owners = weights, surrogates, owners
        mean = sum(rho.values()) / len(rho) or 1.0
        self._rates = {name: rate * value / mean for name, value in rho.items()}
        self._others: dict[str, Tensor] = {}  # T of the blocks of other ranks
        self._is_stale = True  # nothing was sent yet, or the surrogates were changed since
        self.begin_step(0, active=True)
        self._hooks = (
            on_steps(register_optimizer_step_pre_hook, self._enter),
            on_steps(register_optimizer_step_post_hook, self._pull),
        )

    def end(self) -> None:
        """Stop pulling."""
        for hook in self._hooks:
            hook.remove()

    def begin_step(self, steps: int, *, active: bool) -> None:
        """Pull after the optimizer's step that follows `steps` others, or not if not `active`."""
        self._steps, self._active = steps, active  # step and block give the seed with which bfloat16 is rounded
        self._entered: list[Optimizer] = []  # each steps within the step of the one before, as where one wraps another
        if not active:
            self._others.clear()
            self._is_stale = True

    def mark_targets_stale(self) -> None:
        """Let the next step of the optimizer, which is then collective, send every T: the surrogates were changed."""
        self._is_stale = True

    @property
    def received_bytes(self) -> int:
        """Bytes of the T that other ranks sent."""
        return sum(T.nbytes for T in self._others.values())

    def broadcast_targets(self, names: Iterable[str]) -> None:
        """Send the current T of these blocks to every rank, if the next step pulls at all; collective."""
        if distributed.world_size() == 1 or not self._active:
            return
        for name in names:
            T = self._T(name)
            if T is None:
                X = self._weights[name]
                T = self._others[name] = torch.empty(X.shape, dtype=torch.float32, device=X.device)
            distributed.broadcast(T, self._owners[name])

    def _T(self, name: str) -> Tensor | None:
        return self._surrogates[name].T if name in self._surrogates else self._others.get(name)

    def _enter(self, optimizer: Optimizer, *_: Any) -> None:
        self._leave(optimizer)  # which an error has ended, if it is still there, and with it all that it had begun
        self._entered.append(optimizer)

    def _leave(self, optimizer: Optimizer) -> None:
        if optimizer in self._entered:
            del self._entered[self._entered.index(optimizer) :]

    @torch.no_grad()
    def _pull(self, optimizer: Optimizer, *_: Any) -> None:
        self._leave(optimizer)
        if self._entered:
            return
        rates = {id(X): group.get("lr") for group in optimizer.param_groups for X in group["params"]}
        trained = {name: rates[id(X)] for name, X in self._weights.parameters.items() if id(X) in rates}
        if not self._active or not trained:
            return
        if self._is_stale:
            self.broadcast_targets(self._weights)
            self._is_stale = False
        # 1 if a fused optimizer has skipped a step whose gradient was not finite.
        left_out: Any = getattr(optimizer, "found_inf", None)
        for i, name in enumerate(self._weights):
            if name not in trained:
                continue
            if trained[name] is None:
                raise UserError(
                    f"the optimizer has no learning rate lr, with which the decoupled pull moves block {name}; give it "
                    'one, or take pull="coupled"'
                )
            X, T = self._weights[name], self._T(name)
            _require_one_device(name, X, T)
            share = trained[name] * self._rates[name]
            share = share if left_out is None else share * (1 - left_out)
            change = (T - X.float()).mul_(share)
            if X.dtype == torch.bfloat16:
                add_rounded(X, change, self._steps * len(self._rates) + i)
            else:
                X.add_(change)


def _require_one_device(name: str, X: Tensor, T: Tensor) -> None:
    if X.device != T.device:
        raise UserError(
            f"block {name} is on {X.device} now, but its L and S are on {T.device}; make the Salaad after the model is "
            "on its device"
        )
