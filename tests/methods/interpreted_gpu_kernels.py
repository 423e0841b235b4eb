"""The GPU kernels of the ADMM and the penalty, which Triton interprets."""

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle, interpreter_builder

from salaad.methods.salaad import elementwise, gpu_kernels

# Thresholds of three blocks; τ_L of a stack is above 0 for all blocks or for none.
HIGH = elementwise.Thresholds(*torch.tensor([[1, 0.4, 0.1], [0.5, 0.2, 0], [0.3, 0.1, 0]]))
ZERO = HIGH._replace(tau_L=torch.zeros(3))


def matrices(dtype: torch.dtype, *shape: int):
    generator = torch.Generator().manual_seed(0)
    X, L, R = (torch.randn(3, *shape, generator=generator) for _ in range(3))
    return X.to(dtype), L, R


@pytest.fixture
def used(monkeypatch):
    """A list that gets the name of every kernel that is launched."""
    names: list[str] = []
    for name in ("sparse_and_dual", "add_penalty"):
        usual = getattr(gpu_kernels, name)
        monkeypatch.setattr(gpu_kernels, name, lambda *args, name=name, usual=usual: names.append(name) or usual(*args))
    return names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (37, 61)])
def test_an_update_is_that_of_torch_to_the_bit(dtype, shape, used):
    X, L, R = matrices(dtype, *shape)
    for tau, thresholded in ((HIGH, True), (ZERO, False)):
        found, wanted = (
            elementwise.sparse_and_dual(X, L, R, tau, thresholded),
            elementwise.sparse_and_dual_in_torch(X, L, R, tau, thresholded),
        )
        assert torch.equal(found.R, wanted.R) and torch.equal(found.T, wanted.T)
        assert torch.equal(found.nnz, wanted.nnz)
        # Sums of up to 2257 numbers of size 1 in float32, added up program by program.
        torch.testing.assert_close(found[3:], wanted[3:], rtol=1e-5, atol=1e-3)
    alone = elementwise.sparse_and_dual(X[0], L[0], R[0], elementwise.Thresholds(*(tau[0] for tau in HIGH)), True)
    together = elementwise.sparse_and_dual(X, L, R, HIGH, True)
    assert all(torch.equal(one, many[0]) for one, many in zip(alone, together, strict=True))
    assert used == ["sparse_and_dual"] * 4


def test_columns_of_another_layout_are_left_to_torch(used):
    X, L, R = matrices(torch.float32, 8, 8)
    found, wanted = (
        way(X.mT, L, R, HIGH, True) for way in (elementwise.sparse_and_dual, elementwise.sparse_and_dual_in_torch)
    )
    assert not used and torch.equal(found.T, wanted.T)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 1])
def test_what_is_not_finite_shows_in_the_statistics_of_its_block(wrong, place):
    X, L, R = matrices(torch.float32, 7, 13)
    (X, L)[place][0, 3, 4] = wrong
    found = elementwise.sparse_and_dual(X, L, R, HIGH, True)
    seen = found.delta + found.total
    assert not seen[0].isfinite() and seen[1:].isfinite().all()


def test_entries_are_counted_in_64_bits(monkeypatch):
    """The program for entries from 2³² on writes nothing for a block of 91 entries, which has none of them."""
    tile, size = 2**32 // gpu_kernels._BLOCK, 91
    X, L, R = (matrix[0].flatten() for matrix in matrices(torch.float32, 7, 13))
    after, T = torch.full((size,), 5.0), torch.full((size,), 5.0)
    partial = torch.empty(tile + 1, 4)
    usual = interpreter_builder.create_get_program_id
    monkeypatch.setattr(
        interpreter_builder,
        "create_get_program_id",
        lambda axis: TensorHandle(np.array([tile], np.int32), tl.int32) if axis == 0 else usual(axis),
    )
    gpu_kernels.divide_kernel[(1, 1)](
        X, L, R, after, T, torch.ones(3), partial, size, tile + 1, BLOCK=gpu_kernels._BLOCK
    )
    assert (after == 5).all() and (T == 5).all() and not partial[-1].any()


def test_the_penalty_joins_a_gradient(used):
    X, T, _ = matrices(torch.float32, 37, 61)
    gradient = torch.randn(37, 61)
    expected = gradient.double() + 0.01 * (X[0].double() - T[0].double())
    elementwise.add_penalty(gradient, X[0], T[0], 0.01, seed=1)
    assert used == ["add_penalty"]
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-6)


def test_a_penalty_far_below_the_resolution_of_bfloat16_is_there_in_the_mean(used):
    """The gradient is 1 and the penalty 1e-4; the next number above 1 in bfloat16 is 1.0078."""
    X, T = torch.ones(300, 100).bfloat16(), torch.zeros(300, 100)
    found = []
    for seed in range(4):
        gradient = torch.ones(300, 100).bfloat16()
        elementwise.add_penalty(gradient, X, T, 1e-4, seed)
        found.append(gradient)
    assert used == ["add_penalty"] * 4
    again = torch.ones(300, 100).bfloat16()
    elementwise.add_penalty(again, X, T, 1e-4, 3)
    assert torch.equal(again, found[3]) and not torch.equal(found[2], found[3])
    # 120 000 draws of 2⁻⁷ with probability 0.0128: the mean is off by 2.5e-6 in one standard deviation; 5 are allowed.
    assert abs(torch.stack(found).double().mean().item() - 1 - 1e-4) < 1.3e-5


def test_a_nan_of_a_gpu_stays_one_when_it_is_rounded_at_random(used):
    T = torch.full((3, 5), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    gradient = torch.ones(3, 5).bfloat16()
    elementwise.add_penalty(gradient, torch.ones(3, 5).bfloat16(), T, 0.1, seed=1)
    assert used == ["add_penalty"] and gradient.isnan().all()
