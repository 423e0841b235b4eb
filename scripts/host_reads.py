"""How often the host waits for a device, counted on the CPU by the operations that would make it wait."""

from collections import Counter

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
# A value on the host, or a shape that depends on values.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.is_nonzero}
# They look inside whether they have converged.
CHECKED = {aten._linalg_eigh, aten._linalg_svd, aten._linalg_check_errors, aten.linalg_inv_ex}


class HostReads(TorchDispatchMode):
    """Counts the operations that make the host wait for a device.

    Attributes:
        count: reads of a value, of many at once (`tolist`, `numpy`, `cpu`), and shapes that depend on values.
        decompositions: calls of a vendor's eigensolver or SVD, which wait inside for their error code.
        uploads: tensors made of numbers of the host, which would be copied to the device.
        operators: all operations, by name.
    """

    def __init__(self):
        super().__init__()
        self.count = self.decompositions = self.uploads = 0
        self.operators = Counter()
        self._copies = _Copies(self)

    @property
    def total(self) -> int:
        """All operations."""
        return self.operators.total()

    def __enter__(self):
        self._copies.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet, kwargs = func.overloadpacket, kwargs or {}
        self.operators[packet.__name__] += 1
        masks = [index for index in args[1] if index is not None] if packet in (aten.index, aten.index_put_) else []
        self.count += packet in WAITING or any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)
        self.count += packet is aten.repeat_interleave and kwargs.get("output_size") is None
        self.decompositions += packet in CHECKED
        self.uploads += packet is aten.lift_fresh
        return func(*args, **kwargs)


class _Copies(TorchFunctionMode):
    """Counts what takes a whole tensor to the host, which on the CPU is no operation."""

    def __init__(self, reads: HostReads):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name, before = getattr(func, "__name__", ""), self.reads.count
        result = func(*args, **(kwargs or {}))
        away = name == "to" and any(isinstance(value, str) and value == "cpu" for value in args[1:])
        if name in ("tolist", "numpy", "cpu") or away:
            self.reads.count = before + 1
        return result
