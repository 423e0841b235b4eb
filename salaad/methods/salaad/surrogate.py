"""One surrogate block: L + S beside a weight X, its ADMM update and its I-controller (Algorithm 1, eqs. 3 to 6).

All variables are scaled by ρ, so that ρ appears in the gradient only and no number of the size 1e-8 is stored:

    dual = Y/ρ,   τ_L = α/ρ,   τ_S = β/ρ,   T = L + S − dual,   ∇ℓ_ρ = ρ(X − T)

An update does the first three lines J times, then the controller (section 4.2) once:

    L ← SVT(X − S + dual, τ_L)                                                      eq. 3
    S ← soft threshold(X − L + dual, τ_S)                                           eq. 4
    dual ← dual + X − L − S                                                         eq. 5
    τ_L ← (τ_L + (Γ(L) − Γ̂)Δα)₊,   τ_S ← (τ_S + (Υ(S) − Υ̂)Δβ)₊

S and the dual are two parts of one matrix R = X − L + dual_old: eq. 4 gives S = soft threshold(R, τ_S), and eq. 5 gives
dual = R − S = clip(R, τ_S). L = T − S + dual is not needed by the next update. So a block stores two dense float32
matrices, R and T, and, once its rank is low, the leading singular vectors from which the next update starts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.rounding import add_rounded
from salaad.prox import clip, effective_rank, soft_threshold, truncate
from salaad.spectral import SOLVERS as SPECTRAL_SOLVERS
from salaad.spectral import SvtResult, threshold

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
        error: `delta` over ‖X‖_F.
        bound: of the error in L relative to ‖X − S + dual‖_F.
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


class Surrogate:
    """The state of one block and its update.

    Args:
        X: weight of the block (n×m, any floating dtype and device).
        rho: penalty coefficient ρ of this block (eq. 7).
        config: targets, controller step sizes, inner iterations, solver.

    It starts with L₀ = X₀ truncated to rank Γ̂·min(n, m), S₀ = dual₀ = 0 and thresholds of 0.

    Attributes:
        kept: the last update changed nothing, as no solver converged or the result was not finite.
    """

    def __init__(self, X: Tensor, rho: float, config: SalaadConfig) -> None:
        self.rho = rho
        self.config = config
        X = X.detach().float()
        self.tau_L = X.new_zeros(())
        self.tau_S = X.new_zeros(())
        self._tau_R = X.new_zeros(
            ()
        )  # the τ_S that divides R into S and dual: its value before the last controller step
        L, self.sigma = truncate(X, max(1, round(config.rank_ratio * min(X.shape))))
        self.R = torch.zeros_like(X)
        self.T = L
        self.basis: Tensor | None = None
        self.kept = False
        self.rank = effective_rank(self.sigma, config.gamma, config.energy)

    @torch.no_grad()
    def update(self, X: Tensor) -> Tensor:
        """One ADMM update (J inner iterations) towards X (n×m), then one step of the controller.

        If no solver converges or the result is not finite, the block and its thresholds stay as they were, and the
        solver is `KEPT`.

        Returns:
            The numbers of `UpdateRecord` in order, the solver as its index in `SOLVERS`, as one float32 tensor (8) on
            the device of X. They are finite whenever X is.
        """
        X = X.detach().float()
        before = (self.R, self.T, self.sigma, self.basis, self._tau_R)
        try:
            found, dual, delta = self._iterate(X)
        except torch.linalg.LinAlgError:
            found, delta = None, None
        # The dual is clipped: only T shows an infinite L.
        self.kept = found is None or not bool((delta + self.T.sum()).isfinite())
        if not self.kept:
            solver, bound = found.solver, found.bound
            self.rank = effective_rank(self.sigma, self.config.gamma, self.config.energy)
            density = self._density(dual)
            self._control(density)
        else:
            self.R, self.T, self.sigma, self.basis, self._tau_R = before
            dual = self._dual()
            solver, bound, density = KEPT, 0.0, self._density(dual)
            delta = torch.linalg.vector_norm(X - self.T - dual)
        error = delta / torch.linalg.vector_norm(X).clamp_min(torch.finfo(X.dtype).tiny)
        statistics = (self.rank_ratio, density, self.alpha, self.beta, delta, error, bound, SOLVERS.index(solver))
        return torch.stack([torch.as_tensor(value, device=X.device, dtype=torch.float32) for value in statistics])

    def _iterate(self, X: Tensor) -> tuple[SvtResult, Tensor, Tensor]:
        """J inner iterations (eqs. 3 to 5); returns the last SVT, the dual (n×m) and ‖X − L − S‖_F."""
        tau_L, dual = float(self.tau_L), self._dual()
        for _ in range(self.config.inner):
            before = dual
            found = threshold((X - self.R).add_(dual, alpha=2), tau_L, self.basis, self.config.method)
            self.sigma, self.basis = found.sigma, found.basis
            # Without a threshold L = X − S + dual, so R = S; computed from X and L, S would fill with rounding errors.
            self.R = (X - found.L).add_(dual) if tau_L > 0 else self.R - dual
            self._tau_R = self.tau_S.clone()
            dual = self._dual()
        self.T = (found.L + self.R).sub_(dual, alpha=2)
        return found, dual, torch.linalg.vector_norm(dual - before)  # eq. 5 adds X − L − S to the dual

    def _density(self, dual: Tensor) -> Tensor:
        """Υ(S): R and the dual differ where S is not zero."""
        return torch.count_nonzero(dual != self.R) / self.R.numel()

    def _control(self, density: Tensor) -> None:
        """One step of the I-controller (section 4.2); a threshold never goes below 0."""
        config = self.config
        self.tau_L = (self.tau_L + (self.rank_ratio - config.rank_ratio) * config.delta_alpha).clamp_min(0)
        self.tau_S = (self.tau_S + (density - config.density) * config.delta_beta).clamp_min(0)

    def _dual(self) -> Tensor:
        """Y/ρ (n×m)."""
        return clip(self.R, self._tau_R)

    @torch.no_grad()
    def add_penalty_gradient(self, gradient: Tensor, X: Tensor, scale: float = 1.0, seed: int = 0) -> None:
        """Add scale·ρ(X − T), the gradient of ℓ_ρ (eq. 6), to `gradient` (n×m) in place.

        To one in bfloat16 it is added by a rounding up or down at random, which `seed` fixes.
        """
        if gradient.dtype == torch.bfloat16:
            add_rounded(gradient, (X.float() - self.T).mul_(scale * self.rho), seed)
        else:
            gradient.add_(X, alpha=scale * self.rho).sub_(self.T, alpha=scale * self.rho)

    @torch.no_grad()
    def penalty(self, X: Tensor) -> Tensor:
        """ℓ_ρ(X) = ρ/2·‖X − L − S + dual‖²_F (eq. 6), a 0-d tensor."""
        return self.rho / 2 * torch.linalg.vector_norm(X.float() - self.T).square()

    def low_rank(self) -> Tensor:
        """L (n×m), dense, up to rounding; `deployed` truncates it to its effective rank."""
        return low_rank_of(self.T, self.R, self._tau_R)

    def sparse(self) -> Tensor:
        """S (n×m), dense."""
        return soft_threshold(self.R, self._tau_R)

    def dual(self) -> Tensor:
        """Y = ρ·dual (n×m), the dual variable unscaled."""
        return self.rho * self._dual()

    def deployed(self) -> Tensor:
        """L truncated to its effective rank, plus S (n×m): the matrix of every reported L + S figure."""
        return truncate(self.low_rank(), self.rank)[0] + self.sparse()

    def is_finite(self) -> bool:
        """Whether the state that the next update starts from is finite; waits for the device."""
        state = (self.R, self.T, self.sigma, self.tau_L, self.tau_S, self._tau_R)
        # A sum is not finite if one entry is not, and needs no mask of the size of the matrix.
        return all(bool(tensor.sum(dtype=torch.float64).isfinite()) for tensor in state)

    @property
    def alpha(self) -> float:
        """α = ρ·τ_L, the weight of the nuclear norm."""
        return self.rho * float(self.tau_L)

    @property
    def beta(self) -> float:
        """β = ρ·τ_S, the weight of the l1 norm."""
        return self.rho * float(self.tau_S)

    @property
    def rank_ratio(self) -> float:
        """Γ(L) (Definition 4.1): the effective rank over min(n, m)."""
        return self.rank / min(self.T.shape)

    @property
    def nnz(self) -> int:
        """Entries of S that are not zero."""
        return int(torch.count_nonzero(self.sparse()))

    @property
    def density(self) -> float:
        """Υ(S): `nnz` over n·m."""
        return self.nnz / self.T.numel()

    @property
    def parameters(self) -> int:
        """Parameters of the block as L + S: rank·(n + m) + nnz."""
        return self.rank * sum(self.T.shape) + self.nnz

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors with which `load_state_dict` continues to the bit."""
        basis = {} if self.basis is None else {"basis": self.basis}
        return {
            "target": self.T,
            "residual": self.R,
            "sigma": self.sigma,
            "thresholds": torch.stack([self.tau_L, self.tau_S, self._tau_R]),
            **basis,
        }

    def require_fitting(self, state: dict[str, Tensor], name: str) -> None:
        """Raise a UserError, in which `name` is the block's, unless `load_state_dict` can load `state`."""
        mine = self.state_dict()
        missing = {"target", "residual", "sigma", "thresholds"} - set(state)
        if missing:
            raise UserError(f"the state of block {name} lacks its {min(missing)}; give a whole one")
        for key in ("target", "residual", "thresholds"):
            found, wanted = tuple(state[key].shape), tuple(mine[key].shape)
            if found != wanted:
                raise UserError(f"the state has block {name} as {found}, the model as {wanted}; give one of this model")

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, onto this block's device."""
        state = {key: value.to(self.T.device) for key, value in state.items()}
        self.T, self.R, self.sigma, self.basis = state["target"], state["residual"], state["sigma"], state.get("basis")
        self.tau_L, self.tau_S, self._tau_R = state["thresholds"].unbind()
        self.rank = effective_rank(self.sigma, self.config.gamma, self.config.energy)


def low_rank_of(T: Tensor, R: Tensor, tau: Tensor) -> Tensor:
    """L = T − S + dual of a block (n×m), S and dual the parts into which τ divides R."""
    return T - R + 2 * clip(R, tau)


def target_of(L: Tensor, R: Tensor, tau: Tensor) -> Tensor:
    """T = L + S − dual of a block (n×m): the inverse of `low_rank_of`, up to rounding."""
    return L + R - 2 * clip(R, tau)
