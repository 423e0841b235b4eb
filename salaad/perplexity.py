"""Perplexity: exp of the token-weighted mean negative log-likelihood over non-padding tokens."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from salaad import sharding
from salaad.cross_entropy import IGNORED


@dataclass(frozen=True)
class Perplexity:
    """Mean negative log-likelihood in nats and the number of predicted tokens it is the mean of."""

    loss: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """Exp of the loss."""
        return math.exp(min(self.loss, 700.0))


@torch.no_grad()
def evaluate(loss: nn.Module, batches: Iterable[dict[str, Tensor]], device: torch.device) -> Perplexity:
    """Perplexity of a `SummedLoss` over every rank's `batches` together; the same figure on every rank."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    training = loss.training
    loss.eval()
    for batch in batches:
        labels = batch["labels"].to(device, non_blocking=True)
        total[0] += loss(batch["input_ids"].to(device, non_blocking=True), labels).double()
        total[1] += (labels[:, 1:] != IGNORED).sum()
    loss.train(training)
    summed, tokens = sharding.all_sum(total).tolist()
    return Perplexity(summed / max(1.0, tokens), int(tokens))
