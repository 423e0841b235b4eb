"""The device of a benchmark: a check that it exists, a clock that waits for it, and marks that time its work."""

import time
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from salaad.common.errors import UserError

Name = TypeVar("Name", bound=Hashable)


def require_device(name: str) -> None:
    """Raise a UserError unless there is such a device, cpu or cuda."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"--device is cuda, but torch {torch.__version__} finds no GPU here; mend the driver, or give --device cpu"
        )


def now(device: torch.device) -> float:
    """Return the time in seconds, once all work given to the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def in_turns(works: Mapping[Name, Callable[[], Any]], rounds: int, device: torch.device) -> dict[Name, list[float]]:
    """Return name → seconds in each of `rounds` rounds, after one round that is not counted.

    The works take turns in each round, so that a machine whose speed drifts slows all of them.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in works}
    for _ in tqdm(range(1 + rounds), desc="rounds", leave=False, disable=None):
        for name, work in works.items():
            start = now(device)
            work()
            seconds[name].append(now(device) - start)
    return {name: times[1:] for name, times in seconds.items()}


class Marks:
    """Marks in the work of a device, and the seconds between them.

    On a GPU marks are events in its stream, so the host does not wait for them and runs ahead as in a training.

    Args:
        device: the device whose work is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._points: list = []

    def set(self) -> None:
        """Set a mark after all work given to the device so far."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._points.append(event)
        else:
            self._points.append(time.perf_counter())

    def take(self) -> list[float]:
        """Return the seconds between each mark and the next, and delete all marks; waits for a GPU."""
        points, self._points = self._points, []
        if not self._cuda:
            return [after - before for before, after in pairwise(points)]
        if points:
            points[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(points)]
