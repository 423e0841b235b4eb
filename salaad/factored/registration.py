"""The registration of both folder formats with transformers, made when transformers imports the modules to change.

The formats are entered in the registry of quantizers. `from_pretrained` passes an argument that it does not know to the
configuration if that has an attribute of this name, and otherwise to the model's class, which fails on it; so `budget`
is taken out of the arguments where the configuration is made from config.json. It is left there where it is not ours:
where the architecture, or the config.json of a folder of another format, has a setting of this name. A configuration
that is given to `from_pretrained` must have its size already: `config = AutoConfig.from_pretrained(folder, budget=…)`.

Some methods of models know dense layers only, and ask the model's quantizer first if it is ours. Importing transformers
takes seconds, and so does importing our classes: neither is imported with this module.
"""

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from inspect import signature
from types import ModuleType
from typing import Any

from salaad.common.errors import UserError
from salaad.model.folder_formats import ANY_SIZE, FIXED_SIZE, format_name, is_any_size

ASKED = "_asked_budget"  # the attribute of a configuration that holds the size to open
OPENED_DENSE = "_opened_dense"  # the attribute of a model without a quantizer that holds methods of ours
_METHODS = ("save_pretrained", "resize_token_embeddings", "dequantize")
# `format_name` of a folder's `quant_method` → module, class of the entry in config.json, class of the quantizer.
_FORMATS = {
    "salaad": ("salaad.factored.fixed_size", "SlrConfig", "SlrQuantizer"),
    "salaad-elastic": ("salaad.factored.any_size", "ElasticConfig", "ElasticQuantizer"),
}


class _Later:
    """A stand-in for a class, which is imported when it is called or one of its attributes is read."""

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
    """An import hook that changes one module after its import, and then removes itself."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self.name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, whose loader applies the change after the import; None for other modules."""
        if fullname != self.name:
            return None
        others = (finder for finder in sys.meta_path if not isinstance(finder, _AfterImport))
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:  # a module may be searched for without being imported
                sys.meta_path.remove(self)
                self._change(module)

        spec.loader.exec_module = exec_module
        return spec


def _enter_formats(registry: ModuleType) -> None:
    for method in (*_FORMATS, FIXED_SIZE, ANY_SIZE):
        module, entry, quantizer = _FORMATS[format_name(method)]
        registry.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _Later(module, entry)
        registry.AUTO_QUANTIZER_MAPPING[method] = _Later(module, quantizer)


def _take_budgets(configurations: ModuleType) -> None:
    usual = configurations.PreTrainedConfig.from_dict.__func__

    @wraps(usual)
    def from_dict(cls: type, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Return the configuration in a config.json, with the budget that `from_pretrained` was given."""
        any_size = is_any_size(config_dict.get("quantization_config"))
        own_setting = "budget" in signature(cls.__init__).parameters or ("budget" in config_dict and not any_size)
        asked = None if own_setting else kwargs.pop("budget", None)
        if asked is not None and not any_size:
            raise UserError(
                f"budget {asked} is asked of a folder that holds one size; leave it out, or give a folder that was "
                "written with --elastic"
            )
        made = usual(cls, config_dict, **kwargs)
        if asked is not None:
            config = made[0] if kwargs.get("return_unused_kwargs") else made
            setattr(config, ASKED, str(asked))  # as a number of NumPy would not be written into config.json
        return made

    configurations.PreTrainedConfig.from_dict = classmethod(from_dict)


def _ask_ours_first(models: ModuleType) -> None:
    for name in _METHODS:
        setattr(models.PreTrainedModel, name, _asking(getattr(models.PreTrainedModel, name)))


def _asking(usual: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of models that calls `own_…` of the model's quantizer, or of `OPENED_DENSE`, if there is one.

    It is a method of the class, as one set on a model would refer to the model, which would not be freed at once.
    """

    @wraps(usual)
    def method(model: Any, *args: Any, **kwargs: Any) -> Any:
        holder = getattr(model, "hf_quantizer", None) or getattr(model, OPENED_DENSE, None)
        own = getattr(holder, f"own_{usual.__name__}", None)
        return usual(model, *args, **kwargs) if own is None else own(usual, model, *args, **kwargs)

    return method


_CHANGES: dict[str, Callable[[ModuleType], None]] = {
    "transformers.configuration_utils": _take_budgets,
    "transformers.modeling_utils": _ask_ours_first,
    "transformers.quantizers.auto": _enter_formats,
}


def register() -> None:
    """Let `from_pretrained` open both formats: at once, or as soon as transformers imports the modules concerned."""
    waiting = {finder.name for finder in sys.meta_path if isinstance(finder, _AfterImport)}
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
        elif name not in waiting:
            sys.meta_path.insert(0, _AfterImport(name, change))
