"""Thresholding a stack of matrices, by eigenvectors and by products alone, against full SVDs in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salaad.prox import effective_rank
from salaad.spectral.products import MOST_SPREAD, product_stack
from salaad.spectral.results import TOLERANCE, StackResult
from salaad.spectral.stacks import gram_stack
from scripts.host_reads import HostReads

SHAPES = ((40, 40), (40, 90))


def stack(n: int, m: int, kept: int = 10, seed: int = 0, gap: float = 0.5, least: float = 0.05) -> Tensor:
    """Three random matrices with `kept` singular values from 3 to 1, and the others from `gap` down to `least`."""
    generator = torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(3, size, n, generator=generator).double())[0] for size in (n, m))
    sigma = torch.cat([torch.linspace(3, 1, kept), torch.linspace(gap, least, n - kept)]).double()
    return ((U * sigma) @ V.mT).float()


def reference(Z: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    U, s, Vh = torch.linalg.svd(Z.double(), full_matrices=False)
    shrunk = (s - tau).clamp_min(0)
    return (U * shrunk[..., None, :]) @ Vh, shrunk


def errors(found: StackResult, Z: Tensor, tau: float) -> Tensor:
    """The error of every L that was found, relative to ‖Z‖_F."""
    return (found.L.double() - reference(Z, tau)[0]).norm(dim=(1, 2)) / Z.double().norm(dim=(1, 2))


def by(solver: str, Z: Tensor, tau: float, **kinds) -> StackResult:
    taus = torch.full((len(Z),), tau)
    return product_stack(Z, taus, **kinds) if solver == "products" else gram_stack(Z, taus, **kinds)


@pytest.mark.parametrize("energy", ["nuclear", "squared"])
@pytest.mark.parametrize("tau", [0.1, 0.3, 0.8, 2.0, 5.0])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solver", ["gram", "products"])
def test_a_stack_is_the_full_svd_of_each(solver, shape, tau, energy):
    Z = stack(*shape)
    found = by(solver, Z, tau, energy=energy)
    assert (found.solver, found.holds.tolist()) == (solver, [True] * 3)
    assert (errors(found, Z, tau) < 1e-5).all()  # sixty products in float32, each rounding to 6e-8
    _, sigma = reference(Z, tau)
    assert found.kept.tolist() == torch.count_nonzero(sigma > 1e-6, dim=1).tolist()
    expected = [effective_rank(values, 0.999, energy) for values in sigma]
    # The cut is found to a thousandth of the largest singular value.
    assert all(abs(rank - other) <= 1 for rank, other in zip(found.rank.tolist(), expected, strict=True))
    if solver == "gram":
        torch.testing.assert_close(found.sigma.double(), sigma, rtol=0, atol=2e-5)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0.1, 1.5), st.integers(1, 20), st.floats(0.06, 0.99))
def test_the_bound_of_the_products_holds_wherever_the_threshold_falls(seed, tau, kept, gap):
    Z = stack(40, 60, kept, seed, gap)
    found = by("products", Z, tau)
    assert (errors(found, Z, tau)[found.holds] <= found.bound[found.holds]).all()
    assert (found.bound[found.holds] <= TOLERANCE).all()


def test_a_singular_value_at_the_threshold_makes_no_error():
    Z = stack(40, 60, gap=0.8)
    tau = float(torch.linalg.svdvals(Z[0].double())[20])
    found = by("products", Z, tau)
    assert found.holds.all() and (errors(found, Z, tau) <= found.bound).all()


SPECTRA = {
    "exponential": lambda n: torch.linspace(0, -6, n).double().exp(),
    "hyperbola": lambda n: 1 / torch.arange(1, n + 1).double(),
    "noise": lambda n: torch.cat([torch.ones(1).double(), torch.linalg.svdvals(noise(n))[1:] / (20 * n**0.5)]),
}


def noise(n: int) -> Tensor:
    """A Gaussian matrix (n×n), whose singular values go up to 2√n."""
    return torch.randn(n, n, generator=torch.Generator().manual_seed(n)).double()


@pytest.mark.parametrize("n", [64, 300])
@pytest.mark.parametrize("kind", list(SPECTRA))
def test_products_hold_up_to_a_known_spread_and_not_at_four_times_that(kind, n):
    U, V = (torch.linalg.qr(noise(size))[0][:, :n] for size in (n, 2 * n))
    sigma = SPECTRA[kind](n)
    Z = ((U * sigma) @ V.mT).float()[None]
    for spread in (MOST_SPREAD / 5, MOST_SPREAD / 2, MOST_SPREAD):  # for "noise": τ above all but one σ, then amid them
        found = by("products", Z, 1 / spread)
        assert found.holds.all() and found.bound < 0.7 * TOLERANCE
    assert not by("products", Z, 1 / (4 * MOST_SPREAD)).holds.any()


@pytest.mark.parametrize("solver", ["gram", "products"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_matrix_that_is_not_finite_does_not_disturb_its_neighbours(solver, value):
    Z = stack(40, 60)
    before = by(solver, Z, 0.8)
    Z[1, 3, 4] = value
    found = by(solver, Z, 0.8)
    assert found.holds.tolist() == [True, False, True]
    for place in (0, 2):
        torch.testing.assert_close(found.L[place], before.L[place])


def test_too_small_a_threshold_shows():
    assert not by("products", stack(64, 64, kept=40, gap=0.2), 0.002).holds.any()


@pytest.mark.parametrize("solver", ["gram", "products"])
def test_zeros_stay_zeros(solver):
    found = by(solver, torch.zeros(2, 12, 20), 0.1)
    assert not found.L.any() and found.rank.tolist() == [0, 0]


def test_no_threshold_returns_the_matrix_to_the_bit():
    Z = stack(40, 60)
    found = gram_stack(Z, None)
    assert torch.equal(found.L, Z) and found.holds.all()
    torch.testing.assert_close(found.sigma.double(), reference(Z, 0.0)[1], rtol=0, atol=2e-5)


def test_no_solver_of_a_stack_looks_at_a_number():
    Z, tau = stack(40, 60), torch.full((3,), 0.8)
    works = ((lambda: gram_stack(Z, tau), 1), (lambda: gram_stack(Z, None), 1), (lambda: product_stack(Z, tau), 0))
    for work, decompositions in works:
        with HostReads() as reads:
            work()
        assert (reads.count, reads.uploads, reads.decompositions) == (0, 0, decompositions)
