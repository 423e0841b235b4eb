"""The elementwise part of ADMM updates of several blocks, against the update of one; and the same by kernels."""

from pathlib import Path

import pytest
import torch

from salaad.config.methods import SalaadConfig
from salaad.methods.salaad import passes
from salaad.methods.salaad.surrogate import Surrogate
from tests.helpers.interpreted import needs_triton, passes_interpreted


@needs_triton
def test_kernels_compute_the_same():
    assert passes_interpreted(Path(__file__).with_name("interpreted_gpu_kernels.py"))


def test_blocks_together_are_updated_as_each_alone():
    """The first has no threshold τ_L at its first update, and has one at its second."""
    generator = torch.Generator().manual_seed(0)
    alone = [
        Surrogate(torch.randn(20, 30, generator=generator), 1.0, SalaadConfig(method="exact", delta_alpha=5))
        for _ in range(3)
    ]
    for block in alone[1:]:
        block.tau_L, block.tau_S = torch.tensor(0.7), torch.tensor(0.2)
    for _ in range(2):
        X = torch.randn(3, 20, 30, generator=generator)
        thresholds = torch.stack([torch.stack([each.tau_L, each.tau_S, each._tau_R]) for each in alone])
        R = torch.stack([each.R for each in alone])
        records = [block.update(weight) for block, weight in zip(alone, X, strict=True)]
        L = torch.stack([each.T - each.R + 2 * each.R.clamp(-each._tau_R, each._tau_R) for each in alone])
        T, statistics = passes.divide(X, L, R, thresholds)
        for i, (block, record) in enumerate(zip(alone, records, strict=True)):
            torch.testing.assert_close(R[i], block.R, rtol=0, atol=1e-5)  # L was recovered, up to rounding
            torch.testing.assert_close(T[i], block.T, rtol=0, atol=1e-5)
            assert statistics[i, 1].sqrt().item() == pytest.approx(record[4].item(), rel=1e-5)
            assert statistics[i, 2].sqrt().item() == pytest.approx(X[i].norm().item(), rel=1e-6)
            assert statistics[i, 3].item() == pytest.approx(T[i].double().sum().item(), abs=1e-3)
            assert statistics[i, 0].item() == block.nnz


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_penalty_is_that_of_a_block(dtype):
    block = Surrogate(torch.randn(9, 7), 0.3, SalaadConfig())
    X, gradient = torch.randn(9, 7), torch.randn(9, 7).to(dtype)
    expected = gradient.clone()
    block.add_penalty_gradient(expected, X, scale=2.0, seed=5)
    passes.add_penalty(gradient, X, block.T, 2.0 * block.rho, seed=5)
    assert torch.equal(gradient, expected)
