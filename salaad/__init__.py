"""SALAAD: pretrain a language model whose weights are drawn towards low-rank plus sparse, deploy it at any size."""

import importlib
from typing import Any

import salaad.factored  # noqa: F401  enters the folder formats into transformers' registry: from_pretrained opens them
from salaad.compression.in_memory import compress
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.plugin import Salaad

# Compression lies above the methods, which import nothing of it: the class gets this verb where the two come together.
Salaad.compress = compress

_LATER = {"SalaadCallback": "salaad.methods.salaad.trainer_callback"}  # what takes long to import, and few need

__all__ = ["Salaad", "SalaadCallback", "SalaadConfig"]


def __getattr__(name: str) -> Any:
    """Import what is asked for by its name."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
