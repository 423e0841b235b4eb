"""The allocation by energy per parameter, against a greedy removal one unit at a time."""

import math
from collections import Counter
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from salaad.energy_allocation import UnitQueue, allocate_by_energy, implied_kappa

numbers = st.floats(0.0, 10.0, width=32)


def falling(values: list[float]) -> torch.Tensor:
    return torch.tensor(sorted(values, reverse=True), dtype=torch.float32)


block = st.tuples(
    st.integers(1, 9), st.integers(1, 9), st.lists(numbers, max_size=6), st.lists(numbers, max_size=12)
).map(lambda b: (b[0], b[1], falling(b[2]), falling(b[3])))
models = st.lists(block, min_size=1, max_size=4).map(lambda blocks: {f"b{i}": b for i, b in enumerate(blocks)})


def total(spectra: dict) -> int:
    return kept_parameters(spectra, {name: (len(sigma), len(S)) for name, (_, _, sigma, S) in spectra.items()})


def kept_parameters(spectra: dict, kept: dict) -> int:
    return sum(min(n * m, kept[name][0] * (n + m) + kept[name][1]) for name, (n, m, _, _) in spectra.items())


def leading_bits(worth: float) -> float:
    """The worth with all but its first five binary digits cut off."""
    mantissa, exponent = math.frexp(worth)
    return math.ldexp(math.floor(mantissa * 32), exponent)


def one_at_a_time(spectra: dict, most: int) -> dict:
    """Remove the unit of least worth (of equals the last) until `most` parameters are left; return what is left.

    A block that still costs as much as it does dense then has all of its units back.
    """
    whole = {name: (len(sigma), len(S)) for name, (_, _, sigma, S) in spectra.items()}
    left = {name: list(counts) for name, counts in whole.items()}
    while kept_parameters(spectra, left) > most:
        candidates = []
        for place, (name, (n, m, sigma, S)) in enumerate(spectra.items()):
            rank, entries = left[name]
            if rank:
                candidates.append((leading_bits(float(sigma[rank - 1]) ** 2 / (n + m)), -2 * place, name, 0))
            if entries:
                candidates.append((leading_bits(float(S[entries - 1]) ** 2), -2 * place - 1, name, 1))
        _, _, name, side = min(candidates)
        left[name][side] -= 1
    dense = {name for name, (n, m, *_) in spectra.items() if left[name][0] * (n + m) + left[name][1] >= n * m}
    return {name: whole[name] if name in dense else tuple(counts) for name, counts in left.items()}


@settings(deadline=None)
@given(models, st.floats(0, 1))
def test_it_is_the_greedy_removal_and_meets_the_budget_within_a_unit(spectra, share):
    most = int(share * total(spectra))
    kept = allocate_by_energy(spectra, most=most)
    assert kept == one_at_a_time(spectra, most)
    assert 0 <= most - kept_parameters(spectra, kept) < max(n + m for n, m, *_ in spectra.values())


@settings(deadline=None)
@given(models, st.floats(0, 1), st.floats(0, 1))
def test_a_smaller_budget_keeps_a_part_of_what_a_larger_one_keeps(spectra, one, other):
    less, more = sorted(int(share * total(spectra)) for share in (one, other))
    small, large = (allocate_by_energy(spectra, most=most) for most in (less, more))
    assert all(small[name][side] <= large[name][side] for name in spectra for side in (0, 1))


def test_what_is_kept_is_worth_more_than_what_goes():
    sigma, S = torch.tensor([4.0, 2.0]), torch.tensor([1.0, 0.5])
    # Worth: 16/8 = 2, 4/8 = 0.5, 1, 0.25; cost 8, 8, 1, 1.
    spectra = {"a": (3, 5, sigma, S)}
    assert allocate_by_energy(spectra, most=15) == {"a": (2, 2)}  # dense
    assert allocate_by_energy(spectra, most=14) == {"a": (1, 1)}
    assert allocate_by_energy(spectra, most=9) == {"a": (1, 1)}
    assert allocate_by_energy(spectra, most=8) == {"a": (1, 0)}
    assert implied_kappa({"a": (3, 5, 2, 2)}, {"a": (1, 0)}) == 0.8
    assert implied_kappa({"a": (3, 5, 2, 2)}, {"a": (2, 2)}) is None


def test_less_than_nothing_is_refused():
    with pytest.raises(ValueError, match="blocks cannot have -1 parameters; give 0 or more"):
        allocate_by_energy({"a": (3, 5, torch.ones(2), torch.ones(2))}, most=-1)


# ---- the queue of units (`line`)


sides = st.tuples(st.integers(1, 9), st.integers(1, 9))


@st.composite
def lines(draw, shapes: list[tuple[int, int]] | None = None) -> UnitQueue:
    """A strategy for queues of up to six levels with up to three units of each kind; blocks may have equal shapes."""
    shapes = draw(st.lists(sides, min_size=1, max_size=4)) if shapes is None else shapes
    counts = draw(st.lists(st.lists(st.integers(0, 3), min_size=2 * len(shapes), max_size=2 * len(shapes)), max_size=6))
    named = {f"b{i}": shape for i, shape in enumerate(shapes)}
    return UnitQueue(named, torch.tensor(counts, dtype=torch.int64).view(-1, len(shapes), 2))


def units(line: UnitQueue) -> list[tuple[str, int, int]]:
    """Return block, side (0 for L, 1 for S) and cost of every unit, in the order of the queue."""
    return [
        (name, side, sum(shape) if side == 0 else 1)
        for level in line.counts.tolist()
        for (name, shape), pair in zip(line.shapes.items(), level, strict=True)
        for side in (0, 1)
        for _ in range(pair[side])
    ]


def tally(line: UnitQueue, some: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    found = Counter((name, side) for name, side, _ in some)
    return {name: (found[name, 0], found[name, 1]) for name in line.shapes}


def cost_of(line: UnitQueue, some: list[tuple[str, int, int]]) -> int:
    """Return what units cost together, of which those of a block cost no more than it does dense."""
    costs = Counter()
    for name, _, cost in some:
        costs[name] += cost
    return sum(min(cost, math.prod(line.shapes[name])) for name, cost in costs.items())


def beginning(line: UnitQueue, most: int) -> list[tuple[str, int, int]]:
    """Return the units from the queue's first on, as long as their total cost is at most `most`."""
    every = units(line)
    return next(every[:count] for count in range(len(every), -1, -1) if cost_of(line, every[:count]) <= most)


def with_dense(line: UnitQueue, some: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    """Return what the blocks keep: these units, and all of a block in which they cost as much as it does dense."""
    whole, kept = tally(line, units(line)), tally(line, some)
    dense = {
        name
        for name, (rank, entries) in kept.items()
        if rank * sum(line.shapes[name]) + entries >= math.prod(line.shapes[name])
    }
    return {name: whole[name] if name in dense else kept[name] for name in kept}


def spent(line: UnitQueue, kept: dict[str, tuple[int, int]]) -> int:
    costs = {name: rank * sum(line.shapes[name]) + entries for name, (rank, entries) in kept.items()}
    return sum(min(cost, math.prod(line.shapes[name])) for name, cost in costs.items())


@settings(deadline=None)
@given(lines(), st.data())
def test_the_longest_beginning_that_fits_is_kept_and_the_next_unit_would_exceed_it(line, data):
    most = data.draw(st.integers(0, line.parameters + 3))
    kept = line.keep(most)
    assert list(kept) == list(line.shapes)
    first = beginning(line, most)
    assert kept == with_dense(line, first)
    every = units(line)
    assert spent(line, kept) == cost_of(line, first) <= most
    assert len(first) == len(every) or cost_of(line, every[: len(first) + 1]) > most


@settings(deadline=None)
@given(lines(), st.data())
def test_the_longest_beginning_that_so_many_numbers_hold_is_stored(line, data):
    most = data.draw(st.integers(0, line.numbers + 3))
    every = units(line)
    costs = list(accumulate(cost for *_, cost in every))
    assert line.first_stored(most).units() == tally(line, every[: sum(cost <= most for cost in costs)])
    assert line.numbers == (costs[-1] if costs else 0)


@settings(deadline=None)
@given(lines())
def test_at_every_budget_the_beginning_is_kept_and_the_larger_budget_keeps_no_less_of_anything(line):
    before = dict.fromkeys(line.shapes, (0, 0))
    for most in range(line.parameters + 2):
        kept = line.keep(most)
        assert kept == with_dense(line, beginning(line, most))
        assert all(kept[name][side] >= before[name][side] for name in kept for side in (0, 1))
        before = kept
    assert before == tally(line, units(line))


@settings(deadline=None)
@given(models, st.floats(0, 1), st.floats(0, 1))
def test_the_line_of_a_model_has_its_units_and_keeps_its_largest_for_any_two_budgets(spectra, one, other):
    line = UnitQueue.of(spectra)
    assert line.parameters == total(spectra)
    assert line.keep(line.parameters) == {name: (len(sigma), len(S)) for name, (_, _, sigma, S) in spectra.items()}
    small, large = sorted(int(share * line.parameters) for share in (one, other))
    fewer, more = line.keep(small), line.keep(large)
    assert kept_parameters(spectra, fewer) <= small and kept_parameters(spectra, more) <= large
    assert all(fewer[name][side] <= more[name][side] for name in spectra for side in (0, 1))


@settings(deadline=None)
@given(lines())
def test_parameters_are_what_all_units_cost(line):
    assert line.parameters == cost_of(line, units(line)) == spent(line, tally(line, units(line)))


@settings(deadline=None)
@given(st.lists(sides, min_size=1, max_size=3), st.data())
def test_of_two_lines_behind_each_other_the_second_begins_after_all_of_the_first(shapes, data):
    first, second = (data.draw(lines(shapes)) for _ in range(2))
    both = UnitQueue(first.shapes, torch.cat([first.counts, second.counts]))
    assert both.numbers == first.numbers + second.numbers
    most = data.draw(st.integers(0, both.parameters + 3))
    begun = beginning(first, most)
    if len(begun) == len(units(first)):
        begun = beginning(both, most)
        assert begun[: len(units(first))] == units(first)
    assert both.keep(most) == with_dense(both, begun)


@settings(deadline=None)
@given(lines(), st.data())
def test_of_what_was_kept_less_is_what_is_kept_of_all(line, data):
    more = data.draw(st.integers(0, line.parameters))
    less = data.draw(st.integers(0, more))
    assert line.first(more).keep(less) == line.keep(less)


def spectra_of(count: int, seed: int) -> dict[str, tuple[int, int, Tensor, Tensor]]:
    """Return `count` random blocks, some without L or S, whose values spread over many magnitudes and repeat."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for k in range(count):
        n, m, rank, nnz = torch.randint(0, 9, (4,), generator=generator).tolist()
        sigma, S = (torch.randn(size, generator=generator).mul(4).exp().round(decimals=1) for size in (rank, nnz * n))
        found[f"b{k}"] = (n + 1, m + 1, sigma, S * (-1) ** k)
    return found


@pytest.mark.parametrize("count", [1, 7, 60])
def test_a_line_counts_the_units_at_each_leading_five_bits_the_highest_first(count):
    spectra = spectra_of(count, seed=count)
    found = {}
    for k, (n, m, sigma, S) in enumerate(spectra.values()):
        for side, values, cost in ((0, sigma, n + m), (1, S, 1)):
            for value in values.double().tolist():
                found.setdefault(leading_bits(value * value / cost), Counter())[k, side] += 1
    expected = [[[found[level][k, side] for side in (0, 1)] for k in range(count)] for level in sorted(found)[::-1]]
    line = UnitQueue.of(spectra)
    assert line.counts.dtype == torch.int64 and line.counts.tolist() == expected


class Largest(TorchDispatchMode):
    """The most elements of a tensor that any function of torch returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        self.elements = max(self.elements, *(t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)), 0)
        return out


def test_a_line_takes_no_more_memory_than_its_levels():
    spectra = spectra_of(300, seed=0)
    with Largest() as largest:
        line = UnitQueue.of(spectra)
    assert largest.elements <= max(line.counts.numel(), 2**15)


def test_a_line_by_hand():
    counts = torch.tensor([[[1, 2], [0, 1]], [[0, 0], [0, 0]], [[0, 3], [2, 0]]])
    line = UnitQueue({"a": (3, 5), "b": (1, 4)}, counts)
    assert (line.numbers, line.parameters) == (24, 17)  # of b, whose units cost 11, 4
    expected = {0: (0, 0, 0, 0), 7: (0, 0, 0, 0), 8: (1, 0, 0, 0), 10: (1, 2, 0, 0), 11: (1, 2, 0, 1)}
    # One term of b would cost 5, so b is dense for 3 more, with both terms.
    expected |= {13: (1, 4, 0, 1), 14: (1, 5, 0, 1), 16: (1, 5, 0, 1), 17: (1, 5, 2, 1)}
    for most, (*a, in_L, in_S) in expected.items():
        assert line.keep(most) == {"a": tuple(a), "b": (in_L, in_S)}


def test_a_line_of_nothing_keeps_nothing():
    nothing = torch.empty(0)
    for spectra in ({}, {"a": (3, 5, nothing, nothing)}):
        assert UnitQueue.of(spectra).parameters == 0
        assert UnitQueue.of(spectra).keep(10) == dict.fromkeys(spectra, (0, 0))
