"""The loss with its GPU kernel, which Triton interprets."""

import pytest
import torch
import torch.nn.functional as F

from salaad.model import gpu_kernels, loss
from salaad.model.loss import IGNORED, summed_cross_entropy


@pytest.fixture
def launched(monkeypatch):
    """A list that gets the number of tokens of every kernel launch."""
    counts, usual = [], gpu_kernels.cross_entropy_
    monkeypatch.setattr(gpu_kernels, "cross_entropy_", lambda z, *rest: counts.append(len(z)) or usual(z, *rest))
    return counts


@pytest.mark.parametrize("vocabulary", [50, 5000])  # fewer logits than a program reads at once, and more
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_and_its_gradients_are_those_of_all_logits_at_once(vocabulary, dtype, launched):
    torch.manual_seed(0)
    hidden, head = torch.randn(6, 12).to(dtype).requires_grad_(), torch.randn(vocabulary, 12).to(dtype).requires_grad_()
    targets = 9 * torch.arange(6)
    targets[2] = IGNORED
    exact = [part.detach().double().requires_grad_() for part in (hidden, head)]
    expected = F.cross_entropy(exact[0] @ exact[1].T, targets, reduction="sum")
    found = summed_cross_entropy(hidden, head, targets)
    tolerance = 1e-6 if dtype == torch.float32 else 0.01  # logits and gradients in bfloat16
    assert found.dtype == torch.float32 and found.item() == pytest.approx(expected.item(), rel=tolerance)
    mine, theirs = torch.autograd.grad(found, [hidden, head]), torch.autograd.grad(expected, exact)
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == dtype and (a - b).norm() <= 2 * tolerance * b.norm()
    assert not mine[0][2].any()
    assert launched == [6]
    with torch.no_grad():
        assert summed_cross_entropy(hidden, head, targets).item() == pytest.approx(found.item(), rel=1e-6)


def test_tokens_go_through_the_head_in_chunks(launched, monkeypatch):
    monkeypatch.setattr(loss, "_FEWEST_TOKENS", 4)
    monkeypatch.setitem(loss._CHUNK, "cpu", 1)
    hidden, head, targets = torch.randn(9, 5), torch.randn(11, 5), torch.arange(9)
    expected = F.cross_entropy(hidden.double() @ head.double().T, targets, reduction="sum")
    assert summed_cross_entropy(hidden, head, targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert launched == [4, 4, 1]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_is_not_hidden(wrong):
    hidden, head = torch.ones(2, 3).requires_grad_(), torch.randn(7, 3)
    head[5, 1] = wrong
    found = summed_cross_entropy(hidden, head, torch.tensor([0, IGNORED]))
    assert not found.isfinite()
    [gradient] = torch.autograd.grad(found, hidden)
    assert not gradient[0].isfinite().all()


@pytest.mark.parametrize("wrong", [7, 2**40, -1])
def test_a_target_outside_of_the_vocabulary_is_not_hidden(wrong):
    losses = gpu_kernels.cross_entropy_(torch.randn(2, 7), torch.tensor([wrong, 3]), IGNORED, with_gradient=True)
    assert losses[0].isnan() and losses[1].isfinite()


@pytest.mark.filterwarnings("ignore:overflow", "ignore:divide by zero")
def test_logits_far_apart_neither_overflow_nor_vanish():
    logits = torch.tensor([[300.0, -300.0, 299.0], [-1e30, 1e30, 0.0]])
    losses = gpu_kernels.cross_entropy_(logits, torch.tensor([2, 1]), IGNORED, with_gradient=True)
    expected = torch.tensor([1 + torch.tensor(-1.0).exp().log1p().item(), 0.0])
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(logits.sum(1), torch.zeros(2))
