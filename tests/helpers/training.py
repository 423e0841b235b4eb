"""Running train.py on a toy model and reading what it wrote."""

import importlib
import json
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import train
from salaad.common import distributed
from salaad.config.command_line import read_command_line
from scripts.reliability.toy_run import ROOT, launch_command
from tests.helpers.forked import Forked, run_script
from tests.helpers.ranks import run_ranks

SECONDS = ("seconds", "tokens_per_second")


def run_training(arguments: list[str], output: Path) -> None:
    """Run `train.main` with these options in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config, options = read_command_line([*arguments, f"--output={output}"])
    train.main(config, options)


def train_on_ranks(
    orders: list[tuple[list[str], Path]], processes: int, tmp_path: Path, importing: str = "train"
) -> None:
    """Run `train.main` on several ranks, once for each of `orders` (options, output), without a launcher's start.

    Every rank first imports the module `importing`, which may register a method.
    """
    run_ranks(_train_on_a_rank, processes, tmp_path, orders, importing, timeout=300)


def train_as_told(command: list[str], environment: dict[str, str]) -> None:
    """Train in this process or in forked ones what `scripts.on_device.trainings.perform` starts as a command."""
    *words, output = command[command.index("train.py") + 1 :]
    folder = Path(output.removeprefix("--output="))
    if "--num_processes" not in command:
        run_training(words, folder)
    else:
        train_on_ranks([(words, folder)], int(command[command.index("--num_processes") + 1]), folder.parent)


def train_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `scripts.trainings.trained` train in this process, as the start of another takes ten seconds."""
    run = subprocess.run  # also git's, for the provenance

    def run_or_train(command: list[str], **how: Any) -> subprocess.CompletedProcess:
        if "train.py" not in command:
            return run(command, **how)
        end = command.index("--output")
        run_training([*command[2:end], *command[end + 2 :]], Path(command[end + 1]))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run_or_train)


def _train_on_a_rank(orders: list[tuple[list[str], Path]], importing: str) -> None:
    importlib.import_module(importing)
    rank, size = str(distributed.rank()), str(distributed.world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    train.leave_together = lambda accelerator: accelerator.wait_for_everyone()
    for arguments, output in orders:
        run_training(arguments, output)


def start(arguments: list[str], output: Path, processes: int = 1) -> subprocess.Popen:
    """Start `accelerate launch train.py` as a user types it, with one thread per process."""
    command, environment = launch_command(arguments, output, processes)
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def start_alone(arguments: list[str], output: Path) -> Forked:
    """Start `python train.py`, without a launcher and without its imports."""
    return Forked(run_script, "train.py", [*arguments, f"--output={output}"])


def launch(arguments: list[str], output: Path, processes: int = 1) -> subprocess.CompletedProcess:
    """Launch train.py as `start` does, and wait until it ends."""
    process = start(arguments, output, processes)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_steps(process: subprocess.Popen | Forked, output: Path) -> None:
    """Return when the run in `output` has logged a step, or has ended."""
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Return the rows of a run's JSON lines file, without the fields that measure time."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in SECONDS} for row in rows]


def assert_same_records(first: Path, second: Path) -> None:
    """Assert that two runs have written the same records, except for times."""
    for name in ("metrics.jsonl", "blocks.jsonl", "evaluations.jsonl"):
        assert lines(first, name) == lines(second, name)


def last_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of a run that its file `latest` names."""
    return folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()


def moments(checkpoint: Path) -> dict[int, dict]:
    """Return index of a parameter → its optimizer state, from the files of all ranks."""
    files = (checkpoint / "state").glob("optimizer*.pt")
    return {i: entry for file in files for i, entry in torch.load(file, weights_only=True)["state"].items()}


def weights(folder: Path) -> dict:
    """The model's tensors in the newest checkpoint."""
    return load_file(last_checkpoint(folder) / "model" / "model.safetensors")
