"""L + S of weights that were trained without SALAAD: the post-hoc rivals, for the same tools to cut and refine."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from salaad.compression.refinement import refine
from salaad.config.run import SalaadConfig
from salaad.factored.slr import Slr
from salaad.prox import effective_rank
from salaad.rpca import rpca

_ALTERNATIONS = 50  # of GoDec, which ends at a plateau


@dataclass(frozen=True)
class PostHoc:
    """How to split a finished matrix X.

    Args:
        blocks: which weights to split.
        method: `rpca` (convex, finds rank and density itself, L + S = X) or `godec` (rank and count are given, and
            L + S is as near to X as alternating projections bring it).
        rank_ratio: of GoDec, the rank over min(n, m).
        density: of GoDec, the entries of S over n·m.
    """

    blocks: SalaadConfig
    method: Literal["rpca", "godec"] = "rpca"
    rank_ratio: float = 0.25
    density: float = 0.25

    @property
    def label(self) -> str:
        """What tables call it."""
        return {"rpca": "RPCA", "godec": "GoDec"}[self.method]

    def split(self, X: Tensor) -> Slr:
        """The parts of X (n×m, float32), on the CPU."""
        if self.method == "godec":
            rank, nnz = round(self.rank_ratio * min(X.shape)), round(self.density * X.numel())
            return refine(X, rank=rank, nnz=nnz, iterations=_ALTERNATIONS).to("cpu")
        L, S = (part.cpu() for part in rpca(X))
        rank = effective_rank(torch.linalg.svdvals(L), self.blocks.gamma, self.blocks.energy)
        return Slr.from_parts(L, S, rank)
