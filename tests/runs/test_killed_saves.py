"""Runs that are killed in the middle of a save, and launchers that end before their processes have saved."""

import signal
import time

import psutil
import pytest
from torch.distributed.launcher.api import LaunchConfig

from salaad.common.files import verify
from salaad.runs.checkpoints import Checkpoints
from scripts.reliability.toy_run import ROOT
from tests.helpers.forked import Forked, run_on_ranks
from tests.helpers.training import (
    assert_same_records,
    last_checkpoint,
    lines,
    train_on_ranks,
    wait_for_steps,
)


def test_a_run_killed_while_it_saves_goes_on_from_the_checkpoint_before(toy, tmp_path):
    arguments = toy(train__save_every=4, train__keep_last=1)
    words = ["8", *arguments, f"--output={tmp_path / 'run'}"]
    process = Forked(run_on_ranks, "tests/helpers/train_until_killed.py", words, 2)
    state = tmp_path / "run" / "checkpoints" / ".partial-step-0000008" / "state"
    try:
        until = time.monotonic() + 200
        while (
            process.poll() is None
            and time.monotonic() < until
            and not all((state / file).is_file() for file in files_of_two())
        ):
            time.sleep(0.05)
    finally:
        process.kill_all()  # as a launcher kills its processes when they take too long to save
    err = process.communicate(timeout=120)[1]
    assert state.is_dir(), err[-2000:]  # killed in the middle
    folder = tmp_path / "run" / "checkpoints"
    assert last_checkpoint(tmp_path / "run").name == "step-0000004"
    assert Checkpoints(folder).newest_whole() == (folder / "step-0000004", [])
    verify(folder / "step-0000004", alone=True)

    train_on_ranks([(arguments, tmp_path / output) for output in ("run", "whole")], 2, tmp_path)
    assert len(lines(tmp_path / "run")) == 12
    assert_same_records(tmp_path / "run", tmp_path / "whole")
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-0000012"]


def files_of_two() -> list[str]:
    return [f"optimizer-{rank:05d}-of-00002.pt" for rank in (0, 1)]


def test_the_launcher_waits_as_long_as_it_is_told(monkeypatch):
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 30
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "270")
    assert LaunchConfig(1, 1, 1).shutdown_timeout == 270
    for path in ("accelerate/gpu8.yaml", "accelerate/nodes4.yaml", "slurm/train.sbatch"):
        assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=270" in (ROOT / "configs" / path).read_text()


@pytest.mark.parametrize("ends", [signal.SIGUSR1, signal.SIGKILL])  # for all of the job; for the launcher alone
def test_two_processes_save_although_their_launcher_has_died(toy, tmp_path, ends):
    words = [*toy(train__steps=100000), f"--output={tmp_path / 'run'}"]
    # The variable by which a process knows that it has a launcher.
    launcher = Forked(run_on_ranks, "train.py", words, 2, environment={"ACCELERATE_MIXED_PRECISION": "no"})
    try:
        wait_for_steps(launcher, tmp_path / "run")
        trainers = psutil.Process(launcher.pid).children(recursive=True)
        launcher.send_signal(ends)
        if ends == signal.SIGUSR1:
            for trainer in trainers:
                trainer.send_signal(ends)
        out, err = launcher.communicate(timeout=120)  # the trainers hold its pipes until they end
    finally:
        launcher.kill()
    assert launcher.returncode == -ends
    assert "go on with the same command" in out and "Traceback" not in err, err[-2000:]
    assert not any(trainer.is_running() and trainer.status() != psutil.STATUS_ZOMBIE for trainer in trainers)
    newest = last_checkpoint(tmp_path / "run")
    assert int(newest.name.removeprefix("step-")) == lines(tmp_path / "run")[-1]["step"]
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest_whole() == (newest, [])
