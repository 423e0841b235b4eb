"""SALAAD on any torch model: the blocks of the model, the penalty during backward, the ADMM on its schedule.

loss.backward()     # ρ(X − T) joined the gradient of every block this rank owns
optimizer.step()    # any optimizer: it sees the gradient of ℓ + ℓ_ρ
salaad.step()       # every K steps: L, S, the dual and the controller
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.float32 import true_float32
from salaad.methods.salaad import ownership, storage
from salaad.methods.salaad.decoupled import DecoupledPull
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import UpdateRecord
from salaad.methods.salaad.updates import Updates, blocks_due
from salaad.methods.salaad.watch import Watch
from salaad.model import coverage
from salaad.model.parameters import restored
from salaad.model.roles import find_blocks
from salaad.model.second_moments import Moments, moments_in, save_second_moments, second_moments


class Salaad:
    """The surrogates of a model's blocks.

    It is a context, at whose end it lets go of the model: the penalty no longer joins.

    Args:
        model: any torch module with 2-D weights, or experts in 3-D ones, on its final device and in its final dtype.
        config: targets, ρ, roles and schedule.
        scaler: the `GradScaler` that scales the loss, if one does; the penalty then shares its scale.
        most_records: updates of a block that are kept for `drain_records`, the newest; all of them for None.
        total_steps: of the whole training, which `config.release` is a part of.

    Attributes:
        blocks: names of all blocks, the same on every rank.
        owners: block → rank that owns it.
        steps: optimizer steps counted so far.

    Raises:
        UserError: a role matches nothing, a weight cannot be watched (`Watch`), or `config.release` is a part of an
            unknown number of steps.
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
        if self.config.release and total_steps is None:
            raise UserError(
                f"release is {self.config.release}, a part of the training, whose length is not known; give "
                "Salaad(model, config, total_steps=…)"
            )
        self._released_at = round((1 - self.config.release) * total_steps) if self.config.release else None
        self.model = distributed.unwrapped(model)
        self.scaler = scaler
        self.weights = find_blocks(self.model, self.config)
        self.blocks = tuple(self.weights)
        self._watch = Watch(self.weights, self._has_joined_nothing)
        self._costs = ownership.costs_of(self.weights)
        self.owners = ownership.assign_owners(self._costs, distributed.world_size(), self.config.owners)
        self._surrogates: dict[str, Surrogate] = {}
        for name in ownership.dearest_first(self._costs):
            if self.owners[name] == distributed.rank():
                with true_float32(self.weights[name].device):
                    self._surrogates[name] = Surrogate(self.weights[name], self._rho(name), self.config)
        self._updates = Updates(self._surrogates, self.weights, self.config.overlap, most_records)
        self.steps = 0
        self._pending: set[str] = set()
        self._scale: float | None = None
        self._pull: DecoupledPull | None = None
        if self.config.pull == "decoupled":
            rho = {name: self._rho(name) for name in self.blocks}
            mean = sum(rho.values()) / len(rho) or 1.0
            rates = {name: self.config.pull_rate * value / mean for name, value in rho.items()}
            self._pull = DecoupledPull(self.weights, self.surrogates, self.owners, rates)
        self.skip()
        # The hooks do not keep this object: the cycle with the weights would be one that Python cannot free.
        join = weakref.WeakMethod(self._join_gradient)
        self._hooks = [
            self.weights.places[name].parameter.register_post_accumulate_grad_hook(partial(_call, join, name))
            for name in self.surrogates
        ]
        self.closed = False
        self._moments_found: Moments = {}

    def __repr__(self) -> str:
        """What part of the model is drawn towards L + S, and what is left out for which reason."""
        lines = [f"{what}: {how_much}" for what, how_much in coverage.said(self.model, self.weights)]
        return "\n  ".join([f"Salaad after {self.steps:,} steps", *lines])

    def __enter__(self) -> Self:
        """This object."""
        return self

    def __exit__(self, *error: object) -> None:
        """`close`."""
        self.close()

    def close(self) -> None:
        """Let go of the model: the penalty joins no more gradients. L, S and what is made of them stay.

        Raises:
            NotFiniteError: a weight of the last update holds NaN or infinity; the model is let go all the same.
        """
        try:
            self._updates.end()
        finally:
            for hook in self._hooks:
                hook.remove()
            if self._pull is not None:
                self._pull.end()
            if not self.closed:
                self._watch.end()
            self.closed = True

    def _rho(self, name: str) -> float:
        """Eq. 5: ρ = c / (N·sqrt(n·m)), unless an absolute ρ was given."""
        if self.config.rho is not None:
            return self.config.rho
        return self.config.rho_constant / (len(self.blocks) * self.weights[name].numel() ** 0.5)

    def _join_gradient(self, name: str, *_: Tensor) -> None:
        # Only the first backward after a step: with gradient accumulation ℓ_ρ still counts once. The mean over the
        # ranks, of whom this one alone adds it, then is the coupled gradient.
        if name not in self._pending:
            return
        if self._scale is None:
            self._scale = distributed.world_size() * (1.0 if self.scaler is None else self.scaler.get_scale())
        self._pending.discard(name)
        seed = self.steps * len(self.blocks) + self.blocks.index(name)
        place = self.weights.places[name]
        self.surrogates[name].add_penalty_gradient(place.gradient, place.weight, self._scale, seed)

    def _has_joined_nothing(self) -> bool:
        return 0 < len(self._surrogates) == len(self._pending)

    def join_gradients(self) -> None:
        """Add the penalty to gradients that no backward accumulated, as those of `torch.autograd.grad`.

        To be called before the optimizer's step; blocks that a backward has reached since the last step are passed
        over. Of several ranks the owner adds it as many times as there are ranks, before the gradients are averaged.
        """
        for name in tuple(self._pending):
            if self.weights.places[name].gradient is not None:
                self._join_gradient(name)

    def step(self) -> None:
        """Count an optimizer step and update the blocks that the schedule names.

        Raises:
            UserError: the penalty no longer reaches the weights, as `Watch.check` finds.
            NotFiniteError: a weight of this rank's updates holds NaN or infinity.
        """
        if self.closed:
            raise UserError("this Salaad was closed and lets the model go; make a new one, or load what it saved")
        self._watch.check(self.scaler)
        self._updates.end()  # of the step before, if no gradient has come since
        self.steps += 1
        self.skip()
        due = list(blocks_due(self.owners, self._costs, distributed.world_size(), self.steps, self.config))
        self._updates.begin(due, self.steps)
        if not (self.config.overlap and self._pending):  # else the first gradient that a block joins ends the round
            self._updates.end()
        if self._pull is not None:
            self._pull.send(due)

    @property
    def is_released(self) -> bool:
        """Whether nothing draws the weights in the next step."""
        return self._released_at is not None and self.steps >= self._released_at

    def skip(self) -> None:
        """Let the penalty join the next backward, in place of `step`, where a gradient was thrown away."""
        joins = self._pull is None and not self.is_released
        self._pending = set(self._surrogates) if joins else set()
        self._scale = None
        if self._pull is not None:
            self._pull.steps, self._pull.active = self.steps, not self.is_released

    def finish(self) -> None:
        """When training ends: a last update for the blocks that the last step did not update."""
        self._updates.end()
        self._updates.begin([name for name, last in self._updates.last.items() if last != self.steps], self.steps)
        self._updates.end()
        if self._pull is not None:
            self._pull.send(self.blocks)

    @property
    def surrogates(self) -> Mapping[str, Surrogate]:
        """Block → `Surrogate`, for the blocks that this rank owns, after the update that the device still computes."""
        self._updates.end()
        return self._surrogates

    def drain_records(self) -> list[tuple[int, str, UpdateRecord]]:
        """Every rank's ADMM updates since the last call, as (step, block, record), in order; the same on every rank.

        Raises:
            NotFiniteError: on every rank, if a weight of these updates or any surrogate holds NaN or infinity.
        """
        return self._updates.drain(self.blocks, self.steps)

    def penalty(self) -> Tensor:
        """ℓ_ρ (eq. 6) summed over all blocks, at the weights as they are now; the same on every rank."""
        device = next(iter(self.weights.values())).device
        mine = [surrogate.penalty(self.weights[name]) for name, surrogate in self.surrogates.items()]
        return distributed.all_sum(torch.stack(mine).sum() if mine else torch.zeros((), device=device))

    def summary(self) -> dict[str, float]:
        """Mean effective rank ratio and density over all blocks, and the model's parameters as L + S."""
        mine = [(s.rank_ratio, s.density, s.parameters) for s in self.surrogates.values()]
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
        """Steps counted, and when each block was updated; the same on every rank, collective."""
        self._updates.end()
        updated = {name: step for part in distributed.gather(self._updates.last) for name, step in part.items()}
        return {"steps": self.steps, "updated_at": updated}

    def load_counts(self, counts: Mapping[str, Any]) -> None:
        """Take over what `counts` gave, at any world size."""
        self.steps = counts["steps"]
        self._updates.last = {name: counts["updated_at"][name] for name in self.surrogates}
        self.skip()
        if self._pull is not None:
            self._pull.forget()

    def state_dict(self) -> dict[str, Any]:
        """All that `load_state_dict` needs to go on to the bit with the weights as they are: tensors and plain values.

        L, S and dual are those of this rank's blocks; `save` is what another number of ranks can read.
        """
        state = {name: surrogate.state_dict() for name, surrogate in self.surrogates.items()}
        return {"settings": asdict(self.config), **self.counts(), "surrogates": state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave, on this rank; the model's weights have to be those of that time.

        Raises:
            UserError: a part is missing or of another shape; then nothing is taken over.
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
        any number of ranks. Of a model without `save_pretrained` it holds no weights.

        Args:
            folder: one that is not there yet.
            tokenizer: saved beside the model, which text needs.

        Raises:
            UserError: the folder is there, or cannot be written.
        """
        storage.save_folder(Path(folder), (self.model, tokenizer), self.writer)

    def index(self) -> dict[str, Any]:
        """What `write` writes beside tensors: settings, counts, every rank's blocks and their norms; collective.

        Raises:
            NotSavedError: a rank has no memory for it.
        """
        return storage.index_of(self.surrogates, self.weights, settings=asdict(self.config), **self.counts())

    def write(self, folder: Path, index: Mapping[str, Any]) -> dict[str, str]:
        """Write all that `load` reads beside the model's weights, into a folder that is there; exchanges nothing.

        Returns:
            Name → SHA-256 of this rank's large file.
        """
        return storage.save_surrogates(self.surrogates, folder, index)

    def writer(self) -> Callable[[Path], None]:
        """What writes the same and what the optimizer knows of the gradients, by which compress.py cuts; collective."""
        index = self.index()

        def write(folder: Path) -> None:
            self.write(folder, index)
            if distributed.rank() == 0:
                save_second_moments(self.second_moments(), folder)

        return write

    def second_moments(self) -> Moments:
        """Of the optimizer that moves the weights; before its first step those that `load` found."""
        optimizer = self._watch.optimizer
        return self._moments_found if optimizer is None else second_moments(self.model, optimizer)

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
        """A `Salaad` on `model` that goes on from what `save`, `SalaadCallback` or train.py wrote; collective.

        Args:
            model: with the weights it had then.
            folder: that of `save`, a checkpoint of the Trainer or one of train.py.
            config: other settings with which to go on; those that were saved unless given.
            scaler: as of `Salaad`.
            total_steps: as of `Salaad`.

        Raises:
            UserError: the folder holds no whole state, or that of a model with other blocks or other weights.
        """
        surrogates = Path(folder) / "surrogate"
        about = storage.read_about(surrogates)
        if not {"settings", "steps", "updated_at"} <= set(about):
            raise UserError(
                f"{surrogates} does not say settings and steps, so an older version wrote it; go on with train.py, or "
                "with that version"
            )
        salaad = cls(model, config or SalaadConfig(**about["settings"]), scaler=scaler, total_steps=total_steps)
        try:
            storage.load_surrogates(salaad.surrogates, surrogates, salaad.weights)
            salaad.load_counts(about)
            salaad._moments_found = moments_in(Path(folder), model)
        except UserError:
            salaad.close()
            raise
        return salaad

    @contextmanager
    @torch.no_grad()
    def deployed(self) -> Iterator[None]:
        """Within this context the model computes with L + S, truncated as deployed, instead of X, on every rank."""
        with restored(self.weights):
            # First all that this rank owns, so that no rank waits for another's in between.
            for name, surrogate in self.surrogates.items():
                X = self.weights[name]
                with true_float32(X.device):
                    X.copy_(surrogate.deployed())
            for name, X in self.weights.items():
                distributed.broadcast(X.data, self.owners[name])
            yield


def _call(method: weakref.WeakMethod, *arguments: Any) -> None:
    if (found := method()) is not None:
        found(*arguments)
