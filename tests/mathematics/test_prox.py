"""The proximal operators against NumPy in float64, their optimality, and Definition 4.1 in exact fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salaad.prox import effective_rank, soft_threshold, svt, truncate
from salaad.spectral.stacks import gram_stack

METHODS = ("exact", "gram", "auto")
SHAPES = ((6, 6), (3, 11), (11, 3), (1, 7), (7, 1), (1, 1))
properties = settings(deadline=None, max_examples=40)


def gaussian(n: int, m: int, seed: int = 0, rank: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random matrix, of the given rank if one is given (0 is the zero matrix)."""
    generator = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(n, m, generator=generator, dtype=torch.float64).to(dtype)
    factors = [torch.randn(size, generator=generator, dtype=torch.float64) for size in ((n, rank), (rank, m))]
    return (factors[0] @ factors[1]).to(dtype)


def with_spectrum(n: int, m: int, sigma: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A matrix with random singular vectors and the singular values `sigma`."""
    U, V = (np.linalg.qr(gaussian(size, len(sigma), seed=size).numpy())[0] for size in (n, m))
    return torch.from_numpy((U * sigma) @ V.T).to(dtype)


def numpy_svt(Z: Tensor, tau: float) -> tuple[np.ndarray, np.ndarray]:
    U, sigma, Vh = np.linalg.svd(Z.double().numpy(), full_matrices=False)
    shrunk = np.maximum(sigma - tau, 0)
    return (U * shrunk) @ Vh, shrunk


def largest(Z: Tensor) -> float:
    return float(np.linalg.svd(Z.double().numpy(), compute_uv=False)[0])


@st.composite
def matrices(draw, dtypes=(torch.float32, torch.float64)) -> Tensor:
    """A strategy for matrices: tall, wide and square; of full rank, rank-deficient and zero; of size 1e-3 to 1e3."""
    n, m = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    rank = draw(st.none() | st.integers(0, min(n, m)))
    scale = 10.0 ** draw(st.integers(-3, 3))
    return (scale * gaussian(n, m, draw(st.integers(0, 10**6)), rank)).to(draw(st.sampled_from(dtypes)))


# ---- soft threshold


@properties
@given(matrices(), st.floats(0, 3, allow_subnormal=False), st.booleans())
def test_soft_threshold_is_its_closed_form_to_the_bit(Z, tau, as_tensor):
    tau = torch.tensor(tau, dtype=Z.dtype)
    z = Z.numpy()
    expected = np.sign(z) * np.maximum(np.abs(z) - tau.numpy(), 0)
    shrunk = soft_threshold(Z, tau if as_tensor else tau.item())
    assert shrunk.dtype == Z.dtype
    np.testing.assert_array_equal(shrunk.numpy(), expected)


def test_soft_threshold_gives_exact_zeros_inside_the_band_and_on_its_border():
    Z = torch.tensor([-0.3, -0.1, -0.0, 0.0, 0.1, 0.3])
    assert soft_threshold(Z, 0.3).tolist() == [0.0] * 6
    assert torch.count_nonzero(soft_threshold(Z, 0.1)) == 2


@pytest.mark.parametrize("tau", [0, 0.0, torch.zeros(())])
def test_soft_threshold_of_zero_returns_its_argument(tau):
    Z = gaussian(9, 5, dtype=torch.float32)
    assert torch.equal(soft_threshold(Z, tau), Z)


def test_soft_threshold_takes_any_shape_and_leaves_its_argument_alone():
    Z = gaussian(4, 6).reshape(2, 3, 4)
    before = Z.clone()
    assert soft_threshold(Z, 0.5).shape == Z.shape
    assert torch.equal(Z, before)


def assert_minimises(objective, minimum: Tensor, Z: Tensor) -> None:
    """Assert that a step D from the minimum costs at least ½‖D‖², as a prox objective is 1-strongly convex."""
    f = objective(minimum)
    directions = [gaussian(*Z.shape, seed) for seed in range(8)] + [gaussian(*Z.shape, 99, rank=1), minimum, Z, -Z]
    for direction in directions:
        for size in (1.0, 1e-2, 1e-4):
            D = size * direction
            assert objective(minimum + D) - f >= D.square().sum() / 2 - 1e-10 * (1 + f)


@pytest.mark.parametrize("tau", [0.0, 0.3, 2.0])
def test_soft_threshold_minimises_the_l1_proximal_objective(tau):
    Z = gaussian(5, 8)
    assert_minimises(lambda S: tau * S.abs().sum() + (S - Z).square().sum() / 2, soft_threshold(Z, tau), Z)


# ---- singular-value threshold


def svt_error(method: str, dtype: torch.dtype) -> float:
    """The allowed error of σ and L, relative to σ₁.

    A full SVD is backward stable. The Gram route knows σ² to about eps·σ₁², hence a σ close to 0 to √eps·σ₁ only.
    """
    eps = torch.finfo(dtype).eps
    return 50 * eps if method == "exact" else 8 * eps**0.5


@properties
@given(matrices(), st.floats(0, 1.2), st.sampled_from(METHODS), st.booleans())
def test_svt_is_that_of_numpy_for_every_matrix(Z, fraction, method, as_tensor):
    tau = fraction * largest(Z)
    L, sigma = svt(Z, torch.tensor(tau, dtype=Z.dtype) if as_tensor else tau, method)
    expected, spectrum = numpy_svt(Z, tau)
    bound = svt_error(method, Z.dtype) * largest(Z) + 1e-12
    assert L.dtype == sigma.dtype == Z.dtype
    assert L.is_contiguous()
    np.testing.assert_allclose(sigma.double().numpy(), spectrum, rtol=0, atol=bound)
    np.testing.assert_allclose(L.double().numpy(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(40, 40), (24, 60), (60, 24)])
@pytest.mark.parametrize("fraction", [0.02, 0.2, 0.7])
def test_svt_in_float32_is_right_to_a_few_roundings_where_singular_values_are_not_tiny(shape, fraction, method):
    Z = with_spectrum(*shape, np.linspace(1, 0.1, min(shape)), torch.float32)
    L, sigma = svt(Z, fraction, method)
    expected, spectrum = numpy_svt(Z, fraction)
    np.testing.assert_allclose(sigma.numpy(), spectrum, rtol=0, atol=3e-6)
    assert np.linalg.norm(L.numpy() - expected) < 5e-6 * np.linalg.norm(Z.numpy())


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tau", [0, 0.0, torch.zeros(())])
def test_svt_with_threshold_zero_returns_its_argument_to_the_bit(shape, tau, method):
    Z = gaussian(*shape, dtype=torch.float32)
    L, sigma = svt(Z, tau, method)
    assert torch.equal(L, Z)
    np.testing.assert_allclose(sigma.numpy(), numpy_svt(Z, 0)[1], rtol=0, atol=2e-3 * largest(Z))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", SHAPES)
def test_svt_above_the_largest_singular_value_is_exactly_zero(shape, method):
    Z = gaussian(*shape, dtype=torch.float32)
    for L, sigma in (svt(Z, 1.01 * largest(Z), method), svt(torch.zeros_like(Z), 0.5, method)):
        assert torch.count_nonzero(L) == torch.count_nonzero(sigma) == 0
        assert L.shape == Z.shape
        assert len(sigma) == min(shape)


@pytest.mark.parametrize("method", METHODS)
def test_svt_of_the_zero_matrix_without_threshold_is_zero(method):
    L, sigma = svt(torch.zeros(4, 7), 0.0, method)
    assert torch.count_nonzero(L) == torch.count_nonzero(sigma) == 0


@properties
@given(matrices(dtypes=(torch.float64,)), st.floats(0.01, 0.9), st.sampled_from(METHODS))
def test_svt_reports_the_singular_values_of_what_it_returns_in_descending_order(Z, fraction, method):
    L, sigma = svt(Z, fraction * largest(Z), method)
    assert len(sigma) == min(Z.shape)
    assert (sigma >= 0).all()
    assert (sigma.diff() <= 0).all()
    measured = np.linalg.svd(L.numpy(), compute_uv=False)
    np.testing.assert_allclose(sigma.numpy(), measured, rtol=0, atol=1e-6 * largest(Z) + 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_svt_minimises_the_nuclear_proximal_objective(shape, fraction, method):
    Z = gaussian(*shape)
    tau = fraction * largest(Z)

    def objective(L: Tensor) -> Tensor:
        return tau * torch.linalg.matrix_norm(L, "nuc") + (L - Z).square().sum() / 2

    assert_minimises(objective, svt(Z, tau, method)[0], Z)


@pytest.mark.parametrize("method", METHODS)
def test_svt_and_effective_rank_see_the_rank_of_a_rank_deficient_matrix(method):
    Z = gaussian(96, 200, rank=6, dtype=torch.float32)
    assert effective_rank(svt(Z, 0.0, method)[1]) == 6
    assert effective_rank(svt(Z, 1e-3, method)[1]) == 6


# ---- effective rank


@pytest.mark.parametrize(
    ("sigma", "gamma", "energy", "rank"),
    [
        ([5.0], 0.999, "nuclear", 1),
        ([5.0], 1.0, "nuclear", 1),
        ([0.0, 0.0, 0.0], 0.999, "nuclear", 0),
        ([0.0], 1.0, "squared", 0),
        ([1.0, 1.0, 1.0, 1.0], 0.5, "nuclear", 2),  # covered exactly
        ([1.0, 1.0, 1.0, 1.0], 0.51, "nuclear", 3),
        ([1.0, 1.0, 1.0, 1.0], 1.0, "nuclear", 4),
        ([1.0, 1.0, 1.0, 1.0], 1e-9, "nuclear", 1),
        ([3.0, 2.0, 1.0, 0.0, 0.0], 1.0, "nuclear", 3),  # zeros never count
        ([8.0, 1.0, 1.0], 0.8, "nuclear", 1),
        ([8.0, 1.0, 1.0], 0.9, "nuclear", 2),
        ([8.0, 1.0, 1.0], 0.96, "squared", 1),  # 64 of 66
        ([8.0, 1.0, 1.0], 0.98, "squared", 2),
        ([3.0, 2.0], 0.65, "nuclear", 2),  # 3 of 5
        ([3.0, 2.0], 0.65, "squared", 1),  # 9 of 13
        ([1e30, 1e-30], 1.0, "nuclear", 1),  # below one rounding of the sum
        ([1e-30, 1e-30], 0.9, "nuclear", 2),
    ],
)
def test_effective_rank_of_spectra_made_by_hand(sigma, gamma, energy, rank):
    assert effective_rank(torch.tensor(sigma), gamma, energy) == rank


@properties
@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=30),
    st.integers(1, 64),
    st.sampled_from([("nuclear", 1), ("squared", 2)]),
)
def test_effective_rank_is_definition_4_1_in_exact_fractions(values, sixty_fourths, energy):
    name, power = energy
    values.sort(reverse=True)
    gamma = Fraction(sixty_fourths, 64)
    energies = [Fraction(value) ** power for value in values]
    covering = [k for k in range(1, len(values) + 1) if sum(energies[:k]) >= gamma * sum(energies)]
    expected = min(covering) if any(values) else 0
    assert effective_rank(torch.tensor(values, dtype=torch.float32), float(gamma), name) == expected


def test_effective_rank_sums_a_long_float32_spectrum_without_losing_its_tail():
    # All values are equal, so the rank is 0.999·100000; by a running sum in float32 it would be off by more than one.
    assert effective_rank(torch.full((100_000,), 0.1), 0.999) in (99_900, 99_901)


def test_effective_rank_does_not_depend_on_scale_and_defaults_to_the_papers_energy():
    sigma = torch.logspace(0, -5, 40)
    ranks = {effective_rank(scale * sigma) for scale in (1e-6, 1.0, 1e6)}
    assert ranks == {effective_rank(sigma, 0.999, "nuclear")}


# ---- truncation


@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5)])
@pytest.mark.parametrize("rank", [0, 1, 3, 5])
def test_truncation_loses_exactly_the_energy_of_the_tail(shape, rank):
    X = gaussian(*shape)
    sigma = np.linalg.svd(X.numpy(), compute_uv=False)
    approximation, kept = truncate(X, rank)
    lost = (X - approximation).square().sum().item()
    assert lost == pytest.approx((sigma[rank:] ** 2).sum(), rel=1e-10, abs=1e-12)
    np.testing.assert_allclose(kept.numpy()[:rank], sigma[:rank], rtol=1e-10)
    assert (kept[rank:] == 0).all()
    assert len(kept) == min(shape)
    assert rank == 0 or np.linalg.matrix_rank(approximation.numpy()) == rank


@pytest.mark.parametrize("rank", [6, 7, 100])
def test_truncation_at_full_rank_or_above_is_a_copy_of_the_matrix(rank):
    X = gaussian(6, 9)
    approximation, _ = truncate(X, rank)
    torch.testing.assert_close(approximation, X, rtol=0, atol=1e-12)
    assert approximation.data_ptr() != X.data_ptr()


# ---- entries whose squares have no place in float32


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e-15, 1e15, 1e20, 1e30])
def test_very_small_and_very_large_matrices_are_solved_like_others(size):
    Z = (size * gaussian(20, 30)).float()
    U, sigma, Vh = np.linalg.svd(Z.double().numpy(), full_matrices=False)
    for tau in (0.0, float(sigma[10])):
        for method in METHODS:
            L, found = svt(Z, tau, method)
            np.testing.assert_allclose(L.double().numpy() / size, numpy_svt(Z, tau)[0] / size, atol=1e-4)
            np.testing.assert_allclose(found.double().numpy() / size, numpy_svt(Z, tau)[1] / size, atol=1e-4)
    for matrix in (Z, Z.mT.contiguous()):
        found = truncate(matrix, 5)[0]
        found = found if matrix is Z else found.mT
        np.testing.assert_allclose(found.double().numpy() / size, (U[:, :5] * sigma[:5]) @ Vh[:5] / size, atol=1e-4)


@pytest.mark.parametrize("size", [1e-36, 1e-25, 1e-15, 1e15, 1e20, 1e30])
def test_a_stack_says_where_squares_have_no_place(size):
    Z = torch.stack([gaussian(20, 30).float(), (size * gaussian(20, 30)).float(), torch.zeros(20, 30)])
    tau = torch.tensor([1.0, size, 1.0])
    found = gram_stack(Z, tau)
    assert found.holds.tolist() == [True, 1e-16 < size < 1e16, True]
    for L, matrix, threshold, holds in zip(found.L, Z, tau.tolist(), found.holds.tolist(), strict=True):
        if holds:
            np.testing.assert_allclose(L.double().numpy(), numpy_svt(matrix, threshold)[0], atol=1e-5 * threshold)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: svt(torch.ones(4, 4), -1.0), "tau is -1.0, and a threshold is at least 0; give 0 or more"),
        (lambda: svt(torch.ones(4, 4), torch.tensor(torch.nan)), "tau is nan"),
        (lambda: svt(torch.ones(2, 4, 4), 0.1), r"Z is torch.float32 of shape \(2, 4, 4\); give a matrix in float32"),
        (lambda: svt(torch.ones(0, 4), 0.1), r"of shape \(0, 4\)"),
        (lambda: svt(torch.ones(4, 4).bfloat16(), 0.1), "Z is torch.bfloat16"),
        (lambda: svt(torch.ones(4, 4).int(), 1), "Z is torch.int32"),
        (lambda: soft_threshold(torch.ones(3), -1.0), "tau is -1.0"),
        (lambda: soft_threshold(torch.ones(3), float("nan")), "tau is nan"),
        (lambda: soft_threshold(torch.ones(3).int(), 1), r"Z is torch.int32; .* such as Z.float\(\)"),
        (lambda: effective_rank(torch.tensor([2.0, torch.nan])), "sigma has entries that are negative or not finite"),
        (lambda: effective_rank(torch.tensor([2.0, -1.0])), "sigma has entries that are negative"),
        (lambda: effective_rank(torch.ones(0)), r"of shape \(0,\); give a vector of singular values"),
        (lambda: effective_rank(torch.ones(2, 2)), r"of shape \(2, 2\)"),
        (lambda: effective_rank(torch.ones(2), gamma=1.5), r"gamma is 1.5, outside \(0, 1\]"),
        (lambda: effective_rank(torch.ones(2), energy="other"), "energy is 'other'; give nuclear or squared"),
    ],
)
def test_what_has_no_meaning_is_told_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


@pytest.mark.parametrize("tau", [0.0, 0.3])
def test_what_svt_returns_has_no_gradient(tau):
    Z = torch.ones(3, 4, requires_grad=True)
    assert not any(part.requires_grad for part in svt(Z, tau))
