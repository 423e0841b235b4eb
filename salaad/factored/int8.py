"""Numbers stored as int8, with one float scale per row.

A singular term of U·V has a scale for its column of U and one for its row of V; of S's entries, in the order in which
they are stored, every `GROUP` share a scale.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128
NAMES = tuple(
    f"{x}_{kind}" for kind in ("int8", "scales") for x in "UVS"
)  # of the tensors that hold U, V and S's values
_LARGEST = 127


def groups(count: int) -> int:
    """The number of scales that `count` entries of S take."""
    return -(-count // GROUP)


def encode(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize rows (k×g) to int8 (k×g) with scales (k, float32); a number is off by half a scale at most."""
    rows = rows.float()
    largest = rows.abs().amax(1) if rows.shape[1] else rows.new_zeros(len(rows))
    scales = torch.where(largest > 0, largest / _LARGEST, 1.0)
    return (rows / scales[:, None]).round().to(torch.int8), scales


def decode(numbers: Tensor, scales: Tensor) -> Tensor:
    """The rows (k×g) that `encode` quantized, in the dtype of the scales."""
    return (numbers.float() * scales.float()[:, None]).to(scales.dtype)


def encode_entries(values: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize entries of S (nnz) to int8 with one scale per group; the last group may be short."""
    whole = F.pad(values, (0, groups(len(values)) * GROUP - len(values)))
    numbers, scales = encode(whole.view(-1, GROUP))
    return numbers.flatten()[: len(values)], scales


def decode_entries(numbers: Tensor, scales: Tensor) -> Tensor:
    """The entries (nnz) that `encode_entries` quantized, in the dtype of the scales."""
    whole = F.pad(numbers, (0, len(scales) * GROUP - len(numbers)))
    return decode(whole.view(-1, GROUP), scales).flatten()[: len(numbers)]


def holds(stored: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> bool:
    """Whether the tensors of `NAMES` decode to these U, V and S_values, within two roundings in their dtype.

    So it is with parts that were read from int8, since `encode` restores scales up to a rounding, and zeros exactly.
    """
    decoded = decode_parts(stored)
    return all(_equal(decoded[name], part) for name, part in parts.items())


def _equal(decoded: Tensor, part: Tensor) -> bool:
    coarser = max((torch.finfo(kind.dtype) for kind in (decoded, part)), key=lambda kind: kind.eps)
    # A scale below the normal numbers of float16 is off by half of the least one, and its numbers by up to 127 times.
    least = 128 * coarser.smallest_normal * coarser.eps
    return bool(((decoded - part).abs() <= 2 * coarser.eps * part.abs().float() + least).all())


def outlines(n: int, m: int, rank: int, nnz: int) -> dict[str, Tensor]:
    """Name → uninitialized tensor, for all of `NAMES`, of an n×m matrix U·V + S in a file."""
    numbers = (torch.empty(shape, dtype=torch.int8) for shape in ((rank, n), (rank, m), (nnz,)))
    scales = map(torch.empty, (rank, rank, groups(nnz)))
    return dict(zip(NAMES, (*numbers, *scales), strict=True))


def decode_parts(stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name of a parameter → U (n×r), V (r×m) and S_values (nnz), those whose tensors of `NAMES` are given."""
    found = {}
    if "U_int8" in stored:
        found["U"] = decode(stored["U_int8"], stored["U_scales"]).mT.contiguous()
    if "V_int8" in stored:
        found["V"] = decode(stored["V_int8"], stored["V_scales"])
    if "S_int8" in stored:
        found["S_values"] = decode_entries(stored["S_int8"], stored["S_scales"])
    return found
