"""Homomorphic parameter allocation: what every block keeps under a budget (paper, section 3.3). Arithmetic only.

Of the C parameters to remove, κC come from the low-rank parts and (1 − κ)C from the sparse parts,

    φ_L = κC / C_L,   φ_S = (1 − κ)C / C_S,   C_L = Σ rank·(n + m),   C_S = Σ nnz,

and every block loses the fraction φ_L of its singular values and φ_S of its entries, the smallest first. What one side
cannot give is taken from the other.

Fractions have to become whole numbers without a block gaining what another loses. So all singular values of the model
stand in one line, the j-th smallest of a block of rank r at (j − ½)/r, and the line is cut at the t that meets the
budget. Every block then loses the share t to within half a value (Webster's rule), t is φ_L but for rounding, and a
smaller budget always removes more of the same line. The entries of S have a line of their own.
"""

import heapq
from collections.abc import Mapping, Sequence
from fractions import Fraction

from salaad.common.budgets import format_count
from salaad.common.errors import UserError

Blocks = Mapping[str, tuple[int, int, int, int]]
Kept = dict[str, tuple[int, int]]


def allocate(blocks: Blocks, *, remove: int, kappa: float) -> Kept:
    """Ranks and entries to keep so that at least `remove` parameters go, and less than one singular value more.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        remove: C, parameters to remove, from 0 to all that the blocks hold.
        kappa: κ in [0, 1], the part of C that the low-rank side gives; of κC the fraction is the sparse side's.

    Returns:
        Name → (rank kept, entries kept), the largest ones.

    Raises:
        UserError: κ or C is out of range.
    """
    removable_L = sum(rank * (n + m) for n, m, rank, _ in blocks.values())
    removable_S = sum(nnz for *_, nnz in blocks.values())
    if not 0 <= kappa <= 1:
        raise UserError(f"kappa is {kappa}, outside [0, 1]; give the part of the budget that the low-rank side gives")
    if not 0 <= remove <= removable_L + removable_S:
        raise UserError(
            f"{remove:,} parameters cannot be removed from {removable_L + removable_S:,}; give 0 to all of them"
        )
    # Exact in the decimal that was written: 0.6·5 is 3, which the binary 0.6 misses.
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
    """How many units each block loses when the line of all units is cut as soon as `target` parameters are gone.

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

    def place(i: int, j: int) -> tuple[Fraction, int]:
        return Fraction(2 * j - 1, 2 * counts[i]), i

    following = [place(i, units + 1) for i, units in enumerate(removed) if units < counts[i]]
    heapq.heapify(following)
    while total < target:
        _, i = heapq.heappop(following)
        removed[i] += 1
        total += costs[i]
        if removed[i] < counts[i]:
            heapq.heappush(following, place(i, removed[i] + 1))

    def undo(i: int) -> tuple[Fraction, int]:
        where, block = place(i, removed[i])
        return -where, -block

    latest = [undo(i) for i, units in enumerate(removed) if units]
    heapq.heapify(latest)
    while total - costs[-latest[0][1]] >= target:
        i = -heapq.heappop(latest)[1]
        removed[i] -= 1
        total -= costs[i]
        if removed[i]:
            heapq.heappush(latest, undo(i))
    return removed


def fit(blocks: Blocks, *, fixed: int, budget: int, kappa: float) -> Kept:
    """What the blocks of a model keep so that the whole has at most `budget` parameters.

    Args:
        blocks: name → (n, m, rank, nnz) of L + S as trained.
        fixed: parameters that are never compressed, such as norms and the head.
        budget: parameters of the whole model; at or above L + S as trained, L + S is kept as it is.
        kappa: κ in [0, 1].

    Raises:
        UserError: the budget is below what is never compressed, or κ is out of range.
    """
    return allocate(blocks, remove=to_remove(blocks, fixed=fixed, budget=budget), kappa=kappa)


def to_remove(blocks: Blocks, *, fixed: int, budget: int) -> int:
    """C: parameters the blocks have to lose so that the whole has at most `budget`; `fixed` are never compressed.

    Raises:
        UserError: the budget is below what is never compressed.
    """
    if budget < fixed:
        raise UserError(
            f"budget {format_count(budget, up=False)} is below the floor of {format_count(fixed)} (the parts that are "
            f"never compressed); give {format_count(fixed)} or more"
        )
    return max(0, fixed + parameters(blocks) - budget)


def parameters(blocks: Blocks, kept: Kept | None = None) -> int:
    """Σ rank·(n + m) + nnz over the blocks, as they are or as `kept` has them."""
    return sum(
        rank * (n + m) + nnz
        for name, (n, m, *whole) in blocks.items()
        for rank, nnz in [kept[name] if kept is not None else whole]
    )
