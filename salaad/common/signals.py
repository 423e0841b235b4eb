"""What the ranks tell each other at every step without waiting: tokens, a request to stop, numbers gone wrong."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from salaad.common.errors import Stopped

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of prctl


def follow_launcher() -> None:
    """Let the launcher's end be a SIGTERM: with one process it passes none on, and would leave a training behind."""
    if sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ:
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)


class StopRequest:
    """SIGTERM or Ctrl-C asks for a stop after the step; another one two seconds later ends the process at once.

    Not sooner, because a scheduler may signal the whole group and the launcher pass its own signal on.
    """

    def __init__(self) -> None:
        self.asked = False
        self._when = 0.0
        self._process = os.getpid()
        self._waiting = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, _: FrameType | None) -> None:
        # A data worker inherits this handler when it is forked, but has nothing to finish.
        again = self.asked and time.monotonic() - self._when > 2
        if again or os.getpid() != self._process:
            os._exit(128 + number)
        if not self.asked:
            self.asked, self._when = True, time.monotonic()
            if self._waiting:
                raise Stopped

    @contextmanager
    def ends_waiting(self) -> Iterator[None]:
        """Within this context a request raises `Stopped` at once: for a wait whose end nobody needs then."""
        if self.asked:
            raise Stopped
        self._waiting = True
        try:
            yield
        finally:
            self._waiting = False
