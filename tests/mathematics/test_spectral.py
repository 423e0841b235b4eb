"""Singular-value thresholding by every solver against a full SVD in float64, and its bound against the true error."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.surrogate import Surrogate
from salaad.prox import effective_rank
from salaad.spectral import SOLVERS, TOLERANCE, threshold
from salaad.spectral import ladder as spectral
from salaad.spectral.stacks import gram_stack

SHAPES = ((40, 40), (40, 90), (90, 40))


@pytest.fixture(autouse=True)
def _small_matrices_may_use_subspaces(monkeypatch):
    monkeypatch.setattr(spectral, "SMALLEST_SIDE", 8)
    monkeypatch.setattr(spectral, "LARGEST_SHARE", 0.5)


def matrix(n: int, m: int, kept: int = 10, seed: int = 0, gap: float = 0.5) -> Tensor:
    """A random matrix (n×m) with `kept` singular values from 3 to 1, and the others from `gap` down to 0.05."""
    generator = np.random.default_rng(seed)
    k = min(n, m)
    U, V = (np.linalg.qr(generator.normal(size=(size, k)))[0] for size in (n, m))
    sigma = np.concatenate([np.linspace(3, 1, kept), np.linspace(gap, 0.05, k - kept)])
    return torch.from_numpy((U * sigma) @ V.T).float()


STEEP = {
    "10^(-i/5)": lambda i: 10 ** (-i / 5),
    "exp(-i/5)": lambda i: (-i / 5).exp(),
    "10^(-i/20)": lambda i: 10 ** (-i / 20),
    "hyperbola": lambda i: 1 / (i + 1),
}


def steep(kind: str, n: int = 300, m: int = 360) -> Tensor:
    """A random matrix (n×m) with a steep spectrum that begins with 1."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.linalg.qr(torch.randn(size, n, generator=generator).double())[0] for size in (n, m))
    return ((U * STEEP[kind](torch.arange(n).double())) @ V.mT).float()


def moved(Z: Tensor, by: float, seed: int = 1) -> Tensor:
    """Z plus Gaussian noise of norm `by`·‖Z‖_F."""
    noise = torch.randn(Z.shape, generator=torch.Generator().manual_seed(seed))
    return Z + by * Z.norm() / noise.norm() * noise


def reference(Z: Tensor, tau: float) -> tuple[Tensor, Tensor]:
    U, s, Vh = torch.linalg.svd(Z.double(), full_matrices=False)
    shrunk = (s - tau).clamp_min(0)
    return (U * shrunk) @ Vh, shrunk


def error(found: spectral.SvtResult, Z: Tensor, tau: float) -> float:
    """The error of the L that was found, relative to ‖Z‖_F."""
    return float((found.L.double() - reference(Z, tau)[0]).norm() / Z.double().norm())


def no_eigenvectors(monkeypatch, failures: int) -> None:
    """Make the next `failures` eigendecompositions fail to converge."""
    real, left = torch.linalg.eigh, [failures]

    def eigh(*arguments, **keywords):
        left[0] -= 1
        if left[0] >= 0:
            raise torch.linalg.LinAlgError("did not converge")
        return real(*arguments, **keywords)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)


@pytest.mark.parametrize("solver", ["exact", "gram"])
@pytest.mark.parametrize("tau", [0.001, 0.3, 0.8, 2.0, 5.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_direct_solvers_are_the_full_svd(shape, tau, solver):
    Z = matrix(*shape)
    found = threshold(Z, tau, solver=solver)
    assert found.solver == solver
    assert error(found, Z, tau) < 5e-6
    np.testing.assert_allclose(found.sigma.numpy(), reference(Z, tau)[1].numpy(), atol=2e-5)


@pytest.mark.parametrize("tau", [0.0, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 5e-2])
@pytest.mark.parametrize("kind", list(STEEP))
def test_ranks_and_bounds_are_true_where_squaring_loses_the_digits(kind, tau):
    Z = steep(kind)
    gram, stack = threshold(Z, tau, solver="gram"), gram_stack(Z[None], torch.tensor([tau]) if tau else None)
    assert gram.solver == "gram"
    expected = reference(Z, tau)[1]
    for found, bound in ((gram, gram.bound), (replace(gram, L=stack.L[0]), float(stack.bound))):
        assert error(found, Z, tau) <= bound
    assert abs(effective_rank(gram.sigma) - effective_rank(expected)) <= 1 and gram.bound <= TOLERANCE
    if tau == 0 or tau >= 1e-2:  # in between a stack, which must not wait for a number, may say so by its bound
        assert abs(int(stack.rank) - effective_rank(expected)) <= 1
        assert float(stack.bound) < TOLERANCE
    if tau < 3e-3 and kind != "hyperbola":
        assert error(gram, Z, tau) < 5e-6 and gram.bound < 1e-5


@pytest.mark.parametrize("drift", [0.0, 0.01, 0.1, 0.3])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_subspace_follows_a_matrix_that_moves(shape, drift):
    Z = matrix(*shape)
    basis = threshold(Z, 0.8).basis
    following = moved(Z, drift)
    found = threshold(following, 0.8, basis)
    assert found.solver == "subspace"
    assert error(found, following, 0.8) <= found.bound + 1e-6
    assert found.bound <= TOLERANCE
    np.testing.assert_allclose(found.sigma.numpy(), reference(following, 0.8)[1].numpy(), atol=3e-3)
    again = threshold(following, 0.8, found.basis)
    assert again.bound <= TOLERANCE
    assert len(found.L) == shape[0]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(0, 0.5), st.floats(0.1, 1.5), st.integers(1, 20), st.floats(0.05, 0.95))
def test_the_bound_holds_whatever_the_matrix_and_wherever_it_came_from(seed, drift, tau, kept, gap):
    before = matrix(40, 60, kept, seed, gap)
    Z = moved(before, drift, seed + 1)
    found = threshold(Z, tau, threshold(before, tau).basis)
    assert error(found, Z, tau) <= found.bound + 1e-5
    assert found.bound <= TOLERANCE


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.floats(1.005, 2), st.floats(0, 0.02), st.integers(1, 14))
def test_the_bound_holds_for_a_singular_value_that_has_just_come_up(seed, height, drift, kept):
    before = matrix(60, 70, kept, seed, gap=0.9)
    U, sigma, Vh = torch.linalg.svd(before.double(), full_matrices=False)
    sigma[-5] = height  # from far outside the basis to above the threshold
    Z = moved(((U * sigma) @ Vh).float(), drift, seed + 1)
    found = threshold(Z, 1.0, threshold(before, 1.0).basis)
    assert error(found, Z, 1.0) <= found.bound + 1e-5
    assert found.bound <= TOLERANCE


def test_a_basis_from_elsewhere_never_changes_a_result_silently():
    Z = matrix(40, 60)
    unrelated = torch.linalg.qr(torch.randn(40, 18, generator=torch.Generator().manual_seed(3)))[0]
    found = threshold(Z, 0.8, unrelated)
    assert error(found, Z, 0.8) <= max(found.bound, 3e-6)
    assert found.bound <= TOLERANCE


def test_a_rank_that_outgrows_the_basis_falls_to_the_next_solver():
    basis = threshold(matrix(40, 60, kept=4), 0.8).basis
    Z = matrix(40, 60, kept=19)
    found = threshold(Z, 0.8, basis)
    assert found.solver == "gram"
    assert error(found, Z, 0.8) < 5e-6


def test_the_basis_follows_the_rank_up_and_down():
    basis, widths = None, []
    for kept in (4, 5, 7, 9, 7, 5, 3):
        Z = moved(matrix(40, 60, kept), 0.01)
        found = threshold(Z, 0.8, basis)
        assert int((found.sigma > 0).sum()) == kept
        assert error(found, Z, 0.8) <= max(found.bound, 3e-6)
        basis = found.basis
        widths.append(basis.shape[1])
    assert max(widths) == widths[3]
    assert widths[-1] < widths[3]


def with_spectrum(sigma: Tensor, m: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A matrix (n×m) with n singular values, in float64 before it is rounded, and its left vectors."""
    n, generator = len(sigma), torch.Generator().manual_seed(seed)
    U, V = (torch.linalg.qr(torch.randn(size, n, generator=generator).double())[0] for size in (n, m))
    return ((U * sigma) @ V.mT).float(), U.float()


@pytest.mark.parametrize(("n", "m", "kept", "new"), [(400, 400, 60, 4), (400, 400, 60, 300), (700, 1100, 200, 480)])
def test_many_new_singular_values_just_above_the_threshold_are_part_of_the_bound(n, m, kept, new):
    """None of them shows in a basis that is exact: each lacks little in L, all of them together a lot."""
    parts = ((95.0, kept), (0.5, 8), (1.02, new), (0.01, n - kept - 8 - new))
    sigma = torch.cat([torch.full((count,), value) for value, count in parts]).double()
    Z, U = with_spectrum(sigma, m)
    found = threshold(Z, 1.0, U[:, : kept + 8], "subspace")
    assert error(found, Z, 1.0) <= found.bound
    assert (found.solver == "subspace") == (new == 4)  # of four the bound is within the tolerance


def test_a_vector_half_inside_the_basis_counts_with_its_own_value():
    """Its half outside is what a kept vector is off by: this kept vector moves as if the value outside were 0.975."""
    sigma = torch.cat([torch.tensor([50.0, 1.03, 0.975]), torch.full((61,), 1e-3)]).double()
    Z, U = with_spectrum(sigma, 64)
    halves = (U[:, 2] + U[:, 3]) / 2**0.5
    off = U[:, 1] + 0.02 * (U[:, 2] - U[:, 3]) / 2**0.5
    basis = torch.linalg.qr(torch.stack([U[:, 0], off, halves], 1))[0]
    found = threshold(Z, 1.0, torch.cat([basis, U[:, 60:]], 1), "subspace")
    assert error(found, Z, 1.0) <= max(found.bound, 1e-6)


def test_random_columns_do_not_depend_on_the_default_device():
    """The device meta stands in for `torch.set_default_device("cuda")`, on which a generator of the CPU fails."""
    Z = matrix(40, 90)
    basis, Z = threshold(Z, 0.8).basis, moved(Z, 0.01)
    with torch.device("meta"):
        found = threshold(Z, 0.8, basis, "subspace")
    assert found.solver == "subspace" and error(found, Z, 0.8) <= found.bound + 1e-6


def test_where_most_is_kept_there_is_no_basis():
    assert threshold(matrix(40, 60, kept=30), 0.8).basis is None
    assert threshold(matrix(40, 60, kept=5), 0.8).basis.shape[0] == 40
    assert threshold(matrix(60, 40, kept=5), 0.8).basis.shape[0] == 40


@pytest.mark.parametrize("shape", SHAPES)
def test_no_threshold_returns_the_matrix_to_the_bit(shape):
    Z = matrix(*shape)
    for solver in ("exact", "gram", "auto"):
        assert torch.equal(threshold(Z, 0.0, threshold(Z, 0.8).basis, solver).L, Z)


def test_eigenvectors_that_do_not_converge_leave_it_to_the_svd(monkeypatch):
    Z = matrix(40, 60)
    no_eigenvectors(monkeypatch, 1)
    found = threshold(Z, 0.8)
    assert found.solver == "exact"
    assert error(found, Z, 0.8) < 5e-6


def test_ritz_vectors_that_do_not_converge_leave_it_to_the_gram_matrix(monkeypatch):
    Z = matrix(40, 60)
    basis = threshold(Z, 0.8).basis
    for failures, solver in ((1, "gram"), (2, "exact")):
        with monkeypatch.context() as patch:
            no_eigenvectors(patch, failures)
            found = threshold(Z, 0.8, basis)
        assert found.solver == solver
        assert error(found, Z, 0.8) < 5e-6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_shows_on_every_solver(value):
    Z = matrix(40, 60)
    basis = threshold(Z, 0.8).basis
    Z[3, 4] = value
    for solver in ("exact", "gram", "subspace", "auto"):
        try:
            assert not threshold(Z, 0.8, basis, solver).sigma.isfinite().all()
        except torch.linalg.LinAlgError:
            continue


def test_a_matrix_of_zeros_stays_one():
    for solver in ("exact", "gram", "auto"):
        assert not threshold(torch.zeros(12, 20), 0.1, None, solver).L.any()


def test_the_same_input_gives_the_same_bits():
    Z = matrix(40, 60)
    basis = threshold(Z, 0.8).basis
    first, second = (threshold(moved(Z, 0.1), 0.8, basis) for _ in range(2))
    assert torch.equal(first.L, second.L)
    assert torch.equal(first.basis, second.basis)


def drift(X: Tensor, steps: int) -> list[Tensor]:
    return [moved(X, 0.005 * step, seed=step) for step in range(steps)]


def test_a_block_goes_on_bit_for_bit_from_its_state_on_the_subspace_solver():
    config = SalaadConfig(rank_ratio=0.2, delta_alpha=0.5, delta_beta=0.01)
    X = matrix(40, 60)
    block, weights = Surrogate(X, 1e-3, config), drift(X, 40)
    used = [SOLVERS[int(block.update(wandered)[-1])] for wandered in weights[:36]]
    copy = Surrogate(X, 1e-3, config)
    copy.load_state_dict({key: value.clone() for key, value in block.state_dict().items()})
    assert used[-1] == "subspace"
    for wandered in weights[36:]:
        assert torch.equal(block.update(wandered), copy.update(wandered))
    for key, value in block.state_dict().items():
        assert torch.equal(value, copy.state_dict()[key]), key


def test_forty_updates_with_subspaces_end_where_full_svds_end():
    X, ends = matrix(40, 60), {}
    for solver in ("exact", "auto"):
        block = Surrogate(X, 1e-3, SalaadConfig(rank_ratio=0.2, delta_alpha=0.3, delta_beta=0.005, method=solver))
        for wandered in drift(X, 40):
            block.update(wandered)
        ends[solver] = block
    assert ends["auto"].rank == ends["exact"].rank
    assert abs(ends["auto"].density - ends["exact"].density) < 0.01
    gap = (ends["auto"].T - ends["exact"].T).norm() / ends["exact"].T.norm()
    assert gap < 5e-3
