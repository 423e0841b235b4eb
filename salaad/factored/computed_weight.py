"""The dense weight of a factored layer, which refuses to be written to."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from salaad.common.errors import UserError

REFUSED = (
    "this weight is computed from U, V and S, so nothing can be written into it; call model.dequantize() first, change "
    "U, V and S_values, or write into its clone()"
)


class ComputedWeight(Tensor):
    """A dense weight computed from U, V and S, which can be read but not written.

    A change in place, such as merging an adapter, would be lost, since every access computes the weight anew.
    """

    _is_hf_initialized = True  # so that transformers does not initialize it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, but refuse an operation that writes into such a weight; views of one are such weights, too.

        Raises:
            UserError: the operation writes into the weight.
        """
        kwargs = kwargs or {}
        if any(isinstance(tensor, ComputedWeight) for tensor in _written(func, args, kwargs)):
            raise UserError(REFUSED)
        if func == Tensor.__iter__:  # its rows would be plain tensors
            return iter(args[0].unbind())
        with torch._C.DisableTorchFunctionSubclass():
            result = args[0].detach().clone() if func == Tensor.__deepcopy__ else func(*args, **kwargs)
        if func in (Tensor.as_subclass, Tensor.__deepcopy__):
            return result
        if type(result) in (tuple, list):  # as from chunk
            return type(result)(_as_view(part, args) for part in result)
        return _as_view(result, args)


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What an operation writes into: its first argument, if it works in place, and `out`."""
    name, written = getattr(func, "__name__", ""), []
    in_place = name.endswith("_") and not name.endswith("__") and name != "requires_grad_"
    if in_place or name in _WRITING or kwargs.get("inplace"):
        first = args[0] if args else kwargs.get("tensor")  # torch.nn.init gives the keyword
        written += first if isinstance(first, list | tuple) else [first]
    out = kwargs.get("out")
    return [*written, *(out if isinstance(out, list | tuple) else [out])]


def _as_view(result: Any, args: Sequence[Any]) -> Any:
    """Return a tensor that shares memory with a weight among `args` as such a weight, and anything else as it is."""
    if type(result) is Tensor and not torch.compiler.is_compiling():  # which cannot trace the question
        for given in args:
            if isinstance(given, ComputedWeight) and torch._C._is_alias_of(result, given):
                return result.as_subclass(ComputedWeight)
    return result


_WRITING = {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow"))}
