"""Robust PCA of a finished matrix, which the paper's appendix A compares with SALAAD as a post-hoc decomposition.

    min ‖L‖_* + λ‖S‖₁   subject to   D = L + S,   λ = 1/√max(n, m)   (Candès et al.)

solved by the inexact augmented Lagrange multiplier method (Lin et al.).
"""

from numbers import Integral

import torch
from torch import Tensor

from salaad.prox import soft_threshold, svt

_STALLED = 100  # iterations without a new least residual after which the loop ends


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
    """Split D (n×m, float32 or float64) into a low-rank L and a sparse S (n×m), of D's dtype on D's device.

    Everything is computed in float64: in float32 the residual stalls between 1e-7 and 1e-6, and the fast solver of
    `svt` is not accurate enough for thresholds down to 1e-7·‖D‖₂.

    Args:
        D: the matrix.
        lam: weight λ of ‖S‖₁; 1/√max(n, m) if not given, so that transposing D transposes L and S.
        growth: factor of the penalty μ per iteration. Where D is not low-rank plus sparse, the density of S depends on
            the growth, so report both.
        tolerance: the loop ends at ‖D − L − S‖_F ≤ tolerance·‖D‖_F, or when the residual no longer falls. With a
            tolerance below the rounding of D (3e-8 in float32) S fills with rounding errors.
        max_iterations: the loop ends after so many.
        method: the solver of the singular-value threshold, as in `svt`.

    Raises:
        ValueError: D is no finite matrix of these dtypes, or a setting is outside its limits.
    """
    if reason := not_a_finite_matrix(D):
        raise ValueError(f"D {reason}")
    if D.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"D is {D.dtype}, too coarse to hold L + S = D to 1e-7; give float32 or float64")
    lam = max(D.shape) ** -0.5 if lam is None else lam
    limits = (
        ("lam", lam, 0),
        ("growth", growth, 1),
        ("tolerance", tolerance, 0),
        ("max_iterations", max_iterations, 0),
    )
    for name, value, limit in limits:
        if not limit < value < float("inf"):
            raise ValueError(f"{name} is {value}; give a finite number above {limit}")
    if not isinstance(max_iterations, Integral):
        raise ValueError(f"max_iterations is {max_iterations!r}; give a whole number")
    if not D.any():
        return torch.zeros_like(D), torch.zeros_like(D)
    dtype, scale = D.dtype, float(D.abs().max())
    D = D.double() / scale  # so that squares of the entries neither overflow nor underflow
    spectral, size = float(torch.linalg.matrix_norm(D, 2)), float(torch.linalg.vector_norm(D))
    L, Y = torch.zeros_like(D), D / max(spectral, 1 / lam)  # feasible for the dual problem
    mu, mu_limit = 1.25 / spectral, 1.25e7 / spectral
    least, stalled = float("inf"), 0
    for _ in range(max_iterations):
        S = soft_threshold(D - L + Y / mu, lam / mu)
        L, _ = svt(D - S + Y / mu, 1 / mu, method)
        gap = D - L - S
        residual = float(torch.linalg.vector_norm(gap)) / size
        least, stalled = (residual, 0) if residual < least else (least, stalled + 1)
        if residual <= tolerance or stalled == _STALLED:
            break
        Y = Y + mu * gap
        mu = min(growth * mu, mu_limit)
    return (scale * L).to(dtype), (scale * S).to(dtype)


def not_a_finite_matrix(D: Tensor) -> str | None:
    """Return why D cannot be decomposed, as the end of a sentence that begins with D's name; None if it can be."""
    if D.ndim != 2 or 0 in D.shape or not D.is_floating_point():
        return f"is {D.dtype} of shape {tuple(D.shape)}; give a matrix of real numbers"
    wrong = D.numel() - int(torch.count_nonzero(D.isfinite()))
    return f"has {wrong} of {D.numel()} entries that are not finite; give a matrix without any" if wrong else None
