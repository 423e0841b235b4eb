"""What torch does with a layer besides a forward and a backward pass: against the dense matrix in float64."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize, prune

from salaad.factored.fixed_size import factor
from salaad.factored.layers import SlrActivated, SlrEmbedding, SlrLinear
from tests.factored.test_offloading import activated
from tests.helpers.slr_weights import dense, distance, gaussian, parts

CLOSE = 1e-5  # float32 sums of some hundred products, against float64


def penalty(f, x: Tensor) -> Tensor:
    """Return the gradient with respect to x of ½‖∇f‖², f = Σ y³ being curved."""
    [slope] = torch.autograd.grad(f(x).pow(3).sum(), x, create_graph=True)
    return torch.autograd.grad(slope.pow(2).sum() / 2, x)[0]


@pytest.mark.parametrize("trained", [True, False])
def test_a_second_derivative_is_that_of_the_dense_product(trained):
    slr, x, v = parts(24, 40, 5, 96), gaussian(3, 40), gaussian(3, 40, seed=1)
    layer, W = SlrLinear.from_slr(slr).requires_grad_(trained), dense(slr)
    for derive in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        _, found = derive(lambda x: layer(x).pow(3).sum(), x, v)
        _, expected = derive(lambda x: F.linear(x, W).pow(3).sum(), x.double(), v.double())
        assert distance(found, expected) < CLOSE
    expected = penalty(lambda x: F.linear(x, W), x.double().requires_grad_())
    assert distance(penalty(layer, x.clone().requires_grad_()), expected) < CLOSE


def test_a_penalty_of_the_gradient_reaches_u_v_and_s():
    """Of f = Σ y the gradient is W's column sums for every row, so ½‖∇f‖² has closed-form gradients."""
    slr, x = parts(24, 40, 5, 96), gaussian(3, 40).requires_grad_()
    layer, W = SlrLinear.from_slr(slr), dense(slr)
    [slope] = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    (slope.pow(2).sum() / 2).backward()
    of_W = 3 * W.sum(0).expand(24, 40)
    assert distance(layer.U.grad, of_W @ slr.V.double().mT) < CLOSE
    assert distance(layer.V.grad, slr.U.double().mT @ of_W) < CLOSE
    order = slr.positions.long().sort().values
    assert distance(layer.S_values.grad, of_W.flatten()[order]) < CLOSE


def forward_derivative(f, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, v))).tangent


@pytest.mark.parametrize(("n", "m", "nnz"), [(24, 40, 96), (256, 300, 1500)])  # made dense, and by its parts
def test_transforms_of_torch_see_the_dense_product(n, m, nnz):
    slr, x, v = parts(n, m, 5, nnz), gaussian(3, m), gaussian(3, m, seed=1)
    layer, W = SlrLinear.from_slr(slr), dense(slr)
    assert distance(torch.func.jacrev(layer)(x[0]), W) < CLOSE
    assert distance(torch.func.vmap(layer)(x), x.double() @ W.mT) < CLOSE
    assert distance(torch.func.jvp(layer, (x,), (v,))[1], v.double() @ W.mT) < CLOSE
    assert distance(forward_derivative(layer, x, v), v.double() @ W.mT) < CLOSE
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}

    def summed(parameters: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (row,)).sum()

    per_row = torch.func.vmap(torch.func.grad(summed), in_dims=(None, 0))(parameters, x)
    assert distance(per_row["U"], (x.double() @ slr.V.double().mT)[:, None].expand(-1, n, -1)) < CLOSE


def test_transforms_see_a_layer_with_an_activation_and_an_embedding():
    layer, x, v = activated(parts(24, 40, 5, 96)), gaussian(3, 40), gaussian(3, 40, seed=1)
    assert isinstance(layer, SlrActivated)
    small = 1e-3
    slope = (layer(x + small * v) - layer(x - small * v)) / (2 * small)  # the central difference; error O(small²)
    assert distance(torch.func.jvp(layer, (x,), (v,))[1], slope.detach()) < 1e-3
    table, ids = parts(50, 16, 3, 80), torch.tensor([[1, 4, 4], [49, 0, 7]])
    embedding = SlrEmbedding.from_slr(table)
    assert distance(torch.func.vmap(embedding)(ids), dense(table)[ids]) < CLOSE


def test_a_negative_view_is_read_with_its_sign():
    slr, x = parts(24, 40, 5, 96), gaussian(3, 40)
    with torch.no_grad():
        assert distance(SlrLinear.from_slr(slr)(torch._neg_view(x)), -x.double() @ dense(slr).mT) < CLOSE


def test_on_the_meta_device_there_are_shapes_alone():
    layer, embedding = SlrLinear.from_slr(parts(24, 40, 5, 96)), SlrEmbedding.from_slr(parts(50, 16, 3, 80))
    assert layer.to("meta")(torch.empty(2, 3, 40, device="meta")).shape == (2, 3, 24)
    assert embedding.to("meta")(torch.empty(2, 3, dtype=torch.int64, device="meta")).shape == (2, 3, 16)


def test_a_pruned_and_a_parametrized_layer_compute_with_what_is_left():
    slr, x = parts(24, 40, 5, 96), gaussian(3, 40)
    pruned = SlrLinear.from_slr(slr)
    prune.l1_unstructured(pruned, "S_values", 0.5)
    left = slr.values.double() * (torch.arange(96) < 48)  # the values come in descending order of magnitude
    assert distance(pruned(x), x.double() @ dense(replace(slr, values=left)).mT) < CLOSE

    class Doubled(nn.Module):
        def forward(self, U: Tensor) -> Tensor:
            return 2 * U

    parametrized = SlrLinear.from_slr(slr)
    parametrize.register_parametrization(parametrized, "U", Doubled())
    assert distance(parametrized(x), x.double() @ dense(replace(slr, U=2 * slr.U)).mT) < CLOSE


def test_frozen_weights_stay_frozen_in_parts_and_made_dense():
    model = nn.Sequential(nn.Linear(40, 24)).requires_grad_(False)
    factor(model, {"0": parts(24, 40, 5, 96)})
    assert isinstance(model[0], SlrLinear)
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == []
