"""How often the state of long work is saved."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

_SHARE = 0.05  # of the time, at the most, goes into saving


class SavePace:
    """Says when to save next: after some time, but so rarely that saving takes a twentieth of all time at the most.

    Args:
        seconds: shortest time from the end of a save to the begin of the next.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds, self._wait, self._since = seconds, seconds, time.monotonic()

    def is_due(self) -> bool:
        """Whether it is time to save."""
        return time.monotonic() - self._since > self._wait

    @contextmanager
    def save(self) -> Iterator[None]:
        """Context manager around a save, whose length decides when the next is due."""
        begin = time.monotonic()
        yield
        self._since = time.monotonic()
        self._wait = max(self._seconds, (self._since - begin) / _SHARE)
