"""Running train.py on a toy model and reading what it wrote."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

import train
from salaad.cli import read_command_line

ROOT = Path(__file__).resolve().parent.parent
MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
SECONDS = ("seconds", "tokens_per_second")


def toy_arguments(text_files: dict, tokenizer: str, **overrides: object) -> list[str]:
    """Command-line options of a run that takes seconds; `overrides` like train__steps=3."""
    options: dict[str, object] = {f"model__{key}": value for key, value in MODEL.items()}
    options |= {
        "model__vocab_size": 512,
        "data__source": "files",
        "data__files": json.dumps(text_files["train"]),
        "data__validation_files": json.dumps(text_files["validation"]),
        "data__tokenizer": tokenizer,
        "data__sequence_length": 32,
        "data__workers": 0,
        "train__steps": 12,
        "train__batch": 4,
        "train__log_every": 1,
        "train__eval_every": 0,
        "train__save_every": 0,
        "train__eval_tokens": 2000,
        "salaad__every": 3,
        "salaad__delta_alpha": 0.1,
        "salaad__delta_beta": 0.01,
        "salaad__rho_constant": 5.0,
    }
    options |= overrides
    return [f"--{key.replace('__', '.')}={value}" for key, value in options.items()]


def run_training(arguments: list[str], output: Path) -> None:
    """`train.main` in this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    config, options = read_command_line([*arguments, f"--output={output}"])
    train.main(config, options)


def start(arguments: list[str], output: Path, processes: int = 1) -> subprocess.Popen:
    """`accelerate launch train.py` as a user types it, on one thread per process."""
    command = [str(Path(sys.executable).parent / "accelerate"), "launch"]
    if processes > 1:
        command += ["--config_file", "configs/accelerate/cpu2.yaml", "--num_processes", str(processes)]
        command += ["--main_process_port", "0"]
    command += ["train.py", *arguments, f"--output={output}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def launch(arguments: list[str], output: Path, processes: int = 1) -> subprocess.CompletedProcess:
    """`start`, and wait for the end."""
    process = start(arguments, output, processes)
    try:
        out, err = process.communicate(timeout=300)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def wait_for_steps(process: subprocess.Popen, output: Path) -> None:
    """Return when the run in `output` has logged a step, or has ended."""
    metrics = output / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.05)


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """The lines of a record, without the fields that measure time."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in SECONDS} for row in rows]


def last_checkpoint(folder: Path) -> Path:
    """The checkpoint that `latest` names."""
    return folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()


def weights(folder: Path) -> dict:
    """The model's tensors in the newest checkpoint."""
    return load_file(last_checkpoint(folder) / "model" / "model.safetensors")
