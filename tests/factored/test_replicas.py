"""Replicas of torch.nn.DataParallel: copies of the layers whose tensors are plain attributes, in other memory."""

import copy
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.nn.parallel import replicate

from salaad.factored.fixed_size import factor
from salaad.factored.layers import SlrEmbedding, SlrLinear
from salaad.factored.siblings import join_siblings
from tests.factored.test_fixed_size import blocks_of, gpt2, llama
from tests.factored.test_offloading import activated
from tests.helpers.models import IDS
from tests.helpers.slr_weights import distance, gaussian, parts


@pytest.fixture
def replicas(monkeypatch):
    """A function that makes replicas by torch's own code, whose copies lie in other memory of the same device."""
    module = import_module("torch.nn.parallel.replicate")  # the package has a function of the same name

    def copies(tensors, devices, detach=False):
        return [[t.detach().clone() if detach else t * 1 for t in tensors] for _ in devices]

    monkeypatch.setattr(module, "_broadcast_coalesced_reshape", copies)
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    return lambda model, count: replicate(model, range(count), detach=not torch.is_grad_enabled())


@pytest.mark.parametrize("make", [llama, gpt2])
def test_replicas_of_a_model_compute_and_train_as_the_model_does(make, replicas):
    model = make()
    factor(model, blocks_of(model))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        expected = model(IDS).logits
        for replica in replicas(model, 2):
            assert torch.equal(replica(IDS).logits, expected)
    for ids in IDS:
        twin(input_ids=ids[None], labels=ids[None]).loss.backward()
    for replica, ids in zip(replicas(model, 2), IDS, strict=True):
        replica(input_ids=ids[None], labels=ids[None]).loss.backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        # The gradients of both rows are added in another order.
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # our products, and torch's sparse ones
@pytest.mark.parametrize("kind", [SlrLinear.from_slr, SlrEmbedding.from_slr, activated])
def test_a_replica_computes_with_its_own_numbers(kind, dtype, replicas):
    slr = parts(30, 24, 3, 60, dtype=dtype)
    layer = kind(slr).requires_grad_(False)
    x = torch.arange(30) if isinstance(layer, SlrEmbedding) else gaussian(2, 24).to(dtype)
    first = layer(x)
    with torch.no_grad():
        one, other = replicas(layer, 2)
        for tensor in (other.U, other.S_values):
            tensor.mul_(2)
        assert torch.equal(one(x), first)
        assert distance(other(x), 2 * first) < 1e-6
        assert torch.equal(layer(x), first)


def test_a_replica_leaves_the_group_of_its_layer(replicas):
    layers = nn.ModuleDict({f"{x}_proj": SlrLinear.from_slr(parts(24, 24, 3, 60)) for x in "qkv"})
    join_siblings(dict(layers.items()))
    assert all(layer.siblings is not None for layer in layers.values())
    for replica in replicas(layers, 2):
        assert all(layer.siblings is None for layer in replica.values())
    assert all(layer.siblings is not None for layer in layers.values())
