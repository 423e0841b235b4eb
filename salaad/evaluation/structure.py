"""What robust PCA finds in every weight of a model, and beside it what it finds in Gaussian noise of the same shape."""

import re
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import NamedTuple

import torch
from torch import Tensor

from salaad.common.formats import markdown_table
from salaad.prox import effective_rank
from salaad.rpca import check_matrix, rpca


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
        check_matrix(weight, name)
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


def structure_table(rows: Sequence[RpcaRow]) -> str:
    """Mean ± deviation of what robust PCA found, by matrix type and by depth, each beside that of Gaussian noise."""

    def line(group: object, spread: Mapping[str, Spread]) -> tuple[str, ...]:
        cells = (spread[key] for key in ("rank_ratio", "control_rank_ratio", "density", "control_density"))
        shown = [f"{cell.mean:.3f} ± {cell.deviation:.3f}" for cell in cells]
        return str(group), f"{spread['density'].matrices}", *shown

    groups = {kind: spread for by in ("kind", "depth") for kind, spread in summarise(rows, by).items()}
    lines = [line(f"layer {group}" if isinstance(group, int) else group or "–", s) for group, s in groups.items()]
    header = ("matrices", "number", "rank ratio", "of noise", "density of S", "of noise")
    return markdown_table(header, [*lines, line("all", summarise(rows)[None])])
