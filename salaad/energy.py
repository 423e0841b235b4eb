"""One threshold for the whole model: what every block keeps by energy per parameter. Arithmetic only.

A unit is one singular value of a block, which costs n + m parameters and is worth σ²/(n + m), or one entry of its S,
which costs one and is worth its square. All units of a model stand in one line, the most worth first, and a budget
keeps the beginning of the line: so a smaller budget keeps a part of what a larger one keeps, and κ is a result.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from salaad.errors import UserError
from salaad.hpa import Blocks, Kept, parameters

Spectra = Mapping[str, tuple[int, int, Tensor, Tensor]]


def allocate_by_energy(spectra: Spectra, *, remove: int) -> Kept:
    """Ranks and entries to keep so that at least `remove` parameters go, and less than one unit more.

    Args:
        spectra: name → (n, m, singular values of L, magnitudes of S's entries), both in falling order.
        remove: parameters to remove, from 0 to all that the blocks hold.

    Returns:
        Name → (rank kept, entries kept), the largest ones.

    Raises:
        UserError: `remove` is out of range.
    """
    removable = sum(len(sigma) * (n + m) + len(entries) for n, m, sigma, entries in spectra.values())
    if not 0 <= remove <= removable:
        raise UserError(f"{remove:,} parameters cannot be removed from {removable:,}; give 0 to all of them")
    parts = [part for n, m, sigma, S in spectra.values() for part in ((sigma, n + m), (S, 1))]
    if not parts:
        return {}
    worth = torch.cat([values.double().square() / cost for values, cost in parts])
    cost = torch.cat([torch.full((len(values),), cost) for values, cost in parts])
    owner = torch.cat([torch.full((len(values),), i) for i, (values, _) in enumerate(parts)])
    least_first = worth.flip(0).sort(stable=True).indices  # of equal worth, what comes later goes first
    least_first = len(worth) - 1 - least_first
    gone_before = cost[least_first].cumsum(0) - cost[least_first]
    kept = least_first[gone_before >= remove]
    counts = torch.bincount(owner[kept], minlength=len(parts)).view(-1, 2).tolist()
    return {name: (rank, entries) for name, (rank, entries) in zip(spectra, counts, strict=True)}


def implied_kappa(blocks: Blocks, kept: Kept) -> float | None:
    """κ: the part of what is removed that the low-rank side gives; None where nothing is removed.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        kept: name → (rank kept, entries kept).
    """
    removed = parameters(blocks) - parameters(blocks, kept)
    from_L = sum((rank - kept[name][0]) * (n + m) for name, (n, m, rank, _) in blocks.items())
    return from_L / removed if removed else None
