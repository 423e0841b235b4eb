"""The demo itself takes a quarter of an hour; here it is only started."""

import subprocess
import sys

import pytest

from salaad.common.errors import UserError
from scripts import demo
from scripts.reliability.toy_run import ROOT


def test_the_demo_starts_without_anything_on_the_path_of_python(tmp_path):
    command = [sys.executable, "-I", str(ROOT / "scripts" / "demo.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


@pytest.mark.parametrize(
    ("end", "other", "said"),
    [
        ("kill -9 $$", "exec sleep 60", "the full_rank run ended with exit code -9"),
        ("exit 0", "exit 0", "the full_rank run ended before its last step; the same command goes on"),
    ],
)
def test_a_run_that_was_killed_or_stopped_ends_the_demo(tmp_path, monkeypatch, end, other, said):
    start, ends = subprocess.Popen, {"--method=full_rank": end, "--method=salaad": other}

    def stub(command, **options):
        [script] = [ends[word] for word in command if word in ends]
        return start(["sh", "-c", script], **options)

    monkeypatch.setattr(demo.subprocess, "Popen", stub)
    with pytest.raises(UserError, match=said):
        demo.train_side_by_side(tmp_path, 10)
