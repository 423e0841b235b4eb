"""Programs that are forked from a process that has imported what takes seconds, instead of a new Python for each.

What a test sees of such a program is what it sees of a new process: an id, signals, an exit code, output in pipes.
"""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import psutil
import torch
import torch.distributed as dist

from scripts.reliability.toy_run import ROOT

_SLOW_TO_IMPORT = (
    "train",
    "compress",
    "evaluate",
    "tests.helpers.training",
    "transformers.models.llama.modeling_llama",
)


def server(*modules: str) -> multiprocessing.context.ForkServerContext:
    """Return the context whose processes are forked from one that has imported what is slow, and `modules` too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*_SLOW_TO_IMPORT, *modules])
    return context


def begin() -> None:
    """Prepare a forked process: one thread, and none of the imports among the objects that are searched."""
    gc.freeze()  # or each search for live objects goes through the millions that the imports made
    torch.set_num_threads(1)


class Forked:
    """`fn(*args)` as the main program of a process of its own; it offers what tests use of `subprocess.Popen`.

    Args:
        fn: a function of a module.
        args: its picklable arguments.
        environment: variables beside those of this process.
    """

    def __init__(self, fn: Callable[..., Any], *args: Any, environment: dict[str, str] | None = None) -> None:
        self.args = (fn, *args)
        (out, child_out), (err, child_err) = (multiprocessing.Pipe(duplex=False) for _ in range(2))
        variables = dict(os.environ) | (environment or {})
        self._process = server().Process(target=_program, args=(child_out, child_err, variables, fn, args))
        self._process.start()
        self.pid: int = self._process.pid
        for connection in (child_out, child_err):
            connection.close()
        self.stdout, self.stderr = (os.fdopen(os.dup(end.fileno()), errors="replace") for end in (out, err))

    @property
    def returncode(self) -> int | None:
        """The exit code, negative for a signal; None while the process runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same, as a method."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit code; raise subprocess.TimeoutExpired after `timeout` seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.args), timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Read both pipes until all who hold them have ended, and return what was left in them."""
        until = None if timeout is None else time.monotonic() + timeout
        read: dict[Any, str] = {}
        readers = [
            Thread(target=lambda pipe=pipe: read.update({pipe: pipe.read()}), daemon=True)
            for pipe in (self.stdout, self.stderr)
        ]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(None if until is None else max(0, until - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(str(self.args), timeout)
        self.wait(None if until is None else max(0, until - time.monotonic()))
        return read[self.stdout], read[self.stderr]

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def kill_all(self) -> None:
        """Send SIGKILL to the process and all its descendants."""
        with suppress(psutil.NoSuchProcess):
            for process in (*psutil.Process(self.pid).children(recursive=True), psutil.Process(self.pid)):
                process.kill()


def run_script(script: str, words: list[str]) -> None:
    """Run a Python file of the repository as `python script words` does."""
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


def run_code(code: str) -> None:
    """Run code as `python -c code` does."""
    sys.argv = ["-c"]
    exec(code, {"__name__": "__main__"})


def run_on_ranks(script: str, words: list[str], processes: int) -> None:
    """Run a Python file on several ranks, each a child of this process, with the variables that torchrun sets."""
    # The ranks meet at a store that their parent keeps, and one parent has all of them, as under torchrun.
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "TORCHELASTIC_USE_AGENT_STORE": True}
    common |= {"MASTER_ADDR": "localhost", "MASTER_PORT": store.port, "ACCELERATE_USE_CPU": True}
    children = []
    for rank in range(processes):
        children.append(os.fork())
        if not children[-1]:
            own = common | {"RANK": rank, "LOCAL_RANK": rank}
            os.environ |= {name: str(value) for name, value in own.items()}
            os._exit(_exit_code(run_script, script, words))
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    sys.exit(next((code for code in codes if code), 0))


def _program(
    out: Connection, err: Connection, variables: dict[str, str], fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    for connection, number in ((out, 1), (err, 2)):
        os.dup2(connection.fileno(), number)
        connection.close()
    sys.stdout, sys.stderr = (os.fdopen(os.dup(number), "w", buffering=1) for number in (1, 2))
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(ROOT)
    begin()
    sys.exit(_exit_code(fn, *args))


def _exit_code(fn: Callable[..., Any], *args: Any) -> int:
    try:
        fn(*args)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0
