"""Robust PCA of a finished matrix, the post-hoc rival of SALAAD, and the statistics the paper's appendix takes of it.

    min ‖L‖_* + λ‖S‖₁   so that   D = L + S,   λ = 1/√max(n, m)   (Candès et al.)

solved by the inexact augmented Lagrange multiplier method (Lin et al.). Pure noise, too, splits into an L of half the
full effective rank and an S that is mostly nonzero. So every weight has a Gaussian control beside it, and shows
structure only as far as the two differ.
"""

import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.prox import soft_threshold, svt

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
    check_matrix(D, "D")
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


def check_matrix(D: Tensor, name: str) -> None:
    """Raise an error that calls D by `name` unless it is a matrix of finite real numbers."""
    if D.ndim != 2 or 0 in D.shape or not D.is_floating_point():
        raise UserError(f"{name} is {D.dtype} of shape {tuple(D.shape)}; give a matrix of real numbers")
    wrong = D.numel() - int(torch.count_nonzero(D.isfinite()))
    if wrong:
        raise UserError(f"{name} has {wrong} of {D.numel()} entries that are not finite; give a matrix without any")
