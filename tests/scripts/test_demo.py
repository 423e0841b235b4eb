"""The demo itself takes a quarter of an hour; here it is only started."""

import subprocess
import sys

from scripts.reliability.toy_run import ROOT


def test_the_demo_starts_without_anything_on_the_path_of_python(tmp_path):
    command = [sys.executable, "-I", str(ROOT / "scripts" / "demo.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout
