"""What robust PCA finds in every weight of a model and in Gaussian noise of the same shape (paper, appendix A).

Noise, too, splits into an L of half the full effective rank and an S that is mostly nonzero. So every weight has a
Gaussian control beside it, and shows structure only as far as the two differ.
"""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.common.formats import markdown_table
from salaad.prox import effective_rank
from salaad.rpca import not_a_finite_matrix, rpca


@dataclass(frozen=True)
class RpcaStatistics:
    """The statistics that the paper reports of one decomposition into L + S."""

    rank_ratio: float  # Γ(L), Definition 4.1: the effective rank over min(n, m)
    density: float  # entries of S that are not zero, over n·m

    @property
    def sparsity(self) -> float:
        """The sparsity, which the paper reports instead of the density: 1 − density."""
        return 1 - self.density


def statistics(L: Tensor, S: Tensor, gamma: float = 0.999) -> RpcaStatistics:
    """The statistics of L and S (n×m); `gamma` is the share of Σσ that the effective rank covers."""
    rank = effective_rank(torch.linalg.svdvals(L.double()), gamma)
    return RpcaStatistics(rank / min(L.shape), int(torch.count_nonzero(S)) / S.numel())


def gaussian_control(D: Tensor, seed: int = 0) -> Tensor:
    """Gaussian noise with the shape, mean, variance, dtype and device of D; the same numbers on every device."""
    deviation, mean = torch.std_mean(D.double(), correction=0)
    noise = torch.randn(D.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (mean + deviation * noise.to(D.device)).to(D.dtype)


@dataclass(frozen=True)
class RpcaRow:
    """The statistics of one weight and, beside them, of its Gaussian control."""

    name: str
    kind: str  # last part of the module name: q_proj
    depth: int | None  # layer number in the name; None for an embedding
    rank_ratio: float
    density: float
    control_rank_ratio: float
    control_density: float
    error: float  # ‖D − L − S‖_F over ‖D‖_F of the weight


@torch.no_grad()
def model_statistics(
    weights: Mapping[str, Tensor], *, gamma: float = 0.999, growth: float = 1.5, seed: int = 0
) -> Iterator[RpcaRow]:
    """Yield the row of each weight (module or parameter name → n×m, any floating dtype) in turn.

    The control of a weight depends only on `seed` and its name, so its row is the same in any selection of weights.
    A weight that was rounded to bfloat16 has a dense S: the rounding, up to 0.2 % of an entry, raises a density of 0.05
    to 0.6 and more. Give float32 master weights where there are any.

    Raises:
        UserError: a weight is no finite matrix; raised before the first is decomposed.
    """
    for name, weight in weights.items():
        if reason := not_a_finite_matrix(weight):
            raise UserError(f"{name} {reason}")
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
        kind = re.sub(r"\.\d+$", "", name).rpartition(".")[2]  # without the number of an expert
        ratios = (own.rank_ratio, own.density, control.rank_ratio, control.density)
        yield RpcaRow(name, kind, depth, *ratios, error)


class Spread(NamedTuple):
    """Mean and population standard deviation over some matrices."""

    mean: float
    deviation: float
    matrices: int


def summarise(rows: Iterable[RpcaRow], by: str | None = None) -> dict[str | int | None, dict[str, Spread]]:
    """Return group → ratio → spread over the rows of the group, by "kind" or "depth", or for one group None of all."""
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


def structure_table(rows: Sequence[RpcaRow]) -> str:
    """A Markdown table of mean ± deviation by kind and by depth, each beside that of Gaussian noise."""

    def line(group: object, spread: Mapping[str, Spread]) -> tuple[str, ...]:
        cells = (spread[key] for key in ("rank_ratio", "control_rank_ratio", "density", "control_density"))
        shown = [f"{cell.mean:.3f} ± {cell.deviation:.3f}" for cell in cells]
        return str(group), f"{spread['density'].matrices}", *shown

    groups = {kind: spread for by in ("kind", "depth") for kind, spread in summarise(rows, by).items()}
    lines = [line(f"layer {group}" if isinstance(group, int) else group or "–", s) for group, s in groups.items()]
    header = ("matrices", "number", "rank ratio", "of noise", "density of S", "of noise")
    return markdown_table(header, [*lines, line("all", summarise(rows)[None])])
