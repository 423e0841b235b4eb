"""Files whose SHA-256 is computed while they are written, so that gigabytes need not be read again for it."""

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

_APART = 2**18  # bytes from which it is worth hashing in another thread while the disk writes
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
    """A new binary file and context manager, at whose end the content is on the disk; a thread hashes long writes.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self._file, self._hash, self._pool = path.open("wb"), hashlib.sha256(), ThreadPoolExecutor(1)
        self._failed: OSError | None = None

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the file; flush its content to the disk unless the context ended with an error.

        Raises:
            OSError: that of the first write that failed, which `torch.save` hides behind an error about positions.
        """
        self._pool.shutdown()
        with self._file:
            if self._failed:
                raise self._failed
            if kind is None:
                self._file.flush()
                os.fsync(self._file.fileno())

    def write(self, data: bytes | memoryview) -> int:
        """Append bytes and return their number."""
        hashing = self._pool.submit(self._hash.update, data) if len(data) >= _APART else self._hash.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self._failed = self._failed or error
            raise
        finally:
            if hashing:
                hashing.result()

    def flush(self) -> None:
        """Do nothing: the content is flushed at the end of the context."""

    @property
    def digest(self) -> str:
        """SHA-256 of what was written so far, in hexadecimal."""
        return self._hash.hexdigest()


def write_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None) -> str:
    """Write a safetensors file; the tensors are copied to the CPU one at a time.

    Args:
        tensors: name → tensor, on any device.
        path: the file.
        metadata: text entries for the `__metadata__` of the header.

    Returns:
        SHA-256 of the file, in hexadecimal.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    # The widest dtypes first, so that every number lies at a multiple of its size.
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    for name in names:
        tensor = tensors[name]
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [place, place := place + tensor.nbytes],
        }
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)  # the format aligns the data to eight bytes
    with HashedFile(path) as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for name in names:
            content = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(memoryview(content.numpy()))
    return file.digest
