"""SALAAD as a method: the penalty during backward, the ADMM on its schedule, L + S beside X at evaluation."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.config.run import RunConfig
from salaad.methods.base import BlockRecord, Method
from salaad.methods.salaad import ownership
from salaad.methods.salaad.plugin import Salaad
from salaad.methods.salaad.round import bytes_for_a_moment
from salaad.methods.salaad.schedule import pulled_steps
from salaad.methods.salaad.storage import load_surrogates, save_surrogates
from salaad.methods.salaad.update import KEPT
from salaad.methods.work import Work, svd_seconds
from salaad.model import coverage
from salaad.model.roles import find_blocks
from salaad.spectral.cost import Rates, cheapest, seconds

_ADMM_BYTES = 10  # per parameter: R and T of `Surrogate` in float32, and singular vectors of up to half the short side


class SalaadMethod(Method):
    """Pretraining with SALAAD, Algorithm 1 of the paper."""

    Settings = SalaadConfig
    progress = {"rank_ratio": "rank", "density": "density"}  # noqa: RUF012
    remedy = "a lower --optimizer.lr or a weaker pull (--salaad.rho_constant, or rho or pull_rate if given)"

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        super().__init__(model, config)
        for X in find_blocks(model, config.settings).parameters.values():
            if X.dtype == torch.bfloat16:
                X.grad_dtype = torch.float32  # to nearest, the penalty would be rounded away
        self.salaad = Salaad(model, config.settings, most_records=None, total_steps=config.train.steps)

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().check(model, config)
        find_blocks(model, config.settings)
        if config.train.precision == "bf16" and config.optimizer.name not in ("Adam", "AdamW"):
            raise UserError(
                f"optimizer.name is {config.optimizer.name}, but pure bf16 keeps float32 gradients for the blocks, "
                "which only Adam and AdamW take; choose one of them, or train.precision bf16-mixed"
            )

    @classmethod
    def memory(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> dict[str, float]:
        """Return the bytes of one rank, with float32 copies of bfloat16 blocks and the surrogates that it owns."""
        memory = super().memory(model, config, ranks)
        blocks = find_blocks(model, config.settings)
        entries = {name: X.numel() for name, X in blocks.items()}
        sizes = ownership.loads(entries, ownership.owners_of(blocks, ranks, config.settings.owners), ranks)
        if config.train.precision == "bf16":  # the blocks keep gradients and moments in float32
            memory["gradients"] += 2 * sum(sizes)
            memory["optimizer state"] += 4 * sum(sizes)
        memory["ADMM"] = max(sizes) * _ADMM_BYTES
        if config.settings.pull == "decoupled":
            memory["targets of other owners' blocks"] = 4 * (sum(sizes) - min(sizes))
        return memory

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:
        """Return the work of a step, with the ADMM updates of the most loaded rank as periodic work."""
        settings, work = config.settings, super().work(model, config, ranks, rates)
        blocks = find_blocks(model, settings)
        updates = {name: _update_seconds(X, settings, rates) for name, X in blocks.items()}
        once = max(ownership.loads(updates, ownership.owners_of(blocks, ranks, settings.owners), ranks))
        spread = settings.schedule == "staggered"
        return replace(
            work,
            variants=2 * work.variants,  # L + S too
            periodic=once / settings.every if spread else once,
            every=1 if spread else settings.every,
            share=1 - settings.onset,
            beside=settings.overlap,
            notes=_uncounted(settings),
        )

    @classmethod
    def memory_for_a_moment(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> tuple[float, bool]:
        """Return the bytes of the largest ADMM update, and whether `overlap` runs it beside a forward pass."""
        settings, blocks = config.settings, find_blocks(model, config.settings)
        owned = [Counter() for _ in range(ranks)]  # short and long side → how many are updated at once
        for name, owner in ownership.owners_of(blocks, ranks, settings.owners).items():
            owned[owner][tuple(sorted(blocks[name].shape))] += 1
        found = [0.0]
        for shapes in owned:
            if settings.schedule == "staggered":
                shapes = {shape: math.ceil(count / settings.every) for shape, count in shapes.items()}
            alone = settings.method in ("exact", "subspace")
            sizes = [bytes_for_a_moment(n, m, 1 if alone else count) for (n, m), count in shapes.items()]
            if settings.overlap:  # the old states are kept until the whole round is done
                sizes = [size + sum(8 * n * m * count for (n, m), count in shapes.items()) for size in sizes]
            found += sizes
        return max(found), settings.overlap

    @classmethod
    def plan(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> list[tuple[str, str]]:
        """Return the rows on blocks, their owners, targets, pull and controller for --dry-run."""
        blocks, settings = find_blocks(model, config.settings), config.settings
        owners = ownership.owners_of(blocks, ranks, settings.owners)
        counts = [list(owners.values()).count(rank) for rank in range(ranks)]
        imbalance = ownership.imbalance(ownership.costs_of(blocks), owners, ranks)
        return [
            *coverage.coverage_rows(model, blocks),
            ("blocks per owner", ", ".join(map(str, counts))),
            ("imbalance of the owners", f"{imbalance:.3f} (largest cost over mean)"),
            ("targets", f"rank ratio {settings.rank_ratio:g}, density {settings.density:g}"),
            ("pull", _pull_in_words(settings)),
            ("controller", f"K = {settings.every}, Δα = {settings.delta_alpha:g}, Δβ = {settings.delta_beta:g}"),
            ("ADMM updates", f"{_updates(config, max(counts))} per block, {settings.schedule}"),
        ]

    def after_backward(self) -> None:
        """Average the float32 gradients of blocks over the ranks, once the penalty has joined all of them; collective.

        The gradient of a weight that no token of this rank has reached, as of an expert, counts as zero.
        """
        missing = [X for X in self.float32_gradients() if X.grad is None]
        for X in missing:
            X.grad = torch.zeros_like(X, dtype=torch.float32)
        if missing:
            self.salaad.join_gradients()
        super().after_backward()

    def float32_gradients(self) -> list[nn.Parameter]:  # noqa: D102
        parameters = {id(X): X for X in self.salaad.weights.parameters.values()}
        return [X for X in parameters.values() if X.dtype == torch.bfloat16]

    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:  # noqa: D102
        self.salaad.step(may_be_left_out=True)

    def discard(self) -> None:  # noqa: D102
        self.salaad.skip()

    def finish(self) -> None:  # noqa: D102
        self.salaad.finish()

    def columns(self) -> dict[str, float]:  # noqa: D102
        return {"penalty": float(self.salaad.penalty())}

    def drain_records(self) -> list[BlockRecord]:  # noqa: D102
        remark = "step {}: no singular values of {} could be found, so its L and S stay as they were"
        return [
            BlockRecord(step, name, vars(record), remark.format(step, name) if record.method == KEPT else None)
            for step, name, record in self.salaad.drain_records()
        ]

    def variants(self) -> Iterator[tuple[str, AbstractContextManager, dict[str, float]]]:  # noqa: D102
        yield from super().variants()
        yield "L+S", self.salaad.deployed(), self.salaad.summary()

    def state_bytes(self) -> int:  # noqa: D102
        return self.salaad.state_bytes

    def writer(self) -> Callable[[Path], dict[str, str]]:  # noqa: D102
        index = self.salaad.index()

        def write(folder: Path) -> dict[str, str]:
            written = save_surrogates(self.salaad.surrogates, folder / "surrogate", index)
            return {f"surrogate/{name}": digest for name, digest in written.items()}

        return write

    def load(self, folder: Path) -> None:  # noqa: D102
        load_surrogates(self.salaad.surrogates, folder / "surrogate")

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self.salaad.counts()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.salaad.load_counts(state)


def _update_seconds(X: Tensor, settings: SalaadConfig, rates: Rates) -> float:
    """Predicted seconds of an update of a block with the weight X, by the solver that is asked for."""
    n, m = sorted(X.shape)
    if settings.method == "exact":
        return settings.inner * svd_seconds(n, m, rates)
    named = {"gram": "gram", "products": "products", "subspace": "gram"}
    return settings.inner * seconds(named.get(settings.method) or cheapest(n, m, rates), n, m, rates)


def _uncounted(settings: SalaadConfig) -> tuple[str, ...]:
    notes = ()
    if settings.overlap:
        notes += (
            "salaad.overlap is counted as if the ADMM beside a forward pass delayed nothing until it is longer than "
            "that, though both share the device: this is the most that it saves.",
        )
    if settings.method == "subspace":
        notes += ("The solver subspace is counted as gram, which takes over wherever it does not hold.",)
    return notes


def _updates(config: RunConfig, most_blocks: int) -> str:
    """Return the ADMM updates of a block in the whole run, in words: those after the onset, and the one at the end.

    A staggered schedule gives blocks of an owner, who has up to `most_blocks`, offsets that differ by up to one update.
    """
    settings, steps = config.settings, config.train.steps
    every, begin = settings.every, pulled_steps(settings, steps).start
    staggered = settings.schedule == "staggered"
    offsets = {i * every // most_blocks for i in range(most_blocks)} if staggered else {0}
    counts = {
        (steps - offset) // every - (begin - offset) // every + (steps > begin and steps % every != offset)
        for offset in offsets
    }
    return " to ".join(f"{count:,}" for count in sorted({min(counts), max(counts)}))


def _pull_in_words(settings: SalaadConfig) -> str:
    strength = f"c = {settings.rho_constant:g}" if settings.rho is None else f"ρ = {settings.rho:g}"
    strength = strength if settings.pull == "coupled" else f"mean λ = {settings.pull_rate:g}"
    onset = f"; in the first {settings.onset:.0%} of the run no pull, and L is X" if settings.onset else ""
    release = f"; in the last {settings.release:.0%} no pull, and thresholds held" if settings.release else ""
    return f"{settings.pull}, {strength}{onset}{release}"
