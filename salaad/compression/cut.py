"""Cutting L + S to a size: a function of the parts and of the variant asked for, without a model or a folder.

parts ── in order of size, in a norm weighted by `sensitivity` ──▶ kept units (HPA, eqs. 8 and 9, or energy) ──▶ cut
      ── alternating projections towards the target ──▶ refined
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from salaad import hpa
from salaad.common.budgets import fit, require_floor
from salaad.compression.refinement import refine
from salaad.compression.sensitivity import ErrorWeights
from salaad.compression.split import Make, Parts, with_bar
from salaad.compression.variants import Variant
from salaad.energy_allocation import Spectra, UnitQueue, allocate_by_energy, implied_kappa
from salaad.factored.slr import Slr

REFINED = "refined"
Collect = Callable[[str, Parts, Make], Parts]  # what is made, of which parts, the function that makes it → all of it


@dataclass(frozen=True)
class Whole:
    """L + S of a model before anything is cut from it.

    Args:
        parts: block → its units (singular terms of L, entries of S), the largest first.
        fixed: parameters of the model that are never compressed.
        target: block → the n×m matrix that refinement approximates: L + S as trained, or X of a model that was split
            after the fact.
        weights: block → weights of the errors in its entries (see `sensitivity`); without them all entries count alike.
        device: where refinement computes.
    """

    parts: Parts
    fixed: int
    target: Callable[[str], Tensor]
    weights: Mapping[str, ErrorWeights] = field(default_factory=dict)
    device: torch.device | str = "cpu"

    def parameters(self, variant: Variant) -> int:
        """Return the parameters of the whole model with L + S in its blocks, as the variant's allocation counts."""
        return self.fixed + parameters_of(self.parts, variant)

    @property
    def share(self) -> float:
        """L's share of the parameters of L + S, which is the κ at which both sides lose the same fraction."""
        blocks = sizes(self.parts)
        return implied_kappa(blocks, dict.fromkeys(blocks, (0, 0))) or 0.0

    def weighted(self) -> Parts:
        """Return the units of every block scaled by its weights, sorted by size again."""
        scaled = self.scaled(self.parts)
        return {name: slr.resorted() if name in self.weights else slr for name, slr in scaled.items()}

    def scaled(self, parts: Parts) -> Parts:
        """Return units of blocks scaled by the weights of their blocks, in the order in which they are given."""
        return {name: self.weights[name].of_units(slr) if name in self.weights else slr for name, slr in parts.items()}

    def unscaled(self, parts: Parts) -> Parts:
        """Return what `scaled` was given."""
        return {name: self.weights[name].undone(slr) if name in self.weights else slr for name, slr in parts.items()}

    def weighted_target(self, name: str) -> Tensor:
        """Return the target of a block, scaled by its weights."""
        T = self.target(name)
        return self.weights[name].of(T) if name in self.weights else T


def without_saving(of: str, begin: Parts, make: Make) -> Parts:
    """Return the blocks that `make` refines from `begin`; an interrupted command leaves nothing of them."""
    return dict(with_bar(make(begin), len(begin), 0, REFINED))


def cut(whole: Whole, variant: Variant, collect: Collect = without_saving) -> Parts:
    """Return L + S cut to the variant's budget; all of L + S without a budget, or if it fits the budget.

    Args:
        whole: L + S before the cut.
        variant: budget, allocation and refinement.
        collect: function that collects the blocks while they are refined.
    """
    if variant.budget is None or variant.budget >= whole.parameters(variant):
        return whole.parts
    return whole.unscaled(_smaller(whole, whole.weighted(), variant, collect))


def all_sizes(
    whole: Whole, variant: Variant, first: Parts | None = None, collect: Collect = without_saving
) -> tuple[Parts, UnitQueue]:
    """Return all units, and their order by value per parameter, of which every size keeps the first ones.

    Without a refinement these are the units of L + S. With one, the first are those of the cut refined at the variant's
    budget. After them come units that bring the size back up to that of L + S: the rank and entries that the cut lacks,
    fitted in the same way to the difference between the target and the cut.

    Args:
        whole: L + S before the cut.
        variant: budget and refinement of the cut.
        first: the cut, if it was fitted in another way than by refinement.
        collect: function that collects the blocks while they are refined.
    """
    parts = whole.weighted()
    if first is not None:
        near = {name: slr.resorted() for name, slr in whole.scaled(first).items()}
    elif variant.refine and variant.budget < whole.parameters(variant):
        near = _smaller(whole, parts, variant, collect)
    else:
        return whole.unscaled(parts), UnitQueue.of(spectra(parts))

    def rest(names: Collection[str]) -> Iterator[tuple[str, Slr]]:
        """Yield each block's units beyond those of the variant, fitted to what these lack of the whole."""
        for name in names:
            lacking = whole.weighted_target(name) - near[name].dense()
            yield (
                name,
                refine(
                    lacking.to(whole.device),
                    rank=parts[name].rank - near[name].rank,
                    nnz=parts[name].nnz - near[name].nnz,
                    iterations=variant.refine,
                    taken=(near[name].sparse() != 0).to(whole.device),
                ).to("cpu"),
            )

    second = collect(f"rest, {variant.refine} alternations", near, rest)
    orders = [UnitQueue.of(spectra(some)) for some in (near, second)]
    order = UnitQueue(orders[0].shapes, torch.cat([one.counts for one in orders]))
    return whole.unscaled({name: Slr.joined(near[name], second[name]) for name in parts}), order


def spectra(parts: Parts) -> Spectra:
    """Return block → (n, m, singular values, entries of S)."""
    return {name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()}


def parameters_of(parts: Parts, variant: Variant) -> int:
    """Return the parameters of blocks: as the paper counts them, or at most n·m each of a cut by energy."""
    capped = variant.capped or (variant.budget is not None and variant.kappa is None)
    return sum(slr.least_parameters if capped else slr.parameters for slr in parts.values())


def shapes(parts: Parts) -> dict[str, tuple[int, int]]:
    """Return block → (n, m)."""
    return {name: slr.shape for name, slr in parts.items()}


def sizes(parts: Parts) -> hpa.Blocks:
    """Return block → (n, m, rank, number of entries of S)."""
    return {name: (*slr.shape, slr.rank, slr.nnz) for name, slr in parts.items()}


def _smaller(whole: Whole, parts: Parts, variant: Variant, collect: Collect) -> Parts:
    """Return the first units of `parts` (`whole.weighted()`) that fit the variant's budget, refined if it says so.

    They are those that HPA keeps if the variant has a κ, else those that energy keeps.
    """
    blocks, limits = sizes(parts), {"fixed": whole.fixed, "budget": variant.budget}
    if variant.kappa is not None:
        kept = fit(blocks, **limits, kappa=variant.kappa)
    else:
        require_floor(**limits)
        kept = allocate_by_energy(spectra(parts), most=variant.budget - whole.fixed)
    small = {name: slr.cut(*kept[name]) for name, slr in parts.items()}
    if not variant.refine:
        return small

    def make(names: Collection[str]) -> Iterator[tuple[str, Slr]]:
        for name in names:
            slr = small[name]
            T, S = (part.to(whole.device) for part in (whole.weighted_target(name), slr.sparse()))
            yield name, refine(T, rank=slr.rank, nnz=slr.nnz, iterations=variant.refine, S=S).to("cpu")

    return collect(f"cut, {variant.refine} alternations", small, make)
