"""The dense weight of a factored layer, which refuses to be written to."""

from typing import Any

import torch
from torch import Tensor

from salaad.common.errors import UserError


class ComputedWeight(Tensor):
    """A dense weight that was made of U, V and S: to be read, not to be written.

    An adapter merged into it, or any other change in place, would be gone with it.
    """

    _is_hf_initialized = True  # so that transformers leaves it alone

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Plain results for plain operations; an operation that writes into this tensor is refused.

        Raises:
            UserError: it is.
        """
        name = getattr(func, "__name__", "")
        writes = name.endswith("_") and not name.endswith("__")
        written = args[0] if args else (kwargs or {}).get("tensor")  # the latter of torch.nn.init
        if (writes or name in _WRITING) and isinstance(written, ComputedWeight):
            raise UserError(
                "this weight is computed from U, V and S, so nothing can be written into it; call model.dequantize() "
                "first, or change U, V and S_values"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(cls) if func == Tensor.data.__get__ else result


_WRITING = {"__setitem__", "__set__", *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "matmul", "pow"))}
