"""The collective calls between ranks; the only module that makes calls of torch.distributed directly.

At world size 1, every operation is the identity. Sums and broadcasts of tensors use the launcher's process group, whose
timeout allows for a rank that waits for its text (`training.launch.patience`). Calls that may wait for a rank's disk or
network (`barrier`, `gather` and the functions built on them: "meetings") use a group of their own, which waits for
hours while each waiting rank prints which ranks are absent. Presence is noted in a store that the launcher keeps; if
the launcher has died, the ranks wait without a message and the run still saves.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar

import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.distributed_c10d import _get_default_store as _default_store
from torch.nn.parallel import DistributedDataParallel

from salaad.common.errors import NotSavedError, UserError

T = TypeVar("T")
PATIENCE = 6 * 3600  # seconds that ranks wait for a rank that uses its disk or network
TOLD_AFTER = 60.0  # seconds of waiting between two messages
_BUCKET = 2**25  # bytes that are averaged or sent at once
_meetings = 0  # number of meetings so far, the same on every rank


def world_size() -> int:
    """Number of ranks; 1 when nothing was launched."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """This process's rank, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def machines() -> int:
    """Number of machines that the ranks run on; 1 when nothing was launched."""
    return from_environment("GROUP_WORLD_SIZE", 1)


def from_environment(name: str, default: T, read: Callable[[str], T] | None = None) -> T:
    """Return what a launcher, or a user in its place, has set in the environment; `read` is by default its type.

    Raises:
        UserError: the value cannot be read.
    """
    value = os.environ.get(name)
    try:
        return default if value is None else (read or type(default))(value)
    except ValueError:
        kind = "true or false" if isinstance(default, bool) else "a number"
        raise UserError(f"{name} is {value!r} in the environment, but has to be {kind}; correct or unset it") from None


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel, torch.compile or several of them."""
    wrappers = (DistributedDataParallel, nn.DataParallel)
    while isinstance(module, wrappers) or hasattr(module, "_orig_mod"):
        module = module.module if isinstance(module, wrappers) else module._orig_mod
    return module


def has_flat_weights(model: nn.Module) -> bool:
    """Whether a module is in FullyShardedDataParallel or DeepSpeed, which train flat copies spread over processes."""
    # By name, as the import of the first class takes half a second, and the second may not be installed.
    wrappers = {"FullyShardedDataParallel", "DeepSpeedEngine"}
    is_wrapped = any(type(module).__name__ in wrappers for module in model.modules())
    return is_wrapped or any(hasattr(p, "ds_id") for p in model.parameters())  # which marks weights of DeepSpeed ZeRO-3


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is spread over processes, of which each holds a part."""
    return hasattr(tensor, "device_mesh")  # a DTensor, whose import takes half a second


@cache
def _patient(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a CPU group of all ranks of `world` with the timeout `PATIENCE`; the first call is collective."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE))


@cache
def _presence(world: dist.ProcessGroup) -> dist.Store:
    """Return the store of who came to which meeting; it has its own connection, as making a group occupies another."""
    return dist.PrefixStore("salaad", _default_store().clone())


def _note(entry: str, present: bool) -> None:
    """Write an entry "MEETING/RANK" into the store or delete it; do nothing if the store ended with the launcher."""
    with suppress(dist.DistError):
        store = _presence(dist.group.WORLD)
        if present:
            store.set(entry, "")
        else:
            store.delete_key(entry)


def _tell(meeting: int, over: threading.Event) -> None:
    """Print every `TOLD_AFTER` seconds for which ranks this one waits, until the meeting is over."""
    waited = 0.0
    while not over.wait(TOLD_AFTER):
        waited += TOLD_AFTER
        with suppress(dist.DistError):
            store = _presence(dist.group.WORLD)
            absent = [other for other in range(world_size()) if not store.check([f"{meeting}/{other}"])]
            if absent and not over.is_set():
                more = f" and {len(absent) - 3} more" if len(absent) > 3 else ""
                names = ", ".join(map(str, absent[:3]))
                print(f"rank {rank()} has waited {waited:.0f} s for rank {names}{more}", file=sys.stderr, flush=True)


@contextmanager
def _meeting() -> Iterator[dist.ProcessGroup]:
    """Context manager for one collective call on the patient group; a rank that waits in it prints for whom."""
    global _meetings
    _meetings += 1
    meeting, over = _meetings, threading.Event()
    _note(f"{meeting}/{rank()}", present=True)
    teller = threading.Thread(target=_tell, args=(meeting, over), daemon=True)
    teller.start()
    try:
        yield _patient(dist.group.WORLD)  # in the first meeting, making the group waits for all ranks
    finally:
        over.set()
        teller.join()
    _note(f"{meeting - 1}/{rank()}", present=False)  # all ranks have left the previous meeting


def barrier() -> None:
    """Wait until every rank has called this."""
    if world_size() > 1:
        with _meeting() as group:
            dist.barrier(group)


@contextmanager
def first_on_its_machine(is_first: bool) -> Iterator[None]:
    """Let the ranks that are first on their machines through this context before the others."""
    if not is_first:
        barrier()
    yield
    if is_first:
        barrier()


def all_sum(values: Tensor) -> Tensor:
    """Sum `values` over the ranks, in place, on every rank."""
    if world_size() > 1:
        dist.all_reduce(values)
    return values


def broadcast(values: Tensor, owner: int) -> Tensor:
    """Fill `values`, which may lie in memory in another order than the owner's, in place, on every rank."""
    if world_size() > 1:
        sent = values.contiguous()  # backends send the memory as it lies
        dist.broadcast(sent, owner)
        if sent is not values:
            values.copy_(sent)
    return values


def broadcast_all(values: Sequence[Tensor], owner: int) -> None:
    """Fill all of `values` with the owner's, in place, on every rank; many at once."""
    if world_size() > 1 and values:
        dist._broadcast_coalesced(dist.group.WORLD, [value.detach() for value in values], _BUCKET, owner)


def gather(value: Any) -> list[Any]:
    """Every rank's `value`, in rank order, on every rank; small Python objects only."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    with _meeting() as group:
        dist.all_gather_object(values, value, group)
    return values


def first_decides(action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone and return its result on every rank; its UserError is raised on every rank."""
    result, problem = None, None
    if rank() == 0:
        try:
            result = action()
        except UserError as error:
            problem = error
    raise_first(problem)
    return gather(result)[0]


def raise_first(problem: UserError | None) -> None:
    """Raise on every rank the problem of the first rank that has one."""
    problems = [found for found in gather(problem) if found is not None]
    if problems:
        raise problems[0]


def together(action: Callable[[], T], only: int | None = None) -> list[T]:
    """Run `action`, which exchanges nothing with other ranks, on every rank, or on rank `only` alone; collective.

    Returns:
        What every rank's action returned, in rank order, on every rank; small Python objects only.

    Raises:
        NotSavedError: on every rank, if the action failed on any by an error of a disk or of memory or a UserError.
    """
    result, problem = None, None
    try:
        if only in (None, rank()):
            result = action()
    except (OSError, RuntimeError, MemoryError, SafetensorError, UserError) as error:  # SafetensorError is no OSError
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    results, problems = zip(*gather((result, problem)), strict=True)
    for found in problems:
        if found is not None:
            raise NotSavedError(found)
    return list(results)


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Replace each gradient by its mean over the ranks, in the gradient's own dtype; many at once."""
    if world_size() == 1:
        return
    for bucket in _buckets([parameter.grad for parameter in parameters]):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat)
        for gradient, mean in zip(bucket, _unflatten_dense_tensors(flat.div_(world_size()), bucket), strict=True):
            gradient.copy_(mean)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the tensors in order, in lists of one dtype that have up to `_BUCKET` bytes or hold one larger tensor."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        size = sum(one.nbytes for one in bucket) + tensor.nbytes
        if bucket and (size > _BUCKET or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def exclude_from_averaging(module: nn.Module, parameters: Iterable[nn.Parameter]) -> None:
    """Exclude parameters from the averaging of a DistributedDataParallel that will wrap `module`."""
    chosen = {id(parameter) for parameter in parameters}
    named = module.named_parameters(remove_duplicate=False)  # DDP asks for a tied weight by each of its names
    names = [name for name, parameter in named if id(parameter) in chosen]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
