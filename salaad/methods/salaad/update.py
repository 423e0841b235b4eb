"""One ADMM update of a block or of a stack of them, and its I-controller (Algorithm 1, eqs. 3 to 5).

The dual and the thresholds are divided by ρ, so that ρ appears in the gradient only and no number of the size 1e-8 is
stored:

    dual = Y/ρ,   τ_L = α/ρ,   τ_S = β/ρ,   T = L + S − dual,   ∇ℓ_ρ = ρ(X − T)

An update does the first three lines J times, then the controller (section 4.2) once:

    L ← SVT(X − S + dual, τ_L)                                                      eq. 3
    S ← soft threshold(X − L + dual, τ_S)                                           eq. 4
    dual ← dual + X − L − S                                                         eq. 5
    τ_L ← (τ_L + (Γ(L) − Γ̂)Δα)₊,   τ_S ← (τ_S + (Υ(S) − Υ̂)Δβ)₊                    unless they are held

S and the dual are two parts of one matrix R = X − L + dual_old: eq. 4 gives S = soft threshold(R, τ_S), and eq. 5 gives
dual = R − S = clip(R, τ_S). L = T − S + dual is not needed by the next update. So only R and T, two dense matrices in
float32, and the thresholds are stored for a block, beside the singular values and vectors from which the next SVT may
start.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.elementwise import Thresholds, clip_each, sparse_and_dual
from salaad.prox import effective_ranks
from salaad.spectral import SOLVERS as SPECTRAL_SOLVERS
from salaad.spectral import SvtResult
from salaad.spectral.results import StackResult

KEPT = "kept"  # no solver converged, or the result was not finite: the block stayed as it was
SOLVERS = (*SPECTRAL_SOLVERS, KEPT)


@dataclass(frozen=True)
class UpdateRecord:
    """The statistics of one ADMM update of a block, by their keys in blocks.jsonl.

    Args:
        rank_ratio: Γ(L).
        density: Υ(S).
        alpha: α, after the controller.
        beta: β, after the controller.
        delta: ‖X − L − S‖_F.
        error: `delta` over ‖X‖_F, at most the largest number in float32, as where X is 0.
        bound: upper bound of the error in L, relative to ‖X − S + dual‖_F.
        method: the solver that found L, one of `SOLVERS`.
    """

    rank_ratio: float
    density: float
    alpha: float
    beta: float
    delta: float
    error: float
    bound: float
    method: str


@dataclass(frozen=True)
class State:
    """The state that one update leaves to the next, of a block or of a stack of b blocks of one shape.

    Args:
        T: L + S − dual, n×m or b×n×m.
        R: S + dual, n×m or b×n×m.
        tau_L: threshold for the next L, 0-d or b.
        tau_S: threshold for the next S, 0-d or b.
        tau_R: the τ_S that divides R into S and dual, 0-d or b: its value before the last controller step.
    """

    T: Tensor
    R: Tensor
    tau_L: Tensor
    tau_S: Tensor
    tau_R: Tensor

    @property
    def dual(self) -> Tensor:
        """The scaled dual Y/ρ."""
        return clip_each(self.R, self.tau_R)


Found = SvtResult | StackResult


class Figures(NamedTuple):
    """The numbers from which the statistics of an update are made, each 0-d or b.

    Args:
        rank: Γ(L)·min(n, m).
        density: Υ(S).
        delta: ‖X − L − S‖_F.
        norm: ‖X‖_F.
        total: finite only if the state is.
    """

    rank: Tensor
    density: Tensor
    delta: Tensor
    norm: Tensor
    total: Tensor


def advance(
    state: State,
    X: Tensor,
    solve: Callable[[Tensor], Found],
    thresholded: bool,
    config: SalaadConfig,
    held: bool = False,
) -> tuple[State, Found, Figures]:
    """Do one ADMM update of a block or a stack: J inner iterations (eqs. 3 to 5), then the controller (section 4.2).

    Args:
        state: the state before the update.
        X: weight in float32, n×m or b×n×m.
        solve: Z → SVT_τ(Z), τ being `state.tau_L`.
        thresholded: whether τ_L > 0, for all of a stack.
        config: targets, controller step sizes, inner iterations.
        held: whether the thresholds stay as they are, without a controller step.

    Returns:
        The state after the update, the last SVT, and the figures.
    """
    R, tau_R = state.R, state.tau_R
    for _ in range(config.inner):
        # Eq. 3: X − S + dual = X − R + 2·dual, as S = R − dual.
        found = solve((X - R).add_(clip_each(R, tau_R), alpha=2))
        # Eqs. 4 and 5: the new S and dual, as their sum R.
        rest = sparse_and_dual(X, found.L, R, Thresholds(state.tau_L, state.tau_S, tau_R), thresholded)
        R, tau_R = rest.R, state.tau_S
    rank = found.rank if isinstance(found, StackResult) else effective_ranks(found.sigma, config.gamma, config.energy)
    density = rest.nnz / (X.shape[-2] * X.shape[-1])
    tau_L, tau_S = state.tau_L, state.tau_S
    if not held:
        excess = rank.double() / min(X.shape[-2:]) - config.rank_ratio
        tau_L = (tau_L + (excess * config.delta_alpha).float()).clamp_min(0)
        tau_S = (tau_S + (density - config.density) * config.delta_beta).clamp_min(0)
    # The dual is clipped, so it is finite even if L is not: only T shows an infinite L.
    figures = Figures(rank, density, rest.delta, rest.norm, rest.delta + rest.total)
    return State(rest.T, R, tau_L, tau_S, tau_R), found, figures


def statistics(state: State, figures: Figures, rho: float, bound: float | Tensor, solver: str) -> Tensor:
    """Return the fields of `UpdateRecord` in order, the solver as its index in `SOLVERS`, in float32 (8 or b×8)."""
    rank, density, delta, norm, _ = figures
    limits = torch.finfo(torch.float32)
    error = (delta / norm.clamp_min(limits.tiny)).clamp_max(limits.max)
    alpha, beta = (rho * tau.double() for tau in (state.tau_L, state.tau_S))
    ratio = rank.double() / min(state.T.shape[-2:])
    constants = (torch.zeros_like(delta) + bound, torch.full_like(delta, SOLVERS.index(solver)))
    return torch.stack([ratio, density, alpha, beta, delta, error, *constants], -1).float()
