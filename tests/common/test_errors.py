"""Errors of the machine end a command with one sentence and exit code 2; faults of the program with a traceback."""

import errno
import os

import pytest

from tests.helpers.forked import Forked, run_code

FAILURES = {
    "memory of the CPU": ("torch.empty(10**15)", "--train.micro_batch"),
    "memory of a GPU": (
        "raise_(torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 2.00 GiB.'))",
        "2.00 GiB",
    ),
    "memory of Python": ("raise_(MemoryError())", "MemoryError"),
    "memory of the system": (f"raise_(OSError({errno.ENOMEM}, {os.strerror(errno.ENOMEM)!r}))", "--train.micro_batch"),
    "memory while a file is read": ("read(torch.OutOfMemoryError('CUDA out of memory.'))", "--train.micro_batch"),
    "compiler": ("torch.compile(torch.sin, backend=broken)(torch.ones(1))", "--train.compile false"),
}
FAULTS = {
    "plain": ("raise_(ValueError('a fault'))", "ValueError: a fault"),
    "in compiled code": (
        "torch.compile(torch.mm, backend='eager')(torch.ones(2, 2), torch.ones(3, 4))",
        "TorchRuntimeError",
    ),
    "of a library": ("raise_(ImportError('libgomp: cannot allocate memory in static TLS block'))", "libgomp"),
}
PROGRAM = """
from pathlib import Path
import torch
from salaad.common.errors import in_a_sentence, run_command
def raise_(error): raise error
def broken(graph, inputs): raise RuntimeError("PassManager::run failed")
def read(error):
    with in_a_sentence(Path("file")): raise error
run_command(lambda: {failure})
"""


def ended(failure: str) -> tuple[int, str]:
    """Run `failure` as an entry point and return its exit code and what it printed on standard error."""
    process = Forked(run_code, PROGRAM.format(failure=failure))
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.parametrize("failure, said", FAILURES.values(), ids=FAILURES)
def test_errors_of_the_machine_are_a_sentence_with_a_cure(failure: str, said: str) -> None:
    code, err = ended(failure)
    line = err.strip().splitlines()[-1]
    assert code == 2
    assert line.startswith("error: ") and said in line and "--train." in line
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "failure, said",
    [
        (
            "raise_(__import__('safetensors').SafetensorError('I/O error: File too large (os error 27)'))",
            "a file cannot be written (I/O error: File too large (os error 27)); mend that and start again",
        ),
        (
            f"raise_(OSError({errno.ENAMETOOLONG}, {os.strerror(errno.ENAMETOOLONG)!r}, 'aaaa'))",
            f"aaaa cannot be written or read ({os.strerror(errno.ENAMETOOLONG)}); mend that and start again",
        ),
    ],
)
def test_errors_of_a_disk_are_a_sentence_too(failure: str, said: str) -> None:
    code, err = ended(failure)
    assert (code, err.strip().splitlines()[-1]) == (2, f"error: {said}")


@pytest.mark.parametrize("failure, said", FAULTS.values(), ids=FAULTS)
def test_a_fault_of_the_program_keeps_its_traceback(failure: str, said: str) -> None:
    code, err = ended(failure)
    assert code == 1
    assert "Traceback" in err and said in err
