"""All tests of GPU kernels, on the CPU: in a process of their own, as Triton chooses its interpreter when imported."""

import os
import subprocess
import sys
from pathlib import Path

from tests.helpers.needs import needs_triton

TESTS = Path(__file__).resolve().parents[1]
FILES = ("interpreted_*.py", "test_offloading.py")  # the second also computes without an interpreter


@needs_triton
def test_kernels_compute_in_tritons_interpreter_what_torch_computes():
    files = sorted(path for pattern in FILES for path in TESTS.rglob(pattern))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
