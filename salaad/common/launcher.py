"""Getting along with `accelerate launch`: ending when it ends, and having the last word on standard error."""

import ctypes
import os
import select
import signal
import sys

_SIGNAL_OF_PARENTS_DEATH = 1  # PR_SET_PDEATHSIG of prctl
_PATIENCE = 60_000  # milliseconds that a launcher may take to end after one of its processes has


def _launched() -> bool:
    return sys.platform == "linux" and "ACCELERATE_MIXED_PRECISION" in os.environ


def follow_launcher() -> None:
    """Get a SIGTERM when the launcher ends: with one process it passes no signal on, and the training would go on."""
    if _launched():
        launcher = os.getppid()
        ctypes.CDLL(None).prctl(_SIGNAL_OF_PARENTS_DEATH, signal.SIGTERM)
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)


def say_last(sentence: str) -> None:
    """Write a sentence to standard error once more when the launcher has ended.

    To the exit code of a process it launched it adds a traceback of its own, which fills a screen. A process apart
    waits for its end; nothing is done without a launcher, nor on ranks other than the first of a machine.
    """
    if not _launched() or os.environ.get("LOCAL_RANK", "0") != "0":
        return
    try:
        launcher = os.pidfd_open(os.getppid())
    except OSError:
        return
    if os.fork() == 0:
        os.setsid()  # out of reach of the signals by which a launcher ends its processes
        waiting = select.poll()
        waiting.register(launcher, select.POLLIN)
        waiting.poll(_PATIENCE)
        os.write(2, f"\n{sentence}\n".encode())
        os._exit(0)
