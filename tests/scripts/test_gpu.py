"""scripts/gpu.py: its whole path on the CPU with tiny shapes, going on where it stopped, and what fails in between."""

import json
import math
import re

import pytest
import torch

from salaad.common.errors import UserError
from scripts import gpu, gpu_checks
from scripts.gpu_checks import Check


def call(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", *words])
    gpu.main()


def test_the_whole_path_leaves_one_folder_with_every_result(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "cpu"
    call(monkeypatch, "--device=cpu", "--tiny", f"--output={folder}")
    names = [stage.name for stage in gpu.stages("cpu", tiny=True)]
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    checks = found["checks"]["checks"]
    assert {"10 steps of salaad", "resumed training", "training"} < {check["name"] for check in checks}
    assert all(check["error"] <= check["limit"] for check in checks)
    page = (folder / "README.md").read_text()
    assert all(f"| {name} " in page for name in names)
    assert "SALAAD over full-rank" in page

    monkeypatch.setattr(gpu, "perform", lambda *_: pytest.fail("what is there is made again"))
    call(monkeypatch, "--device=cpu", "--tiny", f"--output={folder}")


def test_a_stage_that_fails_is_told_and_the_others_go_on(tmp_path, monkeypatch):
    some = [gpu.Stage("broken", ("no_such_script.py",), 1), gpu.Stage("whole", ("-c", "pass"), 1)]
    some += [gpu.Stage("long", ("-c", "pass"), 1e6)]
    monkeypatch.setattr(gpu, "stages", lambda *_: some)
    with pytest.raises(UserError, match=r"1 stages failed \(broken\)"):
        call(monkeypatch, "--device=cpu", f"--output={tmp_path}")
    page = (tmp_path / "README.md").read_text()
    rows = dict(re.findall(r"^\| (\w+) +\| +(.*?) \|$", page, re.M))
    assert rows["broken"].startswith("exit code 2") and rows["whole"] == "done" and "left out" in rows["long"]


def test_a_wrong_number_does_not_pass_and_a_broken_check_hides_no_other(monkeypatch):
    def breaks(*_):
        raise RuntimeError("no kernel for this device")
        yield

    monkeypatch.setattr(gpu_checks, "KINDS", {"layers": breaks, "solvers": lambda *_: iter([Check("svt", 1.0, 1e-4)])})
    broken, wrong = gpu_checks.all_checks(torch.device("cpu"), True)
    assert not broken.passes and math.isnan(broken.error) and "no kernel" in broken.problem
    assert not wrong.passes


def test_without_a_gpu_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU here"):
        call(monkeypatch)
