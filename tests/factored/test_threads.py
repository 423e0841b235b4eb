"""Layers that several threads call at once, the first call included: no thread sees what another one is changing."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from salaad.factored import gpu_products, siblings
from salaad.factored.layers import SlrEmbedding, SlrLinear
from salaad.factored.siblings import join_siblings
from tests.helpers.slr_weights import gaussian, parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # our products, and torch's sparse ones
@pytest.mark.parametrize("kind", [SlrLinear.from_slr, SlrEmbedding.from_slr])
def test_first_calls_at_once_compute_as_calls_one_after_the_other(kind, dtype):
    slr, barrier = parts(40, 30, 3, 200, dtype=dtype), Barrier(4)
    x = torch.arange(40) if kind == SlrEmbedding.from_slr else gaussian(2, 30).to(dtype)
    expected = kind(slr)(x)

    def call(layer):
        barrier.wait(60)
        with torch.no_grad():
            return [layer(x) for _ in range(3)]

    with ThreadPoolExecutor(4) as threads:
        for _ in range(20):
            for results in threads.map(call, [kind(slr)] * 4):
                assert all(torch.equal(y, expected) for y in results)


class Interrupted:
    """A key in a cache that equals any other; another thread empties the cache during the comparison."""

    def __init__(self, other_thread) -> None:
        self.other_thread = other_thread

    def __eq__(self, other):
        self.other_thread()
        return True

    __hash__ = None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cache_that_another_thread_empties_is_read_once(dtype):
    layer, x = SlrLinear.from_slr(parts(40, 30, 3, 200, dtype=dtype)).requires_grad_(False), gaussian(2, 30).to(dtype)
    expected = layer(x)
    if dtype == torch.float64:
        layer._sparse._kept = Interrupted(layer._sparse.drop), *layer._sparse._kept[1:]
    elif layer._cached_products is not None:  # compiled products need float32
        products = layer._cached_products[1]
        layer._cached_products = Interrupted(lambda: setattr(layer, "_cached_products", None)), products
    assert torch.equal(layer(x), expected)


@pytest.fixture
def group(monkeypatch):
    """Three layers with one input, the list of what was computed for all of them, and a hook within it.

    Dense products on the CPU stand in for the launches on a GPU.
    """
    layers = nn.ModuleDict({f"{x}_proj": SlrLinear.from_slr(parts(24, 30, 3, 60, seed=k)) for k, x in enumerate("qkv")})
    join_siblings(dict(layers.requires_grad_(False).items()))
    computed, hooks = [], []

    def dense_products(products, tensors, x, biases):
        computed.append(x)
        for hook in hooks:
            hook()
        return [F.linear(x, one.dense(given)) for one, given in zip(products, tensors, strict=True)]

    monkeypatch.setattr(siblings, "_fit", lambda *_: True)
    monkeypatch.setattr(gpu_products, "linear_of_several", dense_products)
    return list(layers.values()), computed, hooks


def test_threads_with_the_same_x_each_compute_a_group_once(group):
    layers, computed, _ = group
    x, barrier = gaussian(2, 30), Barrier(2)
    expected = [F.linear(x, layer.weight.as_subclass(torch.Tensor)) for layer in layers]

    def call(_):
        results = []
        for layer in layers:
            barrier.wait(60)
            results.append(layer.siblings.linear(layer, x))
        return results

    with ThreadPoolExecutor(2) as threads:
        for results in threads.map(call, range(2)):
            for y, right in zip(results, expected, strict=True):
                torch.testing.assert_close(y, right)
    assert len(computed) == 2 and layers[0].siblings.layers == tuple(layers)


def test_a_group_that_another_thread_gives_up_meanwhile_gives_its_results(group):
    layers, _, hooks = group
    hooks.append(lambda: setattr(layers[0].siblings, "layers", ()))
    x = gaussian(2, 30)
    y = layers[0].siblings.linear(layers[0], x)
    torch.testing.assert_close(y, F.linear(x, layers[0].weight.as_subclass(torch.Tensor)))
    assert layers[1].siblings.linear(layers[1], gaussian(2, 30, seed=1)) is None
