"""Factored layers with their GPU kernels, which Triton interprets."""

from contextlib import suppress

import pytest
import torch
from torch import nn

from salaad.factored import gpu_products
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.layers import SlrActivated, SlrEmbedding, SlrLinear
from salaad.factored.slr import Slr
from scripts.host_reads import HostReads
from tests.helpers.slr_weights import dense, distance, parts
from tests.helpers.tiny_llama import llama

# Rounding of float32 sums; and one unit in the last place of bfloat16, 2⁻⁷, as the interpreter rounds towards zero.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def same_numbers():
    """Seed the inputs, as a product near zero has a large relative error; and drop the products other tests cached."""
    torch.manual_seed(0)
    gpu_products._products_like.cache_clear()


@pytest.fixture
def launched(monkeypatch):
    """A list that gets the number of layers of each pair of kernel launches."""
    counts, usual = [], gpu_products.linear_of_several

    def counted(layers, *rest):
        counts.append(len(layers))
        return usual(layers, *rest)

    monkeypatch.setattr(gpu_products, "linear_of_several", counted)
    return counts


@DTYPES
def test_a_layer_multiplies_by_the_kernels_with_columns_of_16_bits(dtype, launched):
    slr, b = parts(9, 33, 4, 60, dtype=dtype), torch.randn(9).to(dtype)
    layer, x = SlrLinear.from_slr(slr, b), torch.randn(2, 1, 33).to(dtype)
    exact = x.double() @ dense(slr).T + b.double()
    with torch.no_grad():
        assert distance(layer(x), exact) < TOLERANCE[dtype]
    assert layer.columns.dtype == torch.int16 and launched == [1]
    assert layer.S_columns.dtype == torch.uint8  # NCCL sends no integers of 16 bits


@DTYPES
def test_many_rows_are_multiplied_by_the_dense_weight(dtype, launched, monkeypatch):
    monkeypatch.setattr(gpu_products, "fewest_rows_for_dense", lambda *_: 4)
    slr = parts(9, 33, 4, 60, dtype=dtype)
    layer, few, many = SlrLinear.from_slr(slr), torch.randn(3, 33).to(dtype), torch.randn(4, 33).to(dtype)
    for x, expected in ((few, [1]), (many, [1])):
        with torch.no_grad():
            assert distance(layer(x), x.double() @ dense(slr).T) < TOLERANCE[dtype]
        assert launched == expected


@pytest.mark.parametrize("rows", [3, 4])  # multiplied by U, V and S, and by the dense weight
def test_autocast_changes_nothing(rows, monkeypatch):
    monkeypatch.setattr(gpu_products, "fewest_rows_for_dense", lambda *_: 4)
    slr, x, ids = parts(9, 33, 4, 60), torch.randn(rows, 33, requires_grad=True), torch.tensor([[0, 3, 8]])
    layer, embedding = SlrLinear.from_slr(slr, torch.randn(9)), SlrEmbedding.from_slr(slr).requires_grad_(False)
    wanted = [*layer.parameters(), x]
    expected = layer(x), embedding(ids)
    gradients = torch.autograd.grad(expected[0].square().sum(), wanted)
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x), embedding(ids)
        assert all(map(torch.equal, found, expected))
        with torch.no_grad():
            assert torch.equal(layer(x), expected[0])
        assert all(map(torch.equal, torch.autograd.grad(found[0].square().sum(), wanted), gradients))
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x)
    assert all(map(torch.equal, torch.autograd.grad(found.square().sum(), wanted), gradients))


@pytest.mark.parametrize("rows", [3, 4])
def test_a_result_may_be_written_into(rows, monkeypatch):
    monkeypatch.setattr(gpu_products, "fewest_rows_for_dense", lambda *_: 4)
    slr, x = parts(9, 33, 4, 60), torch.randn(rows, 33, requires_grad=True)
    y = SlrLinear.from_slr(slr)(x).relu_()
    y.sum().backward()
    before = x.detach().double() @ dense(slr).T
    assert distance(x.grad, (before > 0).double() @ dense(slr)) < 1e-6


def test_more_rows_than_a_grid_can_have_are_multiplied_by_the_dense_weight(launched, monkeypatch):
    monkeypatch.setattr(gpu_products, "MOST_ROWS", 16)
    layer = SlrLinear.from_slr(parts(3000, 4000, 1, 1)).requires_grad_(False)  # far fewer numbers as U, V and S
    x = torch.randn(17, 4000)
    assert layer._native(x)[0].has_few(x[:16]) and not layer._native(x)[0].has_few(x)


def test_columns_are_wider_where_a_row_is():
    layer = SlrLinear.from_slr(parts(2, 2**15 + 1, 1, 5))
    x = torch.randn(1, 2**15 + 1)
    assert layer.columns.dtype == torch.int32
    with torch.no_grad():
        assert distance(layer(x), x.double() @ dense(parts(2, 2**15 + 1, 1, 5)).T) < 1e-5  # a sum of 32769


def test_a_row_that_is_not_finite_stays_alone():
    layer, x = SlrLinear.from_slr(parts(6, 20, 3, 30)).requires_grad_(False), torch.randn(3, 20)
    clean = layer(x)
    x[1, 4] = float("nan")
    found = layer(x)
    assert found[1].isnan().any() and torch.equal(found[[0, 2]], clean[[0, 2]])


def test_a_bias_of_another_dtype_is_added_and_layouts_of_x_do_not_matter():
    slr, b = parts(5, 12, 3, 20), torch.randn(5).double()
    layer = SlrLinear.from_slr(slr, b).requires_grad_(False)
    for x in (torch.randn(12), torch.randn(12, 3).T, torch.randn(2, 24)[:, ::2]):
        assert distance(layer(x), x.double() @ dense(slr).T + b) < 1e-6
    assert layer(torch.randn(0, 12)).shape == (0, 5)
    with pytest.raises(RuntimeError, match="must have 12 numbers"):
        layer(torch.randn(2, 11))


def test_a_bias_in_steps_is_read_as_it_looks_and_one_of_another_device_is_not_read(launched):
    slr, b = parts(5, 12, 3, 20), torch.randn(5, 3)[:, 1]
    layer, x = SlrLinear.from_slr(slr).requires_grad_(False), torch.randn(2, 12)
    layer.bias = nn.Parameter(b, requires_grad=False)
    assert layer.bias.stride() == (3,)
    assert distance(layer(x), x.double() @ dense(slr).T + b.double()) < 1e-6 and launched == [1]
    layer.bias = nn.Parameter(torch.empty(5, device="meta"), requires_grad=False)
    with suppress(RuntimeError):  # of torch, as for any linear layer
        layer(x)
    assert launched == [1]


def test_gradients_are_those_of_the_dense_product():
    slr = parts(5, 12, 3, 20)
    layer, x = SlrLinear.from_slr(slr), torch.randn(2, 12, requires_grad=True)
    layer(x).sum().backward()
    assert distance(x.grad, dense(slr).sum(0).expand(2, -1)) < 1e-6
    assert distance(layer.U.grad, (x.detach() @ slr.V.T).sum(0).expand(5, -1)) < 1e-6


@DTYPES
def test_rows_of_an_embedding_are_those_of_the_table(dtype):
    slr = parts(11, 14, 3, 40, dtype=dtype)
    layer, ids = SlrEmbedding.from_slr(slr).requires_grad_(False), torch.tensor([[0, 3, 10], [3, 3, 7]])
    assert distance(layer(ids), dense(slr)[ids]) < TOLERANCE[dtype]


def test_the_compiled_operation_uses_the_kernels(launched):
    slr = parts(5, 12, 3, 20)
    layer, x = SlrLinear.from_slr(slr).requires_grad_(False), torch.randn(2, 12)
    with torch.no_grad():
        y = torch.compile(layer, backend="eager", fullgraph=True)(x)
    assert launched == [1] and distance(y, x.double() @ dense(slr).T) < 1e-6


class Attention(nn.Module):
    """Three layers of different widths that are given the same x."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(24, 9), nn.Linear(24, 12), nn.Linear(24, 8, bias=False)

    def forward(self, x):
        return [self.q_proj(x), self.k_proj(x), self.v_proj(x)]


@pytest.fixture
def attention():
    """An Attention module with factored, frozen layers, and the dense weights of its layers."""
    module = Attention().requires_grad_(False)
    layers = {name: parts(layer.out_features, 24, 2, 10) for name, layer in module.named_children()}
    factor(module, layers)
    assert slr_modules(module).keys() == layers.keys()
    return module.requires_grad_(False), [dense(slr) for slr in layers.values()]


def expected_of(module: Attention, weights, x):
    biases = [0 if layer.bias is None else layer.bias.double() for layer in module.children()]
    return [x.double() @ W.T + b for W, b in zip(weights, biases, strict=True)]


def test_layers_that_are_given_the_same_x_share_launches(attention, launched):
    module, weights = attention
    for rows in (1, 3):
        x = torch.randn(rows, 24)
        for y, exact in zip(module(x), expected_of(module, weights, x), strict=True):
            assert y.is_contiguous() and distance(y, exact) < 1e-6
    assert launched == [3, 3]


def test_a_result_that_waits_is_not_used_after_x_or_a_weight_has_changed(attention, launched):
    module, weights = attention
    x = torch.randn(2, 24)
    module.q_proj(x)
    x.mul_(2)
    assert distance(module.k_proj(x), expected_of(module, weights, x)[1]) < 1e-6
    module.v_proj.S_values.zero_()
    U, V = module.v_proj.U.double(), module.v_proj.V.double()
    assert distance(module.v_proj(x), x.double() @ (U @ V).T) < 1e-6
    assert launched == [3, 3, 3]


def test_what_torch_does_not_count_is_not_waited_with(attention, launched):
    module, weights = attention
    with torch.inference_mode():
        x = torch.randn(2, 24)
        module.q_proj(x)
        x.mul_(2)
        assert distance(module.k_proj(x), expected_of(module, weights, x)[1]) < 1e-6
    assert launched == [1, 1]


def test_a_bias_that_has_changed_is_added(attention):
    module, weights = attention
    x = torch.randn(2, 24)
    module.q_proj(x)
    module.k_proj.bias.add_(1)
    assert distance(module.k_proj(x), expected_of(module, weights, x)[1]) < 1e-6


def test_results_of_a_group_may_be_written_into(attention):
    module, weights = attention
    x = torch.randn(2, 24)
    found = [y.relu_() for y in module(x)]
    assert all(
        distance(y, exact.relu()) < 1e-6 for y, exact in zip(found, expected_of(module, weights, x), strict=True)
    )


def test_a_group_whose_results_nobody_asks_for_is_given_up(attention, launched):
    module, _ = attention
    for _ in range(12):
        module.q_proj(torch.randn(1, 24))
    assert set(launched) == {1, 3} and launched[-1] == 1


def test_a_layer_without_entries_leaves_the_others_of_its_group_together(launched):
    module = Attention().requires_grad_(False)
    layers = {
        name: parts(one.out_features, 24, 2, 0 if name == "k_proj" else 10) for name, one in module.named_children()
    }
    factor(module, layers)
    x = torch.randn(2, 24)
    found, exact = module.requires_grad_(False)(x), expected_of(module, map(dense, layers.values()), x)
    assert all(distance(y, z) < 1e-6 for y, z in zip(found, exact, strict=True))
    assert launched == [2]


def test_a_model_in_parts_computes_what_the_dense_one_does(launched):
    model = llama()
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and name != "lm_head"]
    blocks = {name: parts(*model.get_submodule(name).weight.shape, 2, 20, seed=i) for i, name in enumerate(names)}
    for name, slr in blocks.items():
        model.get_submodule(name).weight.data = dense(slr).float()
    ids = torch.tensor([[5, 6]])
    with torch.no_grad():
        exact = model(ids).logits
        factor(model, blocks)
        assert len(slr_modules(model)) == len(names)
        assert distance(model(ids).logits, exact) < 1e-5
    assert launched.count(3) == launched.count(2) == model.config.num_hidden_layers


@DTYPES
def test_a_layer_with_an_activation_multiplies_by_S_with_the_kernels(dtype, launched):
    slr, b, x = parts(6, 20, 3, 30, dtype=dtype), torch.randn(6).to(dtype), torch.randn(2, 20).to(dtype)
    layer = SlrActivated(20, 6, 3, 30)
    layer.fill(slr)
    layer.bias = nn.Parameter(b)
    S = dense(Slr(slr.shape, slr.U[:, :0], slr.V[:0], slr.positions, slr.values))
    inner = nn.functional.silu(x.double() @ slr.V.double().T)
    with torch.no_grad():
        # In bfloat16 three results are rounded, V·x, its activation and the sum.
        assert distance(layer(x), inner @ slr.U.double().T + x.double() @ S.T + b) < 3 * TOLERANCE[dtype]
    assert launched == [1]


def test_nothing_waits_for_the_device():
    slr = parts(6, 20, 3, 30)
    layer, x, ids = SlrLinear.from_slr(slr).requires_grad_(False), torch.randn(2, 20), torch.tensor([1, 3])
    products, tensors = layer._native(x)
    with HostReads() as reads:
        products.linear(x, None, tensors), products.dense(tensors), products.rows(ids, tensors)
    assert (reads.count, reads.uploads) == (0, 0)  # so a CUDA graph can capture the launches without a wait of the host


def test_numbers_that_the_kernels_do_not_know_are_left_to_torch_with_a_warning():
    layer, x = SlrLinear.from_slr(parts(6, 20, 3, 30, dtype=torch.float64)), torch.randn(2, 20).double()
    with pytest.warns(UserWarning, match=r"a layer of 6×20 has numbers in torch.float64, so torch's operations"):
        gpu_products.products((6, 20), layer._tensors)
    with torch.no_grad():  # a layer on a CPU asks for no kernels in float64
        assert distance(layer(x), x @ dense(parts(6, 20, 3, 30, dtype=torch.float64)).T) < 1e-12
