"""A training process that is started as users start it, and the comparison of two finished runs."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import psutil
import torch

from salaad.common.files import read_json
from scripts.reliability.toy_run import ROOT, launch_command

PATIENCE = 180  # seconds until a process that does nothing counts as hanging
TIMES = ("seconds", "tokens_per_second")
RECORDS = ("metrics.jsonl", "blocks.jsonl", "evaluations.jsonl")


class Broken(Exception):
    """Raised when a training hangs or ends before its time; the message has its last output."""


class Training:
    """A training process that is started as users start it."""

    started: ClassVar[list["Training"]] = []  # all that this process has started, so that none is left running

    def __init__(self, arguments: list[str], output: Path, processes: int = 1) -> None:
        self.output, self.begun, self._since = output, time.monotonic(), time.time()
        self.process = self._start(arguments, processes)
        self._lines: list[str] = []
        self._reader = Thread(target=lambda: self._lines.extend(self.process.stdout), daemon=True)
        self._reader.start()
        self.started.append(self)

    def _start(self, arguments: list[str], processes: int) -> subprocess.Popen:
        command, environment = launch_command(arguments, self.output, processes)
        if processes == 1:  # the launcher alone takes seconds to start
            command = [sys.executable, *command[command.index("train.py") :]]
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **pipe)

    def tree(self) -> list[psutil.Process]:
        """The process and all its descendants; none if it has ended."""
        if not self.alive:  # another process may have its number
            return []
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    @property
    def alive(self) -> bool:
        """Whether the launcher still runs."""
        return self.process.poll() is None

    def said(self) -> str:
        """Return the output that the process has printed so far."""
        return "".join(self._lines)

    def trainers(self) -> list[psutil.Process]:
        """The processes of this run that train, without launcher and data workers."""
        tree = self.tree()
        return [p for p in tree if "train.py" in p.cmdline() and not _is_worker(p, tree)]

    def kill(self) -> None:
        """Send SIGKILL to the launcher and all its descendants at once."""
        for process in self.tree():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()

    def wait(self, seconds: float = PATIENCE * 10) -> int:
        """Wait for the end of the process and return its exit code; after `seconds` kill it and raise Broken."""
        try:
            code = self.process.wait(seconds)
            self._reader.join(seconds)
            return code
        except subprocess.TimeoutExpired:
            self.kill()
            raise Broken(f"hangs after {seconds} s:\n{self.said()[-3000:]}") from None

    def finish(self) -> None:
        """Wait for the end of the run; raise Broken if the run did not finish."""
        if self.wait() or not (self.output / "summary.json").exists():
            raise Broken(f"the run in {self.output} did not finish:\n{self.said()[-3000:]}")

    def until(self, condition: Callable[[], bool], pause: float = 0.005) -> float:
        """Wait for a condition and return the seconds since the start; raise Broken if the trainer ends or hangs."""
        while not condition():
            if not self.alive:
                raise Broken(f"ended before its time:\n{self.said()[-3000:]}")
            if time.monotonic() - self.begun > PATIENCE:
                self.kill()
                raise Broken(f"hangs:\n{self.said()[-3000:]}")
            time.sleep(pause)
        return time.monotonic() - self.begun

    def recovered(self) -> float:
        """Wait until a step beyond the newest checkpoint is logged; return the seconds since the start."""
        saved, metrics = saved_step(self.output), self.output / "metrics.jsonl"
        # Lines after the checkpoint are dropped when the run resumes, so this line is a new one.
        return self.until(lambda: last_step(self.output) > saved and metrics.stat().st_mtime > self._since)

    def saving(self) -> bool:
        """Return whether a checkpoint is being written; unfinished ones that an earlier start left do not count."""
        for partial in (self.output / "checkpoints").glob(".partial-*"):
            with suppress(FileNotFoundError):
                if partial.stat().st_ctime > self._since:
                    return True
        return False


def _is_worker(process: psutil.Process, tree: list[psutil.Process]) -> bool:
    return any(process.ppid() == other.pid and "train.py" in other.cmdline() for other in tree)


def saved_step(run: Path) -> int:
    """The step of the checkpoint that `latest` names; 0 without one."""
    pointer = run / "checkpoints" / "latest"
    return int(pointer.read_text().strip().removeprefix("step-")) if pointer.exists() else 0


def last_step(run: Path) -> int:
    """The last step that metrics.jsonl holds."""
    lines = records(run, "metrics.jsonl")
    return lines[-1]["step"] if lines else 0


def records(run: Path, name: str) -> list[dict[str, Any]]:
    """Return the complete lines of a record file, without the fields that measure time."""
    path = run / name
    text = path.read_text() if path.exists() else ""
    rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def differences(whole: Path, broken: Path) -> list[str]:
    """Return the names of the records and checkpoint files that differ, by even a bit, between two finished runs."""
    found = [name for name in RECORDS if records(whole, name) != records(broken, name)]
    one, two = (run / "checkpoints" / f"step-{saved_step(run):07d}" for run in (whole, broken))
    names = {path.relative_to(one) for path in one.rglob("*") if path.is_file()}
    if names != {path.relative_to(two) for path in two.rglob("*") if path.is_file()}:
        return [*found, "the files of a checkpoint"]
    for name in sorted(map(str, names - {Path("checksums.json")})):
        if name == "state/trainer.json":
            first, second = (read_json(folder / name) for folder in (one, two))
            same = {**first, "seconds": None} == {**second, "seconds": None}
        elif name.endswith(".pt"):
            first, second = (torch.load(folder / name, weights_only=True) for folder in (one, two))
            same = _plain(first) == _plain(second)
        else:
            same = (one / name).read_bytes() == (two / name).read_bytes()
        found += [] if same else [name]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return (str(value.dtype), value.tolist()) if torch.is_tensor(value) else value


def deviation(lines: list[dict[str, Any]], truth: list[dict[str, Any]]) -> float:
    """The largest relative difference between the losses of two records at a step."""
    return max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in zip(lines, truth, strict=True))


def spoil(path: Path, way: str) -> None:
    """Damage one file: delete it (`missing`), flip one bit (`flipped`), or cut it in half."""
    content = bytearray(path.read_bytes())
    if way == "missing":
        path.unlink()
        return
    if way == "flipped":
        content[len(content) // 2] ^= 1
    else:
        del content[len(content) // 2 :]
    path.unlink()  # a checkpoint's files may have hard links elsewhere
    path.write_bytes(bytes(content))
