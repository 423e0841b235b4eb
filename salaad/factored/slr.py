"""One weight as sparse plus low-rank (SLR), as a deployed model stores it: X̂ = U·V + S.

Singular terms and entries are in descending order, so that cutting to fewer parameters (section 4.3) keeps the first
ones.
"""

from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from salaad.prox import low_rank_factors


@dataclass(frozen=True)
class Slr:
    """An n×m matrix U·V + S, with U·V of rank r and `nnz` entries in S.

    Args:
        shape: (n, m).
        U: n×r.
        V: r×m; the r terms of U·V are singular terms, the largest first.
        positions: row-major positions of S's entries (nnz), int32 (int64 where n·m needs it), the largest entry first.
        values: the entries (nnz).
    """

    shape: tuple[int, int]
    U: Tensor
    V: Tensor
    positions: Tensor
    values: Tensor

    TENSORS: ClassVar = ("U", "V", "positions", "values")

    @classmethod
    def from_parts(cls, L: Tensor, S: Tensor, rank: int) -> "Slr":
        """L (n×m) truncated to `rank`, plus the nonzero entries of S (n×m)."""
        return cls(tuple(L.shape), *low_rank_factors(L, rank), *_entries(S))

    @classmethod
    def from_factors(cls, Q: Tensor, V: Tensor, S: Tensor) -> "Slr":
        """Q·V as singular terms, where Q (n×r) has orthonormal columns, plus the nonzero entries of S (n×m)."""
        W = torch.linalg.eigh(V @ V.mT)[1]
        V = W.mT @ V
        # Sorted by row lengths: the eigenvalues are squares, in which the order of small ones is lost.
        order = torch.linalg.vector_norm(V, dim=1).argsort(descending=True)
        return cls(tuple(S.shape), Q @ W[:, order], V[order], *_entries(S))

    @classmethod
    def empty(cls, shape: tuple[int, int], rank: int, nnz: int) -> "Slr":
        """Uninitialised float32 tensors of an n×m matrix, to be filled."""
        n, m = shape
        positions = torch.empty(nnz, dtype=position_dtype(n, m))
        return cls(shape, torch.empty(n, rank), torch.empty(rank, m), positions, torch.empty(nnz))

    @classmethod
    def joined(cls, first: "Slr", second: "Slr") -> "Slr":
        """The sum of both, the units of `first` before those of `second`; no position may be in both."""
        tensors = (
            torch.cat([getattr(first, key), getattr(second, key)], dim=1 if key == "U" else 0) for key in cls.TENSORS
        )
        return cls(first.shape, *tensors)

    @property
    def rank(self) -> int:
        """The number r of terms of U·V."""
        return self.U.shape[1]

    @property
    def sigma(self) -> Tensor:
        """The singular values of U·V (r), the largest first."""
        return torch.linalg.vector_norm(self.U, dim=0) * torch.linalg.vector_norm(self.V, dim=1)

    @property
    def nnz(self) -> int:
        """The number of entries of S."""
        return len(self.values)

    @property
    def parameters(self) -> int:
        """Parameters as the paper counts them: rank·(n + m) + nnz."""
        return self.rank * sum(self.shape) + self.nnz

    @property
    def least_parameters(self) -> int:
        """`parameters`, or the n·m of the dense matrix if they are fewer."""
        return min(self.parameters, prod(self.shape))

    def cut(self, rank: int, nnz: int) -> "Slr":
        """Keep the `rank` largest singular values and the `nnz` largest entries."""
        return Slr(self.shape, self.U[:, :rank], self.V[:rank], self.positions[:nnz], self.values[:nnz])

    def dense(self) -> Tensor:
        """U·V + S (n×m), dense."""
        flat = (self.U @ self.V).flatten()
        return flat.index_add_(0, self.positions, self.values).view(self.shape)

    def sparse(self) -> Tensor:
        """S (n×m), dense."""
        n, m = self.shape
        return self.values.new_zeros(n * m).index_add_(0, self.positions, self.values).view(self.shape)

    def scaled(self, weight: Tensor) -> "Slr":
        """The matrix with its rows scaled by `weight` (n×1), or its columns (1×m); the order of the units stays."""
        rows = weight.shape[1] == 1
        values = self.values * weight.expand(self.shape).flatten()[self.positions]
        U, V = (self.U * weight, self.V) if rows else (self.U, self.V * weight)
        return Slr(self.shape, U, V, self.positions, values)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Slr":
        """The same matrix on a device, its numbers in `dtype` if given."""
        U, V, values = (part.to(device, dtype or part.dtype) for part in (self.U, self.V, self.values))
        return Slr(self.shape, U, V, self.positions.to(device), values)

    def is_sound(self) -> bool:
        """Whether tensors that were read fit `shape` and each other, and every entry has a position of its own."""
        n, m = self.shape
        shapes = [tuple(getattr(self, key).shape) for key in self.TENSORS]
        if shapes != [(n, self.U.shape[-1]), (self.U.shape[-1], m), (self.nnz,), (self.nnz,)]:
            return False
        types = {part.dtype for part in (self.U, self.V, self.values)}
        if len(types) > 1 or not self.U.is_floating_point() or self.positions.is_floating_point():
            return False
        if ((self.positions < 0) | (self.positions >= n * m)).any():
            return False
        taken = torch.zeros(n * m, dtype=torch.bool, device=self.positions.device)
        taken[self.positions.long()] = True
        return int(taken.sum()) == self.nnz

    def resorted(self) -> "Slr":
        """The same matrix, with singular terms and entries in descending order again."""
        Q, R = torch.linalg.qr(self.U)
        return Slr.from_factors(Q, R @ self.V, self.sparse())

    def transposed(self) -> "Slr":
        """The transposed matrix (m×n)."""
        n, m = self.shape
        positions = self.positions % m * n + self.positions // m
        return Slr((m, n), self.V.mT, self.U.mT, positions, self.values)

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to store in a file, by the names in `TENSORS`."""
        return {key: getattr(self, key).contiguous() for key in self.TENSORS}

    @classmethod
    def from_tensors(cls, tensors: dict[str, Tensor]) -> "Slr":
        """The matrix from tensors as the method `tensors` returns them."""
        return cls((tensors["U"].shape[0], tensors["V"].shape[1]), **tensors)


def _entries(S: Tensor) -> tuple[Tensor, Tensor]:
    """Row-major positions of the nonzero entries of S, the largest entry first, and the entries."""
    flat = S.flatten()
    positions = flat.nonzero().squeeze(1)
    order = flat[positions].abs().sort(descending=True, stable=True).indices
    positions = positions[order]
    return positions.to(position_dtype(*S.shape)), flat[positions]


def position_dtype(n: int, m: int) -> torch.dtype:
    """The dtype of row-major positions in an n×m matrix."""
    return torch.int32 if n * m < 2**31 else torch.int64
