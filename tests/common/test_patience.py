"""Ranks wait for a rank with a slow disk longer than for a collective call on devices, and print for which rank."""

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr
from types import SimpleNamespace

import torch

import train
from salaad.common import distributed
from salaad.common.errors import Stopped
from salaad.common.signals import StopRequest
from tests.helpers.ranks import run_ranks


def after_a_slow_write(seconds: float) -> tuple[list[int], str]:
    """Let rank 1 come late to a gather; return what was gathered, and what this rank printed on standard error."""
    distributed.TOLD_AFTER = 0.5
    said = io.StringIO()
    with redirect_stderr(said):
        if distributed.rank() == 1:
            time.sleep(seconds)
        found = distributed.gather(distributed.rank())
        distributed.barrier()
    return found, said.getvalue()


def test_a_slow_rank_is_waited_for_longer_than_devices_may_take_and_named(tmp_path):
    waiting, slow = run_ranks(after_a_slow_write, 2, tmp_path, 4.0, timeout=2)
    assert waiting[0] == slow[0] == [0, 1]
    assert "rank 0 has waited 1 s for rank 1" in waiting[1] and "rank 1 has" not in slow[1]


def device_sum_that_waits() -> str:
    if distributed.rank() == 1:
        time.sleep(4)
    try:
        distributed.all_sum(torch.ones(1))
    except RuntimeError:
        return "gave up"
    return "went on"


def test_sums_on_devices_keep_the_launchers_limit(tmp_path):
    assert "gave up" in run_ranks(device_sum_that_waits, 2, tmp_path, timeout=2)


class SlowText:
    """A stream whose first batch comes after `seconds`, unless a stop is requested before."""

    def __init__(self, seconds: float, request: StopRequest) -> None:
        self.seconds, self.request = seconds, request

    def __iter__(self) -> Iterator[str]:
        with self.request.ends_waiting():
            time.sleep(self.seconds)
        yield "first"
        yield "second"


def beginning(seconds: float, signal_after: float | None) -> str:
    """Begin a run whose rank 1 waits for its first batch, and may alone get a signal meanwhile; return the outcome."""
    request, slow = StopRequest(), distributed.rank() == 1
    if slow and signal_after is not None:
        threading.Timer(signal_after, os.kill, (os.getpid(), signal.SIGTERM)).start()
    run = SimpleNamespace(step=0, request=request, stream=SlowText(seconds if slow else 0, request))
    run.config = SimpleNamespace(train=SimpleNamespace(steps=5))
    try:
        batches = train.Trainer.begin(run)
    except Stopped:
        return "stopped"
    return f"{next(batches)}, {next(batches)}, {int(distributed.all_sum(torch.ones(1)))}"


def test_the_first_text_is_waited_for_longer_than_devices_may_take(tmp_path):
    assert run_ranks(beginning, 2, tmp_path, 4.0, None, timeout=2) == ["first, second, 2"] * 2


def test_all_ranks_end_when_one_is_told_to_before_its_first_text(tmp_path):
    assert run_ranks(beginning, 2, tmp_path, 100.0, 1.0) == ["stopped"] * 2


def order_of_ranks() -> list[str]:
    """Return a list with the time at which this rank was let through `first_on_its_machine`."""
    done = []
    with distributed.first_on_its_machine(distributed.rank() == 0):
        if distributed.rank() == 0:
            time.sleep(0.5)
        done.append(time.monotonic())
    return done


def test_the_first_rank_of_a_machine_goes_first(tmp_path):
    first, second = run_ranks(order_of_ranks, 2, tmp_path)
    assert first[0] < second[0]


def many_meetings() -> int:
    for _ in range(50):
        distributed.barrier()
    return distributed._meetings


def test_many_meetings_leave_no_threads_and_agree_on_their_number(tmp_path):
    assert run_ranks(many_meetings, 3, tmp_path) == [50] * 3


def test_alone_nobody_is_waited_for():
    assert distributed.gather(3) == [3] and distributed.barrier() is None
    with distributed.first_on_its_machine(False):
        pass
