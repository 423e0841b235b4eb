"""Increasing integers in a few bits each (Elias–Fano coding), as the positions of S's entries are stored.

The low bits of every integer are stored as they are, and the high bits in unary, as the steps from one integer to the
next. n integers below N take about 2 + log2(N/n) bits each: 5 bits at a density of 0.1, where a column index takes 16.
"""

import numpy as np


def _split(count: int, universe: int) -> tuple[int, int]:
    """The number of low bits of an integer, and the bytes of all high bits together."""
    low = max(0, (universe // count).bit_length() - 1) if count else 0
    return low, -(-(count + (universe >> low) + 1) // 8) if count else 0


def encoded_size(count: int, universe: int) -> int:
    """The number of bytes that `encode` returns for `count` integers below `universe`."""
    low, high_bytes = _split(count, universe)
    return high_bytes + -(-count * low // 8)


def encode(integers: np.ndarray, universe: int) -> np.ndarray:
    """The code (uint8) of strictly increasing `integers`, from 0 and below `universe`."""
    low, high_bytes = _split(len(integers), universe)
    high = np.zeros(8 * high_bytes, np.uint8)
    high[(integers >> low) + np.arange(len(integers))] = 1
    bits = (integers[:, None] >> np.arange(low)) & 1
    return np.concatenate([np.packbits(array.astype(np.uint8), bitorder="little") for array in (high, bits.ravel())])


def decode(encoded: np.ndarray, count: int, universe: int) -> np.ndarray:
    """The `count` integers (int64) below `universe` that were encoded.

    Raises:
        ValueError: the bytes are not the code of so many increasing integers.
    """
    low, high_bytes = _split(count, universe)
    if len(encoded) != encoded_size(count, universe):
        raise ValueError(f"{len(encoded)} bytes cannot hold {count} integers below {universe}")
    ones = np.flatnonzero(np.unpackbits(encoded[:high_bytes], bitorder="little"))
    if len(ones) != count:
        raise ValueError(f"the bytes hold {len(ones)} integers, not {count}")
    integers = (ones - np.arange(count)) << low
    bits = np.unpackbits(encoded[high_bytes:], count=count * low, bitorder="little").reshape(count, low)
    for i in range(low):
        integers |= bits[:, i].astype(np.int64) << i
    if count and (integers[-1] >= universe or (np.diff(integers) <= 0).any()):
        raise ValueError(f"the bytes do not hold increasing integers below {universe}")
    return integers
