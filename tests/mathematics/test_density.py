"""Effective ranks from moments of a spectrum, against Definition 4.1 on the singular values themselves."""

import pytest
import torch
from torch import Tensor

from salaad.prox import effective_rank
from salaad.spectral.density import COLUMNS, effective_rank_of

SPECTRA = {
    "linear": lambda n: torch.linspace(1, 0, n + 1)[:n],
    "quarter circle": lambda n: (1 - torch.linspace(0, 1, n + 1)[:n] ** 2).sqrt(),
    "exponential": lambda n: torch.linspace(0, -5, n).exp(),
    "hyperbola": lambda n: 1 / torch.arange(1, n + 1),
    "two clusters": lambda n: torch.cat([torch.full((n // 3,), 1.0), torch.full((n - n // 3,), 0.05)]),
}

ALLOWED = {"two clusters": 0.05, "hyperbola": 0.08}  # error of the rank, as a share of the eigenvalues


def matrices(sigma: Tensor, n: int, count: int = 2) -> tuple[Tensor, Tensor]:
    """Return symmetric M (count×n×n) with eigenvalues `sigma` and zeros, and projections onto sigma's eigenvectors."""
    generator = torch.Generator().manual_seed(n)
    V = torch.linalg.qr(torch.randn(count, n, n, generator=generator).double())[0][..., : len(sigma)]
    return ((V * sigma.double()) @ V.mT).float(), (V @ V.mT).float()


def found(sigma: Tensor, n: int, gamma: float, energy: str, top: float = 1.0) -> list[float]:
    M, P = matrices(sigma, n)
    tops = torch.full((len(M), 1, 1), top)
    return effective_rank_of(M, P, torch.full((len(M),), float(len(sigma))), tops, gamma, energy).tolist()


@pytest.mark.parametrize("energy", ["nuclear", "squared"])
@pytest.mark.parametrize("gamma", [0.9, 0.999])
@pytest.mark.parametrize("kept", [1.0, 0.4, 0.1])
@pytest.mark.parametrize("kind", list(SPECTRA))
def test_the_rank_is_that_of_the_definition(kind, kept, gamma, energy):
    n = 400
    sigma = SPECTRA[kind](round(kept * n))
    expected = effective_rank(sigma, gamma, energy)
    # 64 random columns give each eigenvalue a random weight, which matters where many are equal. The cut is sharp to a
    # hundredth of the largest eigenvalue, below which most of a hyperbola lies.
    allowed = 1 + ALLOWED.get(kind, 0.01) * len(sigma)
    assert found(sigma, n, gamma, energy) == pytest.approx([expected] * 2, abs=allowed)


@pytest.mark.parametrize("kept", [4, 20, COLUMNS])
def test_with_as_many_columns_as_dimensions_nothing_is_drawn(kept):
    sigma = torch.linspace(1, 0.3, kept)  # none so small that it could be left out
    assert found(sigma, COLUMNS, 0.999, "nuclear") == [kept] * 2


def test_the_rank_does_not_depend_on_scale_nor_on_a_bound_a_little_too_high():
    sigma = SPECTRA["exponential"](120)
    plain = found(sigma, 300, 0.999, "nuclear")
    assert found(1000 * sigma, 300, 0.999, "nuclear", 1000.0) == plain
    assert found(sigma, 300, 0.999, "nuclear", 1.1) == pytest.approx(plain, abs=1)


def test_nothing_has_rank_0():
    nothing = torch.zeros(2, 100, 100)
    assert effective_rank_of(nothing, nothing, torch.zeros(2), torch.zeros(2, 1, 1), 0.999, "nuclear").tolist() == [
        0,
        0,
    ]
