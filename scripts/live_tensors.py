"""The peak bytes of tensors that a piece of work needs, on top of those that exist before."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def most_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Return the peak bytes that `work` adds to those held: by the allocator on a GPU, else of live tensors."""
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    with LiveTensors() as tensors:
        work()
    return tensors.peak


class LiveTensors(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live tensors made by operations (`now`), and their peak (`peak`)."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()
        before = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        for storage in (tensor.untyped_storage() for tensor in before if tensor.device.type != "meta"):
            # Once this storage is freed, a new one may have its address.
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._known.discard, storage._cdata)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its new storages until they are freed."""
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size
