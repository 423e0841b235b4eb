"""Perplexity against sums by hand, and the legacy perplexity of older tables in the field."""

import math

import pytest
import torch
from torch import nn

from salaad.model.loss import IGNORED
from salaad.model.perplexity import evaluate


class Fixed(nn.Module):
    """A summed loss of 2 nats per token, and of 3 in rows that begin with 7."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        nats = torch.where(input_ids[:, :1] == 7, 3.0, 2.0)
        return (nats * (labels[:, 1:] != IGNORED)).sum()


def test_the_loss_weighs_tokens_and_the_legacy_one_batches_of_which_it_counts_one_too_many():
    short = {"input_ids": torch.tensor([[7, 1, 0, 0]]), "labels": torch.tensor([[7, 1, IGNORED, IGNORED]])}
    long = {"input_ids": torch.tensor([[5, 1, 2, 3]] * 3), "labels": torch.tensor([[5, 1, 2, 3]] * 3)}
    result = evaluate(Fixed(), [short, long], torch.device("cpu"))
    assert result.tokens == 1 + 9
    assert result.loss == pytest.approx((3 * 1 + 2 * 9) / 10)
    assert result.legacy_loss == pytest.approx((3 + 2) / (2 + 1))
    assert result.perplexity == pytest.approx(math.exp(2.1))
    assert result.legacy_perplexity == pytest.approx(math.exp(5 / 3))
