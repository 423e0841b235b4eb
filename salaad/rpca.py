"""Robust PCA of a finished matrix, the post-hoc rival of SALAAD, and the statistics the paper reports of it.

    min ‖L‖_* + λ‖S‖₁   so that   D = L + S,   λ = 1/√max(n, m)   (Candès et al. 2011)

solved by the inexact augmented Lagrange multiplier method (Lin et al. 2010). Pure noise decomposes into an L of about
half the full rank and a half-dense S as well, so a row of `model_statistics` sets beside every weight a Gaussian matrix
of its size: a weight shows structure only as far as its numbers differ from those (paper, appendix on post-hoc RPCA).
"""

import re
import statistics as numbers
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.errors import UserError
from salaad.prox import effective_rank, soft_threshold, svt

_PATIENCE = 50  # iterations without a new least residual: falling ones pause far shorter, rounding ends all others


@torch.no_grad()
def rpca(
    D: Tensor,
    lam: float | None = None,
    *,
    growth: float = 1.5,
    tolerance: float = 1e-7,
    max_iterations: int = 1000,
    method: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Split D (n×m) into a low-rank L and a sparse S.

    Inside everything is float64: in float32 the residual sticks near the tolerance, and `svt`'s fast method, exact
    enough in float64 for thresholds of 1e-7·‖D‖₂, is not in float32, whose exact one takes longer than float64's fast.

    Args:
        D: matrix, float32 or float64, of any size from 1×1 on.
        lam: weight λ of the l1 norm; 1/√max(n, m) if not given, so that transposing D transposes L and S.
        growth: factor of the penalty μ from one iteration to the next. Where D is not low-rank plus sparse, the
            density of S depends on it: report it.
        tolerance: stop at ‖D − L − S‖_F ≤ tolerance·‖D‖_F, or where the residual has stopped falling.
        max_iterations: end of the loop in any case.
        method: of `svt`.

    Returns:
        L and S in the type of D, on its device. In float32 rounding them leaves a residual of up to 1e-7·‖D‖_F.

    Raises:
        UserError: D is no finite float32 or float64 matrix, or a setting is outside its limits.
    """
    _check_matrix(D, "D")
    lam = max(D.shape) ** -0.5 if lam is None else lam
    for name, value, least in (("lam", lam, 0), ("growth", growth, 1), ("tolerance", tolerance, 0)):
        if not least < value < float("inf"):
            raise UserError(f"{name} is {value}; give a finite number above {least}")
    if max_iterations < 1:
        raise UserError(f"max_iterations is {max_iterations}; give 1 or more")
    if not D.any():
        return torch.zeros_like(D), torch.zeros_like(D)
    dtype, D = D.dtype, D.double()
    spectral, size = float(torch.linalg.matrix_norm(D, 2)), float(torch.linalg.vector_norm(D))
    Y = D / max(spectral, float(D.abs().max()) / lam)
    L = torch.zeros_like(D)
    mu, least_residual, stalled = 1.25 / spectral, float("inf"), 0
    largest_mu = 1e7 * mu
    for _ in range(max_iterations):
        S = soft_threshold(D - L + Y / mu, lam / mu)
        L, _ = svt(D - S + Y / mu, 1 / mu, method)
        gap = D - L - S
        residual = float(torch.linalg.vector_norm(gap)) / size
        stalled = 0 if residual < least_residual else stalled + 1
        if residual <= tolerance or stalled == _PATIENCE:
            break
        least_residual = min(residual, least_residual)
        Y = Y + mu * gap
        mu = min(growth * mu, largest_mu)
    return L.to(dtype), S.to(dtype)


def _check_matrix(D: Tensor, name: str) -> None:
    if D.ndim != 2 or 0 in D.shape or not torch.is_floating_point(D):
        raise UserError(f"{name} is {D.dtype} of shape {tuple(D.shape)}; RPCA needs a matrix of real numbers")
    if name == "D" and D.dtype not in (torch.float32, torch.float64):
        raise UserError(f"D is {D.dtype}, too coarse for L + S = D to 1e-7; give it as float32 or float64")
    wrong = int(torch.count_nonzero(~torch.isfinite(D)))
    if wrong:
        raise UserError(f"{name} has {wrong} of {D.numel()} entries that are infinite or no number; RPCA needs none")


@dataclass(frozen=True)
class RpcaStatistics:
    """What the paper reports of one decomposition."""

    rank: int  # effective rank Γ of L (Definition 1)
    rank_ratio: float  # Γ over min(n, m)
    density: float  # entries of S that are not zero, over n·m

    @property
    def sparsity(self) -> float:
        """The paper's word for 1 − density."""
        return 1 - self.density


def statistics(L: Tensor, S: Tensor, gamma: float = 0.999) -> RpcaStatistics:
    """The statistics of L and S (n×m both); `gamma` is the share of nuclear energy that the effective rank covers."""
    rank = effective_rank(torch.linalg.svdvals(L.double()), gamma)
    return RpcaStatistics(rank, rank / min(L.shape), int(torch.count_nonzero(S)) / S.numel())


def gaussian_control(D: Tensor, seed: int = 0) -> Tensor:
    """Independent Gaussian entries of the shape, mean and variance, type and device of D; the same on every device."""
    deviation, mean = torch.std_mean(D.double(), correction=0)
    noise = torch.randn(D.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (mean + deviation * noise.to(D.device)).to(D.dtype)


@dataclass(frozen=True)
class RpcaRow:
    """One weight, its decomposition and that of its Gaussian control."""

    name: str
    kind: str  # last part of the module name: q_proj
    depth: int | None  # layer number in the name; none for an embedding
    weight: RpcaStatistics
    control: RpcaStatistics
    error: float  # ‖D − L − S‖_F/‖D‖_F of the weight


@torch.no_grad()
def model_statistics(
    weights: Mapping[str, Tensor], *, gamma: float = 0.999, growth: float = 1.5, seed: int = 0
) -> Iterator[RpcaRow]:
    """Decompose every weight (module or parameter name → n×m, any floating dtype) and its control, one row at a time.

    A weight's control depends on `seed` and its name only, so part of a model gives the same rows as the whole.

    Raises:
        UserError: one of the weights is no finite matrix; found before the first is decomposed.
    """
    for name, weight in weights.items():
        _check_matrix(weight, name)
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        D = weight.detach().double()
        L, S = rpca(D, growth=growth)
        noise = gaussian_control(D, zlib.crc32(f"{seed} {module}".encode()))
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", module)
        yield RpcaRow(
            name=module,
            kind=module.rpartition(".")[2],
            depth=int(number[1]) if number else None,
            weight=statistics(L, S, gamma),
            control=statistics(*rpca(noise, growth=growth), gamma),
            error=float(torch.linalg.vector_norm(D - L - S) / torch.linalg.vector_norm(D).clamp_min(1e-300)),
        )


class Spread(NamedTuple):
    """Mean ± standard deviation over matrices (dividing by their number: they are all there are)."""

    mean: float
    deviation: float


def summarise(rows: Iterable[RpcaRow], by: str | None = None) -> dict[str | int | None, dict[str, Spread]]:
    """Group → rank_ratio, density, control_rank_ratio and control_density as mean ± deviation over its matrices.

    `by` is `kind`, `depth`, or nothing for one group `None` of all matrices; groups come in order of appearance.
    """
    groups: dict[str | int | None, list[RpcaRow]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by) if by else None, []).append(row)
    return {
        group: {
            prefix + field: Spread(numbers.fmean(values), numbers.pstdev(values))
            for prefix, part in (("", "weight"), ("control_", "control"))
            for field in ("rank_ratio", "density")
            for values in [[getattr(getattr(row, part), field) for row in members]]
        }
        for group, members in groups.items()
    }
