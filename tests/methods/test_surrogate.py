"""One block against a second implementation of Algorithm 1: NumPy, float64, the paper's unscaled α, β, Y and ρ."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import UpdateRecord
from salaad.spectral import SOLVERS

SHAPES = ((20, 20), (12, 30), (30, 12))


class Reference:
    """Algorithm 1 and section 4.2 with the paper's variables, literally but for a threshold of 0.

    A threshold of 0 means no thresholding: then L is its argument itself, and X − L + Y/ρ is S without rounding.
    """

    def __init__(self, X: np.ndarray, rho: float, config: SalaadConfig) -> None:
        self.rho, self.config = rho, config
        U, s, Vh = np.linalg.svd(X, full_matrices=False)
        k = max(1, round(config.rank_ratio * min(X.shape)))
        self.L = (U[:, :k] * s[:k]) @ Vh[:k]
        self.S = self.Y = np.zeros_like(X)
        self.alpha = self.beta = 0.0

    def update(self, X: np.ndarray) -> None:
        rho, config = self.rho, self.config
        for _ in range(config.inner):
            Z = X - self.S + self.Y / rho
            U, s, Vh = np.linalg.svd(Z, full_matrices=False)
            s = np.maximum(s - self.alpha / rho, 0)
            self.L = (U * s) @ Vh if self.alpha > 0 else Z
            R = X - self.L + self.Y / rho if self.alpha > 0 else self.S
            self.S = np.sign(R) * np.maximum(np.abs(R) - self.beta / rho, 0)
            self.Y = self.Y + rho * (X - self.L - self.S)
        self.rank = definition_1(s, config.gamma, config.energy)
        self.nnz = np.count_nonzero(self.S)
        self.gap = np.linalg.norm(X - self.L - self.S)
        gamma_L, upsilon_S = self.rank / min(X.shape), self.nnz / X.size
        self.alpha = max(0, self.alpha + rho * (gamma_L - config.rank_ratio) * config.delta_alpha)
        self.beta = max(0, self.beta + rho * (upsilon_S - config.density) * config.delta_beta)


def definition_1(sigma: np.ndarray, gamma: float, energy: str = "nuclear") -> int:
    share = np.cumsum(sigma ** {"nuclear": 1, "squared": 2}[energy])
    return int(np.argmax(share / share[-1] >= gamma)) + 1 if share[-1] > 0 else 0


def weight(n: int, m: int, seed: int = 0) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed))


def drift(X: Tensor, updates: int, seed: int, size: float = 0.05) -> list[Tensor]:
    """Return the weight X at every update, between which it moves by Gaussian noise."""
    return [X := X + size * weight(*X.shape, seed * 1000 + k) for k in range(updates)]


def block_after(updates: int, X: Tensor, rho: float = 1e-3, **settings) -> tuple[Surrogate, Tensor]:
    """A surrogate after some updates, and the weight of the last of them."""
    block = Surrogate(X, rho, SalaadConfig(**settings))
    weights = drift(X, updates, seed=3)
    for wandered in weights:
        block.update(wandered)
    return block, weights[-1] if weights else X


def updated(block: Surrogate, X: Tensor) -> UpdateRecord:
    *numbers, method = block.update(X).tolist()
    return UpdateRecord(*numbers, SOLVERS[int(method)])


def with_thresholds(block: Surrogate, tau_L: float, tau_S: float) -> Surrogate:
    """Give the block other thresholds for its next update, through its public state."""
    state = block.state_dict()
    block.load_state_dict(state | {"thresholds": torch.tensor([tau_L, tau_S, state["thresholds"][2].item()])})
    return block


# The first settings raise both thresholds and let them settle near the targets; the second take steps so
# large that α returns to 0 again and again; the third count energy as the authors' code does.
SETTLING = {"rank_ratio": 0.25, "density": 0.2, "delta_alpha": 0.5, "delta_beta": 0.05}
CLAMPING = {"rank_ratio": 0.85, "density": 0.7, "delta_alpha": 6.0, "delta_beta": 0.5}
SQUARED = {**SETTLING, "energy": "squared", "gamma": 0.97}


@pytest.mark.parametrize("settings", [SETTLING, CLAMPING, SQUARED], ids=["settling", "clamping", "squared"])
@pytest.mark.parametrize("method", ["exact", "auto"])
@pytest.mark.parametrize("inner", [1, 3])
@pytest.mark.parametrize("shape", SHAPES)
def test_forty_updates_follow_algorithm_1_written_in_the_papers_variables(shape, inner, method, settings):
    config = SalaadConfig(**settings, inner=inner, method=method)
    rho, start = 3e-7, weight(*shape)
    block, reference = Surrogate(start, rho, config), Reference(start.double().numpy(), rho, config)
    np.testing.assert_allclose(block.low_rank().numpy(), reference.L, atol=5e-5)
    seen = []
    for k, X in enumerate(drift(start, 40, seed=1)):
        if k == 30:  # a controller that takes no steps holds the thresholds
            block.held, reference.config = True, replace(config, delta_alpha=0.0, delta_beta=0.0)
        record = updated(block, X)
        reference.update(X.double().numpy())
        # Entries are of size 1 and float32 rounds them to 1e-7; the SVD of a 30×12 matrix and 40 updates, each
        # building on the last, leave 1e-5. The rank is an integer and must agree; S may differ by an entry that lies
        # within that rounding of the threshold, which moves β by Δβ/(n·m) and less.
        entry = 1 / X.numel()
        assert block.rank == reference.rank
        assert abs(block.nnz - reference.nnz) <= 1
        close = {"rtol": 0, "atol": 1e-4}
        np.testing.assert_allclose(block.low_rank().numpy(), reference.L, **close)
        np.testing.assert_allclose(block.sparse().numpy(), reference.S, **close)
        np.testing.assert_allclose(block.dual().numpy() / rho, reference.Y / rho, **close)
        assert record == UpdateRecord(
            rank_ratio=pytest.approx(reference.rank / min(shape)),
            density=pytest.approx(reference.nnz / X.numel(), abs=1.01 * entry),
            alpha=pytest.approx(reference.alpha, rel=1e-5),
            beta=pytest.approx(reference.beta, rel=1e-5, abs=2 * rho * config.delta_beta * entry),
            delta=pytest.approx(reference.gap, abs=1e-3),
            error=pytest.approx(reference.gap / X.double().norm().item(), abs=1e-4),
            bound=pytest.approx(0, abs=1e-5),
            method="gram" if method == "auto" else method,
        )
        assert (block.alpha, block.beta) == pytest.approx((record.alpha, record.beta))
        seen.append((reference.alpha, reference.beta, reference.rank, reference.nnz))
    assert_eventful(np.array(seen), clamping=settings is CLAMPING)


def assert_eventful(seen: np.ndarray, clamping: bool) -> None:
    """Assert that the trajectory is worth comparing: both thresholds were at work, rank and number of entries vary."""
    alpha, beta, rank, nnz = seen.T
    assert (alpha > 0).sum() > 10
    assert (beta > 0).sum() > 10
    assert len(set(rank)) > 3
    assert len(set(nnz)) > 3
    assert not clamping or (alpha[5:] == 0).sum() > 1


def test_the_start_is_the_weight_truncated_to_the_target_rank_without_sparse_part_dual_or_thresholds():
    X = weight(20, 30)
    block = Surrogate(X, 0.1, SalaadConfig(rank_ratio=0.15))
    U, s, Vh = np.linalg.svd(X.double().numpy(), full_matrices=False)
    np.testing.assert_allclose(block.low_rank().numpy(), (U[:, :3] * s[:3]) @ Vh[:3], atol=5e-5)
    assert torch.count_nonzero(block.sparse()) == torch.count_nonzero(block.dual()) == 0
    assert (block.alpha, block.beta, block.rank, block.nnz) == (0, 0, 3, 0)


def test_the_start_keeps_at_least_one_singular_value():
    assert Surrogate(weight(5, 40), 0.1, SalaadConfig(rank_ratio=0.01)).rank == 1


def test_the_start_does_not_follow_the_weight_that_it_was_made_from():
    X = weight(6, 6)
    block = Surrogate(X, 0.1, SalaadConfig(rank_ratio=1.0))
    before = block.low_rank().clone()
    X.zero_()
    assert torch.equal(block.low_rank(), before)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_the_penalty_and_its_gradient_are_those_of_equation_6_by_autograd(shape, scale):
    block, X = block_after(8, weight(*shape), rho=0.7, **SETTLING)
    variable = X.double().requires_grad_()
    L, S, Y = block.low_rank().double(), block.sparse().double(), block.dual().double()
    penalty = block.rho / 2 * torch.linalg.matrix_norm(variable - L - S + Y / block.rho) ** 2
    (gradient,) = torch.autograd.grad(penalty, variable)
    before = weight(*shape, seed=5)
    after = before.clone()
    block.add_penalty_gradient(after, X, scale=scale)
    assert S.count_nonzero() > 0 and Y.count_nonzero() > 0
    torch.testing.assert_close(after.double(), before + scale * gradient, rtol=0, atol=2e-6)
    assert block.penalty(X).item() == pytest.approx(penalty.item(), rel=1e-5)


def test_alpha_rises_with_too_much_rank_and_falls_with_too_little_by_rho_times_the_excess_times_its_step():
    config = SalaadConfig(rank_ratio=0.3, delta_alpha=0.5)
    X = torch.eye(10)
    block = Surrogate(X, 1e-3, config)
    block.update(X)  # no threshold yet, so L = X, whose rank is full
    assert block.alpha == pytest.approx(1e-3 * (1.0 - 0.3) * 0.5)
    with_thresholds(block, tau_L=5.0, tau_S=0.0).update(X)  # L = 0
    assert block.rank_ratio == 0
    assert block.alpha == pytest.approx(1e-3 * (5.0 - 0.3 * 0.5))


def test_beta_rises_with_too_much_density_and_falls_with_too_little_by_rho_times_the_excess_times_its_step():
    config = SalaadConfig(density=0.2, delta_beta=0.05)
    X = weight(10, 10)
    block = with_thresholds(Surrogate(X, 1e-3, config), tau_L=1e3, tau_S=0.0)
    block.update(X)  # L = 0 and no threshold for S, so S = X, which is dense
    assert block.density == 1
    assert block.beta == pytest.approx(1e-3 * (1.0 - 0.2) * 0.05)
    with_thresholds(block, tau_L=1e3, tau_S=50.0).update(X)
    assert block.density == 0
    assert block.beta == pytest.approx(1e-3 * (50.0 - 0.2 * 0.05))


def test_thresholds_stop_at_zero():
    config = SalaadConfig(rank_ratio=1.0, density=1.0, delta_alpha=10.0, delta_beta=10.0)
    X = weight(8, 3)[:, :1] @ weight(1, 6)
    block = Surrogate(X, 1e-3, config)
    block.update(X)
    assert (block.rank, block.nnz) == (1, 0)
    assert (block.alpha, block.beta) == (0, 0)


def test_rounding_does_not_fill_the_sparse_part_when_both_thresholds_return_to_zero():
    X = weight(32, 32)
    block = with_thresholds(Surrogate(X, 1e-3, SalaadConfig()), tau_L=3.0, tau_S=1.0)
    block.update(X)
    before = block.sparse().clone()
    with_thresholds(block, tau_L=0.0, tau_S=0.0).update(X)
    # L becomes X − S + dual, and S, the soft threshold of X − L + dual by 0, stays what it was.
    assert 0 < before.count_nonzero() < before.numel() / 10
    torch.testing.assert_close(block.sparse(), before, rtol=0, atol=1e-5)
    assert torch.equal(block.sparse() != 0, before != 0)


def test_a_weight_of_zeros_gives_a_record_of_finite_numbers():
    X = torch.zeros(4, 6)
    record = updated(Surrogate(X, 0.1, SalaadConfig()), X)
    assert np.isfinite([record.delta, record.error]).all()
    assert (record.rank_ratio, record.density, record.delta) == (0, 0, 0)


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_the_rank_times_n_plus_m_and_the_entries_of_s(shape):
    block, _ = block_after(20, weight(*shape), **SETTLING)
    S = block.sparse().numpy()
    rank = definition_1(np.linalg.svd(block.low_rank().double().numpy(), compute_uv=False), 0.999)
    assert 0 < np.count_nonzero(S) < S.size
    assert block.parameters == rank * sum(shape) + np.count_nonzero(S)
    assert (block.rank, block.nnz) == (rank, np.count_nonzero(S))
    assert (block.rank_ratio, block.density) == (rank / min(shape), np.count_nonzero(S) / S.size)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_deployed_is_the_best_approximation_of_l_at_its_effective_rank_plus_s(shape):
    block, _ = block_after(20, weight(*shape), **SETTLING, gamma=0.9)
    U, s, Vh = np.linalg.svd(block.low_rank().double().numpy(), full_matrices=False)
    r = definition_1(s, 0.9)
    low_rank = block.deployed().numpy() - block.sparse().numpy()
    assert 0 < r < np.count_nonzero(s > 1e-3)
    np.testing.assert_allclose(low_rank, (U[:, :r] * s[:r]) @ Vh[:r], atol=2e-5)
    assert np.linalg.matrix_rank(low_rank, tol=1e-4 * s[0]) == r


@pytest.mark.parametrize("updates", [0, 12])
@pytest.mark.parametrize("inner", [1, 2])
def test_a_saved_block_goes_on_bit_for_bit(updates, inner):
    block, X = block_after(updates, weight(14, 22), **SETTLING, inner=inner)
    file = io.BytesIO()
    torch.save(block.state_dict(), file)
    file.seek(0)
    other = Surrogate(weight(14, 22, seed=9), block.rho, block.config)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert state_of(other) == state_of(block)
    for wandered in drift(X, 8, seed=4):
        assert torch.equal(block.update(wandered), other.update(wandered))
        assert state_of(other) == state_of(block)


def state_of(block: Surrogate) -> list:
    gradient = torch.zeros_like(block.low_rank())
    block.add_penalty_gradient(gradient, torch.ones_like(gradient))
    matrices = (block.low_rank(), block.sparse(), block.dual(), block.deployed(), gradient)
    return [block.alpha, block.beta, block.rank, *(matrix.tolist() for matrix in matrices)]


@pytest.mark.parametrize("updates", [0, 5])
@pytest.mark.parametrize("method", ["exact", "gram"])
@pytest.mark.parametrize("shape", [(64, 48), (48, 64)])
def test_a_block_keeps_no_more_than_three_dense_float32_matrices(shape, method, updates):
    block, _ = block_after(updates, weight(*shape), **SETTLING, method=method)
    tensors = [value for value in vars(block).values() if isinstance(value, Tensor)]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    assert sum(tensor.numel() == 64 * 48 for tensor in tensors) <= 3
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    assert sum(storages.values()) <= 4 * (3 * 64 * 48 + 48 + 16)


def test_an_update_towards_a_weight_of_0_has_finite_statistics():
    """As a layer that is pruned or begun anew; the error relative to it is too large for a number."""
    block, _ = block_after(8, 10 * weight(40, 60), rank_ratio=0.25, density=0.2, delta_alpha=5, delta_beta=0.5)
    record = updated(block, torch.zeros(40, 60))
    assert record.delta > 1 and record.error == torch.finfo(torch.float32).max


def test_a_bfloat16_weight_gets_a_float32_surrogate():
    block, X = block_after(3, weight(10, 16).bfloat16(), **SETTLING)
    gradient = torch.zeros(10, 16)
    block.add_penalty_gradient(gradient, X)
    expected = block.rho * (X.float() - block.low_rank() - block.sparse()) + block.dual()
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-9)
