"""How often the host waits for a device, counted on the CPU by the operations that would make it wait."""

from collections import Counter

import torch
from pytest import MonkeyPatch
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
        read: the tensors of which a single value was read.
    """

    def __init__(self):
        super().__init__()
        self.count = self.decompositions = self.uploads = 0
        self.operators = Counter()
        self.read = []
        self._patch = MonkeyPatch()

    @property
    def total(self) -> int:
        """All operations."""
        return self.operators.total()

    def __enter__(self):
        # A mode of torch's functions would see nothing of the hooks of gradients: `backward` is such a function itself.
        for name in ("tolist", "numpy", "cpu", "to"):
            self._patch.setattr(torch.Tensor, name, self._counting(name))
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._patch.undo()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet, kwargs = func.overloadpacket, kwargs or {}
        self.operators[packet.__name__] += 1
        masks = [index for index in args[1] if index is not None] if packet in (aten.index, aten.index_put_) else []
        self.count += packet in WAITING or any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)
        self.count += packet is aten.repeat_interleave and kwargs.get("output_size") is None
        self.decompositions += packet in CHECKED
        if packet is aten._local_scalar_dense:
            self.read.append(args[0])
        self.uploads += packet is aten.lift_fresh
        return func(*args, **kwargs)

    def _counting(self, name):
        """A method of tensors that takes a whole one to the host, which on the CPU is no operation."""
        method = getattr(torch.Tensor, name)

        def counted(tensor, *args, **kwargs):
            before = self.count
            result = method(tensor, *args, **kwargs)
            to_host = name != "to" or any(isinstance(value, str) and value == "cpu" for value in args)
            self.count = before + 1 if to_host else self.count
            return result

        return counted
