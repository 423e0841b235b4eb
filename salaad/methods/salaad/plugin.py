"""SALAAD on any torch model: the blocks of the model, the penalty during backward, the ADMM on its schedule.

loss.backward()     # ρ(X − T) joined the gradient of every block this rank owns
optimizer.step()    # any optimizer: it sees the gradient of ℓ + ℓ_ρ
salaad.step()       # every K steps: L, S, the dual and the controller
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from salaad.common import distributed
from salaad.common.errors import NotFiniteError, UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad import ownership
from salaad.methods.salaad.surrogate import SOLVERS, Surrogate, UpdateRecord
from salaad.model.build import restored
from salaad.model.roles import find_blocks


class Salaad:
    """The surrogates of a model's blocks.

    Args:
        model: any torch module with 2-D weights, on its final device, not yet wrapped for data parallelism.
        config: targets, ρ, roles and schedule.

    Attributes:
        blocks: names of all blocks, the same on every rank.
        owners: block → rank that owns it.
        surrogates: block → `Surrogate`, for the blocks that this rank owns.
        steps: optimizer steps counted so far.
    """

    def __init__(self, model: nn.Module, config: SalaadConfig | None = None) -> None:
        self.config = config or SalaadConfig()
        self.model = model
        self.weights = find_blocks(model, self.config)
        self.blocks = tuple(self.weights)
        self._check_weights()
        costs = ownership.costs_of(self.weights)
        self.owners = ownership.assign_owners(costs, distributed.world_size())
        self.surrogates: dict[str, Surrogate] = {}
        # Owners keep their blocks in order of cost, so that the staggered schedule mixes dear and cheap ones.
        for name in sorted(self.blocks, key=lambda name: (-costs[name], name)):
            if self.owners[name] == distributed.rank():
                with _true_fp32(self.weights[name]):
                    self.surrogates[name] = Surrogate(self.weights[name], self._rho(name), self.config)
        self.steps = 0
        self._updated_at: dict[str, int] = dict.fromkeys(self.surrogates, 0)
        self._records: list[tuple[int, str, Tensor]] = []
        self._pending: set[str] = set(self.surrogates)
        for name, X in self.weights.items():
            if X.dtype == torch.bfloat16:
                # The penalty is about 1e-4 of the gradient: an addition in bfloat16 would round it away.
                X.grad_dtype = torch.float32
            if name in self.surrogates:
                X.register_post_accumulate_grad_hook(partial(self._join_gradient, name))

    def _check_weights(self) -> None:
        for name, X in self.weights.items():
            if not X.requires_grad:
                raise UserError(f"block {name} is frozen, so nothing can draw it; unfreeze it or leave out its role")
            if not X.isfinite().all():
                raise NotFiniteError(name, 0)

    def _rho(self, name: str) -> float:
        """Eq. 5: ρ = c / (N·sqrt(n·m)), unless an absolute ρ was given."""
        if self.config.rho is not None:
            return self.config.rho
        return self.config.rho_constant / (len(self.blocks) * self.weights[name].numel() ** 0.5)

    def _join_gradient(self, name: str, X: Tensor) -> None:
        # Only the first backward after a step: with gradient accumulation ℓ_ρ still counts once. The mean over the
        # ranks, of whom this one alone adds it, then is the coupled gradient.
        if name in self._pending:
            self._pending.discard(name)
            self.surrogates[name].add_penalty_gradient(X.grad, X, scale=distributed.world_size())

    def step(self) -> None:
        """Count an optimizer step and update the blocks that the schedule names."""
        self.steps += 1
        self.skip()
        K = self.config.every
        for i, name in enumerate(self.surrogates):
            offset = i * K // len(self.surrogates) if self.config.schedule == "staggered" else 0
            if self.steps % K == offset:
                self._update(name)

    def skip(self) -> None:
        """Let the penalty join the next backward, in place of `step`, where a gradient was thrown away."""
        self._pending = set(self.surrogates)

    def finish(self) -> None:
        """When training ends: a last update for the blocks that the last step did not update."""
        for name in self.surrogates:
            if self._updated_at[name] != self.steps:
                self._update(name)

    def _update(self, name: str) -> None:
        X = self.weights[name]
        with _true_fp32(X):
            statistics = self.surrogates[name].update(X)
        self._updated_at[name] = self.steps
        self._records.append((self.steps, name, statistics))

    def drain_records(self) -> list[tuple[int, str, UpdateRecord]]:
        """Every rank's ADMM updates since the last call, as (step, block, record), in order; the same on every rank.

        Raises:
            NotFiniteError: on every rank, if a weight of these updates or any surrogate holds NaN or infinity.
        """
        broken = [name for name, surrogate in self.surrogates.items() if not surrogate.is_finite()]
        for name in chain.from_iterable(distributed.gather(broken)):
            raise NotFiniteError(name, self.steps)
        rows = torch.stack([values for *_, values in self._records]).tolist() if self._records else []
        mine = [(step, name, row) for (step, name, _), row in zip(self._records, rows, strict=True)]
        self._records = []
        order = {name: i for i, name in enumerate(self.blocks)}
        records = sorted(
            chain.from_iterable(distributed.gather(mine)), key=lambda record: (record[0], order[record[1]])
        )
        for step, name, row in records:
            if not all(map(_is_finite, row)):
                raise NotFiniteError(name, step)
        return [(step, name, UpdateRecord(*row, SOLVERS[int(solver)])) for step, name, (*row, solver) in records]

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

    def state_dict(self) -> dict:
        """Step counts, the same on every rank; the surrogates' tensors are saved block by block beside it."""
        updated = {name: step for part in distributed.gather(self._updated_at) for name, step in part.items()}
        return {"steps": self.steps, "updated_at": updated}

    def load_state_dict(self, state: dict) -> None:
        """Take over what `state_dict` gave, at any world size."""
        self.steps = state["steps"]
        self._updated_at = {name: state["updated_at"][name] for name in self.surrogates}

    @contextmanager
    @torch.no_grad()
    def deployed(self) -> Iterator[None]:
        """Within this context the model computes with L + S, truncated as deployed, instead of X, on every rank."""
        with restored(self.weights):
            for name, X in self.weights.items():
                if name in self.surrogates:
                    with _true_fp32(X):
                        X.copy_(self.surrogates[name].deployed())
                distributed.broadcast(X.data, self.owners[name])
            yield


def _is_finite(value: float) -> bool:
    return value - value == 0


@contextmanager
def _true_fp32(X: Tensor) -> Iterator[None]:
    """The ADMM computes in true float32, whatever TF32 or autocast settings the training uses."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(X.device.type, enabled=False):
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
