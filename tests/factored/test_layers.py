"""The layers of U·V + S against dense matrices in float64, within the roundings of their arithmetic."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salaad.factored.layers import SlrEmbedding, SlrLinear
from salaad.factored.slr import Slr
from tests.factored.test_offloading import activated
from tests.helpers.slr_weights import dense, distance, gaussian, parts, sparse

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
properties = settings(deadline=None, max_examples=60)


def magnitude(x: Tensor, slr: Slr) -> Tensor:
    """|x|·(|U|·|V| + |S|)ᵀ, to which the error of every rounding in the layer is proportional."""
    W = slr.U.double().abs() @ slr.V.double().abs() + torch.from_numpy(sparse(slr)).abs()
    return x.double().abs() @ W.mT


def assert_rounds_to(y: Tensor, expected: Tensor, size: Tensor, roundings: int = 4) -> None:
    """Assert that y differs from the float64 result by at most so many roundings of numbers of the given size."""
    assert y.shape == expected.shape
    info = torch.finfo(y.dtype)
    allowed = roundings * (info.eps / 2 * size + info.smallest_normal * info.eps)
    error = (y.double() - expected).abs()
    assert (error <= allowed).all(), (error / allowed).max()


@st.composite
def parts_of_any_shape(draw, dtypes=(torch.float64, torch.float32, torch.bfloat16, torch.float16)) -> Slr:
    """A strategy for U·V + S: tall, wide and square; rank 0 to full; S empty, with empty rows, and full."""
    n, m = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rank, nnz = draw(st.integers(0, min(n, m))), draw(st.integers(0, n * m))
    return parts(n, m, rank, nnz, draw(st.integers(0, 10**6)), draw(st.sampled_from(dtypes)))


@properties
@given(parts_of_any_shape(), st.sampled_from([(), (1,), (5,), (2, 3), (2, 1, 3), (50,), (0,), (2, 0)]), st.booleans())
def test_a_linear_layer_is_the_dense_product_within_rounding(slr, batch, biased):
    n, m = slr.shape
    x = gaussian(*batch, m).to(slr.U.dtype)
    bias = gaussian(n, seed=1).to(slr.U.dtype) if biased else None
    layer = SlrLinear.from_slr(slr, bias)
    assert (layer.in_features, layer.out_features) == (m, n)
    y = layer(x)
    assert y.dtype == x.dtype
    offset = 0 if bias is None else bias.double()
    size = magnitude(x, slr) + (0 if bias is None else bias.double().abs())
    # Products of 16-bit floats are summed in float32; sums of float32 and float64 round at every term.
    roundings = 4 if x.dtype.itemsize < 4 else 4 + m + slr.rank
    assert_rounds_to(y, x.double() @ dense(slr).mT + offset, size, roundings)


@properties
@given(parts_of_any_shape(), st.sampled_from([(), (1,), (7,), (2, 3), (0,), (2, 0)]), st.booleans())
def test_an_embedding_gives_the_rows_of_the_dense_table_within_rounding(slr, batch, short):
    ids = torch.randint(slr.shape[0], batch, generator=torch.Generator().manual_seed(1))
    layer = SlrEmbedding.from_slr(slr)
    assert (layer.num_embeddings, layer.embedding_dim) == slr.shape
    y = layer(ids.int() if short else ids)
    assert y.dtype == slr.U.dtype
    size = magnitude(torch.eye(slr.shape[1]), slr).mT[ids]
    assert_rounds_to(y, dense(slr)[ids], size, 4 + slr.rank)


@properties
@given(parts_of_any_shape(), st.sampled_from([SlrLinear, SlrEmbedding]))
def test_the_weight_of_a_layer_is_the_dense_matrix_within_rounding(slr, kind):
    size = magnitude(torch.eye(slr.shape[1]), slr).mT
    assert_rounds_to(kind.from_slr(slr).weight, dense(slr), size, 4 + slr.rank)


# With many entries it pays to make the dense weight first, with few it does not.
@pytest.mark.parametrize("nnz", [12, 80])
@pytest.mark.parametrize(("n", "m"), [(40, 6), (6, 40)], ids=["tall", "wide"])
@pytest.mark.parametrize(
    "laid_out",
    [
        lambda m: gaussian(m, 4, 3).permute(1, 2, 0),
        lambda m: gaussian(4, m, 3).mT,
        lambda m: gaussian(4, 3, 2 * m)[..., 1 : m + 1],
        lambda m: gaussian(4, 3, 2 * m)[..., ::2],
        lambda m: gaussian(1, 1, m).expand(4, 3, m),
    ],
    ids=["permuted", "transposed", "sliced", "strided", "expanded"],
)
def test_an_input_may_lie_in_memory_in_any_order(n, m, nnz, laid_out):
    slr, x = parts(n, m, 3, nnz), laid_out(m)
    assert not x.is_contiguous()
    assert_rounds_to(SlrLinear.from_slr(slr)(x), x.double() @ dense(slr).mT, magnitude(x, slr), 4 + m)


def test_every_row_of_an_embedding_is_asked_for_twice_and_in_any_order():
    slr = parts(30, 7, 2, 40)
    assert (np.count_nonzero(sparse(slr), axis=1) == 0).any()
    ids = torch.randperm(60, generator=torch.Generator().manual_seed(1)).view(5, 12) % 30
    torch.testing.assert_close(SlrEmbedding.from_slr(slr)(ids), dense(slr)[ids].float())


def test_entries_in_any_order_make_the_same_layer():
    slr = parts(9, 8, 2, 30)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(3))
    shuffled = Slr(slr.shape, slr.U, slr.V, slr.positions[order], slr.values[order])
    first, second = (SlrLinear.from_slr(each).state_dict() for each in (slr, shuffled))
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("kind", [SlrLinear, SlrEmbedding])
def test_a_layer_holds_its_own_numbers_and_no_more_memory_than_they_take(kind):
    whole = parts(20, 30, 8, 200)
    slr = whole.cut(3, 50)
    layer = kind.from_slr(slr)
    before = layer.weight.clone()
    whole.U.zero_(), whole.V.zero_(), whole.values.zero_(), whole.positions.zero_()
    assert torch.equal(layer.weight, before)
    held = [*layer.parameters(), *layer.buffers()]
    assert {tensor.dtype for tensor in layer.buffers()} == {torch.int32}
    assert sum(t.untyped_storage().nbytes() for t in held) == 4 * (3 * (20 + 30) + 50) + 4 * (50 + 20 + 1)


def test_a_bias_is_the_layers_own():
    bias = gaussian(9)
    layer = SlrLinear.from_slr(parts(9, 8, 2, 30), bias)
    before = bias.clone()
    bias.zero_()
    assert torch.equal(layer.bias, before)


@pytest.mark.parametrize("nnz", [0, 3, 40])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("rows", [1, 30])
def test_gradients_of_inputs_and_parts_are_those_of_the_dense_product(rows, rank, nnz):
    slr = parts(8, 7, rank, nnz, dtype=torch.float64)
    layer = SlrLinear.from_slr(slr, gaussian(8).double()).requires_grad_(True)
    x, coefficients = gaussian(rows, 7).double().requires_grad_(True), gaussian(rows, 8, seed=1).double()
    (layer(x) * coefficients).sum().backward()
    G = coefficients.T @ x.detach()  # the gradient of the dense weight
    torch.testing.assert_close(x.grad, coefficients @ dense(slr))
    torch.testing.assert_close(layer.bias.grad, coefficients.sum(0))
    torch.testing.assert_close(layer.U.grad, G @ slr.V.T)
    torch.testing.assert_close(layer.V.grad, slr.U.T @ G)
    if nnz:
        torch.testing.assert_close(layer.S_values.grad, G.flatten()[slr.positions.long().sort().values])


def test_a_layer_computes_with_the_entries_it_has_now():
    slr, other = parts(24, 40, 3, 100), parts(24, 40, 3, 60, seed=1)
    layer, x = SlrLinear.from_slr(slr), gaussian(2, 40)

    def assert_is(layer, W, tolerance=1e-6):
        assert distance(layer(x.to(layer.U.dtype)), x.double() @ W.mT) < tolerance

    with torch.inference_mode():
        assert_is(layer, dense(slr))
        assert_is(copy.deepcopy(layer).double(), dense(slr), 1e-12)
        assert_is(copy.deepcopy(layer).bfloat16(), dense(slr), 0.02)
        assert_is(SlrLinear.from_slr(slr).bfloat16(), dense(slr), 0.02)  # made of inference tensors
        assert_is(SlrLinear.from_slr(slr).double(), dense(slr), 1e-12)
    copied = copy.deepcopy(layer)
    with torch.no_grad():
        layer.S_values.mul_(2)
    twice = dense(slr) + torch.from_numpy(sparse(slr))
    assert_is(layer, twice)
    assert_is(copied, dense(slr))
    copied.load_state_dict(layer.state_dict(), assign=True)
    assert_is(copied, twice)
    assert_is(copied.double(), twice, 1e-12)
    layer.fill(other)
    assert_is(layer, dense(other))
    x.requires_grad_()
    layer(x).sum().backward()
    assert distance(x.grad, dense(other).sum(0).expand(2, -1)) < 1e-6


def test_a_layer_made_of_trained_parts_computes_with_l_truncated_to_its_rank():
    L = gaussian(14, 3) @ gaussian(3, 9, seed=1)
    S = gaussian(14, 9, seed=2) * (gaussian(14, 9, seed=3) > 1)
    U, sigma, Vh = np.linalg.svd(L.double().numpy(), full_matrices=False)
    x = gaussian(6, 9, seed=4)
    for rank in (3, 2):
        W = torch.from_numpy((U[:, :rank] * sigma[:rank]) @ Vh[:rank]) + S.double()
        y = SlrLinear.from_slr(Slr.from_parts(L, S, rank))(x)
        # Eigenvectors of a Gram matrix in float32 are known to about 1e-6 of its size.
        assert (y - x.double() @ W.mT).norm() < 3e-6 * sigma[0] * x.norm()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("nnz", [0, 60])
@pytest.mark.parametrize("kind", [SlrLinear.from_slr, activated])
def test_a_linear_layer_refuses_integers_as_torchs_own_does(kind, nnz, dtype, autocast):
    layer, x = kind(parts(9, 8, 2, nnz)).requires_grad_(False), torch.ones(2, 8, dtype=dtype)
    with torch.autocast("cpu", enabled=autocast):
        for linear in (torch.nn.Linear(8, 9), layer):
            with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
                linear(x)


@pytest.mark.parametrize("trained", [False, True])
def test_an_embedding_takes_the_indices_that_torchs_own_takes(trained):
    slr = parts(30, 7, 2, 40)
    layer, own = SlrEmbedding.from_slr(slr).requires_grad_(trained), torch.nn.Embedding(30, 7)
    ids = torch.tensor([[0, 29], [7, 7]])
    torch.testing.assert_close(layer(ids), layer.weight[ids].as_subclass(Tensor), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(layer(ids.int()), layer(ids), rtol=1e-5, atol=1e-6)
    for dtype in (torch.int16, torch.uint8, torch.bool, torch.float32):
        for embedding in (own, layer):
            with pytest.raises(RuntimeError, match="Expected tensor for argument #1 'indices'"):
                embedding(ids.to(dtype))
    for dtype in (torch.int32, torch.int64):
        for outside in (30, -1):
            for embedding in (own, layer):
                with pytest.raises(IndexError):
                    embedding(torch.tensor([0, outside], dtype=dtype))
