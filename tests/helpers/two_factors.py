"""A training method from outside the package, with settings and state of its own: projections become W = B·A.

Importing this module registers it as `two_factors`, and `FrozenHead` as `frozen_head`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from salaad.common.errors import UserError
from salaad.common.validation import at_least
from salaad.config.methods import MethodConfig, SalaadConfig
from salaad.methods.base import BlockRecord, Method
from salaad.methods.registry import register
from salaad.model.build import without_weights
from salaad.model.roles import find_blocks


@dataclass(frozen=True)
class TwoFactorsConfig(MethodConfig):
    """Two factors in place of every projection.

    Args:
        rank: of the product.
        restart_every: steps between two restarts of A.
    """

    tunable = ("restart_every",)

    rank: int = 4
    restart_every: int = 5

    def __post_init__(self) -> None:
        at_least(self, 1, "rank", "restart_every")


class Product(nn.Module):
    """A module that computes Y = x·Aᵀ·Bᵀ, in place of a linear layer without bias."""

    def __init__(self, linear: nn.Linear, rank: int) -> None:
        super().__init__()
        n, m = linear.weight.shape
        self.A = nn.Parameter(torch.empty(rank, m, device=linear.weight.device).normal_(std=m**-0.5))
        self.B = nn.Parameter(torch.empty(n, rank, device=linear.weight.device).normal_(std=rank**-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.A.mT @ self.B.mT


class TwoFactors(Method):
    Settings = TwoFactorsConfig
    replaces_modules = True
    progress = {"size": "size"}  # noqa: RUF012
    remedy = "a smaller --two_factors.rank"

    def __init__(self, model, config) -> None:
        super().__init__(model, config)
        self.products = {name: part for name, part in model.named_modules() if isinstance(part, Product)}
        self.mean_sizes: Tensor | None = None
        self.restarts = 0
        self._records: list[BlockRecord] = []

    @classmethod
    def check(cls, model, config) -> None:
        for name, X in find_blocks(model, SalaadConfig()).items():
            if config.settings.rank > min(X.shape):
                raise UserError(
                    f"two_factors.rank is {config.settings.rank}, above the shorter side of {name}, {min(X.shape)}; "
                    f"give {min(X.shape)} or less"
                )

    @classmethod
    def rebuild(cls, model, config) -> None:
        for name in find_blocks(model, SalaadConfig()):
            model.set_submodule(name, Product(model.get_submodule(name), config.settings.rank))

    @classmethod
    def plan(cls, model, config, ranks) -> list[tuple[str, str]]:
        count = sum(isinstance(part, Product) for part in model.modules())
        return [("products", str(count))]

    def build_optimizer(self):
        factors = [p for part in self.products.values() for p in part.parameters()]
        chosen = {id(p) for p in factors}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        lr = self.config.optimizer.lr
        groups = [{"params": factors, "lr": 10 * lr}, {"params": others, "lr": lr}]
        falling = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
        optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.5)
        return optimizer, LambdaLR(optimizer, falling)

    def after_step(self, optimizer, step, discarded) -> None:
        sizes = torch.stack([part.B.detach().norm().cpu() for part in self.products.values()])
        self.mean_sizes = sizes if self.mean_sizes is None else 0.9 * self.mean_sizes + 0.1 * sizes
        if step % self.config.settings.restart_every == 0:
            self.restarts += 1
            with torch.no_grad():
                for i, (name, part) in enumerate(self.products.items()):
                    generator = torch.Generator().manual_seed(1000 * self.restarts + i)
                    part.A.add_(torch.randn(part.A.shape, generator=generator), alpha=0.01)
                    optimizer.state[part.A]["momentum_buffer"].zero_()
                    self._records.append(BlockRecord(step, name, {"size": float(self.mean_sizes[i])}))

    def columns(self) -> dict[str, float]:
        return {"penalty": 0.0, "restarts": self.restarts}

    def drain_records(self) -> list[BlockRecord]:
        records, self._records = self._records, []
        return records

    def export(self, folder: Path) -> None:
        plain = without_weights(self.model.config)
        state = {name: tensor for name, tensor in self.model.state_dict().items() if not name.endswith((".A", ".B"))}
        state |= {f"{name}.weight": part.B @ part.A for name, part in self.products.items()}
        plain.load_state_dict(state)
        plain.save_pretrained(folder)

    def tensors(self) -> dict[str, Tensor]:
        return {} if self.mean_sizes is None else {"mean_sizes": self.mean_sizes}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        self.mean_sizes = tensors["mean_sizes"]

    def state_dict(self) -> dict[str, Any]:
        return {"restarts": self.restarts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.restarts = state["restarts"]


class FrozenHead(Method):
    """Plain pretraining of all but the LM head."""

    @classmethod
    def rebuild(cls, model, config) -> None:
        model.get_output_embeddings().requires_grad_(False)


register("two_factors", TwoFactors)
register("frozen_head", FrozenHead)
