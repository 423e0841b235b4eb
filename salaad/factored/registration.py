"""Both folder formats in transformers' registry of quantizers, entered when transformers itself first makes it.

Making that registry takes seconds, and so do the classes that are entered: neither is imported with this module, but
when a folder is opened.
"""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from salaad.model.folder_formats import ANY_SIZE, FIXED_SIZE, format_name

_REGISTRY = "transformers.quantizers.auto"
# The `quant_method` in config.json without the cure, as earlier versions wrote it → module, its entry, its quantizer.
_FORMATS = {
    "salaad": ("salaad.factored.fixed_size", "SlrConfig", "SlrQuantizer"),
    "salaad-elastic": ("salaad.factored.any_size", "ElasticConfig", "ElasticQuantizer"),
}


class _Later:
    """A class that is imported when it is called, or something of it is asked for."""

    def __init__(self, module: str, name: str) -> None:
        self._place = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found()(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found(), name)

    def _found(self) -> type:
        module, name = self._place
        return getattr(import_module(module), name)


class _AfterImport(MetaPathFinder):
    """Enters the formats when the registry is imported, and is then taken out of the way."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _enter(module)

        spec.loader.exec_module = exec_module
        return spec


def _enter(registry: ModuleType) -> None:
    for method in (*_FORMATS, FIXED_SIZE, ANY_SIZE):
        module, entry, quantizer = _FORMATS[format_name(method)]
        registry.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _Later(module, entry)
        registry.AUTO_QUANTIZER_MAPPING[method] = _Later(module, quantizer)


def register() -> None:
    """Let `from_pretrained` open both formats, now or as soon as transformers can."""
    if _REGISTRY in sys.modules:
        _enter(sys.modules[_REGISTRY])
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport())
