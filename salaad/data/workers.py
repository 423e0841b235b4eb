"""Processes that read ahead of the trainer, and how their end is noticed."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from salaad.common.errors import UserError

GRACE = 60  # seconds a worker outlives a request to end


class Workers:
    """Items of all workers in turn: worker 0's for the first step, worker 1's for it, …, then the second step's.

    A worker that ends by itself is told when the next item is asked for. torch would raise at that very moment,
    wherever the trainer is then, be it in the middle of a checkpoint.

    Args:
        dataset: gives the items of one worker.
        count: how many there are; 0 gives the items of one in this process.

    Raises:
        UserError: the system refuses more processes.
    """

    def __init__(self, dataset: IterableDataset, count: int) -> None:
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=count,
            collate_fn=_as_it_is,
            worker_init_fn=_leave_interrupts_to_the_trainer,
            generator=torch.Generator(),  # a loader draws a seed, which must not come from the run's own generator
        )
        others = multiprocessing.active_children()
        try:
            with _quiet_fork(), _on_child(signal.SIG_DFL):
                self._items = iter(loader)
        except OSError as error:
            raise UserError(
                f"data.workers {count} processes cannot be started ({error.strerror}); give fewer, or 0 for none"
            ) from error
        self._processes = [child for child in multiprocessing.active_children() if child not in others]

    def __next__(self) -> Any:
        """The next item.

        Raises:
            UserError: a worker is gone.
        """
        # A worker killed while it hands over an item leaves the trainer waiting for the rest, until the signal comes.
        with _on_child(self._require_all) if self._processes else contextlib.nullcontext():
            self._require_all()
            try:
                return next(self._items)
            except RuntimeError:  # torch's own, into which it turns whatever comes while it waits
                self._require_all()
                raise

    def _require_all(self, signum: int = 0, frame: FrameType | None = None) -> None:
        for process in self._processes:
            if not process.is_alive():
                code = process.exitcode
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                raise UserError(
                    f"a process that reads training text (pid {process.pid}) {how}, as happens when memory runs out; "
                    f"go on with --resume auto, and where memory is short with fewer data.workers or a smaller "
                    f"data.shuffle_window"
                )

    def close(self) -> None:
        """End them; one that is stuck, such as in a long wait for the hub, within seconds."""
        self._items = iter(())  # the loader's own end: it asks, and waits for a while
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


@contextlib.contextmanager
def _on_child(handler: Any) -> Iterator[None]:
    """Another handler for the end of a child, or whoever sets one inside, for as long as this lasts."""
    if threading.current_thread() is not threading.main_thread():  # which alone may set handlers
        yield
        return
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def _as_it_is(item: object) -> object:
    return item


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Workers inherit that they tokenise in one thread; otherwise the tokenizers library warns at every fork."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _leave_interrupts_to_the_trainer(worker: int) -> None:
    """A signal to the whole process group must not take the workers before the trainer has saved.

    Ctrl-C is none of a worker's business. SIGTERM may also be the trainer's own way to end a worker that is stuck, so
    it is obeyed, but late.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
