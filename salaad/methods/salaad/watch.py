"""Checks that the penalty still reaches the weights in a training loop that is not ours; errors say what prevents it.

The weights are checked for NaN once; later checks compare identities, dtypes and flags and do not wait for the device.
"""

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from salaad.common import distributed
from salaad.common.errors import NotFiniteError, UserError
from salaad.methods.salaad.weak_hooks import on_steps
from salaad.model.weights import Weights

_WATCHED = WeakIdKeyDictionary()  # weight → the object that watches it
_DEVICES = ("cpu", "cuda")
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Watch:
    """The checks that the penalty still reaches the weights of the blocks.

    Args:
        weights: the weights of the blocks.
        joined_nothing: tells whether the penalty has joined no gradient of this rank's blocks since the last step.

    Attributes:
        moved: optimizer → whether it moved the weights, for those that took their gradients since this was cleared,
            which is done from outside. One whose learning rate is 0 does not, such as that of a warm-up's first step;
            torch.distributed.checkpoint takes such a step, on gradients of 0, to make an optimizer's state.

    Raises:
        UserError: a weight is frozen, sharded over processes, without values, not in float32, float64 or bfloat16, or
            watched by another `Watch`; or the weights lie on several devices, or on one that is neither a CPU nor CUDA.
        NotFiniteError: a weight holds NaN or infinity.
    """

    def __init__(self, weights: Weights, joined_nothing: Callable[[], bool]) -> None:
        # Of several blocks in one parameter, such as the experts of a layer, the first stands for all.
        first: dict[int, tuple[str, nn.Parameter]] = {}
        for name, X in weights.parameters.items():
            first.setdefault(id(X), (name, X))
        self._weights = dict(first.values())
        self._places = weights.places
        _require_one_device(self._weights)
        for name, X in self._weights.items():
            _check(name, X)
        self._kinds = {name: (X.dtype, X.device) for name, X in self._weights.items()}
        self._shapes = {name: X.shape for name, X in self._weights.items()}
        self._joined_nothing, self._missed = joined_nothing, False
        self._passed_by = False  # whether an optimizer without these weights has stepped while they had gradients
        self.moved: dict[Optimizer, bool] = {}  # also of those that a loop has deleted since
        self._scalers: list[Any] | None = None  # found in the first step of an optimizer on these weights
        self._wrappers: list[weakref.ref[DistributedDataParallel]] = []  # found in that step
        self._optimizers: list[weakref.ref[Optimizer]] = []  # in the order of their newest steps
        # After the step and not before it, as a closure may run the backward in it.
        self._hook = on_steps(register_optimizer_step_post_hook, self._notice)
        for X in self._weights.values():
            _WATCHED[X] = weakref.ref(self)

    def end(self) -> None:
        """Stop watching the weights, so that another `Watch` can."""
        self._hook.remove()
        self.moved.clear()
        for X in self._weights.values():
            _WATCHED.pop(X, None)

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers that moved the weights and still exist, the newest step first."""
        return [found for reference in reversed(self._optimizers) if (found := reference()) is not None]

    def _notice(self, optimizer: Optimizer, *_: Any) -> None:
        """Note, after every step of any optimizer, whether its gradients lacked the penalty, and who scaled them.

        Raises:
            UserError: the optimizer has moved the weights before, since `moved` was cleared, or the gradients are
                averaged over a part of the processes.
        """
        watched = {id(X) for X in self._weights.values()}
        trained = (X for group in optimizer.param_groups for X in group["params"] if X.grad is not None)
        if not any(id(X) in watched for X in trained):
            self._passed_by |= any(X.grad is not None for X in self._weights.values())
            return
        moves = not _rests(optimizer)
        if moves and self.moved.get(optimizer):
            raise UserError(
                "the optimizer moved the weights twice without salaad.step(), which updates L and S and lets the "
                "penalty join the next gradient; call it after each step of the optimizer, or close() to train on alone"
            )
        self.moved[optimizer] = moves or self.moved.get(optimizer, False)
        self._missed |= moves and self._joined_nothing()
        others = [other for other in self.optimizers[::-1] if other is not optimizer]
        self._optimizers = [weakref.ref(one) for one in (*others, optimizer)]
        if self._scalers is None:
            self._wrappers = [weakref.ref(wrapper) for wrapper in _wrappers_of(self._weights.values())]
            self._scalers = _scalers_of(optimizer)

    def check(self, scaler: Any, joined: bool = False, through_gradients: bool = True) -> None:
        """Raise an error if the penalty no longer reaches the weights; called after every step of the optimizer.

        Args:
            scaler: the `GradScaler` whose scale the penalty shares, if there is one.
            joined: whether the penalty has joined a gradient that an optimizer must have taken since the last check.
            through_gradients: whether the penalty reaches the weights through their gradients, so that it matters what
                becomes of these.

        Raises:
            UserError: a weight was replaced, moved, cast or frozen; the weights were changed by gradients that the
                penalty never joined; no optimizer has taken the gradient that it joined, or none has the weights that a
                decoupled pull is to move; the loss is scaled by a scaler that the penalty does not know; the gradients
                are compressed on their way to the other ranks.
        """
        for name, X in self._weights.items():
            place = self._places[name]
            if place.module._parameters.get(place.key) is not X or X.shape != self._shapes[name]:
                raise UserError(
                    f"the model has another weight in block {name} than the one that is watched, as "
                    "load_state_dict(assign=True), a new nn.Parameter or FSDP leave behind; make the Salaad after that"
                )
            if (X.dtype, X.device) != self._kinds[name] or not X.requires_grad:
                was = " on ".join(str(part) for part in self._kinds[name])
                raise UserError(
                    f"block {name} was {was} and trained, and is now {X.dtype} on {X.device}"
                    f"{'' if X.requires_grad else ' and frozen'}; make the Salaad after the model is as it trains"
                )
        missed, self._missed = self._missed, False
        if missed:
            raise UserError(
                "the optimizer moved the weights, but no backward since the last salaad.step() reached a block, as "
                "torch.autograd.grad calls no hooks; call loss.backward(), or salaad.join_gradients() before the "
                "optimizer's step, and salaad.step() after it; where a rank's data may miss all of its blocks, as with "
                'experts, take pull="decoupled"'
            )
        if joined and not self.moved and self._scalers is not None and scaler is None:  # a scaler may leave out a step
            raise UserError(
                "the optimizer did not move the weights between two calls of salaad.step(), so the penalty would count "
                "twice; call it after the optimizer's step alone, with accelerate `if accelerator.sync_gradients`, and "
                "salaad.skip() after a gradient that was thrown away"
            )
        if not through_gradients:
            if self._passed_by and not self._optimizers:
                raise UserError(
                    "no optimizer has the weights of the blocks, as where one steps on copies in float32, so the "
                    'decoupled pull moves nothing; take pull="coupled", which goes with the gradients'
                )
            return
        if any(other is not scaler for other in self._scalers or ()):
            raise UserError(
                "the loss is scaled by a GradScaler, beside which the penalty would be as good as none; give it: "
                "Salaad(model, config, scaler=scaler)"
            )
        for wrapper in filter(None, (reference() for reference in self._wrappers)):
            for hook in _compressors_of(wrapper):
                raise UserError(
                    f"DistributedDataParallel sends gradients through {hook}, in whose few digits the penalty would be "
                    "lost; register no communication hook"
                )


def refuse_flat_weights(model: nn.Module) -> None:
    """Raise a UserError if the weights of the model are not its own, in which case no block could be found."""
    if distributed.has_flat_weights(model):
        raise UserError(
            "the model is in FullyShardedDataParallel or DeepSpeed, which train copies spread over the processes, and "
            "a block is updated as a whole matrix by its owner; train with DistributedDataParallel, which keeps "
            "weights whole"
        )


def refuse_compiled_parts(model: nn.Module) -> None:
    """Raise a UserError if a part of the model is inside what torch.compile returned, which adds to the names in it.

    Weights and blocks that are saved under such names are missing in a model that is opened anew.
    """
    for name in (name for name, _ in model.named_modules() if name.endswith("._orig_mod")):
        raise UserError(
            f"{name.removesuffix('._orig_mod')} is what torch.compile returned, so that its weights have other names "
            "than in a saved model; compile it in place instead, by module.compile()"
        )


def _require_one_device(weights: dict[str, nn.Parameter]) -> None:
    [[first, device], *others] = [(name, X.device) for name, X in weights.items()]
    for name, other in others:
        if other != device:
            raise UserError(
                f"block {first} is on {device} and block {name} on {other}, but the blocks of a process are updated on "
                "one device; load the model onto one, without a device_map that spreads it"
            )
    if device.type not in (*_DEVICES, "meta"):  # which has no values, as `_check` says
        raise UserError(
            f"block {first} is on {device}, but L and S are updated on devices of the types {' and '.join(_DEVICES)} "
            "alone, as an update needs float64, which Apple GPUs lack; move the model to the CPU, with the Trainer by "
            "use_cpu=True"
        )


def _check(name: str, X: nn.Parameter) -> None:
    if not X.requires_grad:
        raise UserError(
            f"block {name} is frozen, so nothing can draw it; unfreeze it, or choose other blocks by roles, single "
            "layers by re:PATTERN"
        )
    if distributed.is_sharded(X):
        raise UserError(
            f"block {name} is spread over the processes (DTensor, as FSDP makes it), and a block is updated as a whole "
            "matrix by its owner; train with DistributedDataParallel, which keeps weights whole"
        )
    if X.is_meta:
        raise UserError(f"block {name} has no values yet (device meta); make the Salaad after the weights are loaded")
    if X.dtype not in _DTYPES:
        raise UserError(
            f"block {name} is {X.dtype}, which has no room for the penalty beside the gradient; keep the weights in "
            "float32 under torch.autocast, or in bfloat16"
        )
    if not X.float().isfinite().all():  # so are L and S, which have no place for a 1e39 in float64
        raise NotFiniteError(name, 0)
    other = _WATCHED.get(X)
    if other is not None and other() is not None:
        raise UserError(
            f"block {name} is watched by another Salaad already, and the penalty would count twice; call close() on "
            "that one, or use it as a context: with Salaad(model, config) as salaad"
        )


def _rests(optimizer: Optimizer) -> bool:
    """Whether every learning rate is 0; one on a GPU, for which the host would wait, counts as if it were not."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return all(not (isinstance(rate, Tensor) and rate.is_cuda) and rate == 0 for rate in rates)


def _wrappers_of(weights: Iterable[nn.Parameter]) -> list[DistributedDataParallel]:
    """Find the data-parallel wrappers of these weights among all objects of the process; done only once.

    Raises:
        UserError: one of them averages over a part of the processes.
    """
    if distributed.world_size() == 1:
        return []
    mine = {id(X) for X in weights}
    wrappers = [found for found in gc.get_objects() if issubclass(type(found), DistributedDataParallel)]
    wrappers = [wrapper for wrapper in wrappers if any(id(p) in mine for p in wrapper.parameters())]
    for part in {wrapper.process_group.size() for wrapper in wrappers} - {distributed.world_size()}:
        raise UserError(
            f"DistributedDataParallel averages the gradients over {part} of {distributed.world_size()} processes, over "
            "all of which the blocks are spread; give it no process_group, or train each model in a job of its own"
        )
    return wrappers


def _compressors_of(wrapper: DistributedDataParallel) -> list[str]:
    """Return the names of the communication hooks of `wrapper`, without the plain mean."""
    hooks = [hook.__name__ for hook, _ in wrapper._comm_hooks if hook is not allreduce_hook]
    # Hooks that are built into torch are not in that list; the wrapper's logging data has their name.
    logged = wrapper._get_ddp_logging_data().get("comm_hook") or ""
    return hooks + [logged] * (logged.startswith("BuiltinCommHookType") and not logged.endswith("ALLREDUCE"))


def _scalers_of(optimizer: Optimizer) -> list[Any]:
    """Find every `GradScaler` in use with this optimizer, among all objects of the process; done only once."""
    scalers = [found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler)]
    return [scaler for scaler in scalers if scaler.is_enabled() and id(optimizer) in scaler._per_optimizer_states]
