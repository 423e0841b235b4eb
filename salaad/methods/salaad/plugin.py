"""SALAAD on any torch model: the blocks of the model, the penalty during backward, the ADMM on its schedule.

loss.backward()     # ρ(X − T) joined the gradient of every block this rank owns
optimizer.step()    # any optimizer: it sees the gradient of ℓ + ℓ_ρ
salaad.step()       # every K steps: L, S, the dual and the controller
"""

import warnings
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.common.validation import section
from salaad.config.methods import SalaadConfig
from salaad.methods.float32 import true_float32
from salaad.methods.salaad import ownership, storage
from salaad.methods.salaad.pull import CoupledPull, DecoupledPull
from salaad.methods.salaad.schedule import Schedule, Updates
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import UpdateRecord
from salaad.methods.salaad.watch import Watch, refuse_compiled_parts, refuse_flat_weights
from salaad.model import coverage
from salaad.model.parameters import restored
from salaad.model.roles import find_blocks
from salaad.model.second_moments import Moments, moments_in, save_second_moments, second_moments

_HOOKS_STAY = (
    "as its hooks stay with the first model; make another on the copy of the model, with "
    "load_state_dict(salaad.state_dict())"
)


class _CopiedError(UserError, AttributeError):
    """The error of `_InACopy`; as an AttributeError it lets `hasattr` answer."""


class _InACopy:
    """What stands for a `Salaad` in a deep copy of the module that holds it."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by Python itself, such as whether it can be copied once more
            raise AttributeError(name)
        raise _CopiedError(f"this Salaad was copied with the module that holds it and does nothing, {_HOOKS_STAY}")

    def __setattr__(self, name: str, value: Any) -> None:
        getattr(self, name)


class Salaad:
    """SALAAD on one model: the surrogates of its blocks, the penalty and the ADMM updates.

    As a context manager it calls `close` at the end; an object that nobody holds any more lets the model go too.
    `from salaad import Salaad` also has `compress`, of salaad/compression/in_memory.py.

    Args:
        model: any torch module with 2-D weights, or experts in 3-D ones, on its final device and in its final dtype.
        config: targets, ρ, roles and schedule.
        scaler: the `GradScaler` that scales the loss, if one does; the penalty then shares its scale. A decoupled pull
            has no need of it.
        most_records: how many of the newest updates of each block are kept for `drain_records`; None keeps all.
        total_steps: optimizer steps of the whole training, of which `config.onset` and `config.release` are parts.

    Attributes:
        blocks: names of all blocks, the same on every rank.
        owners: block → rank that owns it.
        steps: optimizer steps counted so far.

    Raises:
        UserError: a role matches nothing, a weight cannot be watched (`Watch`), a part of the model is what
            torch.compile returned, or `config.onset` or `config.release` is given without `total_steps`.
        NotFiniteError: a weight holds NaN or infinity.
    """

    def __init__(
        self,
        model: nn.Module,
        config: SalaadConfig | None = None,
        *,
        scaler: Any = None,
        most_records: int | None = 100,
        total_steps: int | None = None,
    ) -> None:
        self.config = config or SalaadConfig()
        self.model = distributed.unwrapped(model)
        self.scaler = scaler
        refuse_flat_weights(self.model)
        refuse_compiled_parts(self.model)
        self.weights = find_blocks(self.model, self.config)
        self.blocks = tuple(self.weights)
        costs = ownership.costs_of(self.weights)
        self._ranks = distributed.world_size()
        self.owners = ownership.assign_owners(costs, self._ranks, self.config.owners)
        self._schedule = Schedule(self.config, self.owners, costs, total_steps)
        # The parts hold no strong reference to this object: in a cycle it would go on pulling and watching the weights
        # after the user has dropped it, until Python next looks for garbage.
        this = weakref.ref(self)
        self._watch = Watch(self.weights, lambda: this()._has_joined_nothing())
        self._surrogates: dict[str, Surrogate] = {}
        mine = (name for name in ownership.dearest_first(costs) if self.owners[name] == distributed.rank())
        try:
            for name in mine:
                with true_float32(self.weights[name].device):
                    self._surrogates[name] = Surrogate(self.weights[name], self._rho(name), self.config)
        except BaseException:  # such as for lack of memory: another try, with fewer roles, must be able to watch
            self._watch.end()
            raise
        self._updates = Updates(self._surrogates, self.weights, self.config.overlap, most_records)
        self.steps = 0
        if self.config.pull == "decoupled":
            rho = {name: self._rho(name) for name in self.blocks}
            self._pull = DecoupledPull(self.weights, self._surrogates, self.owners, rho, self.config.pull_rate)
        else:
            self._pull = CoupledPull(
                self.weights, self._surrogates, lambda: this().surrogates, lambda: this()._scale_of_gradients()
            )
        self.skip()
        self.closed = False
        self._moments_found: Moments = {}

    def __repr__(self) -> str:
        """Describe what part of the model is in blocks, and what is left out for which reason."""
        lines = [f"{what}: {how_much}" for what, how_much in coverage.coverage_rows(self.model, self.weights)]
        return "\n  ".join([f"Salaad after {self.steps:,} steps", *lines])

    def __deepcopy__(self, memo: dict[int, Any]) -> "_InACopy":
        """Return what refuses every use: a module that holds its Salaad can be copied, as for an average of weights."""
        return _InACopy()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be copied alone, pickled or saved by torch.save: hooks stay behind, and a copy would pull nothing.

        Raises:
            UserError: always.
        """
        raise UserError(f"a Salaad cannot be copied or pickled, {_HOOKS_STAY}")

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, *error: object) -> None:
        """Call `close`."""
        self.close()

    def close(self) -> None:
        """Remove the hooks from the model, so that no penalty is added any more; L and S can still be used.

        Raises:
            NotFiniteError: a weight of the last update holds NaN or infinity; the hooks are removed all the same.
        """
        try:
            self._updates.end()
        finally:
            self._pull.end()
            if not self.closed:
                self._watch.end()
            self.closed = True

    def _rho(self, name: str) -> float:
        """Eq. 7: ρ = c / (N·sqrt(n·m)), unless an absolute ρ was given."""
        if self.config.rho is not None:
            return self.config.rho
        return self.config.rho_constant / (len(self.blocks) * self.weights[name].numel() ** 0.5)

    def _require_open(self) -> None:
        if self.closed:
            raise UserError("this Salaad was closed and lets the model go; make a new one, or load what it saved")

    def require_same_ranks(self) -> None:
        """Raise a UserError if there are more processes now than this was made with, or fewer.

        Which of them owns which block, and by how much the mean over them weakens the penalty, is known from the start.
        """
        now = distributed.world_size()
        if now != self._ranks:
            raise UserError(
                f"this Salaad was made at a world size of {self._ranks}, which is {now} now; make it after "
                "init_process_group, and save before destroy_process_group"
            )

    def _scale_of_gradients(self) -> float:
        """The scale of the loss, times the number of ranks over which the gradients are averaged."""
        self.require_same_ranks()
        return self._ranks * (1.0 if self.scaler is None else self.scaler.get_scale())

    def _has_joined_nothing(self) -> bool:
        """Whether the penalty joined no gradient of this rank's blocks; warn of single blocks that it did not join."""
        pending = self._pull.pending
        if 0 < len(self._surrogates) == len(pending):
            return True
        if self._ranks > 1:
            left_out = sorted(name for name in pending if self.weights.places[name].gradient is not None)
            if left_out:
                warnings.warn(
                    f"block {left_out[0]} has a gradient of other ranks alone, as of an expert that its owner's data "
                    'did not reach, and moves without the penalty in this step; pull="decoupled" needs no gradient',
                    stacklevel=2,
                )
        return False

    def join_gradients(self) -> None:
        """Add the penalty's gradient to gradients that no backward accumulated, as those of `torch.autograd.grad`.

        Call this before the optimizer's step; blocks that a backward has reached since the last step are skipped. With
        several ranks call it before the gradients are averaged: the owner adds the penalty times the number of ranks.

        Raises:
            UserError: this was closed, or there are more or fewer processes than there were.
        """
        self._require_open()
        for names in self._pull.groups:
            if self.weights.places[names[0]].gradient is not None:
                self._pull.join(names)

    def step(self, *, may_be_left_out: bool = False) -> None:
        """Count an optimizer step and update the blocks that the schedule names.

        Args:
            may_be_left_out: whether the loop leaves out the optimizer's step where the gradient is not finite, and
                counts it all the same; then no error is raised if no optimizer took the gradient.

        Raises:
            UserError: the penalty no longer reaches the weights as it should, as `Watch.check` finds, this was closed,
                or there are more or fewer processes than there were.
            NotFiniteError: a weight of this rank's updates holds NaN or infinity.
        """
        self._require_open()
        self.require_same_ranks()
        joined = self._pull.has_joined and not may_be_left_out
        self._watch.check(self.scaler, joined, through_gradients=self.config.pull == "coupled")
        self._updates.end()  # the round of the step before, if no gradient has ended it
        self.steps += 1
        self.skip()
        due = self._schedule.due(self.steps)
        self._begin(due)
        if not (self.config.overlap and self._pull.pending):  # else the penalty, joining a gradient, ends the round
            self._updates.end()
        self._pull.broadcast_targets(due)

    def _begin(self, names: Iterable[str]) -> None:
        """Begin the updates of blocks, which depend on whether the step that has just been taken was pulled.

            before the pull      L becomes X, S and the dual 0: no ADMM update, as nothing draws X towards L + S
            during the pull      the ADMM update and the controller's step
            after the pull       the ADMM update alone: L + S follow X, with the thresholds that they had

        Without a pull X does not come nearer to L + S, and the controller would raise the thresholds without end.
        """
        if self.steps <= self._schedule.pulled.start:
            names = self._updates.reset_to_weights(names, self.steps)
        held = self.steps - 1 not in self._schedule.pulled
        for surrogate in self._surrogates.values():
            surrogate.held = held
        self._updates.begin(names, self.steps)

    @property
    def is_pulled(self) -> bool:
        """Whether the next step pulls the weights, as in all but the parts of `config.onset` and `config.release`."""
        return self.steps in self._schedule.pulled

    def skip(self) -> None:
        """Let the penalty join the next backward again; call this, not `step`, after a gradient was thrown away.

        SAM throws one away in every step: call it there between the two backward passes.
        """
        self._pull.begin_step(self.steps, active=self.is_pulled)
        self._watch.moved.clear()

    def finish(self) -> None:
        """Update, at the end of training, the blocks that the last step did not update."""
        self._updates.end()
        self._begin([name for name, last in self._updates.last.items() if last != self.steps])
        self._updates.end()
        self._pull.broadcast_targets(self.blocks)

    @property
    def surrogates(self) -> Mapping[str, Surrogate]:
        """Block → `Surrogate`, for the blocks that this rank owns; waits for the round that the device is computing."""
        self._updates.end()
        return self._surrogates

    @property
    def state_bytes(self) -> int:
        """Bytes that this rank keeps: the states of its blocks and, for a decoupled pull, the T that others sent."""
        own = sum(value.nbytes for s in self.surrogates.values() for value in s.state_dict().values())
        return own + self._pull.received_bytes

    def drain_records(self) -> list[tuple[int, str, UpdateRecord]]:
        """Return all ranks' ADMM updates as (step, block, record), sorted; the same on every rank.

        They are those since the last call, or since a state was loaded: a roll-back abandons the steps before it.
        Collective: call it on every rank, also where only one of them uses what it returns.

        Raises:
            NotFiniteError: on every rank, if a weight of these updates or any surrogate holds NaN or infinity.
        """
        self.require_same_ranks()
        return self._updates.drain(self.blocks, self.steps)

    def penalty(self) -> Tensor:
        """ℓ_ρ (eq. 6) summed over all blocks, at the weights as they are now; the same on every rank (0-d).

        In parts of the training without a pull it is what the penalty would be.

        Collective: call it on every rank, also where only one of them uses what it returns. With several ranks the
        host waits for the device.
        """
        self.require_same_ranks()
        device = next(iter(self.weights.values())).device
        mine = [surrogate.penalty(self.weights[name]) for name, surrogate in self.surrogates.items()]
        total = torch.stack(mine).sum() if mine else torch.zeros((), device=device)
        if self._ranks == 1:  # without waiting for the device
            return total
        return torch.tensor(sum(distributed.gather(float(total))), dtype=total.dtype, device=device)

    def summary(self) -> dict[str, float]:
        """Return the mean effective rank ratio and density over all blocks, and the model's parameters as L + S.

        Collective: call it on every rank, also where only one of them uses what it returns.
        """
        self.require_same_ranks()
        mine = []
        for surrogate in self.surrogates.values():
            nnz, (n, m) = surrogate.nnz, surrogate.T.shape
            mine.append((surrogate.rank_ratio, nnz / (n * m), surrogate.rank * (n + m) + nnz))
        ratios, densities, parameters = zip(*chain.from_iterable(distributed.gather(mine)), strict=True)
        dense = sum(X.numel() for X in self.weights.values())
        return {
            "rank_ratio": sum(ratios) / len(ratios),
            "density": sum(densities) / len(densities),
            "block_parameters": sum(parameters),
            "block_parameters_dense": dense,
            "parameters": sum(p.numel() for p in self.model.parameters()) - dense + sum(parameters),
        }

    def counts(self) -> dict[str, Any]:
        """Return the steps counted, and the step of each block's last update; the same on every rank, collective."""
        self.require_same_ranks()
        self._updates.end()
        updated = {name: step for part in distributed.gather(self._updates.last) for name, step in part.items()}
        return {"steps": self.steps, "updated_at": updated}

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        """Load what `counts` returned, at any world size; the records of earlier updates are dropped.

        Raises:
            UserError: a block is missing; then nothing is loaded.
        """
        if missing := [name for name in self.surrogates if name not in counts["updated_at"]]:
            raise UserError(f"updated_at does not name block {missing[0]}; give a whole checkpoint or state")
        self.steps = counts["steps"]
        self._updates.load({name: counts["updated_at"][name] for name in self.surrogates})
        self.skip()
        self._pull.mark_targets_stale()

    def state_dict(self) -> dict[str, Any]:
        """Return all that `load_state_dict` needs to continue bit for bit: tensors and plain values; collective.

        The surrogates are those of this rank's blocks alone; another number of ranks can read what `save` writes.
        """
        state = {name: surrogate.state_dict() for name, surrogate in self.surrogates.items()}
        return {"settings": asdict(self.config), **self.counts(), "surrogates": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank; the model must have the weights that it had then.

        `drain_records` no longer returns the updates from before.

        Raises:
            UserError: a part is missing or of another shape; then nothing is loaded.
        """
        for key in ("steps", "updated_at", "surrogates"):
            if key not in state:
                raise UserError(
                    f"the state has no {key}, so L and S would begin anew; give a whole Salaad.state_dict()"
                )
        for name, surrogate in self.surrogates.items():
            if name not in state["surrogates"] or name not in state["updated_at"]:
                raise UserError(
                    f"the state lacks block {name}; give the state of a Salaad with the same roles and, of this rank, "
                    "from as many ranks, or read what Salaad.save wrote with Salaad.load"
                )
            surrogate.require_fitting(state["surrogates"][name], name)
        for name, surrogate in self.surrogates.items():
            surrogate.load_state_dict(state["surrogates"][name])
        self.load_counts(state)

    def save(self, folder: Path | str, tokenizer: Any = None) -> None:
        """Write the model and its L, S, dual, thresholds and counts into a new folder; collective.

        The folder opens with `from_pretrained`, is cut by compress.py, measured by evaluate.py and read by `load`, at
        any number of ranks. If the model has no `save_pretrained`, the folder holds no weights.

        Args:
            folder: a folder that does not exist yet.
            tokenizer: saved with the model; needed to use the folder with text. compress.py and evaluate.py use it as
                it is; `AutoTokenizer` replaces parts of it beside a model of some types, such as qwen2.

        Raises:
            UserError: the folder exists, or cannot be written, or there are more or fewer processes than there were.
        """
        self.require_same_ranks()
        storage.save_folder(Path(folder), (self.model, tokenizer), self.writer)

    def index(self) -> dict[str, Any]:
        """Return the index of a folder's shards: settings, counts, all ranks' blocks, norms of weights; collective.

        Raises:
            NotSavedError: on every rank, if any rank fails, such as for lack of memory.
        """
        return storage.index_of(self.surrogates, self.weights, settings=asdict(self.config), **self.counts())

    def writer(self) -> Callable[[Path], None]:
        """Return a function that writes this rank's share of what `load` and compress.py read besides the weights.

        The call is collective, that of the function is not; it needs an existing folder.

        Raises:
            UserError: a part of the model is what torch.compile returned.
        """
        refuse_compiled_parts(self.model)
        index, moments = self.index(), self.second_moments()

        def write(folder: Path) -> None:
            storage.save_surrogates(self.surrogates, folder, index)
            if distributed.rank() == 0:
                save_second_moments(moments, folder)

        return write

    def second_moments(self) -> Moments:
        """Return the second moments of the weights' optimizers; before the first step, those that `load` has read.

        Collective: an optimizer that shares its state among the ranks has those of some weights on each.
        """
        optimizers = self._watch.optimizers
        if not optimizers:
            return self._moments_found
        return dict(ChainMap(*distributed.together(lambda: second_moments(self.model, *optimizers))))

    @classmethod
    def load(
        cls,
        model: nn.Module,
        folder: Path | str,
        config: SalaadConfig | None = None,
        *,
        scaler: Any = None,
        total_steps: int | None = None,
    ) -> Self:
        """Return a `Salaad` on `model` that continues from what `save`, `SalaadCallback` or train.py wrote; collective.

        Args:
            model: the model, with the weights that were saved.
            folder: a folder from `save`, a checkpoint of the Trainer or a checkpoint of train.py.
            config: settings to continue with; by default those that were saved.
            scaler: as for `Salaad`.
            total_steps: as for `Salaad`.

        Raises:
            UserError: the folder holds no complete state, or the state of a model with other blocks or weights.
        """
        surrogates = Path(folder) / "surrogate"
        about = storage.read_about(surrogates)
        if not {"settings", "steps", "updated_at"} <= set(about):
            raise UserError(
                f"{surrogates} does not say settings and steps, so an older version wrote it; go on with train.py, or "
                "with that version"
            )
        config = config or section(SalaadConfig, about["settings"], surrogates / "index.json")
        salaad = cls(model, config, scaler=scaler, total_steps=total_steps)
        try:
            storage.load_surrogates(salaad.surrogates, surrogates, salaad.weights)
            salaad.load_counts(about)
            salaad._moments_found = moments_in(Path(folder), salaad.model)
        except BaseException:
            salaad.close()
            raise
        return salaad

    @contextmanager
    @torch.no_grad()
    def deployed(self) -> Iterator[None]:
        """Context manager under which the model computes with L + S, truncated as deployed, not X; collective."""
        self.require_same_ranks()
        with restored(self.weights):
            # First all blocks that this rank owns, so that the ranks compute at once, before any waits for a broadcast.
            for name, surrogate in self.surrogates.items():
                X = self.weights[name]
                with true_float32(X.device):
                    X.copy_(surrogate.deployed())
            for name, X in self.weights.items():
                distributed.broadcast(X.data, self.owners[name])
            torch.clear_autocast_cache()
            yield
