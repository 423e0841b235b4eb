"""Random U·V + S, and what they are as dense matrices in float64."""

import numpy as np
import torch
from torch import Tensor

from salaad.factored.slr import Slr


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(n: int, m: int, rank: int, nnz: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Slr:
    """Random parts, the largest entries of S first."""
    generator = torch.Generator().manual_seed(seed)
    U, V, values = (torch.randn(*size, generator=generator) / 4 for size in ((n, rank), (rank, m), (nnz,)))
    positions = torch.randperm(n * m, generator=generator)[:nnz].int()
    values = values[values.abs().argsort(descending=True)]
    return Slr((n, m), U.to(dtype), V.to(dtype), positions, values.to(dtype))


def sparse(slr: Slr) -> np.ndarray:
    """S (n×m) in float64, entry by entry."""
    S = np.zeros(slr.shape)
    for position, value in zip(slr.positions.tolist(), slr.values.tolist(), strict=True):
        S[divmod(position, slr.shape[1])] = value
    return S


def dense(slr: Slr) -> Tensor:
    """U·V + S in float64."""
    return torch.from_numpy(slr.U.double().numpy() @ slr.V.double().numpy() + sparse(slr))


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()
