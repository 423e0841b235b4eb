"""What is trained how: one object with few hooks, so that the training loop knows no method by name."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.run import RunConfig
from salaad.methods.salaad.plugin import Salaad
from salaad.methods.salaad.surrogate import Surrogate, UpdateRecord
from salaad.model.build import count_parameters
from salaad.model.roles import find_blocks


class FullRank:
    """Plain pretraining, and the hooks every method has.

    Args:
        model: the model on its final device, before it is wrapped for data parallelism.
        config: the run's configuration.
    """

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        self.model = model

    @classmethod
    def check(cls, model: nn.Module, config: RunConfig) -> None:
        """Raise a UserError if the method cannot train `model`, of which only names and shapes are read."""

    def float32_gradients(self) -> list[nn.Parameter]:
        """Weights in bfloat16 whose gradients are kept, and averaged over the ranks, in float32."""
        return []

    def after_backward(self) -> None:
        """Called once per optimizer step, when the gradients of all micro-batches are there."""

    def discard(self) -> None:
        """Called when gradients of a backward were thrown away."""

    def after_step(self) -> None:
        """Called after every optimizer step."""

    def finish(self) -> None:
        """Called after the last step, before the last evaluation."""

    def penalty(self) -> Tensor:
        """What the method adds to the loss at the weights as they are now (no dimensions)."""
        return torch.zeros(())

    def drain_records(self) -> list[tuple[int, str, UpdateRecord]]:
        """Block updates since the last call, as (step, block, record); the same on every rank."""
        return []

    def variants(self) -> Iterator[tuple[str, AbstractContextManager, dict[str, float]]]:
        """What to evaluate: a name, a context in which the model is that variant, its parameters and other figures."""
        yield "X", nullcontext(), {"parameters": count_parameters(self.model)}

    def surrogates(self) -> dict[str, Surrogate]:
        """The surrogates this rank owns, for the checkpoint."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the surrogates' tensors; the same on every rank."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class SalaadMethod(FullRank):
    """SALAAD: the penalty during backward, the ADMM on its schedule, L + S beside X at evaluation."""

    def __init__(self, model: nn.Module, config: RunConfig) -> None:
        super().__init__(model, config)
        self.salaad = Salaad(model, config.salaad)

    @classmethod
    def check(cls, model: nn.Module, config: RunConfig) -> None:  # noqa: D102
        find_blocks(model, config.salaad)
        if config.train.precision == "bf16" and config.optimizer.name not in ("Adam", "AdamW"):
            raise UserError(
                f"optimizer.name is {config.optimizer.name}, but pure bf16 keeps float32 gradients for the blocks, "
                "which only Adam and AdamW take; choose one of them, or train.precision bf16-mixed"
            )

    def float32_gradients(self) -> list[nn.Parameter]:  # noqa: D102
        return [X for X in self.salaad.weights.values() if X.dtype == torch.bfloat16]

    def after_backward(self) -> None:  # noqa: D102
        distributed.average_gradients(self.float32_gradients())

    def discard(self) -> None:  # noqa: D102
        self.salaad.skip()

    def after_step(self) -> None:  # noqa: D102
        self.salaad.step()

    def finish(self) -> None:  # noqa: D102
        self.salaad.finish()

    def penalty(self) -> Tensor:  # noqa: D102
        return self.salaad.penalty()

    def drain_records(self) -> list[tuple[int, str, UpdateRecord]]:  # noqa: D102
        return self.salaad.drain_records()

    def variants(self) -> Iterator[tuple[str, AbstractContextManager, dict[str, float]]]:  # noqa: D102
        yield from super().variants()
        yield "L+S", self.salaad.deployed(), self.salaad.summary()

    def surrogates(self) -> dict[str, Surrogate]:  # noqa: D102
        return self.salaad.surrogates

    def state_dict(self) -> dict[str, Any]:  # noqa: D102
        return self.salaad.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: D102
        self.salaad.load_state_dict(state)


METHODS = {"full_rank": FullRank, "salaad": SalaadMethod}
