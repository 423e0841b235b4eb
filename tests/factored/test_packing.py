"""Elias–Fano: round trips, its size against the bound of the literature, its bytes read bit by bit, broken bytes."""

from math import log2

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from salaad.factored.packing import decode, encode, encoded_size

properties = settings(deadline=None, max_examples=150)


@st.composite
def sets(draw) -> tuple[np.ndarray, int]:
    """A strategy for increasing integers and the universe they are below: empty, full, sparse, dense, up to 2⁴⁰."""
    universe = draw(st.integers(1, 300) | st.integers(1, 2**40))
    most = min(universe, 60)
    chosen = draw(st.sets(st.integers(0, universe - 1), max_size=most))
    if universe <= 300 and draw(st.booleans()):
        chosen = set(range(universe)) - chosen
    return np.array(sorted(chosen), np.int64), universe


def low_bits(count: int, universe: int) -> int:
    """⌊log2(N/n)⌋ for N = universe and n = count, by integer arithmetic."""
    low = 0
    while count << (low + 1) <= universe:
        low += 1
    return low


def bits_of(data: np.ndarray) -> list[int]:
    return [byte >> i & 1 for byte in data.tolist() for i in range(8)]


EDGES = [
    (np.arange(0), 10),
    (np.arange(10), 10),
    (np.arange(64), 64),
    (np.array([0]), 1),
    (np.array([0]), 2**40),
    (np.array([2**40 - 1]), 2**40),
    (np.array([6]), 7),
    (np.array([2**31 - 2, 2**31 - 1, 2**31]), 2**31 + 1),
    (np.arange(1, 1000, 7), 1000),
]


@properties
@given(sets())
def test_what_was_encoded_comes_back_as_int64(case):
    integers, universe = case
    decoded = decode(encode(integers, universe), len(integers), universe)
    assert decoded.dtype == np.int64
    np.testing.assert_array_equal(decoded, integers)


@pytest.mark.parametrize(("integers", "universe"), EDGES)
def test_the_edges_come_back(integers, universe):
    encoded = encode(integers, universe)
    assert encoded.dtype == np.uint8
    assert len(encoded) == encoded_size(len(integers), universe)
    assert decode(encoded, len(integers), universe).tolist() == integers.tolist()


def test_32_bit_integers_come_back():
    integers = np.array([0, 5, 2**31 - 1], np.int32)
    assert decode(encode(integers, 2**31), 3, 2**31).tolist() == [0, 5, 2**31 - 1]


@properties
@given(sets())
def test_the_size_is_known_beforehand(case):
    integers, universe = case
    assert len(encode(integers, universe)) == encoded_size(len(integers), universe)


@properties
@given(st.integers(1, 2**40), st.data())
@example(1, None)
@example(2**31, None)
def test_an_integer_takes_two_bits_and_the_logarithm_of_the_mean_step(universe, data):
    count = data.draw(st.integers(1, universe)) if data is not None else universe
    # With N/n = 2^(l+f), 0 ≤ f < 1, the high bits are at most n + N/2^l + 1 = n·(1 + 2^f) + 1 and the low bits n·l;
    # 2^f ≤ 1 + f there by convexity, so both are at most n·(2 + log2(N/n)) + 1, and each rounds up by at most 7 bits.
    assert 8 * encoded_size(count, universe) <= count * (2 + log2(universe / count)) * (1 + 1e-12) + 15


def test_no_integers_take_no_bytes():
    assert [encoded_size(0, universe) for universe in (0, 1, 10**9)] == [0, 0, 0]


def test_a_density_of_a_tenth_takes_about_five_bits():
    assert 5 < 8 * encoded_size(10**6, 10**7) / 10**6 < 5.5


@properties
@given(sets())
def test_the_bytes_read_bit_by_bit_are_the_high_bits_in_unary_steps_and_the_low_bits_as_they_are(case):
    integers, universe = case
    if not len(integers):
        return
    count, low = len(integers), low_bits(len(integers), universe)
    encoded = encode(integers, universe)
    tail = -(-count * low // 8)
    high, high_bits = 0, []
    for bit in bits_of(encoded[: len(encoded) - tail]):
        high += 1 - bit
        high_bits += [high] if bit else []
    rest = bits_of(encoded[len(encoded) - tail :])
    low_parts = [sum(rest[i * low + k] << k for k in range(low)) for i in range(count)]
    assert [(h << low) + part for h, part in zip(high_bits, low_parts, strict=True)] == integers.tolist()
    assert not any(rest[count * low :])


# ---- broken bytes


@properties
@given(sets(), st.integers(-3, 3).filter(bool))
def test_bytes_cut_short_or_with_more_behind_them_are_refused(case, change):
    integers, universe = case
    encoded = encode(integers, universe)
    broken = np.concatenate([encoded, np.zeros(change, np.uint8)]) if change > 0 else encoded[:change]
    if len(broken) != len(encoded):
        with pytest.raises(ValueError, match="bytes cannot hold"):
            decode(broken, len(integers), universe)


@properties
@given(sets(), st.data())
def test_one_wrong_bit_among_the_high_bits_is_always_seen(case, data):
    integers, universe = case
    if not len(integers):
        return
    encoded = encode(integers, universe)
    tail = -(-len(integers) * low_bits(len(integers), universe) // 8)
    bit = data.draw(st.integers(0, 8 * (len(encoded) - tail) - 1))
    encoded[bit // 8] ^= 1 << bit % 8
    with pytest.raises(ValueError, match="the bytes "):
        decode(encoded, len(integers), universe)


@properties
@given(st.integers(0, 40), st.integers(0, 200), st.data())
def test_random_bytes_are_refused_or_are_so_many_increasing_integers(count, universe, data):
    size = encoded_size(count, universe)
    raw = np.frombuffer(data.draw(st.binary(min_size=size, max_size=size)), np.uint8)
    try:
        integers = decode(raw, count, universe).tolist()
    except ValueError:
        return
    assert len(integers) == count
    assert integers == sorted(set(integers))
    assert all(0 <= integer < universe for integer in integers)


def test_integers_out_of_order_or_twice_are_refused():
    for integers in ([1, 0], [2, 2], [0, 3, 2, 3]):
        # Their high bits agree, so that only the low bits are out of order.
        encoded = encode(np.array(integers), 64)
        with pytest.raises(ValueError, match="increasing"):
            decode(encoded, len(integers), 64)


def test_an_integer_at_or_above_the_universe_is_refused():
    assert encoded_size(2, 9) == encoded_size(2, 10)
    with pytest.raises(ValueError, match="below 9"):
        decode(encode(np.array([3, 9]), 10), 2, 9)


def test_more_integers_than_there_are_below_the_universe_are_refused():
    full = encode(np.arange(5), 5)
    assert len(full) == encoded_size(5, 4)
    with pytest.raises(ValueError, match="increasing integers below 4"):
        decode(full, 5, 4)
