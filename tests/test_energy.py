"""The allocation by energy per parameter, against a greedy removal one unit at a time."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from salaad.energy import allocate_by_energy, implied_kappa
from salaad.errors import UserError

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
    """Remove the unit of least worth, of equals the last, until enough is gone."""
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
    with pytest.raises(UserError, match="19 parameters cannot be removed from 18; give 0"):
        allocate_by_energy({"a": (3, 5, torch.ones(2), torch.ones(2))}, remove=19)
