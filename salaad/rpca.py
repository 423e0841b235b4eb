"""Robust PCA of a finished matrix, the post-hoc rival of SALAAD, and the statistics the paper's appendix takes of it.

    min ‖L‖_* + λ‖S‖₁   so that   D = L + S,   λ = 1/√max(n, m)   (Candès et al.)

solved by the inexact augmented Lagrange multiplier method (Lin et al.). Pure noise, too, splits into an L of half the
full effective rank and an S that is mostly nonzero. So every weight has a Gaussian control beside it, and shows
structure only as far as the two differ.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.prox import effective_rank, soft_threshold, svt

_PATIENCE = 100  # iterations without a new least residual: pauses of a residual that still falls are shorter


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
    """Split D (n×m, float32 or float64) into a low-rank L and a sparse S, of its type and on its device.

    All is computed in float64: in float32 the residual sticks between 1e-7 and 1e-6, and the fast method of `svt`,
    too coarse there for thresholds down to 1e-7·‖D‖₂, is in float64 both fine enough and faster than the exact one.

    Args:
        D: the matrix.
        lam: weight λ of ‖S‖₁; 1/√max(n, m) if not given, so that transposing D transposes L and S.
        growth: factor of the penalty μ per iteration. The density of S depends on it where D is no L + S: report it.
        tolerance: ends at ‖D − L − S‖_F ≤ tolerance·‖D‖_F, or where that no longer falls. Below the rounding of D,
            3e-8 in float32, S fills with that rounding; as much is added where L and S are returned in float32.
        max_iterations: ends the loop in any case.
        method: that of `svt`.

    Raises:
        UserError: D is no finite matrix of these types, or a setting is outside its limits.
    """
    _check_matrix(D, "D")
    if D.dtype not in (torch.float32, torch.float64):
        raise UserError(f"D is {D.dtype}, too coarse to hold L + S = D to 1e-7; give float32 or float64")
    lam = max(D.shape) ** -0.5 if lam is None else lam
    limits = (
        ("lam", lam, 0),
        ("growth", growth, 1),
        ("tolerance", tolerance, 0),
        ("max_iterations", max_iterations, 0),
    )
    for name, value, limit in limits:
        if not limit < value < float("inf"):
            raise UserError(f"{name} is {value}; give a finite number above {limit}")
    if not D.any():
        return torch.zeros_like(D), torch.zeros_like(D)
    dtype, scale = D.dtype, float(D.abs().max())
    D = D.double() / scale  # so that squaring the entries never leaves the range of the type
    spectral, size = float(torch.linalg.matrix_norm(D, 2)), float(torch.linalg.vector_norm(D))
    L, Y = torch.zeros_like(D), D / max(spectral, 1 / lam)  # feasible for the dual problem
    mu, mu_limit = 1.25 / spectral, 1.25e7 / spectral
    least, waited = float("inf"), 0
    for _ in range(max_iterations):
        S = soft_threshold(D - L + Y / mu, lam / mu)
        L, _ = svt(D - S + Y / mu, 1 / mu, method)
        gap = D - L - S
        residual = float(torch.linalg.vector_norm(gap)) / size
        least, waited = (residual, 0) if residual < least else (least, waited + 1)
        if residual <= tolerance or waited == _PATIENCE:
            break
        Y = Y + mu * gap
        mu = min(growth * mu, mu_limit)
    return (scale * L).to(dtype), (scale * S).to(dtype)


def _check_matrix(D: Tensor, name: str) -> None:
    if D.ndim != 2 or 0 in D.shape or not D.is_floating_point():
        raise UserError(f"{name} is {D.dtype} of shape {tuple(D.shape)}; give a matrix of real numbers")
    wrong = D.numel() - int(torch.count_nonzero(D.isfinite()))
    if wrong:
        raise UserError(f"{name} has {wrong} of {D.numel()} entries that are not finite; give a matrix without any")


@dataclass(frozen=True)
class RpcaStatistics:
    """What the paper reports of one decomposition."""

    rank_ratio: float  # effective rank Γ of L (Definition 1) over min(n, m)
    density: float  # entries of S that are not zero, over n·m

    @property
    def sparsity(self) -> float:
        """The paper's word: 1 − density."""
        return 1 - self.density


def statistics(L: Tensor, S: Tensor, gamma: float = 0.999) -> RpcaStatistics:
    """The statistics of L and S (n×m both); `gamma` is the share of Σσ that the effective rank covers."""
    rank = effective_rank(torch.linalg.svdvals(L.double()), gamma)
    return RpcaStatistics(rank / min(L.shape), int(torch.count_nonzero(S)) / S.numel())


def gaussian_control(D: Tensor, seed: int = 0) -> Tensor:
    """Gaussian noise of the shape, mean, variance, type and device of D; on every device the same."""
    deviation, mean = torch.std_mean(D.double(), correction=0)
    noise = torch.randn(D.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (mean + deviation * noise.to(D.device)).to(D.dtype)


@dataclass(frozen=True)
class RpcaRow:
    """The statistics of one weight and, beside them, of its Gaussian control."""

    name: str
    kind: str  # last part of the module name: q_proj
    depth: int | None  # layer number in the name; an embedding has none
    rank_ratio: float
    density: float
    control_rank_ratio: float
    control_density: float
    error: float  # ‖D − L − S‖_F over ‖D‖_F of the weight


@torch.no_grad()
def model_statistics(
    weights: Mapping[str, Tensor], *, gamma: float = 0.999, growth: float = 1.5, seed: int = 0
) -> Iterator[RpcaRow]:
    """Yield the row of one weight (module or parameter name → n×m, any floating type) after the other.

    The control of a weight depends on `seed` and on its name, so a part of a model gives the rows it has in the whole.
    A weight that was rounded to bfloat16 has a dense S: the rounding alone, up to 0.2 % of an entry, takes density 0.05
    to 0.6 and more. Give master weights where there are any.

    Raises:
        UserError: a weight is no finite matrix; raised before the first is decomposed.
    """
    for name, weight in weights.items():
        _check_matrix(weight, name)
    for name, weight in weights.items():
        name = name.removesuffix(".weight")
        D = weight.double()
        L, S = rpca(D, growth=growth)
        own = statistics(L, S, gamma)
        noise = gaussian_control(D, zlib.crc32(f"{seed} {name}".encode()))
        control = statistics(*rpca(noise, growth=growth), gamma)
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        depth = int(number[1]) if number else None
        error = float(torch.linalg.vector_norm(D - L - S)) / (float(torch.linalg.vector_norm(D)) or 1.0)
        ratios = (own.rank_ratio, own.density, control.rank_ratio, control.density)
        yield RpcaRow(name, name.rpartition(".")[2], depth, *ratios, error)


class Spread(NamedTuple):
    """Mean ± standard deviation over some matrices, dividing by their number: they are all there are."""

    mean: float
    deviation: float
    matrices: int


def summarise(rows: Iterable[RpcaRow], by: str | None = None) -> dict[str | int | None, dict[str, Spread]]:
    """Group → the four ratios of its rows, by name; groups are `by` "kind" or "depth", or one, None, of all rows."""
    groups: dict[str | int | None, list[RpcaRow]] = {}
    for row in rows:
        groups.setdefault(getattr(row, by) if by else None, []).append(row)
    return {
        group: {
            field: Spread(fmean(values), pstdev(values), len(values))
            for field in ("rank_ratio", "density", "control_rank_ratio", "control_density")
            if (values := [getattr(row, field) for row in members])
        }
        for group, members in groups.items()
    }
