"""The surrogate of one block: L + S for a weight X, its update and its tensors in a checkpoint.

The module `update` says what an update computes and why two matrices are stored, R and T. Once the rank of L is low,
its leading singular vectors are kept too, from which the next update starts.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.elementwise import add_penalty, entries
from salaad.methods.salaad.update import KEPT, Figures, State, advance, statistics
from salaad.prox import clip, effective_ranks, soft_threshold, truncate
from salaad.spectral import SvtResult, threshold


class Surrogate:
    """The surrogate of one block: its state and its ADMM update.

    Args:
        X: weight of the block (n×m, any floating dtype and device).
        rho: penalty coefficient ρ of this block (eq. 7).
        config: targets, controller step sizes, inner iterations, solver.

    The first state is L₀ = X₀ truncated to rank Γ̂·min(n, m), S₀ = dual₀ = 0 and thresholds of 0.

    Attributes:
        rank: the effective rank of L.
        width: number of singular values above τ_L in the matrix from which the last update found L.
        thresholded: whether τ_L > 0.
        kept: whether the last update changed nothing, as no solver converged or the result was not finite.
        held: whether updates leave the thresholds as they are, without a step of the controller.
        avoid_products: whether the next update must not use the solver `products` (see `round`), since it failed in
            the last update or τ_L is too small for it.

    `rank`, `width`, `thresholded` and `avoid_products` are the host's copies of numbers on the device, read once an
    update.
    """

    def __init__(self, X: Tensor, rho: float, config: SalaadConfig) -> None:
        self.rho = rho
        self.config = config
        self.held = False
        X = X.detach().float()
        L, sigma = truncate(X, max(1, round(config.rank_ratio * min(X.shape))))
        self._begin_from(L)
        self.read_host_copies(sigma)

    @torch.no_grad()
    def reset_to(self, X: Tensor) -> None:
        """Let L be X (n×m), and S and the dual 0, as after an update with thresholds of 0.

        The singular values are not computed, so the effective rank counts as min(n, m).
        """
        self._begin_from(X.detach().to(torch.float32, copy=True, memory_format=torch.contiguous_format))
        self.set_host_copies(min(X.shape), min(X.shape), thresholded=False)

    def _begin_from(self, L: Tensor) -> None:
        """Set L; S, the dual and the thresholds become 0."""
        zero = L.new_zeros(())
        self.set_state(State(L, torch.zeros_like(L), zero, zero, zero))

    @torch.no_grad()
    def update(self, X: Tensor) -> Tensor:
        """Do one ADMM update (J inner iterations) towards X (n×m), then one step of the controller unless `held`.

        If no solver converges or the result is not finite, the block and its thresholds stay as they were, and the
        solver is `KEPT`.

        Returns:
            A float32 tensor (8) on the device of X: the fields of `UpdateRecord` in order, the solver as its index in
            `SOLVERS`. It is finite whenever X is.
        """
        X = X.detach().float()
        tau, basis = float(self.tau_L), self.basis
        method = "auto" if self.config.method == "products" else self.config.method

        def solve(Z: Tensor) -> SvtResult:
            nonlocal basis
            found = threshold(Z, tau, basis, method)
            basis = found.basis
            return found

        try:
            state, found, figures = advance(self.state, X, solve, tau > 0, self.config, self.held)
        except torch.linalg.LinAlgError:
            return self._stayed(X)
        kept = torch.count_nonzero(found.sigma)
        seen = torch.stack([figures.total, figures.rank, kept, state.tau_L]).tolist()
        if not math.isfinite(seen[0]):
            return self._stayed(X)
        self.set_state(state)
        self.set_host_copies(int(seen[1]), int(seen[2]), seen[3] > 0, found.sigma, basis)
        return statistics(state, figures, self.rho, found.bound, found.solver)

    def _stayed(self, X: Tensor) -> Tensor:
        """Note that the update changes nothing (`kept`), and return its statistics."""
        self.kept = True
        dual = self.state.dual
        delta, norm = torch.linalg.vector_norm(X - self.T - dual), torch.linalg.vector_norm(X)
        density = entries(self.R, dual) / X.numel()
        figures = Figures(delta.new_full((), self.rank), density, delta, norm, delta)
        return statistics(self.state, figures, self.rho, 0.0, KEPT)

    @property
    def state(self) -> State:
        """The state from which the next update starts."""
        return State(self.T, self.R, self.tau_L, self.tau_S, self._tau_R)

    def set_state(self, state: State) -> None:
        """Set the tensors of this block to those of `state`."""
        self.T, self.R = state.T, state.R
        self.tau_L, self.tau_S, self._tau_R = state.tau_L, state.tau_S, state.tau_R

    def read_host_copies(self, sigma: Tensor, basis: Tensor | None = None) -> None:
        """Read what the host knows of an L with these singular values (min(n, m)) and this basis from the device."""
        rank = effective_ranks(sigma, self.config.gamma, self.config.energy)
        rank, width, thresholded = torch.stack([rank, torch.count_nonzero(sigma), self.tau_L > 0]).tolist()
        self.set_host_copies(rank, width, bool(thresholded), sigma, basis)

    def set_host_copies(
        self, rank: int, width: int, thresholded: bool, sigma: Tensor | None = None, basis: Tensor | None = None
    ) -> None:
        """Set what the host has read from the device, and the singular values of L and a basis if they were found."""
        self.rank, self.width, self.thresholded = rank, width, thresholded
        self.sigma, self.basis, self.kept, self.avoid_products = sigma, basis, False, False

    @torch.no_grad()
    def add_penalty_gradient(self, gradient: Tensor, X: Tensor, scale: float = 1.0, seed: int = 0) -> None:
        """Add scale·ρ(X − T), the gradient of ℓ_ρ (eq. 6), to `gradient` (n×m) in place.

        In a bfloat16 gradient the sum is rounded up or down at random, by random numbers that `seed` fixes.
        """
        add_penalty(gradient, X, self.T, scale * self.rho, seed)

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
        return self.rho * self.state.dual

    def deployed(self) -> Tensor:
        """L truncated to its effective rank, plus S (n×m): the matrix to which all reported numbers of L + S refer."""
        return truncate(self.low_rank(), self.rank)[0] + self.sparse()

    def finite(self) -> Tensor:
        """Whether the state from which the next update starts is finite, as a 0-d tensor."""
        # A sum is not finite if one entry is not, and needs no mask of the size of the matrix.
        sums = [tensor.sum(dtype=torch.float64) for tensor in vars(self.state).values()]
        return torch.stack(sums).isfinite().all()

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
        """The number of nonzero entries of S."""
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
        """Return the tensors with which `load_state_dict` continues bit for bit."""
        state = {
            "target": self.T,
            "residual": self.R,
            "thresholds": torch.stack([self.tau_L, self.tau_S, self._tau_R]),
        }
        if self.sigma is not None:
            state["sigma"] = self.sigma
        else:  # from a solver that finds no singular values
            state["ranks"] = self.T.new_tensor([self.rank, self.width])
        if self.avoid_products:
            state["unfit"] = self.T.new_ones(1)
        return state if self.basis is None else state | {"basis": self.basis}

    def require_fitting(self, state: dict[str, Tensor], name: str) -> None:
        """Raise a UserError about the block `name` unless `load_state_dict` can load `state`."""
        flaw = flaw_of({key: tuple(value.shape) for key, value in state.items() if key != "low_rank"}, *self.T.shape)
        if flaw is None and (other := [key for key, value in state.items() if value.dtype != torch.float32]):
            flaw = f"has its {other[0]} in {state[other[0]].dtype}, where torch.float32 is wanted"
        if flaw is not None:
            raise UserError(f"the state of block {name} {flaw}; give a whole one of this model")

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Load what `state_dict` returned, onto this block's device."""
        state = {key: value.to(self.T.device) for key, value in state.items()}
        self.set_state(State(state["target"], state["residual"], *state["thresholds"].unbind()))
        if "sigma" in state:
            self.read_host_copies(state["sigma"], state.get("basis"))
        else:
            rank, width = map(int, state["ranks"].tolist())
            self.set_host_copies(rank, width, bool(self.tau_L > 0))
        self.avoid_products = "unfit" in state


def shapes_of(n: int, m: int) -> dict[str, tuple[int, ...]]:
    """Part of a `Surrogate.state_dict` of an n×m block → its shape; the old format has L, `low_rank`, for T."""
    short = min(n, m)
    shapes = {"target": (n, m), "low_rank": (n, m), "residual": (n, m), "thresholds": (3,)}
    return shapes | {"sigma": (short,), "ranks": (2,), "unfit": (1,), "basis": (short, short)}


def flaw_of(shapes: Mapping[str, tuple[int, ...]], n: int, m: int) -> str | None:
    """Return what keeps tensors from being a `Surrogate.state_dict` of an n×m block, in which L may stand for T.

    Args:
        shapes: the part of the state that a tensor is → its shape.
        n: rows of the block.
        m: columns of the block.

    Returns:
        The end of a sentence about the block; None if nothing is wrong.
    """
    wanted = shapes_of(n, m)
    for one_of in (("target", "low_rank"), ("residual",), ("thresholds",), ("sigma", "ranks")):
        if not {*one_of} & {*shapes}:
            return f"lacks its {one_of[0]}"
    for key in (key for key in wanted if key in shapes):
        shape, whole = shapes[key], wanted[key]
        # Singular values and vectors are stored as far as the rank needs them.
        part = key in ("sigma", "basis") and shape[:-1] == whole[:-1] and shape and shape[-1] <= whole[-1]
        if shape != whole and not part:
            return f"has its {key} as {shape}, where {whole} is wanted"
    return None


def low_rank_of(T: Tensor, R: Tensor, tau: Tensor) -> Tensor:
    """L = T − S + dual of a block (n×m), S and dual the parts into which τ divides R."""
    return T - R + 2 * clip(R, tau)


def target_of(L: Tensor, R: Tensor, tau: Tensor) -> Tensor:
    """T = L + S − dual of a block (n×m): the inverse of `low_rank_of`, up to rounding."""
    return L + R - 2 * clip(R, tau)
