"""The elementwise part of ADMM updates of several blocks and of the penalty, in torch."""

import pytest
import torch

from salaad.config.methods import SalaadConfig
from salaad.methods.salaad import elementwise
from salaad.methods.salaad.surrogate import Surrogate


def test_blocks_together_are_divided_as_by_the_three_equations():
    generator = torch.Generator().manual_seed(0)
    X, L, R = (torch.randn(3, 20, 30, generator=generator).double() for _ in range(3))
    tau = elementwise.Thresholds(*torch.tensor([[0.7, 0.1, 2.0], [0.2, 0.0, 0.4], [0.3, 0.5, 0.1]]).double())
    dual = R.clamp(-tau.tau_R[:, None, None], tau.tau_R[:, None, None])

    found = elementwise.sparse_and_dual(X, L, R, tau, True)
    S = soft(X - L + dual, tau.tau_S[:, None, None])  # eq. 4
    Y = dual + X - L - S  # eq. 5
    torch.testing.assert_close(found.R, S + Y)
    torch.testing.assert_close(found.T, L + S - Y)
    assert found.nnz.tolist() == S.count_nonzero(dim=(1, 2)).tolist()
    torch.testing.assert_close(found.delta, (X - L - S).norm(dim=(1, 2)))
    torch.testing.assert_close(found.norm, X.norm(dim=(1, 2)))
    torch.testing.assert_close(found.total, (L + S - Y).sum((1, 2)))


def soft(Z: torch.Tensor, tau) -> torch.Tensor:
    """The soft threshold by its definition."""
    return Z.sign() * (Z.abs() - tau).clamp_min(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_penalty_is_that_of_a_block(dtype):
    block = Surrogate(torch.randn(9, 7), 0.3, SalaadConfig())
    X, gradient = torch.randn(9, 7), torch.randn(9, 7).to(dtype)
    expected = gradient.clone()
    block.add_penalty_gradient(expected, X, scale=2.0, seed=5)
    elementwise.add_penalty(gradient, X, block.T, 2.0 * block.rho, seed=5)
    assert torch.equal(gradient, expected)


def test_a_nan_stays_one_in_a_gradient_that_is_rounded_at_random():
    """A GPU computes the NaN of the bits 0x7fffffff; a random number added to them gives those of -0."""
    T = torch.full((4, 8), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    gradient = torch.ones(4, 8).bfloat16()
    elementwise.add_penalty(gradient, torch.ones(4, 8).bfloat16(), T, 0.1, seed=1)
    assert gradient.isnan().all()
