"""`save_pretrained` and `save_model` whose files of weights are hashed while they are written.

Both hand their tensors to `save_file` of safetensors. Within `hashed_saves` they hand them to ours, which writes the
same bytes.
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
    """Within this context, name in the folder → SHA-256, of the files of weights that were written into it so far."""
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
