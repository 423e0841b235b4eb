"""Requests to stop, by SIGTERM, SIGUSR1, SIGHUP or Ctrl-C."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from salaad.common.errors import Stopped


class StopRequest:
    """A request to stop after the current step: SIGTERM, SIGUSR1, SIGHUP or Ctrl-C.

    Schedulers send SIGUSR1 ahead of the time limit, and the end of a terminal sends SIGHUP, unless nohup has it
    ignored. A second signal more than two seconds later ends the process at
    once. One within two seconds does not: a scheduler may signal the whole group and the launcher pass its signal on.
    As a context manager it listens until the end of the context, and signals then do again what they did before.
    """

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0
        self._process = os.getpid()
        self._waiting = False
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # no other thread may set signal handlers
            ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, *(() if ignored else (signal.SIGHUP,))):
                self._before[number] = signal.signal(number, self._handle)

    def __enter__(self) -> Self:
        """Return this object."""
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Put back the handlers that were set before."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # A data worker inherits this handler when it is forked, but has no step to finish.
        again = self.asked and time.monotonic() - self._when > 2
        if again or os.getpid() != self._process:
            os._exit(128 + number)
        if not self.asked:
            self.asked, self._when = True, time.monotonic()
            if self._waiting:
                raise Stopped

    @contextmanager
    def ends_waiting(self) -> Iterator[None]:
        """Context manager for a wait: a request raises `Stopped` at once, as the result of the wait is not needed."""
        if self.asked:
            raise Stopped
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
