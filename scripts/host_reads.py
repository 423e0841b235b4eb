"""How often the host waits for a device, counted on the CPU by the operations that would make it wait.

On the CPU host and device share one memory, so a tensor counts as on the host by its origin: made without a device
being named, moved by `cpu()` or `to("cpu")`, or computed from such tensors alone. All others count as on the device.
The object `DEVICE` stands for the device, and is the `device` of its tensors; any other object equal to it is the host.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

DEVICE = torch.device("cpu")

aten = torch.ops.aten
# They bring a value to the host, or return a shape that depends on values.
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.equal, aten._unique2, aten.is_nonzero}
# They wait inside to check whether they have converged.
CHECKED = {aten._linalg_eigh, aten._linalg_svd, aten._linalg_check_errors, aten.linalg_inv_ex}
MAKING = ("tensor", "as_tensor", "from_numpy", "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint")
WAITS = ((torch.cuda, "synchronize"), (torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"))
GROUPING = "_group_tensors_by_device_and_dtype"
_LONG_AGO = -1  # the step of a host tensor that there is no need to wait for


class HostReads(TorchDispatchMode):
    """Dispatch mode that counts the operations that make the host wait for a device.

    A copy with `non_blocking` is counted when its values are read: under `count` if it was enqueued in the current
    step, else under `earlier`. `next_step` begins a step.

    Attributes:
        count: reads of a value, of many at once (`tolist`, `numpy`, copies to the host), shapes that depend on values,
            and waits for an event, a stream or the whole device.
        earlier: reads of copies that an earlier step enqueued.
        decompositions: calls of a vendor's eigensolver or SVD, which wait inside for their error code.
        uploads: tensors made from numbers on the host, which would be copied to the device.
        operators: counts of all operations, by name.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count = self.earlier = self.decompositions = self.uploads = 0
        self.operators = Counter()
        self._step = 0
        self._on_host = WeakTensorKeyDictionary()  # host tensor → the step in which its copy was enqueued
        self._patches = ExitStack()

    @property
    def total(self) -> int:
        """The number of all operations."""
        return self.operators.total()

    def put_on_host(self, *tensors: Tensor) -> None:
        """Mark tensors as made on the host before counting began."""
        self._place(tensors, _LONG_AGO)

    def next_step(self) -> None:
        """Begin another step, to which all copies enqueued from now on belong."""
        self._step += 1

    def __enter__(self) -> "HostReads":
        # Patches, since a TorchFunctionMode sees nothing inside gradient hooks: `backward` is itself such a function.
        on_host = self._on_host

        def set_(owner: Any, name: str, value: Any) -> None:
            self._patches.enter_context(patch.object(owner, name, value))

        for name in ("tolist", "numpy"):
            set_(Tensor, name, self._looking(getattr(Tensor, name)))
        set_(Tensor, "to", self._moving(Tensor.to))
        set_(Tensor, "cpu", lambda tensor: tensor.to("cpu"))
        set_(Tensor, "device", property(lambda tensor: torch.device("cpu") if tensor in on_host else DEVICE))
        for name in MAKING:
            set_(torch, name, self._making(getattr(torch, name)))
        # By these groups torch itself moves a tensor to the device of others.
        set_(torch._C, GROUPING, self._grouping(getattr(torch._C, GROUPING)))
        for owner, name in WAITS:
            set_(owner, name, self._waiting(getattr(owner, name)))
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet, kwargs = func.overloadpacket, kwargs or {}
        self.operators[packet.__name__] += 1
        self.uploads += packet is aten.lift_fresh
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if packet is aten.copy_:
            self.count += args[0] in self._on_host and args[1] not in self._on_host
            return func(*args, **kwargs)
        masks = [index for index in args[1] if index is not None] if packet in (aten.index, aten.index_put_) else []
        unknown = any(mask.dtype in (torch.bool, torch.uint8) for mask in masks)
        unknown |= packet is aten.repeat_interleave and kwargs.get("output_size") is None
        if packet in WAITING or unknown:
            self._look(*given)
        if packet in CHECKED:
            self.decompositions += not all(tensor in self._on_host for tensor in given)
        made = func(*args, **kwargs)
        if given:
            known = [self._on_host.get(tensor) for tensor in given]
            self._place(made, None if None in known else max(known))
        return made

    def _look(self, *tensors: Tensor) -> None:
        """Count a read by the host of values of these tensors."""
        known = [self._on_host.get(tensor) for tensor in tensors]
        if None in known or self._step in known:
            self.count += 1
        elif any(step != _LONG_AGO for step in known):
            self.earlier += 1

    def _place(self, made: Any, enqueued: int | None) -> None:
        """Mark tensors as on the host, copied there in the step `enqueued`, or as on the device if it is None."""
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._on_host.pop(tensor, None)
                if enqueued is not None:
                    self._on_host[tensor] = enqueued

    def _looking(self, method: Callable) -> Callable:
        """Wrap a tensor method that hands all values to the host, which on the CPU is no operation."""

        def look(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self._look(tensor)
            with _disable_current_modes():
                return method(tensor, *args, **kwargs)

        return look

    def _moving(self, method: Callable) -> Callable:
        """Wrap `to`, so that a move to the host or to the device makes a new tensor, and the host's wait is counted."""

        def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            moved = method(tensor, *args, **kwargs)
            kwargs.pop("copy", None)
            place, _, waits_not, _ = torch._C._nn._parse_to(*args, **kwargs)
            if place is None or place.type != "cpu":
                return moved
            named = kwargs.get("device", args[0] if args else None)
            to_host = (named.device if isinstance(named, Tensor) else named) is not DEVICE
            if to_host == (tensor in self._on_host):
                return moved
            if moved is tensor:
                with _disable_current_modes():
                    moved = tensor.clone()
            self.count += to_host and not waits_not
            self._place(moved, None if not to_host else self._step if waits_not else _LONG_AGO)
            return moved

        return to

    def _making(self, function: Callable) -> Callable:
        """Wrap a function that makes a tensor, on the host unless a device is named."""

        def make(*args: Any, **kwargs: Any) -> Tensor:
            made = function(*args, **kwargs)
            if kwargs.get("device") in (None, "cpu") and all(made is not value for value in args):
                self._place(made, _LONG_AGO)
            return made

        return make

    def _grouping(self, function: Callable) -> Callable:
        """Wrap a function that groups tensors by device and dtype; none are on the host, so all get `DEVICE`."""

        def group(*args: Any) -> dict:
            return {(DEVICE, dtype): tensors for (_, dtype), tensors in function(*args).items()}

        return group

    def _waiting(self, function: Callable) -> Callable:
        """Wrap a function that waits for the device, and count its calls."""

        def wait(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return function(*args, **kwargs)

        return wait
