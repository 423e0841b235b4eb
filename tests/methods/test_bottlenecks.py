"""CoLA against a plain module, LOST against a dense singular value decomposition."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from salaad.common.errors import UserError
from salaad.config.methods import ColaConfig, LostConfig
from salaad.methods.cola import Cola, ColaLinear
from salaad.methods.lost import LostLinear
from salaad.methods.low_rank_layers import factored_layers
from salaad.methods.registry import method_of
from tests.helpers.families import model_of
from tests.helpers.tiny_llama import IDS, config_of, llama


def test_a_layer_of_cola_is_two_linear_layers_with_a_silu_between():
    torch.manual_seed(0)
    layer = ColaLinear(nn.Linear(7, 5), ColaConfig(rank=3))
    plain = nn.Sequential(nn.Linear(7, 3, bias=False), nn.SiLU(), nn.Linear(3, 5))
    plain.load_state_dict({"0.weight": layer.A, "2.weight": layer.B, "2.bias": layer.bias})
    x = torch.randn(4, 7)
    torch.testing.assert_close(layer(x), plain(x))
    layer(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(layer.A.grad, plain[0].weight.grad)
    torch.testing.assert_close(layer.B.grad, plain[2].weight.grad)


def test_the_entries_of_cola_have_their_variance():
    torch.manual_seed(0)
    layer = ColaLinear(nn.Linear(300, 500), ColaConfig(rank=100))
    for factor in (layer.A, layer.B):
        assert factor.var().item() == pytest.approx((100 * 800) ** -0.5, rel=0.03)


def test_the_activation_is_left_out_only_where_training_and_folder_can_leave_it_out():
    config = config_of("cola", "--cola.rank", "4", "--cola.keep_swiglu", "false")
    Cola.check(llama(), config)
    with pytest.raises(UserError, match="hidden_act does not set the activation of a gpt_neox model; keep it, or give"):
        Cola.check(model_of("gpt_neox"), config)


@pytest.mark.parametrize("method", ["lora", "relora", "galore", "loro", "cola", "sltrain", "lost"])
def test_a_model_with_experts_is_refused_by_methods_that_would_leave_them_out(method):
    config = config_of(method, f"--{method}.rank", "4")
    with pytest.raises(UserError, match=rf"method {method} works on linear layers alone, and .*experts.* is none"):
        method_of(config).check(model_of("mixtral"), config)


def test_cola_without_the_silu_of_swiglu_multiplies_gate_and_up():
    model = llama()
    config = config_of("cola", "--cola.rank", "4", "--cola.keep_swiglu", "false")
    Cola.rebuild(model, config)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, 16)
    torch.testing.assert_close(mlp(x), mlp.down_proj(mlp.gate_proj(x) * mlp.up_proj(x)))
    again = type(model)(copy.deepcopy(model.config))  # as a folder's config.json makes the model
    torch.testing.assert_close(again.model.layers[0].mlp.act_fn(x), x)
    assert len(factored_layers(model)) == 14
    model(input_ids=IDS, labels=IDS).loss.backward()


@pytest.mark.parametrize("activation", ["silu", "linear"])
@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_lost_begins_with_the_leading_terms_and_the_columns_they_leave_most_of(shape, activation):
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0])
    W = linear.weight.detach().double().numpy()
    U, sigma, Vh = np.linalg.svd(W, full_matrices=False)
    leading = U[:, :6] * sigma[:6] @ Vh[:6]
    norms = np.linalg.norm(W - leading, axis=0)
    count = int(0.2 * shape[1])
    columns = np.sort(np.argsort(-norms)[:count])
    layer = LostLinear(linear, LostConfig(rank=6, density=0.2, gamma=0.7, activation=activation))
    np.testing.assert_allclose((layer.B @ layer.A).detach().numpy(), leading, atol=1e-5)
    lengths = [torch.linalg.vector_norm(part, dim=side) for part, side in ((layer.B, 0), (layer.A, 1))]
    torch.testing.assert_close(*lengths, rtol=1e-4, atol=1e-5)  # both factors have √σ
    np.testing.assert_array_equal(layer.columns.numpy(), columns)
    np.testing.assert_allclose(layer.W_S.detach().numpy(), W[:, columns], atol=1e-6)  # of W₀, not of the remainder
    x = np.random.default_rng(0).normal(size=(4, shape[1]))
    inside = x @ layer.A.detach().double().numpy().T
    inside = inside / (1 + np.exp(-inside)) if activation == "silu" else inside
    expected = 0.7 * inside @ layer.B.detach().double().numpy().T + 0.3 * x[:, columns] @ W[:, columns].T
    expected += linear.bias.detach().double().numpy()
    np.testing.assert_allclose(layer(torch.tensor(x).float()).detach().numpy(), expected, atol=2e-5)


@pytest.mark.parametrize(("density", "columns"), [(0.01, 1), (0.0, 0), (0.04, 2)])
def test_lost_keeps_a_column_of_a_narrow_layer_too(density, columns):
    layer = LostLinear(nn.Linear(50, 30), LostConfig(rank=6, density=density))
    assert layer.W_S.shape == (30, columns) and layer(torch.randn(2, 50)).shape == (2, 30)


@pytest.mark.parametrize("activation", ["silu", "linear"])
@pytest.mark.parametrize("rank_of_weight", [0, 2])
@pytest.mark.parametrize("pruned", [False, True])
@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_a_term_that_the_weight_lacks_begins_as_an_adapter_of_lora(shape, pruned, rank_of_weight, activation):
    linear, generator = nn.Linear(shape[1], shape[0], bias=False), torch.Generator().manual_seed(0)
    factors = (torch.randn(*sides, generator=generator) for sides in ((shape[0], 2), (2, shape[1])))
    W = torch.linalg.multi_dot(list(factors)) * (rank_of_weight > 0)
    W[: shape[0] // 2 if pruned else 0] = 0  # as whole heads or features that are pruned
    linear.weight.data.copy_(W)
    settings = LostConfig(rank=6, density=0.2, gamma=0.7, activation=activation)
    torch.manual_seed(3)
    layer = LostLinear(linear, settings)
    torch.testing.assert_close(layer.B @ layer.A, W, rtol=0, atol=1e-5 * max(1, float(W.norm())))
    free = ~layer.B.any(0)
    assert int(free.sum()) == 6 - rank_of_weight
    drawn = layer.A[free]
    assert drawn.abs().max() <= shape[1] ** -0.5
    assert drawn.std().item() == pytest.approx((3 * shape[1]) ** -0.5, rel=0.2)  # uniform in ±1/√in
    layer(torch.randn(4, shape[1], generator=generator)).sum().backward()
    assert layer.B.grad[:, free].all()  # so that the term is trained
    torch.manual_seed(3)
    assert torch.equal(LostLinear(linear, settings).A, layer.A)


def test_lost_without_an_activation_is_its_dense_weight():
    torch.manual_seed(0)
    layer = LostLinear(nn.Linear(9, 7, bias=False), LostConfig(rank=3, density=0.4, activation="linear"))
    x = torch.randn(4, 9)
    torch.testing.assert_close(layer(x), x @ layer.dense_weight().mT)
    assert layer.slr().nnz == 7 * 3 and layer.slr().rank == 3
