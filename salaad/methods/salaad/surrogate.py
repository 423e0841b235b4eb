"""One surrogate block: L + S beside a weight X, its ADMM update and its I-controller (paper, Algorithm 1).

Everything is kept in scaled variables, so that ρ appears in the gradient only and nothing of the size 1e-8 is stored:

    U = Y/ρ,   τ_L = α/ρ,   τ_S = β/ρ,   T = L + S − U,   ∇ℓ_ρ = ρ(X − T)

One update, J times, then the controller once:

    L ← SVT(X − S + U, τ_L)
    S ← soft threshold(X − L + U, τ_S)
    U ← U + X − L − S
    τ_L ← (τ_L + (Γ(L) − Γ̂)Δα)₊,   τ_S ← (τ_S + (Υ(S) − Υ̂)Δβ)₊

S and U are two halves of one matrix. With R = X − L + U_old the sparse step gives S = soft(R, τ_S), and the dual step
gives U = R − S = clamp(R, −τ_S, τ_S). And L = T − S + U is not needed for the next update. So a block stores two dense
float32 matrices, R and T, and, once its rank is low, the leading singular vectors that the next update begins with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from salaad.config.methods import SalaadConfig
from salaad.prox import clip, effective_rank, soft_threshold, truncate
from salaad.spectral import METHODS as RUNGS
from salaad.spectral import Thresholded, threshold

KEPT = "kept"  # no rung converged, or the result was not finite: the block stayed as it was
METHODS = (*RUNGS, KEPT)


@dataclass(frozen=True)
class UpdateRecord:
    """What one ADMM update left behind; the units are those of blocks.jsonl."""

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
        rho: penalty coefficient ρ of this block.
        config: targets, controller step sizes, inner iterations.

    The start is L₀ = X₀ truncated to rank Γ̂·min(n, m), S₀ = U₀ = 0 and no thresholds.
    """

    def __init__(self, X: Tensor, rho: float, config: SalaadConfig) -> None:
        self.rho = rho
        self.config = config
        X = X.detach().float()
        self.tau_L = X.new_zeros(())
        self.tau_S = X.new_zeros(())
        self._tau_R = X.new_zeros(())  # the τ_S that split R into S and U; the controller has moved on since
        L, self.sigma = truncate(X, max(1, round(config.rank_ratio * min(X.shape))))
        self.R = torch.zeros_like(X)
        self.T = L
        self.basis: Tensor | None = None
        self.rank = effective_rank(self.sigma, config.gamma, config.energy)

    @torch.no_grad()
    def update(self, X: Tensor) -> Tensor:
        """One ADMM update (J inner iterations) towards X (n×m), then one step of the controller.

        Where no singular values can be found, or the result is not finite, the block and its thresholds stay as they
        were, and the method is `KEPT`.

        Returns:
            The numbers of `UpdateRecord` in order, the method as its place in `METHODS`, as one float32 tensor on the
            device of X. They are finite whenever X is.
        """
        X = X.detach().float()
        before = (self.R, self.T, self.sigma, self.basis, self._tau_R)
        try:
            found, U, delta = self._iterate(X)
        except torch.linalg.LinAlgError:
            found, delta = None, None
        if found is not None and bool((delta + self.T.sum()).isfinite()):  # U is clipped: only T shows an infinite L
            method, bound = found.method, found.bound
            self.rank = effective_rank(self.sigma, self.config.gamma, self.config.energy)
            density = self._density(U)
            self._control(density)
        else:
            self.R, self.T, self.sigma, self.basis, self._tau_R = before
            U = self._U()
            method, bound, density = KEPT, 0.0, self._density(U)
            delta = torch.linalg.vector_norm(X - self.T - U)
        error = delta / torch.linalg.vector_norm(X).clamp_min(torch.finfo(X.dtype).tiny)
        statistics = (self.rank_ratio, density, self.alpha, self.beta, delta, error, bound, METHODS.index(method))
        return torch.stack([torch.as_tensor(value, device=X.device, dtype=torch.float32) for value in statistics])

    def _iterate(self, X: Tensor) -> tuple[Thresholded, Tensor, Tensor]:
        """The last inner iteration's rung, U, and ‖X − L − S‖_F; raises LinAlgError where no rung converges."""
        tau_L, U = float(self.tau_L), self._U()
        for _ in range(self.config.inner):
            before = U
            found = threshold((X - self.R).add_(U, alpha=2), tau_L, self.basis, self.config.method)
            self.sigma, self.basis = found.sigma, found.basis
            # Without a threshold L takes everything that is not S, and R = S: rounding must not fill S.
            self.R = (X - found.L).add_(U) if tau_L > 0 else self.R - U
            self._tau_R = self.tau_S.clone()
            U = self._U()
        self.T = (found.L + self.R).sub_(U, alpha=2)
        return found, U, torch.linalg.vector_norm(U - before)  # the dual step is X − L − S

    def _density(self, U: Tensor) -> Tensor:
        """Υ(S): R and U differ where S is not zero."""
        return torch.count_nonzero(self.R != U) / self.R.numel()

    def _control(self, density: Tensor) -> None:
        """I-controller (section 4.2); a threshold never goes below 0."""
        config = self.config
        self.tau_L = (self.tau_L + (self.rank_ratio - config.rank_ratio) * config.delta_alpha).clamp_min(0)
        self.tau_S = (self.tau_S + (density - config.density) * config.delta_beta).clamp_min(0)

    def _U(self) -> Tensor:
        return clip(self.R, self._tau_R)

    @torch.no_grad()
    def add_penalty_gradient(self, gradient: Tensor, X: Tensor, scale: float = 1.0) -> None:
        """Add scale·ρ(X − T), the gradient of ℓ_ρ in eq. 3, to `gradient` (n×m) in place."""
        gradient.add_(X, alpha=scale * self.rho).sub_(self.T, alpha=scale * self.rho)

    @torch.no_grad()
    def penalty(self, X: Tensor) -> Tensor:
        """ℓ_ρ(X) = ρ/2·‖X − L − S + U‖²_F (eq. 3), without dimensions."""
        return self.rho / 2 * torch.linalg.vector_norm(X.float() - self.T).square()

    def low_rank(self) -> Tensor:
        """L (n×m) up to rounding; `deployed` truncates it to its effective rank."""
        return low_rank_of(self.T, self.R, self._tau_R)

    def sparse(self) -> Tensor:
        """S (n×m), dense."""
        return soft_threshold(self.R, self._tau_R)

    def dual(self) -> Tensor:
        """Y = ρU (n×m)."""
        return self.rho * self._U()

    def deployed(self) -> Tensor:
        """L truncated to its effective rank, plus S (n×m): what every reported L + S figure uses."""
        return truncate(self.low_rank(), self.rank)[0] + self.sparse()

    def is_finite(self) -> bool:
        """Whether everything the next update begins with is; waits for the device."""
        state = (self.R, self.T, self.sigma, self.tau_L, self.tau_S, self._tau_R)
        # A sum is not finite as soon as one entry is not, and takes no memory.
        return all(bool(part.sum(dtype=torch.float64).isfinite()) for part in state)

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
        """Γ(L): the effective rank over min(n, m)."""
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
        """Everything a later `load_state_dict` needs to go on bit for bit."""
        basis = {} if self.basis is None else {"basis": self.basis}
        return {
            "target": self.T,
            "residual": self.R,
            "sigma": self.sigma,
            "thresholds": torch.stack([self.tau_L, self.tau_S, self._tau_R]),
            **basis,
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take over the state that `state_dict` gave, on this block's own device."""
        state = {key: value.to(self.T.device) for key, value in state.items()}
        self.T, self.R, self.sigma, self.basis = state["target"], state["residual"], state["sigma"], state.get("basis")
        self.tau_L, self.tau_S, self._tau_R = state["thresholds"].unbind()
        self.rank = effective_rank(self.sigma, self.config.gamma, self.config.energy)


def low_rank_of(T: Tensor, R: Tensor, tau: Tensor) -> Tensor:
    """L = T − S + U of a block, S and U the halves of R that τ splits it into (n×m all)."""
    return T - R + 2 * clip(R, tau)


def target_of(L: Tensor, R: Tensor, tau: Tensor) -> Tensor:
    """T of a block from its L: what `low_rank_of` undoes, up to rounding."""
    return L + R - 2 * clip(R, tau)
