"""Processes that read text ahead of the trainer, and the error if one of them ends."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from salaad.common.errors import UserError

GRACE = 60  # seconds after which a worker obeys SIGTERM


class Workers:
    """The items of all workers in turn: for each step one of worker 0, one of worker 1, ….

    The unexpected end of a worker is raised when the next item is requested. torch's handler would raise at once,
    wherever the trainer is, even in the middle of a checkpoint.

    Args:
        dataset: yields the items of one worker.
        count: number of worker processes; with 0 the items are computed in this process.

    Raises:
        UserError: the system refuses more processes.
    """

    def __init__(self, dataset: IterableDataset, count: int) -> None:
        loader = DataLoader(
            dataset,
            batch_size=None,
            num_workers=count,
            collate_fn=_identity,
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # a loader draws a seed, which must not advance the run's generator
            # Where a program or a newer Python starts processes otherwise, each would import everything again.
            multiprocessing_context="fork" if count and sys.platform == "linux" else None,
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
            UserError: a worker has ended.
        """
        # If a worker is killed while it sends an item, the trainer waits for the rest until it gets this signal.
        with _on_child(self._require_all) if self._processes else contextlib.nullcontext():
            self._require_all()
            try:
                return next(self._items)
            except RuntimeError:  # torch turns an exception during its wait into this one
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
        """End the workers; one that is stuck, such as in a wait for the hub, is killed after some seconds."""
        self._items = iter(())  # deletes the loader's iterator, which asks the workers to end and waits for a while
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []


@contextlib.contextmanager
def _on_child(handler: Any) -> Iterator[None]:
    """Context manager that sets the handler of SIGCHLD and restores the earlier one, whatever was set inside."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield
        return
    before = signal.signal(signal.SIGCHLD, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def _identity(item: object) -> object:
    return item


@contextlib.contextmanager
def _quiet_fork() -> Iterator[None]:
    """Let forked workers tokenise in one thread; otherwise the tokenizers library warns at every fork."""
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


def _ignore_interrupts(worker: int) -> None:
    """Keep a worker alive after a signal to the whole process group, until the trainer has saved.

    Other signals are ignored. SIGTERM is obeyed after `GRACE` seconds, since torch also uses it to end a worker
    that is stuck.
    """
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(GRACE))
