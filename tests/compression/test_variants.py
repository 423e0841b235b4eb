"""Variants, counts, budgets and κ as text: every accepted form is parsed, any other is refused in one sentence."""

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from salaad.common.budgets import parse_budget, parse_count
from salaad.common.errors import UserError
from salaad.compression.variants import Variant, parse_budgets, parse_kappa, parse_kappas, parse_variants

properties = settings(deadline=None, max_examples=100)
DENSE = 388_000_000


def assert_one_sentence(message: str, value: str) -> None:
    """Assert that a message shows the value, then names the cure, without line break or full stop."""
    wrong, cure = message.split("; ", maxsplit=1)
    assert value in wrong
    assert cure.startswith("give ")
    assert not re.search(r"\n|\. |\.$", message)


# ---- variants


def test_each_form_of_a_variant():
    assert parse_variants("X,L+S,194M@0.6,0.5@1,1200000@0", DENSE) == [
        Variant("X"),
        Variant("L+S"),
        Variant("194M@0.6", 194_000_000, 0.6),
        Variant("0.5@1", 194_000_000, 1.0),
        Variant("1200000@0", 1_200_000, 0.0),
    ]


def test_a_budget_alone_is_a_size_of_an_elastic_folder_and_energy_a_budget_without_kappa():
    assert parse_variants("194M,0.5,194M@energy", DENSE) == [
        Variant("194M", 194_000_000, stored=True),
        Variant("0.5", 194_000_000, stored=True),
        Variant("194M@energy", 194_000_000),
    ]


def test_both_ways_to_cut_take_the_head_too():
    assert parse_variants("194M@energy+head,194M@0.6+head", DENSE) == [
        Variant("194M@energy+head", 194_000_000, head=True),
        Variant("194M@0.6+head", 194_000_000, 0.6, head=True),
    ]


def test_what_is_cut_can_be_fitted_and_what_is_whole_stays():
    assert [variant.fitted(20, True) for variant in parse_variants("X,L+S,0.5@energy", DENSE)] == [
        Variant("X"),
        Variant("L+S"),
        Variant("0.5@energy", 194_000_000, None, 20, True),
    ]


def test_spaces_around_names_are_not_part_of_them_and_order_stays():
    assert [variant.name for variant in parse_variants(" L+S , X,\t194M@0.6 ", DENSE)] == ["L+S", "X", "194M@0.6"]


@pytest.mark.parametrize("name", ["", "x", "L + S", "S+L", "M194", "-0.5", "X;L+S", "nonsense"])
def test_an_unknown_variant_is_one_sentence_naming_all_forms(name):
    with pytest.raises(UserError) as error:
        parse_variants(f"X,{name}", DENSE)
    assert str(error.value) == (
        f"variant {name!r} is unknown; give X, L+S, BUDGET@KAPPA such as 194M@0.6, 194M@energy, either with +head, "
        "or 194M of an elastic folder"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X@0.5", "'X'"),
        ("@0.5", "''"),
        ("194M@", "''"),
        ("194M@high", "'high'"),
        ("194M@0.6+tail", "'0.6+tail'"),
        ("194M@+head", "''"),
        ("194M@1.5", "1.5"),
        ("0@0.5", "'0'"),
    ],
)
def test_a_variant_with_a_wrong_half_names_that_half(name, value):
    with pytest.raises(UserError) as error:
        parse_variants(name, DENSE)
    assert_one_sentence(str(error.value), value)


# ---- counts and budgets


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("10M", 10_000_000),
        ("10m", 10_000_000),
        ("1.2M", 1_200_000),
        ("46.3M", 46_300_000),
        ("1.3B", 1_300_000_000),
        ("1.3b", 1_300_000_000),
        ("512K", 512_000),
        ("0.5k", 500),
        ("194000000", 194_000_000),
        ("1e6", 1_000_000),
        ("1", 1),
    ],
)
def test_counts(text, count):
    assert parse_count(text) == count
    assert isinstance(parse_count(text), int)


@properties
@given(st.integers(1, 999_999), st.sampled_from([("", 0), ("K", 3), ("M", 6), ("B", 9)]))
def test_a_count_with_three_decimals_is_exact_in_every_unit(thousandths, unit):
    letter, power = unit
    count = Fraction(thousandths, 1000) * 10**power
    if count.denominator == 1:
        assert parse_count(f"{thousandths // 1000}.{thousandths % 1000:03d}{letter}") == count


@pytest.mark.parametrize(
    "text", ["", "M", "ten", "10MM", "10G", "1,2M", "10 000", "nan", "inf", "-infM", "nanK", "1e999"]
)
def test_a_count_that_is_no_number_is_one_sentence(text):
    with pytest.raises(UserError, match=r"^count .* is (no number|not finite); give a number such as 10M") as error:
        parse_count(text)
    assert_one_sentence(str(error.value), repr(text))


@pytest.mark.parametrize("text", ["0", "-1", "0M", "-3K", "-0.0"])
def test_a_count_that_is_not_above_zero_is_one_sentence(text):
    with pytest.raises(UserError, match="is less than 1") as error:
        parse_count(text)
    assert_one_sentence(str(error.value), repr(text))


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("194M", 194_000_000),
        ("1.2M", 1_200_000),
        ("194000000", 194_000_000),
        ("0.5", 194_000_000),
        ("0.25", 97_000_000),
        ("1", DENSE),
        ("1.0", DENSE),
        ("1e-1", 38_800_000),
        ("2", 2),  # above 1 a number is a count
        ("0.5M", 500_000),  # whatever has a unit is a count
        ("1K", 1000),
    ],
)
def test_a_budget_is_a_count_or_up_to_one_a_fraction_of_the_dense_model(text, budget):
    assert parse_budget(text, DENSE) == budget
    assert isinstance(parse_budget(text, DENSE), int)


@properties
@given(st.integers(1, 1000), st.integers(1000, 10**10))
def test_a_fraction_is_that_part_of_the_dense_model_to_the_nearest_parameter(thousandths, dense):
    exact = Fraction(thousandths, 1000) * dense
    assert abs(parse_budget(str(thousandths / 1000), dense) - exact) <= Fraction(1, 2) + Fraction(1, 10**4)


@pytest.mark.parametrize("text", ["", "half", "50%", "194X", "nan", "inf", "0,5"])
def test_a_budget_that_is_no_number_is_one_sentence(text):
    with pytest.raises(UserError, match=r"^budget .* is (no number|not finite); give .*194M.*0\.5$") as error:
        parse_budget(text, DENSE)
    assert_one_sentence(str(error.value), repr(text))


@pytest.mark.parametrize("text", ["0", "-0.5", "-194000000", "0M", "-1B"])
def test_a_budget_that_is_not_above_zero_is_one_sentence(text):
    with pytest.raises(UserError, match="is less than 1") as error:
        parse_budget(text, DENSE)
    assert_one_sentence(str(error.value), repr(text))


def test_budgets_come_the_largest_first_and_none_twice():
    assert parse_budgets("144M, 194M,0.5, 300000000,0.25", DENSE) == [300_000_000, 194_000_000, 144_000_000, 97_000_000]
    assert parse_budgets("1M", DENSE) == [1_000_000]


@pytest.mark.parametrize(("text", "value"), [("", "''"), ("194M,", "''"), ("194M,high", "'high'"), ("194M,-1", "'-1'")])
def test_a_wrong_budget_in_a_list_is_one_sentence(text, value):
    with pytest.raises(UserError) as error:
        parse_budgets(text, DENSE)
    assert_one_sentence(str(error.value), value)


# ---- kappa


@pytest.mark.parametrize(("text", "kappa"), [("0", 0.0), ("1", 1.0), ("0.6", 0.6), ("1e-3", 0.001), (" 0.5 ", 0.5)])
def test_a_kappa(text, kappa):
    assert parse_kappa(text) == kappa


@pytest.mark.parametrize("text", ["1.01", "-0.1", "2", "1e9"])
def test_a_kappa_out_of_range_is_one_sentence(text):
    with pytest.raises(UserError, match=r" is outside \[0, 1\]; ") as error:
        parse_kappa(text)
    assert_one_sentence(str(error.value), text)


@pytest.mark.parametrize("text", ["", "half", "0,5", "nan", "inf"])
def test_a_kappa_that_is_no_number_is_one_sentence(text):
    with pytest.raises(UserError, match=r"give a number from 0 to 1$") as error:
        parse_kappa(text)
    assert_one_sentence(str(error.value), repr(text))


@pytest.mark.parametrize(
    ("text", "kappas"),
    [
        ("0.5", [0.5]),
        ("0.2,0.5", [0.2, 0.5]),
        ("0.5, 0.2", [0.5, 0.2]),
        ("0:1:0.1", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1]),
        ("0:1:0.25", [0, 0.25, 0.5, 0.75, 1]),
        ("0.3:0.9:0.2", [0.3, 0.5, 0.7, 0.9]),
        ("0:1:0.3", [0, 0.3, 0.6, 0.9]),  # the last value is not reached in whole steps
        ("0.4:0.4:0.1", [0.4]),
        ("0:1:2", [0]),
    ],
)
def test_kappas_are_a_list_or_a_range_of_the_decimals_one_would_write(text, kappas):
    assert parse_kappas(text) == kappas


@properties
@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 1000))
def test_a_range_holds_each_step_from_the_first_to_the_last_exactly(first, width, step):
    last = min(first + width, 1000)
    expected = [k / 1000 for k in range(first, last + 1, step)]
    assert parse_kappas(f"{first / 1000}:{last / 1000}:{step / 1000}") == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0:1", "'0:1'"),
        ("0:1:0.1:2", "'0:1:0.1:2'"),
        ("0:1:0", "'0:1:0'"),
        ("0:1:-0.1", "'0:1:-0.1'"),
        ("1:0:0.1", "'1:0:0.1'"),
        ("0:1:x", "'x'"),
        ("0:1:inf", "'inf'"),
        ("0:1:", "''"),
        ("0:2:0.1", "2"),
        ("a:1:0.1", "'a'"),
        ("0.2,,0.5", "''"),
        ("0.2,1.5", "1.5"),
        ("", "''"),
    ],
)
def test_kappas_that_are_none_are_one_sentence(text, value):
    with pytest.raises(UserError) as error:
        parse_kappas(text)
    assert_one_sentence(str(error.value), value)
