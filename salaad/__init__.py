"""SALAAD: pretrain a language model whose weights are drawn towards low-rank plus sparse, deploy it at any size."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import salaad.factored  # noqa: F401  registers the folder formats with transformers, so that from_pretrained opens them
from salaad.common.lazy import later
from salaad.config.methods import SalaadConfig

if TYPE_CHECKING:
    from salaad.methods.salaad.plugin import Salaad
    from salaad.methods.salaad.suggest import suggest
    from salaad.methods.salaad.trainer_callback import SalaadCallback

__all__ = ["Salaad", "SalaadCallback", "SalaadConfig", "suggest"]

_find = later(
    __name__,
    {
        "Salaad": "salaad.methods.salaad.plugin",
        "SalaadCallback": "salaad.methods.salaad.trainer_callback",
        "suggest": "salaad.methods.salaad.suggest",
    },
)


def __getattr__(name: str) -> Any:
    """Import and return a public name whose module takes long to import."""
    found = _find(name)
    import_module("salaad.compression.in_memory")  # gives Salaad its `compress`
    return found


def __dir__() -> list[str]:
    """Return the public names, also those that are not imported yet."""
    return __all__
