"""The allocation by energy per parameter, against a greedy removal one unit at a time."""

import math
from collections import Counter

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
    return sum(len(sigma) * (n + m) + len(S) for n, m, sigma, S in spectra.values())


def kept_parameters(spectra: dict, kept: dict) -> int:
    return sum(kept[name][0] * (n + m) + kept[name][1] for name, (n, m, _, _) in spectra.items())


def leading_bits(worth: float) -> float:
    """The worth with all but its first five binary digits cut off."""
    mantissa, exponent = math.frexp(worth)
    return math.ldexp(math.floor(mantissa * 32), exponent)


def one_at_a_time(spectra: dict, remove: int) -> dict:
    """Remove the unit of least worth (of equals the last) until `remove` parameters are gone; return what is left."""
    left = {name: [len(sigma), len(S)] for name, (_, _, sigma, S) in spectra.items()}
    gone = 0
    while gone < remove:
        candidates = []
        for place, (name, (n, m, sigma, S)) in enumerate(spectra.items()):
            rank, entries = left[name]
            if rank:
                candidates.append((leading_bits(float(sigma[rank - 1]) ** 2 / (n + m)), -2 * place, name, 0, n + m))
            if entries:
                candidates.append((leading_bits(float(S[entries - 1]) ** 2), -2 * place - 1, name, 1, 1))
        _, _, name, side, cost = min(candidates)
        left[name][side] -= 1
        gone += cost
    return {name: tuple(counts) for name, counts in left.items()}


@settings(deadline=None)
@given(models, st.floats(0, 1))
def test_it_is_the_greedy_removal_and_meets_the_budget_within_a_unit(spectra, share):
    remove = int(share * total(spectra))
    kept = allocate_by_energy(spectra, remove=remove)
    assert kept == one_at_a_time(spectra, remove)
    excess = total(spectra) - kept_parameters(spectra, kept) - remove
    assert 0 <= excess < max(n + m for n, m, *_ in spectra.values())


@settings(deadline=None)
@given(models, st.floats(0, 1), st.floats(0, 1))
def test_a_smaller_budget_keeps_a_part_of_what_a_larger_one_keeps(spectra, one, other):
    less, more = sorted(int(share * total(spectra)) for share in (one, other))
    large, small = (allocate_by_energy(spectra, remove=remove) for remove in (less, more))
    assert all(small[name][side] <= large[name][side] for name in spectra for side in (0, 1))


def test_what_is_kept_is_worth_more_than_what_goes():
    sigma, S = torch.tensor([4.0, 2.0]), torch.tensor([1.0, 0.5])
    # Worth: 16/8 = 2, 4/8 = 0.5, 1, 0.25; cost 8, 8, 1, 1.
    spectra = {"a": (3, 5, sigma, S)}
    assert allocate_by_energy(spectra, remove=1) == {"a": (2, 1)}
    assert allocate_by_energy(spectra, remove=2) == {"a": (1, 1)}
    assert allocate_by_energy(spectra, remove=9) == {"a": (1, 1)}
    assert allocate_by_energy(spectra, remove=10) == {"a": (1, 0)}
    assert implied_kappa({"a": (3, 5, 2, 2)}, {"a": (1, 0)}) == 0.8
    assert implied_kappa({"a": (3, 5, 2, 2)}, {"a": (2, 2)}) is None


def test_more_than_there_is_is_refused():
    with pytest.raises(ValueError, match="19 parameters cannot be removed from 18; give 0"):
        allocate_by_energy({"a": (3, 5, torch.ones(2), torch.ones(2))}, remove=19)


# ---- the queue of units (`line`)


@st.composite
def lines(draw, costs: tuple[int, ...] | None = None) -> UnitQueue:
    """A strategy for queues of up to six levels with up to three units of each kind; blocks may have equal costs."""
    costs = draw(st.lists(st.integers(2, 12), min_size=1, max_size=4)) if costs is None else costs
    counts = draw(st.lists(st.lists(st.integers(0, 3), min_size=2 * len(costs), max_size=2 * len(costs)), max_size=6))
    named = {f"b{i}": cost for i, cost in enumerate(costs)}
    return UnitQueue(named, torch.tensor(counts, dtype=torch.int64).view(-1, len(costs), 2))


def units(line: UnitQueue) -> list[tuple[str, int, int]]:
    """Return block, side (0 for L, 1 for S) and cost of every unit, in the order of the queue."""
    return [
        (name, side, cost if side == 0 else 1)
        for level in line.counts.tolist()
        for (name, cost), pair in zip(line.costs.items(), level, strict=True)
        for side in (0, 1)
        for _ in range(pair[side])
    ]


def tally(line: UnitQueue, some: list[tuple[str, int, int]]) -> dict[str, tuple[int, int]]:
    found = Counter((name, side) for name, side, _ in some)
    return {name: (found[name, 0], found[name, 1]) for name in line.costs}


def beginning(line: UnitQueue, most: int) -> list[tuple[str, int, int]]:
    """Return the units from the queue's first on, as long as their total cost is at most `most`."""
    kept, cost = [], 0
    for unit in units(line):
        cost += unit[2]
        if cost > most:
            break
        kept.append(unit)
    return kept


def spent(line: UnitQueue, kept: dict[str, tuple[int, int]]) -> int:
    return sum(rank * line.costs[name] + entries for name, (rank, entries) in kept.items())


@settings(deadline=None)
@given(lines(), st.data())
def test_the_longest_beginning_that_fits_is_kept_and_the_next_unit_would_exceed_it(line, data):
    most = data.draw(st.integers(0, line.parameters + 3))
    kept = line.keep(most)
    assert list(kept) == list(line.costs)
    assert kept == tally(line, beginning(line, most))
    every, count = units(line), sum(map(sum, kept.values()))
    assert spent(line, kept) <= most
    assert count == len(every) or spent(line, kept) + every[count][2] > most


@settings(deadline=None)
@given(lines())
def test_at_every_budget_the_beginning_is_kept_and_the_larger_budget_keeps_no_less_of_anything(line):
    before = dict.fromkeys(line.costs, (0, 0))
    for most in range(line.parameters + 2):
        kept = line.keep(most)
        assert kept == tally(line, beginning(line, most))
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
    assert line.parameters == sum(cost for _, _, cost in units(line)) == spent(line, tally(line, units(line)))


@settings(deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=3), st.data())
def test_of_two_lines_behind_each_other_the_second_begins_after_all_of_the_first(costs, data):
    first, second = (data.draw(lines(tuple(costs))) for _ in range(2))
    both = UnitQueue(first.costs, torch.cat([first.counts, second.counts]))
    assert both.parameters == first.parameters + second.parameters
    most = data.draw(st.integers(0, both.parameters + 3))
    if most < first.parameters:
        assert both.keep(most) == first.keep(most)
    else:
        head, tail = first.keep(first.parameters), second.keep(most - first.parameters)
        assert both.keep(most) == {
            name: (head[name][0] + tail[name][0], head[name][1] + tail[name][1]) for name in head
        }


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
    line = UnitQueue({"a": 8, "b": 5}, torch.tensor([[[1, 2], [0, 1]], [[0, 0], [0, 0]], [[0, 3], [2, 0]]]))
    assert line.parameters == 24
    expected = {0: (0, 0, 0, 0), 7: (0, 0, 0, 0), 8: (1, 0, 0, 0), 10: (1, 2, 0, 0), 11: (1, 2, 0, 1)}
    expected |= {13: (1, 4, 0, 1), 18: (1, 5, 0, 1), 19: (1, 5, 1, 1), 23: (1, 5, 1, 1), 24: (1, 5, 2, 1)}
    for most, (*a, in_L, in_S) in expected.items():
        assert line.keep(most) == {"a": tuple(a), "b": (in_L, in_S)}


def test_a_line_of_nothing_keeps_nothing():
    nothing = torch.empty(0)
    for spectra in ({}, {"a": (3, 5, nothing, nothing)}):
        assert UnitQueue.of(spectra).parameters == 0
        assert UnitQueue.of(spectra).keep(10) == dict.fromkeys(spectra, (0, 0))
