"""Processes under `accelerate launch`: they end with the launcher, and one repeats an error after its traceback."""

import ctypes
import os
import select
import signal
import socket
import sys

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of prctl
_PATIENCE = 60_000  # milliseconds that a launcher may take to end after one of its processes has


def _launched() -> bool:
    return sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ


def follow_launcher() -> None:
    """Have SIGTERM sent to this process when the launcher ends.

    A launcher of one process passes no signal on, so the training would go on without the launcher.
    """
    if _launched():
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)


def say_last(sentence: str) -> None:
    """Write a sentence to standard error once more when the launcher has ended.

    When a launched process fails, the launcher prints a traceback of its own, which fills a screen. A separate process
    waits for the launcher's end. Of the processes of a machine the first that fails writes, since the launcher then
    ends the others, which may fail in the same way. Without a launcher nothing is done.
    """
    if not _launched():
        return
    try:
        launcher = os.pidfd_open(os.getppid())
        # One process alone can have this address, and has it until it ends; it is no file.
        only = socket.socket(socket.AF_UNIX)
        only.bind(f"\0salaad-{os.getppid()}")
    except OSError:
        return
    if os.fork() == 0:
        os.setsid()  # out of reach of the signals by which a launcher ends its processes
        waiting = select.poll()
        waiting.register(launcher, select.POLLIN)
        waiting.poll(_PATIENCE)
        os.write(2, f"\n{sentence}\n".encode())
        os._exit(0)
