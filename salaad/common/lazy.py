"""Names of a package that are imported when they are first asked for, as their modules take long to import."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def later(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a `__getattr__` for `package` that imports the names of `names` (name → its module) on demand."""

    def __getattr__(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(names[name]), name)

    return __getattr__
