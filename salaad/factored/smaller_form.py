"""Which form of a block is smaller, U·V + S or dense, and how many bytes it takes.

The position of an entry of S takes a few bits in a file and 16 or 32 in memory. So a block may be smaller as U·V + S in
a file and smaller dense in memory: it is stored as U·V + S, and becomes dense when the folder is opened. An opened
model is saved in the form that it has in memory, so its file may be larger; compress.py writes a folder anew in the
form that is smaller in a file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from math import prod
from typing import Literal

import torch
from torch import nn

from salaad.factored import int8, packing
from salaad.factored.slr import Slr
from salaad.factored.slr_weight import SlrWeight

Numbers = Literal["float", "int8"]
_for_file: ContextVar[Numbers | None] = ContextVar("_for_file", default=None)


@contextmanager
def form_for_file(numbers: Numbers) -> Iterator[None]:
    """Context manager in which blocks take the form that is smaller in a file with such numbers, not in memory."""
    token = _for_file.set(numbers)
    try:
        yield
    finally:
        _for_file.reset(token)


def takes_dense_form(block: Slr | SlrWeight, element: int) -> bool:
    """Whether a block with numbers of `element` bytes takes no fewer bytes as U·V + S than dense.

    Bytes are counted in memory, on a layer's own device or else on the CPU; within `form_for_file`, in a file. A layer
    with an activation between its factors has no dense form.
    """
    if isinstance(block, SlrWeight) and block.activation is not None:
        return False
    numbers = _for_file.get()
    in_parts = _bytes_in_parts(block, element) if numbers is None else _packed_bytes(block, element, numbers)
    return in_parts >= prod(block.shape) * element


def memory_bytes(slr: Slr, element: int) -> int:
    """Bytes of a block in memory in its smaller form, with numbers of `element` bytes."""
    return min(_bytes_in_parts(slr, element), prod(slr.shape) * element)


def disk_bytes(slr: Slr, element: int) -> int:
    """Bytes of a block in a file in its smaller form, with numbers of `element` bytes."""
    return min(_packed_bytes(slr, element, "float"), prod(slr.shape) * element)


def resident_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers in memory, row starts and columns included."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


def opened_bytes(model: nn.Module) -> int:
    """Bytes that a model will take in memory after it is saved and opened again on its present device."""
    layers = (layer for layer in model.modules() if isinstance(layer, SlrWeight) and layer.activation is None)
    in_parts = {layer: _bytes_in_parts(layer, 0) for layer in layers}
    spared = (max(0, size - prod(layer.shape) * layer.U.element_size()) for layer, size in in_parts.items())
    return resident_bytes(model) - sum(spared)


def _numbers(block: Slr | SlrWeight) -> int:
    return block.rank * sum(block.shape) + block.nnz


def _bytes_in_parts(block: Slr | SlrWeight, element: int) -> int:
    """Bytes of a block as U·V + S in memory, with row starts and columns; for a layer as it is, without its bias."""
    if isinstance(block, SlrWeight):
        bias = getattr(block, "bias", None)
        return resident_bytes(block) - (0 if bias is None else bias.nbytes)
    return _numbers(block) * element + 4 * (block.nnz + max(block.shape) + 1)


def _packed_bytes(block: Slr | SlrWeight, element: int, numbers: Numbers) -> int:
    """Bytes of a block as U·V + S in a file."""
    places = packing.encoded_size(block.nnz, prod(block.shape))
    if numbers == "float":
        return _numbers(block) * element + places
    with torch.device("meta"):
        tensors = int8.outlines(*block.shape, block.rank, block.nnz).values()
    return places + sum(tensor.nbytes for tensor in tensors)
