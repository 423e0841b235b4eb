"""The tensors of an elastic folder: units of every range of sizes, written whole, and read as far as a size needs.

The first range holds, for each block NAME,

    elastic.NAME.U (r × n), .V (r × m)                its singular terms, one per row, the highest value first
    elastic.NAME.S_values (nnz), .S_places (nnz × b)  the entries of S, the highest value first, and their row-major
                                                      positions in b bytes each, the lowest byte first

and `elastic.line` (levels × blocks × 2), the counts of its queue of units (`salaad.energy_allocation.UnitQueue`). The
i-th range of smaller sizes holds the same under `elastic.i.`, and under `elastic.i.fitted.` the vectors of the model
that were fitted with its units. Positions in this order take more bytes than increasing ones, so the folder is larger
than one of a fixed size with the same units.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from salaad.common.errors import UserError
from salaad.energy_allocation import UnitQueue
from salaad.factored.slr import Slr, position_dtype
from salaad.model.weight_headers import BYTES, FLOATS, INTEGERS, Headers

_WHOLE = "give a whole copy of the folder"


class SizeRange(NamedTuple):
    """A range of sizes with units of its own.

    Args:
        parts: block → its units, in the order in which sizes take them.
        queue: the order of the units of all blocks.
        vectors: name → norm or bias of the model that was fitted with these units.
        below: the range serves sizes below this number of parameters of the whole model; None for the first range.
    """

    parts: Mapping[str, Slr]
    queue: UnitQueue
    vectors: Mapping[str, Tensor] = MappingProxyType({})
    below: int | None = None

    def stored(self, index: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors that store this range as the `index`-th of a folder, with numbers in `dtype`."""
        names, tensors = _Names(index), {}
        for block, slr in self.parts.items():
            slr = slr.to("cpu", dtype)
            units = {"U": slr.U.mT, "V": slr.V, "S_values": slr.values, "S_places": _to_bytes(slr.positions, slr.shape)}
            tensors |= {names.unit(block, key): tensor for key, tensor in units.items()}
        if index:
            tensors |= {names.vector(name): vector.to("cpu", dtype) for name, vector in self.vectors.items()}
        # Copies, as transformers refuses to save tensors that share memory, and units of two ranges may.
        copied = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        return copied | {names.line: self.queue.counts.int()}


class ElasticFile:
    """The units in a folder's safetensors files, of which only the slices asked for are read."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self._tensors = tensors

    @classmethod
    @contextmanager
    def opened(cls, files: Sequence[str | Path]) -> Iterator["ElasticFile"]:
        """Context manager that opens the files of a folder and reads only their headers."""
        slices = {}
        with ExitStack() as stack:
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                slices |= {key: file.get_slice(key) for key in file.keys() if key.startswith("elastic.")}  # noqa: SIM118
            yield cls(slices)

    def unit_counts(self, index: int) -> Tensor:
        """Read the counts of the queue of units of a range (levels × blocks × 2)."""
        line = _Names(index).line
        counts = self._tensors.get(line)
        if counts is None or len(counts.get_shape()) != 3:
            raise UserError(f"the files hold no {line} of levels × blocks × 2; {_WHOLE}")
        return counts[:]

    def units(self, index: int, block: str, shape: Sequence[int], rank: int, nnz: int) -> Slr:
        """Read the first `rank` singular terms and `nnz` entries of a block of a range, in the dtype of the file.

        Raises:
            UserError: a position is outside the matrix or listed twice.
        """
        name = _Names(index).unit
        U, V = (self._tensors[name(block, key)][:rank] for key in "UV")
        values, places = (self._tensors[name(block, key)][:nnz] for key in ("S_values", "S_places"))
        slr = Slr(tuple(shape), U.mT.contiguous(), V, _from_bytes(places, shape), values)
        if not slr.is_sound():
            raise UserError(f"{name(block, 'S_places')} names places twice or outside; {_WHOLE}")
        return slr

    def vector(self, index: int, name: str) -> Tensor:
        """Read a norm or bias that was fitted with the units of a range."""
        return self._tensors[_Names(index).vector(name)][:]


def expected_units(index: int, block: str, sizes: Sequence[int]) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name → shape and possible dtypes of the tensors of a range's block of `sizes` (n, m, rank, nnz)."""
    n, m, rank, nnz = sizes
    shapes = {"U": (rank, n), "V": (rank, m), "S_values": (nnz,), "S_places": (nnz, _width((n, m)))}
    name = _Names(index).unit
    return {name(block, key): (shape, BYTES if key == "S_places" else FLOATS) for key, shape in shapes.items()}


def expected_line(index: int, blocks: int, headers: Headers) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name → shape and possible dtypes of the counts of a range's queue, which may have any number of levels."""
    line = _Names(index).line
    levels = headers[line].shape[:1] if line in headers else ()
    return {line: ((*levels, blocks, 2), INTEGERS)}


def expected_vector(index: int, name: str, vector: Tensor) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Name → shape and possible dtypes of a vector that was fitted with a range."""
    return {_Names(index).vector(name): (tuple(vector.shape), FLOATS)}


class _Names:
    """The names of the tensors of a range."""

    def __init__(self, index: int) -> None:
        self._prefix = f"elastic.{index}." if index else "elastic."
        self.line = f"{self._prefix}line"

    def unit(self, block: str, key: str) -> str:
        return f"{self._prefix}{block}.{key}"

    def vector(self, name: str) -> str:
        return f"{self._prefix}fitted.{name}"


def _to_bytes(positions: Tensor, shape: tuple[int, int]) -> Tensor:
    """Positions (nnz) in as few bytes each as n·m needs (nnz × b, uint8), the lowest byte first."""
    return ((positions.long()[:, None] >> (8 * torch.arange(_width(shape)))) & 255).to(torch.uint8)


def _width(shape: Sequence[int]) -> int:
    """The number of bytes of a position in a matrix of this shape."""
    n, m = shape
    return -(-max(1, (n * m - 1).bit_length()) // 8)


def _from_bytes(positions: Tensor, shape: Sequence[int]) -> Tensor:
    whole = (positions.long() << (8 * torch.arange(positions.shape[1]))).sum(1)
    # A position outside the matrix has to stay outside when the narrower dtype cannot hold it.
    return whole.clamp(max=shape[0] * shape[1]).to(position_dtype(*shape))
