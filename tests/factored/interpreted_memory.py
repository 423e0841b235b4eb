"""The number of dense weights that a factored model holds at a time, with kernels that Triton interprets."""

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from salaad.factored import cpu_kernels, gpu_products
from salaad.factored.layers import SlrLinear
from tests.helpers.slr_weights import distance, parts

WIDTH, ROWS, LAYERS = 24, 5, 3


class Weights(TorchDispatchMode):
    """A dispatch mode that tracks every tensor with as many numbers as a weight.

    Attributes:
        most: the most storages of such tensors that were alive at a time.
        seen: the number of such tensors that `aten.mm` returned in total.
    """

    def __init__(self):
        super().__init__()
        self.alive: list[weakref.ref] = []
        self.most, self.seen = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        whole = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.numel() == WIDTH * WIDTH]
        self.alive = [ref for ref in self.alive if ref() is not None] + list(map(weakref.ref, whole))
        self.most = max(self.most, len({ref().untyped_storage().data_ptr() for ref in self.alive}))
        self.seen += func.overloadpacket is torch.ops.aten.mm and len(whole)
        return result


@pytest.fixture
def model(monkeypatch) -> nn.Sequential:
    """Factored layers of one size, which multiply by their dense weights from ROWS rows of x on."""
    gpu_products._products_like.cache_clear()
    monkeypatch.setattr(gpu_products, "fewest_rows_for_dense", lambda *_: ROWS)
    monkeypatch.setattr(cpu_kernels, "is_intercepted", lambda: False)  # although `Weights` intercepts
    return nn.Sequential(*(SlrLinear.from_slr(parts(WIDTH, WIDTH, 2, 50, seed=i)) for i in range(LAYERS)))


def test_a_forward_has_one_dense_weight_at_a_time(model):
    with torch.no_grad(), Weights() as weights:
        model(torch.randn(ROWS, WIDTH))
    assert (weights.most, weights.seen) == (1, LAYERS)


@pytest.mark.parametrize("trained", [False, True])
def test_so_has_a_backward(model, trained):
    model.requires_grad_(trained)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with Weights() as weights:
        model(x).sum().backward()
    # A layer's weight is made again for the gradient of x; the weight's gradient gives that of the entries of S.
    assert (weights.most, weights.seen) == (1, LAYERS * (3 if trained else 2))
    exact = torch.ones(ROWS, WIDTH).double()
    for layer in reversed(model):
        exact = exact @ layer.weight.detach().double()
    assert distance(x.grad, exact) < 1e-5
