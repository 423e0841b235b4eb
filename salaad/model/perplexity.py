"""Perplexity: exp of the token-weighted mean negative log-likelihood over non-padding tokens."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from salaad.common import distributed
from salaad.model.loss import IGNORED


@dataclass(frozen=True)
class Perplexity:
    """A model's loss on a text.

    Args:
        loss: mean negative log-likelihood per token, in nats.
        tokens: number of predicted tokens.
        legacy_loss: the loss of older tables in the field: the sum of the batches' mean losses, divided by one more per
            rank than the number of batches, which is too low, the more so the fewer batches there are.
    """

    loss: float
    tokens: int
    legacy_loss: float

    @property
    def perplexity(self) -> float:
        """Exp of the loss."""
        return math.exp(min(self.loss, 700.0))

    @property
    def legacy_perplexity(self) -> float:
        """Exp of the legacy loss, for comparison with older tables only."""
        return math.exp(min(self.legacy_loss, 700.0))


@torch.no_grad()
def evaluate(
    loss: nn.Module,
    batches: Iterable[dict[str, Tensor]],
    device: torch.device,
    stopped: Callable[[], bool] = lambda: False,
) -> Perplexity | None:
    """Return the perplexity of a `SummedLoss` over the `batches` of all ranks together, equal on every rank.

    Args:
        loss: a module that returns the summed loss in nats of `input_ids` and `labels` (rows × length).
        batches: this rank's batches.
        device: the model's device.
        stopped: called before every batch; if it returns True on any rank, the result is None on every rank.
    """
    # Loss, tokens, sum of the batches' mean losses, batches, ranks that stopped.
    total = torch.zeros(5, dtype=torch.float64, device=device)
    training = loss.training
    loss.eval()
    for batch in batches:
        if stopped():
            total[4] = 1
            break
        labels = batch["labels"].to(device, non_blocking=True)
        summed = loss(batch["input_ids"].to(device, non_blocking=True), labels).double()
        tokens = (labels[:, 1:] != IGNORED).sum()
        total[:4] += torch.stack([summed, tokens, summed / tokens.clamp_min(1), torch.ones_like(summed)])
    loss.train(training)
    summed, tokens, means, batches, stopped_ranks = distributed.all_sum(total).tolist()
    if stopped_ranks:
        return None
    # The legacy loss counts one batch too many per rank.
    return Perplexity(summed / max(1.0, tokens), int(tokens), means / (batches + distributed.world_size()))
