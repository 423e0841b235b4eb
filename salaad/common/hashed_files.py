"""Files whose SHA-256 is known when they are written, so that nobody reads gigabytes again to find it out."""

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

_APART = 2**18  # bytes from which hashing beside the disk is worth handing over to another thread
_NAMES = {  # dtype → its name in safetensors
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class HashedFile:
    """A new binary file, a context at whose end its content is on the disk; another thread hashes what is written.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._hash, self._pool = path.open("wb"), hashlib.sha256(), ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        """This object."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Bring the content to the disk, unless writing it has failed."""
        self._pool.shutdown()
        with self._file:
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes."""
        if len(data) < _APART:
            self._hash.update(data)
            return self._file.write(data)
        hashing = self._pool.submit(self._hash.update, data)
        try:
            return self._file.write(data)
        finally:
            hashing.result()

    def flush(self) -> None:
        """Nothing: the end of the context does it."""

    @property
    def digest(self) -> str:
        """SHA-256 of what was written so far, in hexadecimal."""
        return self._hash.hexdigest()


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file, one tensor after the other through the memory of the CPU.

    Args:
        tensors: name → tensor, on any device.
        path: the file.
        metadata: what else its header says.

    Returns:
        SHA-256 of the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    # The widest first, so that every number lies at a multiple of its size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place := place + tensor.nbytes],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format wants numbers at multiples of eight bytes
    with HashedFile(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(content.numpy()))
    return file.digest
