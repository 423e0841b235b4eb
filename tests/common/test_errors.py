"""Errors of the machine end a command with one sentence and exit code 2; faults of the program with a traceback."""

import subprocess
import sys

import pytest

FAILURES = {
    "memory of the CPU": ("torch.empty(10**15)", "--train.micro_batch"),
    "memory of a GPU": (
        "raise_(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.'))",
        "2.00 GiB",
    ),
    "memory of Python": ("raise_(MemoryError())", "MemoryError"),
    "compiler": ("torch.compile(torch.sin, backend=broken)(torch.ones(1))", "--train.compile false"),
}
PROGRAM = """
import torch
from salaad.common.errors import run_command
def raise_(error): raise error
def broken(graph, inputs): raise RuntimeError("PassManager::run failed")
run_command(lambda: {failure})
"""


def ended(failure: str) -> subprocess.CompletedProcess:
    """Run `failure` as an entry point and return how it ended."""
    command = [sys.executable, "-c", PROGRAM.format(failure=failure)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("failure, said", FAILURES.values(), ids=FAILURES)
def test_errors_of_the_machine_are_a_sentence_with_a_cure(failure: str, said: str) -> None:
    done = ended(failure)
    [line] = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert line.startswith("error: ") and said in line and "--train." in line


def test_a_fault_of_the_program_keeps_its_traceback() -> None:
    done = ended("raise_(ValueError('a fault'))")
    assert done.returncode == 1
    assert "Traceback" in done.stderr and "ValueError: a fault" in done.stderr
