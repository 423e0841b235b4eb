"""Run tests of Triton kernels on the CPU, in a process of their own: Triton picks its interpreter when imported."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


def passes_interpreted(file: Path) -> bool:
    """Return whether the tests in a file pass under Triton's interpreter, and print the output of pytest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    return done.returncode == 0
