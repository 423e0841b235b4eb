"""The methods by name: `--method` takes every registered name, and a section of that name has the method's settings."""

from dataclasses import fields

from salaad.config.command_line import TrainOptions
from salaad.config.methods import SETTINGS
from salaad.config.run import RunConfig
from salaad.methods.base import Method
from salaad.methods.cola import Cola
from salaad.methods.full_rank import FullRank
from salaad.methods.galore import Galore
from salaad.methods.lora import Lora
from salaad.methods.loro import Loro
from salaad.methods.lost import Lost
from salaad.methods.matformer import Matformer
from salaad.methods.relora import Relora
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.sltrain import Sltrain

_METHODS: dict[str, type[Method]] = {
    "full_rank": FullRank,
    "salaad": SalaadMethod,
    "lora": Lora,
    "relora": Relora,
    "galore": Galore,
    "loro": Loro,
    "cola": Cola,
    "sltrain": Sltrain,
    "lost": Lost,
    "matformer": Matformer,
}


def register(name: str, method: type[Method]) -> None:
    """Let `--method name` train with `method`.

    Raises:
        ValueError: the name belongs to a method, an option or a section of every configuration, or is no identifier.
    """
    taken = {*_METHODS, *dir(RunConfig()), *(field.name for field in fields(TrainOptions)), "config"}
    if name in taken or not name.isidentifier():
        raise ValueError(f"a method cannot be called {name!r}; give a name of letters that means nothing else here")
    _METHODS[name], SETTINGS[name] = method, method.Settings


def method_of(config: RunConfig) -> type[Method]:
    """Return the class of the method that `config` names."""
    return _METHODS[config.method]
