"""Checks of every solver of the singular-value threshold against float64, and of ADMM updates against the CPU."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.round import update_round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.spectral import TOLERANCE, threshold
from salaad.spectral.products import product_stack
from salaad.spectral.stacks import gram_stack
from scripts.on_device.check import Check, matrix, relative

# Solver → the one to ask `threshold` for: `regularised` only follows a full SVD in float32 that does not converge.
RUNGS = {"exact": "exact", "gram": "gram", "subspace": "subspace", "regularised": "exact"}


def solvers(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield checks of SVT_τ by every solver, on square and other matrices with falling singular values."""
    for n, m in ((24, 24), (40, 24)) if tiny else ((512, 512), (1376, 512), (2048, 5461)):
        Z = matrix(n, m)
        U, sigma, Vh = torch.linalg.svd(Z, full_matrices=False)
        tau = float(sigma[len(sigma) // 4])
        L = (U * (sigma - tau).clamp_min(0)) @ Vh
        kept = len(sigma) // 4
        basis = moved((Vh.mT if n > m else U)[:, : kept + max(8, kept // 2)]).float().to(device)
        Z32 = Z.float().to(device)
        for rung, asked in RUNGS.items():
            with svd_that_fails() if rung == "regularised" else nullcontext():
                found = threshold(Z32, tau, basis, asked)
            problem = "" if found.solver == rung else f"{found.solver} took over"
            yield Check(f"SVT by {rung}, {n}×{m}", relative(found.L, L, Z), TOLERANCE, problem)
        yield from stacks(Z32.mT if n > m else Z32, tau, L.mT if n > m else L)


def moved(basis: Tensor) -> Tensor:
    """Return a slightly perturbed basis (n×q), as one update leaves it to the next."""
    noise = torch.randn(basis.shape, generator=torch.Generator().manual_seed(1), dtype=basis.dtype)
    return torch.linalg.qr(basis + 1e-3 * noise)[0]


def stacks(Z: Tensor, tau: float, L: Tensor) -> Iterator[Check]:
    """Yield checks of SVT_τ of a stack of one matrix (n×m, n ≤ m) by the two solvers without reads by the host."""
    taus = torch.tensor([tau], device=Z.device)
    for solver, found in (
        ("gram", gram_stack(Z[None], taus)),
        ("products", product_stack(Z[None], taus)),
    ):
        problem = "" if bool(found.holds) else f"its bound, {float(found.bound):.1e}, does not hold"
        name = f"SVT of a stack by {solver}, {len(Z)}×{Z.shape[1]}"
        yield Check(name, relative(found.L[0], L, Z.cpu()), TOLERANCE, problem)


def svd_that_fails() -> AbstractContextManager:
    """A context in which no full SVD in float32 converges."""
    usual = torch.linalg.svd

    def svd(A: Tensor, *args: Any, **kwargs: Any) -> Any:
        if A.dtype == torch.float32:
            raise torch.linalg.LinAlgError("no SVD in float32 is wanted")
        return usual(A, *args, **kwargs)

    return patch.object(torch.linalg, "svd", svd)


def updates(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield a check of a block's T after ten rounds, between which its weight moves, against the CPU."""
    n, m = (24, 40) if tiny else (512, 1376)
    config, X = SalaadConfig(delta_alpha=0.05, delta_beta=0.005), matrix(n, m).float()
    D = X.flip(0)
    blocks = [Surrogate(X.to(place), 1e-6, config) for place in (device, "cpu")]
    for step in range(10):
        for block in blocks:
            update_round([(block, (X + 0.01 * step * D).to(block.T.device))])
    yield Check(f"T after 10 updates, {n}×{m}", relative(blocks[0].T, blocks[1].T, X), 20 * TOLERANCE)
