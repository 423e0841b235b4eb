"""The dense weight of a factored layer, which refuses to be written to."""

from typing import Any

import torch
from torch import Tensor

from salaad.common.errors import UserError


class ComputedWeight(Tensor):
    """A dense weight computed from U, V and S, which can be read but not written.

    A change in place, such as merging an adapter, would be lost, since every access computes the weight anew.
    """

    _is_hf_initialized = True  # so that transformers does not initialize it

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return plain tensors from operations that read; refuse an operation that writes into such a weight.

        Raises:
            UserError: the operation writes into the weight.
        """
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__")
        written = args[0] if args else (kwargs or {}).get("tensor")  # torch.nn.init gives the keyword
        if (writes or name in _WRITING) and isinstance(written, ComputedWeight):
            raise UserError(
                "this weight is computed from U, V and S, so nothing can be written into it; call model.dequantize() "
                "first, or change U, V and S_values"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func == Tensor.data.__get__ else result


_WRITING = {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow"))}
