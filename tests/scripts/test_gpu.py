"""scripts/gpu.py: all of it on the CPU with tiny shapes, how it resumes, and how it reports stages that fail."""

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import TextIO

import pytest
import torch

from salaad.common.errors import UserError
from salaad.common.provenance import provenance
from scripts import gpu
from scripts.on_device import trainings
from scripts.on_device.kernels import USED
from tests.helpers.forked import Forked, run_code
from tests.helpers.needs import needs_triton
from tests.helpers.training import train_as_told

RUN = subprocess.run
ROOT = Path(__file__).resolve().parents[2]
TABLE1 = ROOT / "results" / "micro" / "reproduce" / "table1.json"


def call(monkeypatch, *words: str) -> None:
    monkeypatch.setattr("sys.argv", ["gpu.py", *words])
    gpu.main()


@pytest.fixture
def only(monkeypatch):
    """A function that takes the only stages there are, and returns a function that runs `gpu.py` with options."""

    def of(*stages: gpu.Stage):
        monkeypatch.setattr(gpu, "stages", lambda *_: iter(stages))
        return lambda *words: call(monkeypatch, "--device=cpu", *words)

    return of


def outcomes(folder: Path) -> dict[str, str]:
    """Return stage → how it ended, as the page says."""
    [table] = re.findall(r"^\| stage .*\n.*\n((?:\|.*\n)+)", (folder / "README.md").read_text(), re.M)
    return dict(re.findall(r"^\| (\S+) +\| +(.*?) \| +\S* \|$", table, re.M))


def writes(path: Path | str, text: str = "{}") -> str:
    """Return the code for `python -c` that writes a file."""
    return f"from pathlib import Path; Path({str(path)!r}).write_text({text!r})"


def checks_file(path: Path, *rows: dict) -> None:
    about = {"machine": "m", "versions": "v", "commit": provenance()["commit"]}
    usual = {"kind": "solvers", "name": "svt", "error": 1e-6, "limit": 1e-4, "problem": "", "left_out": ""}
    path.write_text(json.dumps({**about, "checks": [usual | row for row in rows]}))


def perform_here(words: tuple[str, ...], environment: dict[str, str], log: TextIO, seconds: float) -> int:
    """Run the script of a stage in this process, as the start of one takes ten seconds."""
    script = importlib.import_module(words[0].removesuffix(".py").replace("/", "."))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(log):
        patch.setattr("sys.argv", list(words))
        script.main()
    return 0


def checks_of_kernels(command: list[str], **how: object) -> subprocess.CompletedProcess:
    """Stand in for the process with Triton's interpreter; what it does is tested in interpreted_gpu_checks.py."""
    if "--kinds=kernels" not in command:
        return RUN(command, **how)
    rows = [{"kind": "kernels", "name": name, "error": 0.0} for name in (USED, "divide_kernel, bfloat16")]
    checks_file(command[-1], *rows)
    return subprocess.CompletedProcess(command, 0, "", "")


@needs_triton
def test_the_whole_path_leaves_one_folder_with_every_result(toy, tmp_path, monkeypatch, capsys):
    # The embedded text takes minutes to be made where it is not cached.
    monkeypatch.setattr(gpu, "TEXT", tuple(word for word in toy() if word.startswith("--data.")))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "none"))  # the commit stays unknown, even if somebody commits
    monkeypatch.setattr(gpu, "exit_code", perform_here)
    monkeypatch.setattr(trainings, "perform", train_as_told)
    monkeypatch.setattr(subprocess, "run", checks_of_kernels)
    folder = tmp_path / "cpu"
    call(monkeypatch, "--device=cpu", "--tiny", f"--output={folder}")
    names = [stage.name for stage in gpu.stages("cpu", tiny=True)]
    found = {name: json.loads((folder / f"{name}.json").read_text()) for name in names}
    checks = {check["name"]: check for check in found["checks"]["checks"]}
    made = {name for name, check in checks.items() if not check["left_out"]}
    assert set(checks) - made == {
        "decoding in a CUDA graph",
        "waits in a training step",
        "waits in a training step with a round of the ADMM",
        "waits in a round of the ADMM",
    }
    assert all(checks[name]["error"] <= checks[name]["limit"] for name in made)
    assert {"10 steps of salaad", "10 steps of lora", "10 steps of relora", "resumed training", "training"} < made
    assert {"10 compiled steps", "resumed training, L and S", "training with updates beside it, L and S"} < made
    assert {"training on 2 processes", "training with --train.shard optimizer on 2 processes"} < made
    assert {f"SVT by {rung}, 40×24" for rung in ("exact", "gram", "subspace", "regularised")} < made
    assert {USED, "divide_kernel, bfloat16"} < made
    page = (folder / "README.md").read_text()
    assert outcomes(folder) == dict.fromkeys(names, "done")
    assert re.findall(r"^## (\w+)$", page, re.M) == ["Checks", "Training", "ADMM", "Inference", "Compression"]
    assert "SALAAD over full-rank" in page and page in capsys.readouterr().out

    monkeypatch.setattr(gpu, "perform", lambda *_: pytest.fail("what is there is made again"))
    call(monkeypatch, "--device=cpu", "--tiny", f"--output={folder}")


def test_a_stage_that_fails_is_told_and_the_others_go_on(tmp_path, only):
    begin = only(
        gpu.Stage("broken", ("no_such_script.py",), 1),
        gpu.Stage("silent", ("-c", "pass"), 1),
        gpu.Stage("whole", ("-c", writes(tmp_path / "whole.json")), 1),
        gpu.Stage("long", ("-c", "pass"), 1e6),
    )
    with pytest.raises(UserError, match=r"2 of 4 stages failed: broken .*no_such_script.* silent .*wrote no result"):
        begin(f"--output={tmp_path}")
    found = outcomes(tmp_path)
    assert "exit code 2" in found["broken"] and "can't open file" in found["broken"]
    assert found["whole"] == "done" and "left out" in found["long"]


def test_checks_that_failed_are_marked_counted_and_told_at_every_start(tmp_path, only, monkeypatch):
    rows = [
        {"name": "whole"},
        {"name": "lost", "error": None},
        {"name": "wrong", "error": 0.2},
        {"name": "broken", "error": None, "problem": "a | b"},
        {"name": "absent", "error": None, "left_out": "it takes a GPU"},
    ]
    checks_file(tmp_path / "checks.json", *rows)
    begin = only(gpu.Stage("checks", ("no_such_script.py",), 1))
    monkeypatch.setattr(gpu, "perform", lambda *_: pytest.fail("what is there is made again"))
    for _ in range(2):
        with pytest.raises(
            UserError, match=r"FAILED: 3 of 5 checks \(lost, wrong, broken\).*deleted is performed again"
        ):
            begin(f"--output={tmp_path}")
    assert outcomes(tmp_path) == {"checks": "FAILED: 3 of 5 checks (lost, wrong, broken)"}
    table = (tmp_path / "README.md").read_text().partition("## Checks")[2]
    lines = {cells[0]: cells[2:] for cells in (re.split(r" *\| *", line)[1:-1] for line in table.splitlines()) if cells}
    assert lines["whole"] == ["1.0e-06", "passes"] and lines["lost"] == ["not finite", "**FAILED**"]
    assert lines["wrong"] == ["2.0e-01", "**FAILED**"] and lines["broken"] == ["a / b", "**FAILED**"]
    assert lines["absent"] == ["it takes a GPU", "left out"]


def test_checks_that_fail_while_they_are_made_are_named_like_those_that_are_there(tmp_path, only):
    (tmp_path / "folder").mkdir()
    checks_file(tmp_path / "checks.json", {"name": "lost", "error": None})
    code = f"{writes(tmp_path / 'folder' / 'checks.json', (tmp_path / 'checks.json').read_text())}; raise SystemExit(2)"
    with pytest.raises(UserError, match=r"checks FAILED: 1 of 1 checks \(lost\)"):
        only(gpu.Stage("checks", ("-c", code), 1))(f"--output={tmp_path / 'folder'}")


def test_the_reproduction_comes_into_the_folder_and_onto_the_page(tmp_path, only):
    result, folder = tmp_path / "table1.json", tmp_path / "folder"
    stage = gpu.Stage("60m-wikipedia", ("-c", writes(result, TABLE1.read_text())), 1, result)
    only(stage)(f"--output={folder}")
    kept = json.loads(TABLE1.read_text())
    assert json.loads((folder / "60m-wikipedia.json").read_text()) == kept
    page = (folder / "README.md").read_text()
    assert "## 60m-wikipedia" in page and outcomes(folder) == {"60m-wikipedia": "done"}
    assert all(table in page for table in kept["tables"].values())
    assert all(f"| {run['name']} " in page and run["machine"] in page for run in kept["trainings"])


def test_without_a_network_the_reason_is_told_and_the_table_is_printed(tmp_path, only, capsys):
    before = ("-c", "import sys; sys.exit('error: huggingface.co cannot be reached')")
    stage = gpu.Stage("60m-wikipedia", ("-c", "pass"), 1, tmp_path / "table1.json", before)
    with pytest.raises(UserError, match=r"exit code 1: error: huggingface.co cannot be reached"):
        only(stage)(f"--output={tmp_path / 'folder'}")
    assert "| 60m-wikipedia | FAILED" in capsys.readouterr().out
    assert not (tmp_path / "folder" / "60m-wikipedia.json").exists()


def test_the_text_is_fetched_unless_all_of_it_is_there(tmp_path, monkeypatch):
    def before() -> tuple[str, ...]:
        return next(stage.before for stage in gpu.stages("cuda", tiny=False) if stage.name == "60m-wikipedia")

    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    (tmp_path / "runs" / ".partial-wikipedia").mkdir(parents=True)  # as a killed fetch leaves it
    assert before()[0] == "scripts/fetch_text.py"
    (tmp_path / "runs" / "wikipedia").mkdir()
    assert before() == ()


def starts_a_child(path: Path) -> str:
    """Return the code for `python -c` of a stage that takes ten minutes and writes its child's process id to `path`."""
    return (
        "import subprocess, time; child = subprocess.Popen(['sleep', '600']); "
        f"open({str(path)!r}, 'w').write(str(child.pid)); time.sleep(600)"
    )


def is_gone(number: str) -> bool:
    status = Path("/proc", number, "status")
    return not status.exists() or "State:\tZ" in status.read_text()


def test_a_stage_that_overruns_is_stopped_with_all_that_it_started(tmp_path, only):
    begun = time.monotonic()
    slow = gpu.Stage("slow", ("-c", starts_a_child(tmp_path / "child")), 4 / 60)
    only(slow, gpu.Stage("late", ("-c", "pass"), 0.01))(f"--output={tmp_path}", f"--hours={5 / 3600}")
    assert time.monotonic() - begun < 300  # of the 600 seconds that it would take
    found = outcomes(tmp_path)
    assert found["slow"].startswith("out of time") and found["late"].startswith("left out")
    assert is_gone((tmp_path / "child").read_text())


def test_a_stage_that_hangs_leaves_their_time_to_the_others(tmp_path, only):
    stuck = gpu.Stage("stuck", ("-c", starts_a_child(tmp_path / "child")), 3 / 60)
    after = gpu.Stage("after", ("-c", writes(tmp_path / "after.json")), 1)
    with pytest.raises(UserError, match="stuck FAILED: stopped after 0 minutes, 2 times what it should take"):
        only(stuck, after)(f"--output={tmp_path}", "--hours=1")
    assert outcomes(tmp_path)["after"] == "done" and is_gone((tmp_path / "child").read_text())


def test_what_another_commit_or_device_made_is_put_aside_and_made_again(tmp_path, only, monkeypatch):
    path, old = tmp_path / "part.json", json.dumps({"commit": "0123", "machine": "m", "is": "old"})
    path.write_text(old)
    new = json.dumps({"commit": provenance()["commit"], "machine": "m"})
    only(gpu.Stage("part", ("-c", writes(path, new)), 1))(f"--output={tmp_path}")
    assert (tmp_path / "older" / "0123" / "part.json").read_text() == old and path.read_text() == new
    assert outcomes(tmp_path) == {"part": "done"}
    assert f" {provenance()['commit']} |" in (tmp_path / "README.md").read_text()
    stage = gpu.Stage("part", (), 1)
    assert gpu.outcome(stage, tmp_path, "cpu", provenance()["commit"]) == "done"
    monkeypatch.setattr(gpu, "name_of", lambda device: "NVIDIA H100")
    assert gpu.outcome(stage, tmp_path, "cuda", provenance()["commit"]) is None


def test_a_reproduction_counts_where_its_trainings_are_of_this_device(tmp_path, monkeypatch):
    kept, here = json.loads(TABLE1.read_text()), "NVIDIA H100"
    stage = gpu.Stage("60m-wikipedia", (), 1, tmp_path / "table1.json")
    monkeypatch.setattr(gpu, "name_of", lambda device: here)
    (tmp_path / "folder").mkdir()
    for machines, expected in (((f"{here}, 8 threads, Linux",) * 2, "done"), ((f"{here}, 8", "AMD EPYC, 2"), None)):
        for about, machine in zip((kept, kept["trainings"][0]), machines, strict=True):
            about["machine"] = machine
        for about in kept["trainings"][1:]:
            about["machine"] = machines[0]
        stage.result.write_text(json.dumps(kept))
        (tmp_path / "folder" / "60m-wikipedia.json").unlink(missing_ok=True)
        assert gpu.outcome(stage, tmp_path / "folder", "cuda", "a commit") == expected


def test_what_was_left_out_for_want_of_memory_is_done(tmp_path, only, monkeypatch):
    (tmp_path / "training-1b-fp32.json").write_text(json.dumps({"left_out": "salaad needs 64 GB, there are 40"}))
    monkeypatch.setattr(gpu, "perform", lambda *_: pytest.fail("it is tried again"))
    only(gpu.Stage("training-1b-fp32", (), 1))(f"--output={tmp_path}")
    assert outcomes(tmp_path) == {"training-1b-fp32": "left out: salaad needs 64 GB, there are 40"}
    assert re.search(r"^\| 1b-fp32 +\| +salaad needs 64 GB, there are 40 ", (tmp_path / "README.md").read_text(), re.M)


def test_checks_that_are_not_all_made_go_on(tmp_path, only):
    checks_file(tmp_path / "checks.json", {"name": "kept"})
    path = tmp_path / "checks.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"left": ["runs"]}))
    assert gpu.outcome(gpu.Stage("checks", (), 1), tmp_path, "cpu", provenance()["commit"]) is None


def test_the_reproduction_takes_as_long_as_is_predicted(monkeypatch):
    slow, fast = (gpu.reproduction_minutes(name) for name in ("NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"))
    assert gpu.AROUND < fast < slow < 120
    assert gpu.reproduction_minutes("Tesla T4") == slow  # unknown, so taken for an A100


def test_who_ends_the_script_ends_the_stage_that_runs(tmp_path):
    child = tmp_path / "child"
    code = (
        f"import sys; sys.argv += ['--device=cpu', '--output={tmp_path}']; from scripts import gpu; "
        f"gpu.stop_as_by_hand(); gpu.stages = lambda *_: [gpu.Stage('slow', ('-c', {starts_a_child(child)!r}), 9)]; "
        "gpu.run_command(gpu.main)"
    )
    process = Forked(run_code, code)
    while not (child.exists() and child.read_text()):
        assert process.poll() is None
        time.sleep(0.1)
    process.terminate()
    assert process.communicate(timeout=120)[1] == "interrupted\n"
    assert process.returncode == 130 and is_gone(child.read_text())


@pytest.mark.parametrize("hours", ["0", "-1", "nan", "inf"])
def test_hours_that_are_none_are_refused(hours, monkeypatch):
    with pytest.raises(UserError, match=r"--hours is .*; give a number above 0"):
        call(monkeypatch, "--device=cpu", f"--hours={hours}")


def test_without_a_gpu_one_sentence_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="finds no GPU here"):
        call(monkeypatch)


def test_what_the_shell_script_starts_needs_no_package_that_only_the_tests_need():
    lines = (ROOT / "tests" / "requirements.txt").read_text().splitlines()
    absent = [line.split("==")[0].replace("-", "_") for line in lines if not line.startswith("#")]
    assert {"psutil", "triton"} < set(absent)
    started = {stage.words[0] for stage in gpu.stages("cuda", tiny=False)} | {"scripts/gpu.py", "scripts/fetch_text.py"}
    names = ", ".join(word.removesuffix(".py").replace("/", ".") for word in sorted(started))
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); import {names}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_shell_script_makes_an_environment_once_and_hands_its_options_on(tmp_path):
    """The script runs in a folder of its own, with a stand-in for Python that writes down its arguments."""
    (tmp_path / "scripts").mkdir()
    for name in ("scripts/gpu.sh", "scripts/venv.sh", "requirements.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/bash\nprintf '<%s>' \"$@\" >> {tmp_path}/said; echo >> {tmp_path}/said\n")
    python.chmod(0o755)
    (tmp_path / "python3.11").symlink_to(sys.executable)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for start in range(2):
        command = ["bash", tmp_path / "scripts" / "gpu.sh", "--hours", "3", "--output", "a b"]
        subprocess.run(command, check=True, cwd=tmp_path.parent, env=environment)
        said = (tmp_path / "said").read_text().splitlines()
        assert said[-1] == f"<scripts/gpu.py><--hours><3><--output><{tmp_path.parent}/a b>"
        installed = [line for line in said if "<pip><install>" in line]
        assert len(installed) == 3 and "<torch==" in installed[0] and len(said) == 4 + start
