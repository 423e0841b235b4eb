"""Hooks that do not keep alive what they belong to: one on a weight would be in a cycle that Python cannot free."""

import weakref
from collections.abc import Callable
from typing import Any


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls the bound `method` while its object exists, and holds no strong reference to it."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (found := reference()) is not None:
            found(*arguments)

    return call
