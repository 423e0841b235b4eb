"""HPA against section 4.3 taken literally and against its rounding rule unit by unit; budgets, and error messages."""

import re
from fractions import Fraction
from itertools import pairwise, product

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from salaad.common.budgets import fit, format_count, parse_budget, parse_count
from salaad.common.errors import UserError
from salaad.hpa import allocate, parameters

properties = settings(deadline=None, max_examples=150)

# One large block, one of rank 0, one without entries, one that holds nothing.
MIXED = {"a": (12, 20, 9, 60), "b": (4, 4, 3, 0), "c": (8, 3, 0, 24), "d": (5, 5, 0, 0), "e": (1, 9, 1, 4)}
EMPTY = {"a": (4, 6, 0, 0), "b": (3, 3, 0, 0)}


@st.composite
def blocks_of(draw, most: int = 6, side: int = 12) -> dict[str, tuple[int, int, int, int]]:
    """A strategy for models of 0 to `most` blocks, with every possible rank and number of entries."""
    blocks = {}
    for i in range(draw(st.integers(0, most))):
        n, m = draw(st.integers(1, side)), draw(st.integers(1, side))
        blocks[f"block {i}"] = (n, m, draw(st.integers(0, min(n, m))), draw(st.integers(0, n * m)))
    return blocks


@st.composite
def cuts(draw, **sizes) -> tuple[dict, int, float]:
    """A strategy for a model, the number of parameters to remove from it, and a κ: two decimals, or any float."""
    blocks = draw(blocks_of(**sizes))
    whole = sum(rank * (n + m) + nnz for n, m, rank, nnz in blocks.values())
    kappa = draw(st.integers(0, 100).map(lambda k: k / 100) | st.floats(0, 1))
    return blocks, draw(st.integers(0, whole)), kappa


def sides(blocks: dict) -> tuple[int, int]:
    """C_L and C_S, the parameters of all low-rank and of all sparse parts."""
    return sum(r * (n + m) for n, m, r, _ in blocks.values()), sum(nnz for *_, nnz in blocks.values())


def gone(blocks: dict, kept: dict) -> tuple[int, int]:
    """Parameters that the low-rank and the sparse parts have lost."""
    left = {name: (n, m, *kept[name]) for name, (n, m, *_) in blocks.items()}
    return tuple(before - after for before, after in zip(sides(blocks), sides(left), strict=True))


def largest_unit(blocks: dict) -> int:
    """Parameters (n + m) of one singular value of the largest block that has any; 1 if no block has."""
    return max((n + m for n, m, rank, _ in blocks.values() if rank), default=1)


# ---- the budget


@properties
@given(cuts())
@example((MIXED, sum(sides(MIXED)), 0.5))
@example((EMPTY, 0, 0.3))
@example(({}, 0, 1.0))
def test_what_is_removed_is_the_budget_and_less_than_one_singular_value_more(cut):
    blocks, remove, kappa = cut
    kept = allocate(blocks, remove=remove, kappa=kappa)
    from_L, from_S = gone(blocks, kept)
    assert remove <= from_L + from_S < remove + largest_unit(blocks)
    assert from_L > 0 or from_S == remove


@properties
@given(cuts())
def test_every_block_is_answered_in_order_and_keeps_no_more_than_it_had_and_no_less_than_nothing(cut):
    blocks, remove, kappa = cut
    kept = allocate(blocks, remove=remove, kappa=kappa)
    assert list(kept) == list(blocks)
    for name, (*_, rank, nnz) in blocks.items():
        assert 0 <= kept[name][0] <= rank
        assert 0 <= kept[name][1] <= nnz


@properties
@given(blocks_of(), st.floats(0, 1))
def test_removing_nothing_keeps_all_and_removing_all_keeps_nothing(blocks, kappa):
    assert allocate(blocks, remove=0, kappa=kappa) == {name: (r, nnz) for name, (*_, r, nnz) in blocks.items()}
    assert allocate(blocks, remove=sum(sides(blocks)), kappa=kappa) == dict.fromkeys(blocks, (0, 0))


@pytest.mark.parametrize("blocks", [MIXED, EMPTY, {"only": (7, 9, 5, 31)}, {"only": (7, 9, 0, 31)}])
@pytest.mark.parametrize("kappa", [0, 0.35, 1])
def test_every_budget_up_to_all_parameters_can_be_met(blocks, kappa):
    for remove in range(sum(sides(blocks)) + 1):
        removed = sum(gone(blocks, allocate(blocks, remove=remove, kappa=kappa)))
        assert remove <= removed < remove + largest_unit(blocks)


def test_a_model_of_a_billion_parameters_is_met_to_a_singular_value_too():
    width, hidden = 2048, 5461
    shapes = [(32000, width)] + 24 * (4 * [(width, width)] + 2 * [(hidden, width)] + [(width, hidden)])
    blocks = {
        str(i): (n, m, min(n, m) * (17 + 7 * i % 29) // 100, n * m * (5 + 11 * i % 23) // 100)
        for i, (n, m) in enumerate(shapes)
    }
    for remove in (1, 10**8 + 1, 3 * 10**8 - 7):
        from_L, from_S = gone(blocks, allocate(blocks, remove=remove, kappa=0.7))
        assert remove <= from_L + from_S < remove + 32000 + width
        assert from_S == remove - 7 * remove // 10


# ---- the split between the sides


@properties
@given(blocks_of(), st.integers(0, 100), st.data())
def test_the_sides_give_kappa_and_the_rest_of_the_budget_or_all_they_have(blocks, percent, data):
    in_L, in_S = sides(blocks)
    remove = data.draw(st.integers(0, in_L + in_S))
    wanted_L, wanted_S = Fraction(percent * remove, 100), Fraction((100 - percent) * remove, 100)
    from_L, from_S = gone(blocks, allocate(blocks, remove=remove, kappa=percent / 100))
    if wanted_L > in_L:
        assert (from_L, from_S) == (in_L, remove - in_L)
    elif wanted_S > in_S:
        assert from_S == in_S
        assert remove - in_S <= from_L < remove - in_S + largest_unit(blocks)
    else:
        assert wanted_S <= from_S < wanted_S + 1
        assert wanted_L - 1 < from_L < wanted_L + largest_unit(blocks)


@pytest.mark.parametrize(
    ("kappa", "remove", "kept"),
    [
        (0, 30, (8, 10)),  # S alone
        (0, 40, (8, 0)),
        (0, 41, (7, 0)),  # S is used up; one singular value of 10 gives the last parameter
        (0, 60, (6, 0)),
        (1, 30, (5, 40)),  # L alone
        (1, 80, (0, 40)),
        (1, 81, (0, 39)),  # L is used up
        (1, 120, (0, 0)),
        (0.5, 100, (2, 0)),  # S has 40 of the 50
        (0.9, 100, (0, 20)),  # L has 80 of the 90
        (0.5, 20, (7, 30)),
        (0.5, 21, (7, 29)),
        (0.25, 41, (7, 9)),  # 10.25 and 30.75
    ],
)
def test_one_block_by_hand(kappa, remove, kept):
    assert allocate({"one": (8, 2, 8, 40)}, remove=remove, kappa=kappa) == {"one": kept}


def test_a_decimal_kappa_means_that_decimal():
    blocks = {"a": (2, 1, 1, 2), "b": (2, 1, 1, 2)}
    assert gone(blocks, allocate(blocks, remove=5, kappa=0.6)) == (3, 2)  # the binary 0.6 is a little less
    entries = {"a": (100, 100, 50, 5000)}
    for percent in range(101):
        assert gone(entries, allocate(entries, remove=100, kappa=percent / 100))[1] == 100 - percent


# ---- equal shares


def common_share(removed: list[int], counts: list[int]) -> bool:
    """Return whether there is one t in [0, 1] with |removed − t·count| ≤ ½ in every block."""
    bounds = [
        (Fraction(2 * k - 1, 2 * r), Fraction(2 * k + 1, 2 * r)) for k, r in zip(removed, counts, strict=True) if r
    ]
    return max([low for low, _ in bounds] + [Fraction(0)]) <= min([high for _, high in bounds] + [Fraction(1)])


@properties
@given(cuts(most=10, side=20))
def test_all_blocks_lose_one_share_of_their_ranks_and_one_of_their_entries_up_to_half_a_unit(cut):
    blocks, remove, kappa = cut
    kept = allocate(blocks, remove=remove, kappa=kappa)
    for side in (0, 1):
        counts = [block[2 + side] for block in blocks.values()]
        assert common_share([count - kept[name][side] for count, name in zip(counts, blocks, strict=True)], counts)


def test_one_share_is_a_condition_that_can_fail():
    assert common_share([1, 2, 0], [10, 20, 0])
    assert not common_share([2, 2], [10, 20])


@properties
@given(blocks_of(), st.floats(0, 1), st.data())
def test_a_smaller_budget_keeps_nothing_that_a_larger_one_removed(blocks, kappa, data):
    removals = data.draw(st.lists(st.integers(0, sum(sides(blocks))), min_size=2, max_size=6).map(sorted))
    for less, more in pairwise([allocate(blocks, remove=remove, kappa=kappa) for remove in removals]):
        for name in blocks:
            assert more[name][0] <= less[name][0]
            assert more[name][1] <= less[name][1]


def test_budgets_are_nested_at_every_single_step():
    for kappa in (0, 0.3, 0.65, 1):
        steps = [allocate(MIXED, remove=remove, kappa=kappa) for remove in range(sum(sides(MIXED)) + 1)]
        for less, more in pairwise(steps):
            assert all(more[name][side] <= less[name][side] for name, side in product(MIXED, (0, 1)))


# ---- section 4.3, twice


def literal(blocks: dict, remove: int, kappa: Fraction) -> dict | None:
    """Return the allocation by section 4.3 taken literally; None if it is no whole number in some block."""
    in_L, in_S = sides(blocks)
    phi_L = kappa * remove / in_L if in_L else Fraction(0)
    phi_S = (1 - kappa) * remove / in_S if in_S else Fraction(0)
    surplus_L = kappa * remove - min(phi_L, 1) * in_L
    surplus_S = (1 - kappa) * remove - min(phi_S, 1) * in_S
    phi_L = min(phi_L, Fraction(1)) + (surplus_S / in_L if surplus_S else 0)
    phi_S = min(phi_S, Fraction(1)) + (surplus_L / in_S if surplus_L else 0)
    assert phi_L * in_L + phi_S * in_S == remove
    kept = {name: (rank - phi_L * rank, nnz - phi_S * nnz) for name, (*_, rank, nnz) in blocks.items()}
    whole = all(count.denominator == 1 for counts in kept.values() for count in counts)
    return {name: (int(rank), int(nnz)) for name, (rank, nnz) in kept.items()} if whole else None


@pytest.mark.parametrize(
    ("blocks", "cases"),
    [
        ({"a": (10, 10, 10, 40), "b": (6, 4, 4, 20), "c": (12, 8, 6, 60), "d": (9, 3, 0, 20), "e": (9, 3, 2, 0)}, 50),
        ({"a": (6, 6, 6, 30), "b": (6, 6, 3, 15), "c": (3, 9, 3, 15)}, 80),
        ({"only": (5, 5, 4, 20)}, 180),
        ({"only": (5, 5, 4, 0)}, 40),
        ({"only": (5, 5, 0, 20)}, 200),
        (EMPTY, 1),
    ],
)
def test_allocation_is_section_4_3_where_every_fraction_of_a_block_is_whole(blocks, cases):
    compared = 0
    for remove, twentieths in product(range(sum(sides(blocks)) + 1), range(21)):
        expected = literal(blocks, remove, Fraction(twentieths, 20))
        if expected is not None:
            assert allocate(blocks, remove=remove, kappa=twentieths / 20) == expected
            compared += 1
    assert compared >= cases


def unit_by_unit(blocks: dict, remove: int, kappa: Fraction) -> dict:
    """Apply the rounding rule a unit at a time: order a side's units, remove them until the side's share is gone.

    Shares are whole numbers: the low-rank side is asked for ⌊κC⌋ parameters, the sparse side for the rest.
    """
    in_L, in_S = sides(blocks)
    asked = kappa * remove // 1
    if asked > in_L:
        asked = in_L
    if remove - asked > in_S:
        asked = remove - in_S
    removed = {name: [0, 0] for name in blocks}
    for side, target in ((0, asked), (1, remove - asked)):
        line = [
            (Fraction(2 * j - 1, 2 * block[2 + side]), name)
            for name, block in blocks.items()
            for j in range(1, block[2 + side] + 1)
        ]
        for _, name in sorted(line, key=lambda unit: unit[0]):
            if target <= 0:
                break
            removed[name][side] += 1
            n, m, *_ = blocks[name]
            target -= n + m if side == 0 else 1
    return {name: (r - removed[name][0], nnz - removed[name][1]) for name, (*_, r, nnz) in blocks.items()}


@properties
@given(blocks_of(most=5, side=8), st.integers(0, 20), st.data())
def test_allocation_is_the_line_of_all_units_cut_where_the_budget_is_met(blocks, twentieths, data):
    remove = data.draw(st.integers(0, sum(sides(blocks))))
    expected = unit_by_unit(blocks, remove, Fraction(twentieths, 20))
    assert allocate(blocks, remove=remove, kappa=twentieths / 20) == expected


@pytest.mark.parametrize("twentieths", [0, 7, 13, 20])
def test_allocation_is_that_line_for_every_budget_of_blocks_that_differ_much(twentieths):
    # The share of the large blocks rounds to 0 in the small ones, so the order of units has to be followed far.
    blocks = {f"small {i}": (1, 2, 1, 1) for i in range(12)} | {"large": (20, 20, 20, 40), "wide": (2, 30, 2, 9)}
    for remove in range(sum(sides(blocks)) + 1):
        expected = unit_by_unit(blocks, remove, Fraction(twentieths, 20))
        assert allocate(blocks, remove=remove, kappa=twentieths / 20) == expected


# ---- the whole model


@properties
@given(blocks_of(), st.integers(0, 500), st.floats(0, 1), st.data())
def test_a_fitted_model_is_never_above_its_budget_and_below_it_by_less_than_one_singular_value(
    blocks, fixed, kappa, data
):
    trained = fixed + sum(sides(blocks))
    budget = data.draw(st.integers(fixed, trained))
    kept = fit(blocks, fixed=fixed, budget=budget, kappa=kappa)
    whole = trained - sum(gone(blocks, kept))
    assert budget - largest_unit(blocks) < whole <= budget
    assert kept == allocate(blocks, remove=trained - budget, kappa=kappa)


@pytest.mark.parametrize("above", [0, 1, 10**9])
def test_a_budget_at_or_above_the_trained_model_keeps_all_of_it(above):
    kept = fit(MIXED, fixed=17, budget=17 + sum(sides(MIXED)) + above, kappa=0.4)
    assert kept == {name: (rank, nnz) for name, (*_, rank, nnz) in MIXED.items()}


def test_a_budget_at_the_floor_keeps_the_floor():
    assert fit(MIXED, fixed=17, budget=17, kappa=0.4) == dict.fromkeys(MIXED, (0, 0))


@properties
@given(cuts())
def test_parameters_are_the_rank_times_n_plus_m_and_the_entries(cut):
    blocks, remove, kappa = cut
    kept = allocate(blocks, remove=remove, kappa=kappa)
    assert parameters(blocks) == sum(sides(blocks))
    assert parameters(blocks, kept) == sum(sides(blocks)) - sum(gone(blocks, kept))


def test_parameters_of_a_model_by_hand():
    assert parameters(MIXED) == 9 * 32 + 60 + 3 * 8 + 24 + 10 + 4
    assert parameters(MIXED, dict.fromkeys(MIXED, (1, 2))) == 32 + 8 + 11 + 10 + 10 + 5 * 2
    assert parameters({}) == parameters(EMPTY) == 0


# ---- error messages


@pytest.mark.parametrize("kappa", [-0.1, 1.0000001, 2, float("nan"), float("inf")])
def test_a_kappa_out_of_range_is_one_sentence(kappa):
    with pytest.raises(ValueError, match=rf"^kappa is {re.escape(str(kappa))}, outside \[0, 1\]; give .*[^.]$"):
        allocate(MIXED, remove=3, kappa=kappa)
    with pytest.raises(ValueError, match=r"^kappa is "):
        fit(MIXED, fixed=10, budget=20, kappa=kappa)


@pytest.mark.parametrize(("remove", "shown"), [(-1, "-1"), (411, "411"), (12_345_678, "12,345,678")])
def test_a_removal_out_of_range_is_one_sentence_with_the_limit(remove, shown):
    assert sum(sides(MIXED)) == 410
    with pytest.raises(ValueError, match=f"^{shown} parameters cannot be removed from 410; give 0 to all of them$"):
        allocate(MIXED, remove=remove, kappa=0.5)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"remove": 6.0}, "^remove is 6.0; give a whole number of parameters$"),
        ({"kappa": torch.tensor(0.6)}, r"^kappa is a Tensor; give a plain number in \[0, 1\]$"),
    ],
)
def test_what_is_no_plain_number_is_one_sentence(wrong, sentence):
    with pytest.raises(ValueError, match=sentence):
        allocate(MIXED, **{"remove": 6, "kappa": 0.5} | wrong)


def test_nothing_can_be_removed_from_nothing():
    with pytest.raises(ValueError, match=r"^1 parameters cannot be removed from 0; "):
        allocate(EMPTY, remove=1, kappa=0.5)


def test_a_budget_below_the_floor_is_one_sentence_with_its_cure():
    with pytest.raises(UserError) as error:
        fit(MIXED, fixed=46_300_000, budget=40_000_000, kappa=0.5)
    assert str(error.value) == (
        "budget 40M is below the floor of 46.3M (the parts that are never compressed); give 46.3M or more"
    )


@properties
@given(st.integers(1, 10**12 - 1), st.data())
@example(46_300_001, None)
@example(999_999_999, None)
@example(999, None)
@example(1, None)
def test_the_budget_that_the_sentence_tells_to_give_can_be_had(fixed, data):
    budget = data.draw(st.integers(0, fixed - 1)) if data is not None else fixed - 1
    with pytest.raises(UserError) as error:
        fit(MIXED, fixed=fixed, budget=budget, kappa=0.5)
    cure = re.fullmatch(r"budget .* is below .*; give (\S+) or more", str(error.value)).group(1)
    cured = parse_budget(cure, 10**13)
    kept = fit(MIXED, fixed=fixed, budget=cured, kappa=0.5)
    assert fixed + parameters(MIXED, kept) <= cured


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1K"),
        (46_300, "46.3K"),
        (999_999, "999.999K"),
        (1_000_000, "1M"),
        (1_840_000, "1.84M"),
        (1_840_001, "1.841M"),
        (46_300_000, "46.3M"),
        (194_000_000, "194M"),
        (194_000_001, "194.001M"),
        (999_999_999, "1000M"),
        (1_300_000_000, "1.3B"),
    ],
)
def test_counts_by_hand(count, text):
    assert format_count(count) == text


@properties
@given(st.integers(1, 10**12 - 1))
def test_a_count_typed_back_is_that_count_rounded_up_by_less_than_a_thousandth(count):
    typed = parse_count(format_count(count))
    assert count <= typed < count + max(1, Fraction(count, 1000))


@properties
@given(st.integers(0, 10**12 - 1), st.integers(0, 10**12 - 1))
def test_a_larger_count_is_never_shown_smaller(a, b):
    assume(0 < a <= b)
    assert parse_count(format_count(a)) <= parse_count(format_count(b))
