"""Hooks that do not keep alive what they belong to: one on a weight would be in a cycle that Python cannot free."""

import weakref
from collections.abc import Callable
from typing import Any

from torch.utils.hooks import RemovableHandle

_on_steps: list[tuple[weakref.WeakMethod, RemovableHandle]] = []


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls the bound `method` while its object exists, and holds no strong reference to it."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        if (found := reference()) is not None:
            found(*arguments)

    return call


def on_steps(
    register: Callable[[Callable[..., None]], RemovableHandle], method: Callable[..., None]
) -> RemovableHandle:
    """Let `register` add a hook on the steps of all optimizers that calls the bound `method` while its object exists.

    The hooks of objects that are gone are removed here and not when an object goes: that may be while torch, calling
    one hook after another, relies on their dictionary to stay as it is.
    """
    known = _on_steps.copy()
    _on_steps.clear()
    for reference, handle in known:
        if reference() is None:
            handle.remove()
        else:
            _on_steps.append((reference, handle))
    handle = register(weakly(method))
    _on_steps.append((weakref.WeakMethod(method), handle))
    return handle
