"""Homomorphic parameter allocation (HPA): what every block keeps under a budget (eqs. 8 and 9, section 4.3).

Of the C parameters to remove, κC come from the low-rank parts and (1 − κ)C from the sparse parts,

    φ_L = κC / C_L,   φ_S = (1 − κ)C / C_S,   C_L = Σ rank·(n + m),   C_S = Σ nnz,

and every block loses the fraction φ_L of its singular values and φ_S of its entries, the smallest first. If one side
has fewer parameters than its part, the other gives the rest.

Fractions are rounded to whole units by Webster's rule: all singular values of the model form one queue, in which the
j-th smallest of a block of rank r has the position (j − ½)/r, and all values up to the position t are removed, t the
least that meets the budget. Every block then loses the share t to within half a value, t equals φ_L up to rounding, and
a smaller budget removes a superset of what a larger one removes. The entries of S have a queue of their own.
"""

import heapq
from collections.abc import Mapping, Sequence
from fractions import Fraction
from numbers import Integral, Real

Blocks = Mapping[str, tuple[int, int, int, int]]
Kept = dict[str, tuple[int, int]]


def allocate(blocks: Blocks, *, remove: int, kappa: float) -> Kept:
    """Ranks and entries to keep so that at least `remove` parameters go, and less than one singular value more.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        remove: C, parameters to remove, from 0 to all that the blocks hold.
        kappa: κ in [0, 1], the part of C that the low-rank side gives, rounded down to whole parameters.

    Returns:
        Name → (rank kept, entries kept); the largest singular values and entries are kept.

    Raises:
        ValueError: κ or C is out of range, κ is no plain number or C no whole one.
    """
    if not isinstance(kappa, Real):
        raise ValueError(f"kappa is a {type(kappa).__name__}; give a plain number in [0, 1]")
    if not isinstance(remove, Integral):
        raise ValueError(f"remove is {remove!r}; give a whole number of parameters")
    removable_L = sum(rank * (n + m) for n, m, rank, _ in blocks.values())
    removable_S = sum(nnz for *_, nnz in blocks.values())
    if not 0 <= kappa <= 1:
        raise ValueError(f"kappa is {kappa}, outside [0, 1]; give the low-rank side's part of what is removed")
    if not 0 <= remove <= removable_L + removable_S:
        raise ValueError(
            f"{remove:,} parameters cannot be removed from {removable_L + removable_S:,}; give 0 to all of them"
        )
    # Exact in decimal, as κ was written: 0.6·5 is 3, but slightly less with the binary 0.6.
    from_L = int(Fraction(str(kappa)) * remove)
    from_L = max(min(from_L, removable_L), remove - removable_S)
    ranks = [rank for _, _, rank, _ in blocks.values()]
    entries = [nnz for *_, nnz in blocks.values()]
    removed_ranks = _remove(ranks, [n + m for n, m, *_ in blocks.values()], from_L)
    removed_entries = _remove(entries, [1] * len(entries), remove - from_L)
    return {
        name: (rank - less_rank, nnz - less_nnz)
        for (name, (_, _, rank, nnz)), less_rank, less_nnz in zip(
            blocks.items(), removed_ranks, removed_entries, strict=True
        )
    }


def _remove(counts: Sequence[int], costs: Sequence[int], target: int) -> list[int]:
    """Return the units that each block loses if the queue is removed from its start until `target` parameters are gone.

    Args:
        counts: units of each block.
        costs: parameters of one unit of each block.
        target: parameters to remove, at most Σ counts·costs.
    """
    capacity = sum(count * cost for count, cost in zip(counts, costs, strict=True))
    if target == 0:
        return [0] * len(counts)
    share = Fraction(target, capacity)
    removed = [int(share * count + Fraction(1, 2)) for count in counts]
    total = sum(units * cost for units, cost in zip(removed, costs, strict=True))

    def position(i: int, j: int) -> tuple[Fraction, int]:
        return Fraction(2 * j - 1, 2 * counts[i]), i

    following = [position(i, units + 1) for i, units in enumerate(removed) if units < counts[i]]
    heapq.heapify(following)
    while total < target:
        _, i = heapq.heappop(following)
        removed[i] += 1
        total += costs[i]
        if removed[i] < counts[i]:
            heapq.heappush(following, position(i, removed[i] + 1))

    def undo(i: int) -> tuple[Fraction, int]:
        last, block = position(i, removed[i])
        return -last, -block

    latest = [undo(i) for i, units in enumerate(removed) if units]
    heapq.heapify(latest)
    while total - costs[-latest[0][1]] >= target:
        i = -heapq.heappop(latest)[1]
        removed[i] -= 1
        total -= costs[i]
        if removed[i]:
            heapq.heappush(latest, undo(i))
    return removed


def parameters(blocks: Blocks, kept: Kept | None = None) -> int:
    """Σ rank·(n + m) + nnz over the blocks, with the ranks and entries of `blocks` or, if given, those of `kept`."""
    return sum(
        rank * (n + m) + nnz
        for name, (n, m, *whole) in blocks.items()
        for rank, nnz in [kept[name] if kept is not None else whole]
    )
