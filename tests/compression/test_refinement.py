"""Refinement against NumPy: alternations with full SVDs, planted matrices, and what each half alone would give."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import salaad.compression.refinement
from salaad.compression.refinement import PLATEAU, refine
from salaad.factored.slr import Slr

properties = settings(deadline=None, max_examples=50)

SHAPES = ((9, 9), (7, 16), (16, 7))
STEPS = (1, 2, 3, 5, 10, 20)
close = {"rtol": 0, "atol": 1e-10}


def gaussian(n: int, m: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(n, m))


def spiked(n: int, m: int, seed: int = 0, last: float = 0.01) -> np.ndarray:
    """A matrix with singular values from 1 down to `last`, a tenth of its entries off by about their size."""
    k = min(n, m)
    U, V = np.linalg.qr(gaussian(n, k, seed))[0], np.linalg.qr(gaussian(m, k, seed + 1))[0]
    spikes = gaussian(n, m, seed + 2) * (np.random.default_rng(seed + 3).random((n, m)) < 0.1)
    return (U * np.geomspace(1, last, k)) @ V.T + spikes / np.sqrt(n * m)


def truncated(T: np.ndarray, rank: int) -> np.ndarray:
    U, s, Vh = np.linalg.svd(T, full_matrices=False)
    return (U[:, :rank] * s[:rank]) @ Vh[:rank]


def largest(R: np.ndarray, count: int) -> np.ndarray:
    """R with all but its `count` largest entries set to zero."""
    kept = np.zeros_like(R).ravel()
    order = np.argsort(-np.abs(R).ravel(), kind="stable")[:count]
    kept[order] = R.ravel()[order]
    return kept.reshape(R.shape)


def alternated(T: np.ndarray, rank: int, nnz: int, iterations: int) -> np.ndarray:
    """L + S after the given number of alternations, with a full SVD each."""
    S = np.zeros_like(T)
    for _ in range(iterations):
        L = truncated(T - S, rank)
        S = largest(T - L, nnz)
    return L + S


def refined(T: np.ndarray, rank: int, nnz: int, iterations: int, S: np.ndarray | None = None) -> Slr:
    return refine(
        torch.from_numpy(T), rank=rank, nnz=nnz, iterations=iterations, S=None if S is None else torch.from_numpy(S)
    )


def low_rank(slr: Slr) -> np.ndarray:
    return (slr.U @ slr.V).numpy()


def error(T: np.ndarray, slr: Slr) -> float:
    return float(np.linalg.norm(T - slr.dense().double().numpy()))


@pytest.fixture
def endless(monkeypatch) -> None:
    """Lower the threshold of the plateau, so that none ends a refinement."""
    monkeypatch.setattr(salaad.compression.refinement, "PLATEAU", -1.0)


@pytest.fixture
def alternations(monkeypatch) -> list[Tensor]:
    """A list to which every later alternation appends its S."""
    made = []
    inner = salaad.compression.refinement._largest
    monkeypatch.setattr(salaad.compression.refinement, "_largest", lambda *args: made.append(inner(*args)) or made[-1])
    return made


@st.composite
def problems(draw) -> tuple[np.ndarray, int, int]:
    """Draw T of up to 10×10 with a falling spectrum, a rank below full, and a count of up to half of all entries."""
    n, m = draw(st.integers(1, 10)), draw(st.integers(1, 10))
    T = spiked(n, m, draw(st.integers(0, 10**6)), 10.0 ** draw(st.integers(-5, -1)))
    return T, draw(st.integers(0, min(n, m) - 1)), draw(st.integers(0, n * m // 2))


# ---- the error


@properties
@given(problems(), st.sampled_from([torch.float64, torch.float32]))
def test_more_iterations_never_leave_a_larger_error(problem, dtype):
    T, rank, nnz = problem
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(salaad.compression.refinement, "PLATEAU", -1.0)
        made = [refine(torch.from_numpy(T).to(dtype), rank=rank, nnz=nnz, iterations=steps) for steps in STEPS]
    assert made[0].U.dtype == made[0].values.dtype == dtype
    rounding = 30 * torch.finfo(dtype).eps * np.linalg.norm(T)
    assert all(error(T, more) <= error(T, fewer) + rounding for fewer, more in pairwise(made))


@properties
@given(problems(), st.integers(1, 5), st.integers(0, 10**6))
def test_the_error_is_never_above_that_of_the_start_with_the_best_l_for_it(problem, iterations, seed):
    T, rank, nnz = problem
    start = largest(gaussian(*T.shape, seed), nnz)
    best = np.linalg.norm(T - start - truncated(T - start, rank))
    assert error(T, refined(T, rank, nnz, iterations, start)) <= best + 1e-12


@properties
@given(problems(), st.booleans(), st.integers(0, 1))
def test_one_iteration_is_the_best_l_for_the_start_and_the_best_s_for_that_l(problem, begun, iterations):
    T, rank, nnz = problem
    start = largest(T, nnz) if begun else None
    slr = refined(T, rank, nnz, iterations, start)
    L = truncated(T if start is None else T - start, rank)
    np.testing.assert_allclose(low_rank(slr), L, rtol=0, atol=1e-9)
    np.testing.assert_allclose(slr.sparse().numpy(), largest(T - L, nnz), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(40, 40), (30, 70), (70, 30)])
def test_it_ends_as_near_as_alternations_with_full_svds(shape, monkeypatch):
    rank, nnz = 6, shape[0] * shape[1] // 10
    plateau, ends, firsts = [], [], []
    for T in (spiked(*shape, seed) for seed in range(4)):
        full = np.linalg.norm(T - alternated(T, rank, nnz, 50))
        firsts.append(np.linalg.norm(T - alternated(T, rank, nnz, 1)) / full)
        for ratios, threshold in ((plateau, PLATEAU), (ends, -1.0)):
            monkeypatch.setattr(salaad.compression.refinement, "PLATEAU", threshold)
            ratios.append(error(T, refined(T, rank, nnz, 50)) / full)
    assert min(firsts) > 1.1
    assert np.mean(ends) < 1.01
    assert np.mean(plateau) < 1.02


@pytest.mark.parametrize("shape", [(40, 40), (30, 70), (70, 30)])
@pytest.mark.parametrize("size", [0.5, 5.0])
def test_an_exactly_low_rank_and_sparse_matrix_is_found_again(shape, size, endless):
    n, m = shape
    L, S, generator = gaussian(n, 3, 1) @ gaussian(3, m, 2), np.zeros(n * m), np.random.default_rng(3)
    places = generator.permutation(n * m)[: n * m // 20]
    S[places] = size * generator.choice([-1, 1], len(places)) * (1 + generator.random(len(places)))
    slr = refined(L + S.reshape(shape), 3, len(places), 100)
    np.testing.assert_allclose(low_rank(slr), L, **close)
    np.testing.assert_allclose(slr.sparse().numpy(), S.reshape(shape), **close)
    np.testing.assert_allclose(slr.sigma.numpy(), np.linalg.svd(L, compute_uv=False)[:3], **close)


# ---- the parts


@properties
@given(problems(), st.sampled_from(STEPS))
def test_rank_and_count_are_those_asked_for_and_both_parts_come_in_order(problem, iterations):
    T, rank, nnz = problem
    slr = refined(T, rank, nnz, iterations)
    assert (slr.shape, slr.rank, slr.nnz) == (T.shape, rank, nnz)
    assert slr.sparse().count_nonzero() == nnz
    for gram in (slr.U.mT @ slr.U, slr.V @ slr.V.mT):
        np.testing.assert_allclose((gram - gram.diag().diag()).numpy(), 0, **close)
    for sizes in (slr.sigma, slr.values.abs()):
        assert all(large + 1e-12 >= small for large, small in pairwise(sizes.tolist()))
    np.testing.assert_allclose(slr.sigma.numpy(), np.linalg.svd(low_rank(slr), compute_uv=False)[:rank], **close)


@properties
@given(problems(), st.sampled_from(STEPS))
def test_the_entries_are_the_largest_of_what_l_leaves(problem, iterations):
    T, rank, nnz = problem
    slr = refined(T, rank, nnz, iterations)
    np.testing.assert_allclose(slr.sparse().numpy(), largest(T - low_rank(slr), nnz), **close)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 6), (6, 1), (1, 1)])
def test_without_entries_it_is_the_truncated_svd(shape, endless):
    T = spiked(*shape)
    for rank in range(min(shape) + 1):
        slr = refined(T, rank, 0, 5)
        assert (slr.rank, slr.nnz) == (rank, 0)
        np.testing.assert_allclose(slr.dense().numpy(), truncated(T, rank), **close)
        np.testing.assert_allclose(slr.sigma.numpy(), np.linalg.svd(T, compute_uv=False)[:rank], **close)


@pytest.mark.parametrize("shape", [*SHAPES, (1, 6), (6, 1), (1, 1)])
def test_without_rank_it_is_the_largest_entries_to_the_bit(shape):
    T = gaussian(*shape)
    for nnz in range(T.size + 1):
        slr = refined(T, 0, nnz, 5)
        assert (slr.U.shape, slr.V.shape) == ((shape[0], 0), (0, shape[1]))
        np.testing.assert_array_equal(slr.dense().numpy(), largest(T, nnz))


def test_entries_that_are_zero_are_not_stored():
    T = np.zeros((5, 8))
    T[1, 2], T[4, 7] = 3, -1
    assert refined(T, 0, 10, 5).values.tolist() == [3, -1]
    assert refined(np.zeros((5, 8)), 2, 10, 5).nnz == 0


@pytest.mark.parametrize(("shape", "iterations"), [((7, 16), 1), ((7, 16), 10), ((1, 6), 3), ((9, 9), 1)])
def test_the_transposed_matrix_has_the_transposed_parts(shape, iterations, endless):
    T, start = spiked(*shape), largest(gaussian(*shape), 4)
    taken = torch.from_numpy(np.random.default_rng(5).random(shape) < 0.2)
    rank, nnz = min(shape) // 3, T.size // 5
    for options in ({}, {"S": torch.from_numpy(start)}, {"taken": taken}):
        one = refine(torch.from_numpy(T), rank=rank, nnz=nnz, iterations=iterations, **options)
        turned = {name: part.mT for name, part in options.items()}
        other = refine(torch.from_numpy(T).mT, rank=rank, nnz=nnz, iterations=iterations, **turned)
        assert other.shape == shape[::-1]
        np.testing.assert_allclose(low_rank(other), low_rank(one).T, **close)
        np.testing.assert_allclose(other.sparse().numpy(), one.sparse().numpy().T, **close)


@properties
@given(problems(), st.sampled_from(STEPS), st.integers(0, 10**6), st.booleans())
def test_places_that_are_taken_stay_zero_and_the_entries_are_the_largest_of_the_others(
    problem, iterations, seed, begun
):
    T, rank, nnz = problem
    taken = np.random.default_rng(seed).permutation(T.size).reshape(T.shape) < T.size // 2
    start = torch.from_numpy(np.where(taken, 0, largest(T, nnz))) if begun else None
    slr = refine(torch.from_numpy(T), rank=rank, nnz=nnz, iterations=iterations, S=start, taken=torch.from_numpy(taken))
    assert (slr.rank, slr.nnz) == (rank, nnz)
    assert not slr.sparse().numpy()[taken].any()
    np.testing.assert_allclose(slr.sparse().numpy(), largest(np.where(taken, 0, T - low_rank(slr)), nnz), **close)


def test_what_it_is_given_stays_as_it_is_and_parts_of_a_weight_need_no_gradient():
    T, S = torch.nn.Parameter(torch.from_numpy(spiked(7, 16))), torch.from_numpy(largest(spiked(7, 16), 9))
    taken = torch.zeros(7, 16, dtype=torch.bool)
    before = [tensor.detach().clone() for tensor in (T, S, taken)]
    slr = refine(T, rank=2, nnz=9, iterations=5, S=S, taken=taken)
    assert all(torch.equal(old, new) for old, new in zip(before, (T, S, taken), strict=True))
    assert not any(tensor.requires_grad for tensor in slr.tensors().values())


# ---- the end


@pytest.mark.parametrize("threshold", [0.05, 0.01, PLATEAU])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_stops_at_the_first_iteration_that_gains_less_than_the_plateau(shape, threshold, alternations, monkeypatch):
    monkeypatch.setattr(salaad.compression.refinement, "PLATEAU", threshold)
    T = spiked(*shape)
    refined(T, 2, 10, 500)
    done = len(alternations)
    assert 1 < done < 500
    errors = [error(T, refined(T, 2, 10, steps)) for steps in range(1, done + 1)]
    gains = [1 - after / before for before, after in pairwise(errors)]
    assert all(gain > threshold for gain in gains[:-1])
    assert gains[-1] <= threshold


@pytest.mark.parametrize("iterations", STEPS)
def test_without_a_plateau_it_makes_every_iteration_asked_for(iterations, alternations, endless):
    slr = refined(spiked(7, 16), 2, 10, iterations)
    assert len(alternations) == iterations
    assert torch.equal(slr.sparse(), alternations[-1])


@pytest.mark.parametrize(("T", "rank"), [(gaussian(7, 16), 0), (np.zeros((7, 16)), 3), (np.zeros((16, 7)), 0)])
def test_nothing_to_gain_is_seen_in_the_second_iteration(T, rank, alternations):
    refined(T, rank, 10, 50)
    assert len(alternations) == 2
