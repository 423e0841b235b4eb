"""Wall time by phase of training since the last logged line."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from salaad.runs.records import PHASES


class Stopwatch:
    """A stopwatch of wall time by phase, since the last `take`.

    On a GPU a phase is timed between two events in its stream, as the host runs ahead of the device: the host's clock
    would count the step before towards the first phase that waits for the device.
    """

    def __init__(self, device: torch.device, earlier: Mapping[str, float] | None = None) -> None:
        self._cuda = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float, earlier or {})
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._begun = time.perf_counter() - sum(self._seconds.values())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager that counts the time spent inside towards the phase `name`."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
        else:
            begun = time.perf_counter()
        try:
            yield
        finally:
            if self._cuda:
                end.record()
                self._events.append((name, start, end))
            else:
                self._seconds[name] += time.perf_counter() - begun

    def read(self) -> dict[str, float]:
        """Seconds by phase since the last `take`; `train` is whatever belongs to no other phase. Waits for a GPU."""
        for name, start, end in self._events:
            end.synchronize()
            self._seconds[name] += start.elapsed_time(end) / 1e3
        self._events.clear()
        others = {name: self._seconds[name] for name in PHASES[1:]}
        return {"train": time.perf_counter() - self._begun - sum(others.values()), **others}

    def take(self) -> dict[str, float]:
        """Return the result of `read` and start again from zero."""
        seconds = self.read()
        self._seconds.clear()
        self._begun += sum(seconds.values())
        return seconds
