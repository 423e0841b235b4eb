"""GaLore: dense weights, whose gradients the optimizer sees projected to a subspace that changes (2403.03507).

    every T steps:  P (short×r) = the leading singular vectors of the gradient on its shorter side
    every step:     R = Pᵀ·G,   N = Adam's direction for R,   W −= lr·scale·P·N

for every projection; the moments have the size of R and are kept when P changes. The same optimizer trains all other
weights without a projection, at the full learning rate.

The optimizer is any of torch's with moments. In place of every W it trains a small parameter (r×long) that is zero
before a step and has the gradient R; after the step, scale·P times this parameter is the change of W. Different from
the released code: ε is added to Adam's corrected second moment, as torch does it; the arbitrary sign of a singular
vector is chosen so that its product with the vector it replaces is not negative; weight decay is decoupled for the
projected weights, whatever the optimizer; with several ranks, each computes some of the subspaces.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.methods import GaloreConfig
from salaad.config.run import RunConfig
from salaad.methods.base import BYTES, Method
from salaad.methods.float32 import at_least_float32, true_float32
from salaad.methods.low_rank_layers import projections, require_projections
from salaad.methods.optimizer import build_optimizer
from salaad.methods.salaad.ownership import loads, owners_of
from salaad.methods.work import Work
from salaad.spectral import leading_left_vectors
from salaad.spectral.cost import Rates, seconds

_WITH_MOMENTS = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam")


def lying(X: Tensor) -> Tensor:
    """A view of X or of its transpose, whichever has the shorter side first; a square matrix is transposed."""
    return X.mT if X.shape[0] >= X.shape[1] else X


class Galore(Method):
    """Pretraining with the optimizer's moments in a subspace of the gradient (GaLore)."""

    Settings = GaloreConfig
    own_projection_rate = True

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        super().__init__(model, config)
        rank = config.settings.rank
        self.weights = {name: layer.weight for name, layer in projections(model).items()}
        self.P = {name: lying(W).new_zeros(min(W.shape), rank) for name, W in self.weights.items()}
        # What the optimizer trains in place of W: its change in the subspace, zero between two steps.
        self.changes = {name: nn.Parameter(W.new_zeros(rank, max(W.shape))) for name, W in self.weights.items()}
        self.is_due = True  # whether the next step chooses new subspaces
        self.decay = 0.0  # learning rate times weight decay of this step

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:  # noqa: D102
        super().check(model, config)
        require_projections(model, config)
        name = config.optimizer.name
        if name not in _WITH_MOMENTS:
            raise UserError(
                f"optimizer.name is {name}, which keeps no moments for galore to make smaller; give one of "
                f"{', '.join(_WITH_MOMENTS)}"
            )

    @classmethod
    def memory(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> dict[str, float]:  # noqa: D102
        memory, rank = super().memory(model, config, ranks), config.settings.rank
        weight, _, moments = BYTES[config.train.precision]
        shapes = [layer.weight.shape for layer in projections(model).values()]
        memory["optimizer state"] += sum((rank * max(shape) - shape.numel()) * moments for shape in shapes)
        memory["gradients"] += sum(rank * max(shape) * weight for shape in shapes)
        return memory | {"subspaces": sum(rank * (max(shape) + min(shape)) * weight for shape in shapes)}

    @classmethod
    def bytes_beside(cls, model: PreTrainedModel, config: RunConfig) -> int:
        """Return the bytes of P of all projections."""
        weight = BYTES[config.train.precision][0]
        return sum(config.settings.rank * min(layer.weight.shape) * weight for layer in projections(model).values())

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:  # noqa: D102
        weights = {name: layer.weight for name, layer in projections(model).items()}
        subspaces = {name: seconds("gram", *sorted(W.shape), rates) for name, W in weights.items()}
        periodic = max(loads(subspaces, owners_of(weights, ranks), ranks))
        return replace(super().work(model, config, ranks, rates), periodic=periodic, every=config.settings.every)

    def build_optimizer(self) -> tuple[Optimizer, LambdaLR]:  # noqa: D102
        projected = {id(W) for W in self.weights.values()}
        others = [p for p in self.model.parameters() if id(p) not in projected]
        settings = self.config.optimizer
        optimizer, schedule = build_optimizer([*others, *self.changes.values()], settings, self.config.train.steps)
        optimizer.register_step_pre_hook(lambda *_: self.project(optimizer))
        return optimizer, schedule

    @torch.no_grad()
    def project(self, optimizer: Optimizer) -> None:
        """Give the optimizer R = Pᵀ·G of every projected weight, after clipping; choose new subspaces first if due."""
        # A gradient that is not finite has no singular vectors; then no step follows, and new subspaces are still due.
        if self.is_due and not bool(getattr(optimizer, "found_inf", 0)):
            self.choose_subspaces()
        group = optimizer.param_groups[0]
        self.decay = group["lr"] * group["weight_decay"]
        for name, W in self.weights.items():
            self.changes[name].grad = self.P[name].mT @ lying(W.grad).to(W.dtype)

    def choose_subspaces(self) -> None:
        """Compute P of every projected weight from its gradient in this step; collective."""
        owners = owners_of(self.weights, distributed.world_size())
        for name, owner in owners.items():
            if owner == distributed.rank():
                [G], P = at_least_float32(lying(self.weights[name].grad)), self.P[name]
                with true_float32(G.device):
                    found = leading_left_vectors(G, P.shape[1])
                against = (found * P).sum(0) < 0
                P.copy_(torch.where(against, -found, found))
        for name, owner in owners.items():
            distributed.broadcast(self.P[name], owner)
        self.is_due = False

    @torch.no_grad()
    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:  # noqa: D102
        for name, W in self.weights.items():
            if self.decay:
                W.mul_(1 - self.decay * (1 - discarded))
            lying(W).addmm_(self.P[name], self.changes[name], alpha=self.config.settings.scale)
            self.changes[name].zero_()
            W.grad = None  # the optimizer does not hold W, so its zero_grad leaves this gradient
        self.is_due = self.is_due or step % self.config.settings.every == 0

    def tensors(self) -> dict[str, Tensor]:  # noqa: D102
        return self.P

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:  # noqa: D102
        for name, P in tensors.items():
            self.P[name].copy_(P)

    def state_bytes(self) -> int:  # noqa: D102
        return sum(tensor.nbytes for kept in (self.P, self.changes) for tensor in kept.values())

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return {"is_due": self.is_due}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.is_due = state["is_due"]
