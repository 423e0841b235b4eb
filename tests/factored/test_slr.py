"""`Slr`, a weight as U·V + S, against NumPy: truncated SVD, largest entries, dense matrices."""

from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from salaad.factored.slr import Slr

properties = settings(deadline=None, max_examples=60)

SHAPES = ((6, 6), (4, 11), (11, 4), (1, 7), (7, 1), (1, 1))
close = {"rtol": 0, "atol": 1e-11}


def gaussian(n: int, m: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, m))


def low_rank(n: int, m: int, seed: int = 0) -> np.ndarray:
    """A matrix with the singular values 1 … 0.2, so that every truncation of it is unique."""
    k = min(n, m)
    U, V = (np.linalg.qr(gaussian(size, k, seed + size))[0] for size in (n, m))
    return (U * np.linspace(1, 0.2, k)) @ V.T


def sparse(n: int, m: int, nnz: int, seed: int = 0) -> np.ndarray:
    """A matrix with `nnz` nonzero entries of both signs, no two of equal size."""
    S = np.zeros(n * m)
    generator = np.random.default_rng(seed)
    S[generator.permutation(n * m)[:nnz]] = generator.choice([-1, 1], nnz) * generator.permutation(nnz) - 0.3
    return S.reshape(n, m)


def truncated(L: np.ndarray, rank: int) -> np.ndarray:
    U, s, Vh = np.linalg.svd(L, full_matrices=False)
    return (U[:, :rank] * s[:rank]) @ Vh[:rank]


def largest(S: np.ndarray, count: int) -> np.ndarray:
    """S with all but its `count` largest entries set to zero."""
    kept = np.zeros_like(S).ravel()
    order = np.argsort(-np.abs(S).ravel(), kind="stable")[:count]
    kept[order] = S.ravel()[order]
    return kept.reshape(S.shape)


def parts(L: np.ndarray, S: np.ndarray, rank: int) -> Slr:
    return Slr.from_parts(torch.from_numpy(L), torch.from_numpy(S), rank)


def example(shape: tuple[int, int], rank: int | None = None, nnz: int | None = None, seed: int = 0) -> Slr:
    """Return an Slr of random L and S, of full rank and half dense unless `rank` and `nnz` say otherwise."""
    n, m = shape
    rank, nnz = min(n, m) if rank is None else rank, n * m // 2 if nnz is None else nnz
    return parts(low_rank(n, m, seed), sparse(n, m, nnz, seed), rank)


def ranks_of(shape: tuple[int, int]) -> list[int]:
    return sorted({0, 1, min(shape) // 2, min(shape)})


def entries_of(shape: tuple[int, int]) -> list[int]:
    return sorted({0, 1, shape[0] * shape[1] // 3, shape[0] * shape[1]})


CASES = [(shape, rank, nnz) for shape in SHAPES for rank, nnz in product(ranks_of(shape), entries_of(shape))]


# ---- from L and S


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_the_parts_are_the_truncated_svd_of_l_and_the_entries_of_s(shape, rank, nnz):
    L, S = low_rank(*shape), sparse(*shape, nnz)
    slr = parts(L, S, rank)
    assert (slr.shape, slr.rank, slr.nnz) == (shape, rank, nnz)
    assert (slr.U.shape, slr.V.shape) == ((shape[0], rank), (rank, shape[1]))
    assert slr.U.is_contiguous() and slr.V.is_contiguous()
    np.testing.assert_allclose((slr.U @ slr.V).numpy(), truncated(L, rank), **close)
    scattered = np.zeros(S.size)
    scattered[slr.positions.numpy()] = slr.values.numpy()
    np.testing.assert_array_equal(scattered.reshape(shape), S)
    np.testing.assert_allclose(slr.dense().numpy(), truncated(L, rank) + S, **close)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_terms_are_singular_the_largest_first(shape):
    L = low_rank(*shape)
    slr = parts(L, np.zeros(shape), min(shape))
    sizes = slr.U.norm(dim=0) * slr.V.norm(dim=1)
    np.testing.assert_allclose(sizes.numpy(), np.linalg.svd(L, compute_uv=False), **close)
    for gram in (slr.U.mT @ slr.U, slr.V @ slr.V.mT):
        np.testing.assert_allclose((gram - gram.diag().diag()).numpy(), 0, **close)


@properties
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_no_matrix_of_that_rank_is_closer_to_l_whatever_the_spectrum(n, m, data):
    inner = data.draw(st.integers(0, min(n, m)))
    seed, scale = data.draw(st.integers(0, 10**6)), 10.0 ** data.draw(st.integers(-3, 3))
    L = scale * gaussian(n, inner, seed) @ gaussian(inner, m, seed + 1)
    rank = data.draw(st.integers(0, min(n, m)))
    slr = parts(L, np.zeros((n, m)), min(n, m)).cut(rank, 0)
    sigma = np.linalg.svd(L, compute_uv=False)
    lost = np.linalg.norm(L - slr.dense().numpy())
    assert lost == pytest.approx(np.linalg.norm(sigma[rank:]), rel=1e-7, abs=1e-11 * max(sigma[0], 1e-300))


@pytest.mark.parametrize("shape", [(48, 48), (20, 70), (70, 20)])
def test_in_float32_the_parts_are_right_to_a_few_roundings(shape):
    L, S = low_rank(*shape), sparse(*shape, 100) / 100
    slr = Slr.from_parts(torch.from_numpy(L).float(), torch.from_numpy(S).float(), 10)
    assert {slr.U.dtype, slr.V.dtype, slr.values.dtype} == {torch.float32}
    np.testing.assert_allclose(slr.dense().numpy(), truncated(L, 10) + S, rtol=0, atol=3e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_entries_come_the_largest_first_and_equal_ones_in_row_major_order(shape):
    S = np.random.default_rng(3).integers(-2, 3, shape).astype(float)
    slr = parts(np.zeros(shape), S, 0)
    positions = np.flatnonzero(S)
    expected = sorted(positions.tolist(), key=lambda place: (-abs(S.ravel()[place]), place))
    assert slr.positions.tolist() == expected
    np.testing.assert_array_equal(slr.values.numpy(), S.ravel()[expected])


def test_a_negative_zero_is_no_entry():
    assert parts(np.zeros((2, 2)), np.array([[0.0, -0.0], [1e-300, 0.0]]), 0).positions.tolist() == [2]


def test_transposed_and_strided_matrices_are_read_as_they_look():
    L, S = low_rank(5, 9), sparse(5, 9, 20)
    plain = parts(L, S, 3)
    views = Slr.from_parts(torch.from_numpy(L.T.copy()).mT, torch.from_numpy(np.repeat(S, 2, axis=1))[:, ::2], 3)
    assert torch.equal(views.positions, plain.positions)
    assert torch.equal(views.values, plain.values)
    torch.testing.assert_close(views.dense(), plain.dense(), **close)


def test_the_parts_do_not_follow_the_matrices_they_were_made_from():
    L, S = torch.from_numpy(low_rank(4, 7)), torch.from_numpy(sparse(4, 7, 9))
    slr = Slr.from_parts(L, S, 4)
    before = slr.dense()
    L.zero_(), S.zero_()
    assert torch.equal(slr.dense(), before)


# ---- cutting


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cut_is_the_best_approximation_of_its_rank_and_the_largest_entries(shape):
    L, S = low_rank(*shape), sparse(*shape, shape[0] * shape[1] * 2 // 3)
    slr = parts(L, S, min(shape))
    for rank, nnz in product(range(min(shape) + 1), range(slr.nnz + 1)):
        cut = slr.cut(rank, nnz)
        assert (cut.shape, cut.rank, cut.nnz) == (shape, rank, nnz)
        np.testing.assert_allclose(cut.dense().numpy(), truncated(L, rank) + largest(S, nnz), **close)


@properties
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 10**6), st.data())
def test_no_entries_weigh_more_than_those_a_cut_keeps_where_many_are_equal(n, m, seed, data):
    S = np.random.default_rng(seed).integers(-2, 3, (n, m)).astype(float)
    count = data.draw(st.integers(0, np.count_nonzero(S)))
    kept = parts(np.zeros((n, m)), S, 0).cut(0, count).dense().numpy()
    assert np.count_nonzero(kept) == count
    assert np.all((kept == S) | (kept == 0))
    assert np.abs(kept).sum() == np.sort(np.abs(S).ravel())[::-1][:count].sum()


def test_a_cut_of_a_cut_is_the_smaller_cut():
    slr = example((8, 5))
    for (rank, nnz), (less, fewer) in pairwise([(5, 20), (4, 20), (4, 7), (1, 2), (0, 0)]):
        assert_same(slr.cut(rank, nnz).cut(less, fewer), slr.cut(less, fewer))


def test_cutting_to_what_is_there_changes_nothing_and_leaves_the_original_whole():
    slr = example((6, 9))
    before = slr.dense()
    assert_same(slr.cut(slr.rank, slr.nnz), slr)
    slr.cut(1, 1).dense()
    assert torch.equal(slr.dense(), before)


def assert_same(a: Slr, b: Slr) -> None:
    assert a.shape == b.shape
    for key, tensor in b.tensors().items():
        assert a.tensors()[key].dtype == tensor.dtype
        assert torch.equal(a.tensors()[key], tensor)


# ---- sizes, dense, transposed, tensors


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_parameters_are_the_paper_s_count_and_the_numbers_stored(shape, rank, nnz):
    slr = example(shape, rank, nnz)
    assert slr.parameters == rank * (shape[0] + shape[1]) + nnz
    assert slr.parameters == slr.U.numel() + slr.V.numel() + slr.values.numel()


@pytest.mark.parametrize("shape", SHAPES)
def test_dense_leaves_the_parts_alone(shape):
    slr = example(shape)
    before = [tensor.clone() for tensor in slr.tensors().values()]
    first = slr.dense()
    first.zero_()
    assert all(torch.equal(old, new) for old, new in zip(before, slr.tensors().values(), strict=True))
    assert slr.dense().count_nonzero() > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_without_rank_and_entries_a_weight_is_zero(shape):
    slr = example(shape, 0, 0)
    assert slr.parameters == 0
    assert slr.dense().shape == shape
    assert torch.count_nonzero(slr.dense()) == 0


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_the_transposed_parts_are_those_of_the_transposed_matrix_in_the_same_order(shape, rank, nnz):
    slr = example(shape, rank, nnz)
    other = slr.transposed()
    assert (other.shape, other.rank, other.nnz) == (shape[::-1], rank, nnz)
    np.testing.assert_allclose(other.dense().numpy(), slr.dense().numpy().T, **close)
    smaller = slr.cut(rank // 2, nnz // 2)
    np.testing.assert_allclose(other.cut(rank // 2, nnz // 2).dense().numpy(), smaller.dense().numpy().T, **close)
    assert_same(other.transposed(), slr)


@pytest.mark.parametrize("shape", [(46_340, 46_340), (2, 2**30 - 1), (2**30 - 1, 2), (2**20, 2**20)])
def test_places_of_the_largest_matrices_are_transposed_without_overflow(shape):
    n, m = shape
    dtype = torch.int32 if n * m < 2**31 else torch.int64
    places = [0, m - 1, m, n * m // 2, n * m - 1]
    slr = Slr(shape, torch.zeros(0, 0), torch.zeros(0, 0), torch.tensor(places, dtype=dtype), torch.ones(5))
    other = slr.transposed()
    assert other.positions.dtype == dtype
    assert other.positions.tolist() == [place % m * n + place // m for place in places]


def test_places_take_four_bytes():
    assert example((5, 6)).positions.dtype == torch.int32


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_parts_come_back_from_a_file_whole_cut_and_transposed(shape, rank, nnz):
    whole = example(shape, rank, nnz)
    for slr in (whole, whole.cut(rank // 2, nnz // 2), whole.transposed()):
        tensors = slr.tensors()
        assert all(isinstance(tensor, Tensor) and tensor.is_contiguous() for tensor in tensors.values())
        back = Slr.from_tensors(load(save(tensors)))
        assert_same(back, slr)
        assert (back.rank, back.nnz, back.parameters) == (slr.rank, slr.nnz, slr.parameters)


def test_a_file_holds_the_four_named_tensors():
    assert tuple(example((3, 4)).tensors()) == Slr.TENSORS == ("U", "V", "positions", "values")


# ---- scaled, resorted, joined, sparse, to, from_factors


def assert_in_order(slr: Slr, atol: float = 1e-11) -> None:
    """Assert that the terms of U·V are its singular ones and that terms and entries come the largest first."""
    for gram in (slr.U.mT @ slr.U, slr.V @ slr.V.mT):
        np.testing.assert_allclose((gram - gram.diag().diag()).numpy(), 0, rtol=0, atol=atol)
    sigma = np.linalg.svd((slr.U @ slr.V).numpy(), compute_uv=False)[: slr.rank]
    np.testing.assert_allclose(slr.sigma.numpy(), sigma, rtol=0, atol=atol)
    assert np.all(np.diff(slr.values.abs().numpy()) <= 0)


def positive(n: int, m: int, seed: int = 7) -> np.ndarray:
    """Positive weights that change the order of terms and entries."""
    return np.exp(gaussian(n, m, seed))


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_scaled_parts_are_those_of_the_matrix_times_the_weight_unit_by_unit(shape, rank, nnz):
    slr = example(shape, rank, nnz)
    for weight in (positive(shape[0], 1), positive(1, shape[1])):
        scaled = slr.scaled(torch.from_numpy(weight))
        assert (scaled.shape, scaled.rank, scaled.nnz) == (shape, rank, nnz)
        assert torch.equal(scaled.positions, slr.positions)
        for some in ((rank, nnz), (rank, 0), (0, nnz), (rank // 2, nnz // 3)):
            cut = slr.cut(*some).dense().numpy()
            np.testing.assert_allclose(scaled.cut(*some).dense().numpy(), weight * cut, **close)


@pytest.mark.parametrize("shape", SHAPES)
def test_scaling_back_gives_the_parts_back_and_leaves_the_original_whole(shape):
    slr = example(shape)
    before = {key: tensor.clone() for key, tensor in slr.tensors().items()}
    weight = torch.from_numpy(positive(shape[0], 1))
    back = slr.scaled(weight).scaled(1 / weight)
    for key, tensor in slr.tensors().items():
        assert torch.equal(tensor, before[key])
        torch.testing.assert_close(back.tensors()[key], tensor, **close)


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_resorted_parts_are_the_same_matrix_in_order_of_size(shape, rank, nnz):
    L, S = truncated(low_rank(*shape), rank), sparse(*shape, nnz)
    for weight in (positive(shape[0], 1), positive(1, shape[1])):
        slr = parts(L, S, rank).scaled(torch.from_numpy(weight)).resorted()
        assert (slr.shape, slr.rank, slr.nnz) == (shape, rank, nnz)
        assert_in_order(slr)
        np.testing.assert_allclose(slr.sparse().numpy(), weight * S, **close)
        np.testing.assert_allclose((slr.U @ slr.V).numpy(), weight * L, **close)
        cut = slr.cut(rank // 2, nnz // 3).dense().numpy()
        np.testing.assert_allclose(cut, truncated(weight * L, rank // 2) + largest(weight * S, nnz // 3), **close)


def test_a_weight_can_change_which_units_are_the_largest():
    slr = Slr.from_parts(torch.diag(torch.tensor([3.0, 2.0])), torch.tensor([[0.0, 5.0], [4.0, 0.0]]), 2)
    scaled = slr.scaled(torch.tensor([[1.0], [10.0]]))
    assert (scaled.sigma.tolist(), scaled.values.tolist()) == ([3, 20], [5, 40])
    assert (scaled.resorted().sigma.tolist(), scaled.resorted().values.tolist()) == ([20, 3], [40, 5])


@pytest.mark.parametrize("shape", SHAPES)
def test_joined_parts_add_up_and_keep_all_of_the_first_before_any_of_the_second(shape):
    n, m = shape
    S = sparse(n, m, n * m)
    here = np.random.default_rng(4).random(shape) < 0.4
    first = parts(low_rank(n, m), np.where(here, S, 0), min(shape) // 2)
    second = parts(10 * low_rank(n, m, 5), np.where(here, 0, 10 * S), min(shape))
    joined = Slr.joined(first, second)
    assert (joined.shape, joined.rank, joined.nnz) == (shape, first.rank + second.rank, first.nnz + second.nnz)
    assert joined.positions.dtype == first.positions.dtype
    np.testing.assert_allclose(joined.dense().numpy(), first.dense().numpy() + second.dense().numpy(), **close)
    np.testing.assert_array_equal(joined.sparse().numpy(), np.where(here, S, 10 * S))
    assert_same(joined.cut(first.rank, first.nnz), first)
    for rank, nnz in product(range(second.rank + 1), (0, second.nnz // 2, second.nnz)):
        more = joined.cut(first.rank + rank, first.nnz + nnz).dense().numpy()
        expected = first.dense().numpy() + second.cut(rank, nnz).dense().numpy()
        np.testing.assert_allclose(more, expected, **close)


@pytest.mark.parametrize("shape", SHAPES)
def test_joining_nothing_changes_nothing(shape):
    slr = example(shape)
    nothing = slr.cut(0, 0)
    assert_same(Slr.joined(slr, nothing), slr)
    assert_same(Slr.joined(nothing, slr), slr)


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_sparse_is_s_to_the_bit_and_not_a_view(shape, rank, nnz):
    S = sparse(*shape, nnz)
    slr = parts(low_rank(*shape), S, rank)
    np.testing.assert_array_equal(slr.sparse().numpy(), S)
    slr.sparse().fill_(7)
    np.testing.assert_array_equal(slr.sparse().numpy(), S)
    np.testing.assert_array_equal(slr.cut(rank, nnz // 2).sparse().numpy(), largest(S, nnz // 2))
    np.testing.assert_array_equal(slr.transposed().sparse().numpy(), S.T)


def test_sparse_has_the_dtype_of_the_entries():
    assert example((3, 4)).to("cpu", torch.float32).sparse().dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, None])
def test_moved_parts_have_their_numbers_in_that_dtype_and_their_places_as_they_were(dtype):
    slr = example((6, 9))
    moved = slr.to("cpu", dtype)
    assert (moved.shape, moved.rank, moved.nnz) == (slr.shape, slr.rank, slr.nnz)
    assert torch.equal(moved.positions, slr.positions) and moved.positions.dtype == torch.int32
    for key in ("U", "V", "values"):
        rounded = getattr(slr, key).to(dtype or torch.float64)
        assert getattr(moved, key).dtype == rounded.dtype
        assert torch.equal(getattr(moved, key), rounded)
    assert slr.U.dtype == slr.V.dtype == slr.values.dtype == torch.float64


def test_all_parts_are_moved_to_the_device():
    moved = example((6, 9)).to(torch.device("meta"), torch.float32)
    assert {tensor.device.type for tensor in moved.tensors().values()} == {"meta"}
    assert (moved.shape, moved.rank, moved.nnz, moved.U.dtype) == ((6, 9), 6, 27, torch.float32)


@pytest.mark.parametrize(("shape", "rank", "nnz"), CASES)
def test_factors_with_an_orthonormal_side_become_singular_terms_of_the_same_matrix(shape, rank, nnz):
    n, m = shape
    Q, mixing = np.linalg.qr(gaussian(n, rank, 1))[0], np.linalg.qr(gaussian(rank, rank, 2))[0]
    V = mixing @ low_rank(rank, m, 3) if rank else np.zeros((0, m))
    S = sparse(n, m, nnz)
    slr = Slr.from_factors(*map(torch.from_numpy, (Q, V, S)))
    assert (slr.shape, slr.rank, slr.nnz) == (shape, rank, nnz)
    assert_in_order(slr)
    assert np.all(np.diff(slr.sigma.numpy()) <= 1e-11)
    np.testing.assert_allclose((slr.U @ slr.V).numpy(), Q @ V, **close)
    np.testing.assert_array_equal(slr.sparse().numpy(), S)
    for some in range(rank + 1):
        cut = slr.cut(some, nnz // 2).dense().numpy()
        np.testing.assert_allclose(cut, truncated(Q @ V, some) + largest(S, nnz // 2), **close)


@properties
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 10**6), st.data())
def test_the_first_terms_of_factors_are_their_best_approximation_whatever_the_spectrum(n, m, seed, data):
    rank, inner = data.draw(st.integers(0, n)), data.draw(st.integers(0, m))
    Q = np.linalg.qr(gaussian(n, rank, seed))[0]
    V = 10.0 ** data.draw(st.integers(-3, 3)) * gaussian(rank, inner, seed + 1) @ gaussian(inner, m, seed + 2)
    slr = Slr.from_factors(*map(torch.from_numpy, (Q, V, np.zeros((n, m)))))
    some = data.draw(st.integers(0, rank))
    sigma = np.linalg.svd(Q @ V, compute_uv=False)
    lost = np.linalg.norm(Q @ V - slr.cut(some, 0).dense().numpy())
    assert lost == pytest.approx(np.linalg.norm(sigma[some:]), rel=1e-6, abs=1e-7 * max(sigma[0], 1e-300))
