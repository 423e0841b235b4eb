"""`save_pretrained` and `save_model` with weight files that are hashed while they are written.

Both functions call `save_file` of safetensors. Within `hashed_saves` they call a function of ours instead, which writes
the same bytes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import safetensors.torch
from torch import Tensor
from transformers import modeling_utils

from salaad.common.hashed_files import write_tensors

_SAVES = ((modeling_utils, "safe_save_file"), (safetensors.torch, "save_file"))


@contextmanager
def hashed_saves(folder: Path) -> Iterator[dict[str, str]]:
    """Context manager that yields name in `folder` → SHA-256 of the weight files written so far within the context."""
    hashed: dict[str, str] = {}

    def save(tensors: Mapping[str, Tensor], path: str, metadata: Mapping[str, str] | None = None) -> None:
        hashed[str(Path(path).relative_to(folder))] = write_tensors(tensors, Path(path), metadata)

    before = [getattr(module, name) for module, name in _SAVES]
    try:
        for module, name in _SAVES:
            setattr(module, name, save)
        yield hashed
    finally:
        for (module, name), function in zip(_SAVES, before, strict=True):
            setattr(module, name, function)
