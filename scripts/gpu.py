"""Everything that only a GPU can tell, in one command: checks, benchmarks, and a training if there is time for it.

    bash scripts/gpu.sh                    two hours at the most; results/gpu/NAME, NAME that of the device
    bash scripts/gpu.sh --hours 12         with the training of 60m on Wikipedia text
    bash scripts/gpu.sh --device cpu --tiny --output runs/gpu   the same path with the smallest shapes, in minutes

Every stage is a command of its own that writes one JSON file. Existing files are kept: the same command goes on after
an interruption, and a file that is deleted is made again. A file of another commit is moved to older/COMMIT and made
again, except for trainings, which are kept if this device made them. A stage that fails is named in the table, and the
others go on; one that takes twice its expected time, or is not done when the hours are over, is stopped. Send in the
folder.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from salaad.common.errors import UserError, run_command
from salaad.common.files import read_json, write_json
from salaad.common.gpus import gpu_called
from salaad.common.provenance import provenance
from salaad.config.command_line import read_command_line
from salaad.training.prediction import predict
from scripts.devices import require_device
from scripts.on_device.check import FAILED, Check
from scripts.on_device.page import page
from scripts.outlines import description_of
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.grid import SCALES, distinct
from scripts.trainings import ROOT

PRECISIONS = ("fp32", "tf32", "bf16-mixed", "bf16")
SIZES = {"60m": 32, "130m": 32, "350m": 16, "1b": 8}  # rows of 256 tokens in a step of the benchmark
TINY = ("--model.hidden_size=32", "--model.intermediate_size=48", "--model.vocab_size=4096", "--train.batch=2")
TEXT = ("--data.source=python-docs", "--data.packing=true", "--data.workers=0")
WIKIPEDIA = "runs/wikipedia"
PATIENCE = 60.0  # seconds that a stage has to end by itself once its time is over; a training saves meanwhile
DONE = "done"
MARGIN = 2  # a stage is stopped after so many times its expected minutes
AROUND = 30  # minutes of the reproduction beside its trainings: text, evaluations


class Stage(NamedTuple):
    """One command, with its expected time and the place of its result.

    Args:
        name: name of the JSON file, shown in the table.
        words: arguments of `python`; `--output FILE` is added unless `result` is given.
        minutes: expected time; the stage is left out if less time is left, and stopped after `MARGIN` times as many
            minutes.
        result: the file that the command writes if it has a fixed place; this file is copied.
        before: arguments of another `python` command, which must succeed first.
    """

    name: str
    words: tuple[str, ...]
    minutes: float
    result: Path | None = None
    before: tuple[str, ...] = ()


def stages(device: str, tiny: bool) -> Iterator[Stage]:
    """Yield all stages, those first that others rely on."""
    small, on = ("--tiny",) if tiny else (), ("--device", device)
    yield Stage("checks", ("scripts/gpu_checks.py", *on, *small), 8)
    for size, batch in ({"nano": 2} if tiny else SIZES).items():
        for precision in PRECISIONS[:1] if tiny else PRECISIONS:
            words = ("scripts/bench_training.py", "--methods=salaad", f"--config={size}", *TEXT)
            words += TINY if tiny else (f"--train.batch={batch}", f"--train.micro_batch={batch}")
            words += (f"--train.precision={precision}", f"--steps={10 if tiny else 50}", "--salaad.every=10")
            yield Stage(f"training-{size}-{precision}", words, 10)
    if not tiny:
        batch = f"--train.batch={SIZES['350m']}"
        words = ("scripts/bench_training.py", "--methods=salaad", "--config=350m", "--config=fast", *TEXT, batch)
        yield Stage("training-350m-fast", (*words, "--steps=50"), 20)
    for size in ("nano",) if tiny else SIZES:
        words = ("scripts/bench_admm.py", f"--config={size}", *on, *(TINY if tiny else ()))
        yield Stage(f"admm-{size}", (*words, "--rounds=1") if tiny else words, 10)
    for size in ("nano",) if tiny else ("350m", "1b"):
        for dtype in ("float32",) if tiny else ("float32", "bfloat16"):
            words = ("scripts/bench_inference.py", f"--config={size}", f"--dtype={dtype}", *on)
            words += (*TINY, "--salaad.embedding=true", "--rounds=1", "--tokens=2") if tiny else ()
            yield Stage(f"inference-{size}-{dtype}", words, 10)
    for size in ("nano",) if tiny else ("350m", "1b"):
        words = ("scripts/bench_compression.py", f"--config={size}", *on, *(TINY if tiny else ()))
        yield Stage(f"compression-{size}", words, 10)
    if not tiny:
        words = ("scripts/reproduce.py", "--scale=60m-wikipedia", "table1")
        result = ROOT / "results" / "60m-wikipedia" / "reproduce" / "table1.json"
        words += ("--again",) if result.exists() and not is_of(device, read_json(result)) else ()
        # The folder gets its name when all of it is there.
        text = () if (ROOT / WIKIPEDIA).is_dir() else ("scripts/fetch_text.py", "--output", WIKIPEDIA)
        yield Stage("60m-wikipedia", words, reproduction_minutes(name_of(device)), result, text)


@cache
def reproduction_minutes(gpu: str) -> float:
    """Predicted minutes of the reproduction on a GPU of this name, good to a factor of two."""
    scale = SCALES["60m-wikipedia"]
    [item] = [item for item in ITEMS if item.name == "table1"]
    seconds = 0.0
    for run in distinct(item.runs(scale), scale):
        config, _ = read_command_line(run.command(scale)[1:])
        seconds += config.train.steps * sum(predict(config, description_of(config), gpu_called(gpu), 1).values())
    return seconds / 60 + AROUND


def name_of(device: str) -> str:
    """Return the driver's name of the GPU; an empty string for a CPU, and where there is no GPU."""
    return torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else ""


def is_of(device: str, result: Mapping[str, Any]) -> bool:
    """Return whether this device made a result and all trainings in it."""
    machines = [about["machine"] for about in (result, *result.get("trainings", ())) if "machine" in about]
    return all(machine.startswith(name_of(device)) for machine in machines)


def outcome(stage: Stage, folder: Path, device: str, commit: str | None = None) -> str | None:
    """Return how a stage ended, from its result of this device and `commit` (of any if None); None without a result.

    A result with a fixed place is copied first; it may be of another commit, since trainings take hours.
    """
    path = folder / f"{stage.name}.json"
    if stage.result and stage.result.exists() and is_of(device, read_json(stage.result)):
        write_json(read_json(stage.result), path)
    if not path.exists():
        return None
    found = read_json(path)
    if not is_of(device, found) or not (stage.result or commit in (None, found.get("commit", commit))):
        return None
    if stage.name != "checks":
        return f"left out: {found['left_out']}" if "left_out" in found else DONE
    if found.get("left"):
        return None
    checks = [Check.from_row(row) for row in found["checks"]]
    failed = [check.name for check in checks if check.outcome == FAILED]
    return f"{FAILED}: {len(failed)} of {len(checks)} checks ({', '.join(failed)})"[:300] if failed else DONE


def set_aside(path: Path, device: str, commit: str) -> None:
    """Move a result of another commit or device to older/COMMIT; one that this commit and device have begun stays."""
    found = read_json(path) if path.exists() else {}
    if found.get("commit", commit) != commit or not is_of(device, found):
        older = path.parent / "older" / found.get("commit", "unknown")
        older.mkdir(parents=True, exist_ok=True)
        path.replace(older / path.name)


def perform(stage: Stage, folder: Path, device: str, commit: str, left: float) -> str:
    """Run a stage for at most `left` seconds, with its output in NAME.log, and return how it ended."""
    result = folder / f"{stage.name}.json"
    set_aside(result, device, commit)
    words = stage.words if stage.result else (*stage.words, "--output", str(result))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
    seconds = min(left, 60 * MARGIN * stage.minutes)
    end, path = time.monotonic() + seconds, folder / f"{stage.name}.log"
    with path.open("w") as log:
        for command in filter(None, (stage.before, words)):
            code = exit_code(command, environment, log, end - time.monotonic())
            if code is None and seconds < left:
                return f"{FAILED}: stopped after {seconds / 60:.0f} minutes, {MARGIN} times what it should take"
            if code is None:
                return f"out of time: stopped after {seconds / 60:.0f} minutes; give more --hours, and it goes on"
            if code:
                lines = path.read_text().strip().splitlines()
                last = lines[-1] if lines else "nothing said"
                problem = f"{FAILED}: {command[0]}, exit code {code}: {last}"[:300]
                break
        else:
            problem = f"{FAILED}: {words[0]} wrote no result"
    return outcome(stage, folder, device) or problem


def exit_code(words: tuple[str, ...], environment: dict[str, str], log: TextIO, seconds: float) -> int | None:
    """Run a Python command and return its exit code; None if it, and all it started, was stopped after `seconds`."""
    command = [sys.executable, *words]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        return process.wait(max(0.0, seconds))
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.returncode is None:
            stop(process)


def stop(process: subprocess.Popen) -> None:
    """Terminate a process and its process group; processes that do not end within `PATIENCE` seconds are killed."""
    end = time.monotonic() + PATIENCE
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < end:
            process.poll()
            os.killpg(process.pid, 0)  # raises once no process of the group is left
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def default_folder(device: str) -> Path:
    """Return results/gpu/NAME for the NAME of the device."""
    return ROOT / "results" / "gpu" / re.sub(r"[^a-z0-9]+", "-", (name_of(device) or "cpu").lower()).strip("-")


def main() -> None:
    """Run the stages that are missing and fit the hours, and write the page.

    Raises:
        UserError: there is no such device, or a stage failed.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--hours", type=float, default=2.0, help="that all may take; stages that need longer are left out"
    )
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="what is checked")
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, to check the path itself")
    parser.add_argument("--output", type=Path, help="folder to leave; results/gpu/NAME unless given")
    options = parser.parse_args()
    require_device(options.device)
    if not 0 < options.hours < float("inf"):
        raise UserError(f"--hours is {options.hours:g}; give a number above 0")
    folder = (options.output or default_folder(options.device)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    end, outcomes, commit = time.monotonic() + 3600 * options.hours, {}, provenance()["commit"]
    for stage in stages(options.device, options.tiny):
        left, told = end - time.monotonic(), outcome(stage, folder, options.device, commit)
        if told is None and left < 60 * stage.minutes:
            told = f"left out: takes about {stage.minutes:.0f} minutes; give more --hours"
        elif told is None:
            print(f"{stage.name}, {left / 60:.0f} minutes left", flush=True)
            told = perform(stage, folder, options.device, commit, left)
            print(f"{stage.name}: {told}", flush=True)
        outcomes[stage.name] = told
        (folder / "README.md").write_text(page(folder, outcomes))
    print(f"\n{page(folder, outcomes)}\nSend in {folder}")
    failed = {name: told for name, told in outcomes.items() if told.startswith(FAILED)}
    if failed:
        told = "; ".join(f"{name} {told}" for name, told in failed.items())
        raise UserError(
            f"{len(failed)} of {len(outcomes)} stages failed: {told}; the logs lie in {folder}, and a stage whose JSON "
            "file is deleted is performed again"
        )


def stop_as_by_hand() -> None:
    """Let SIGTERM and SIGHUP act on this process as Ctrl-C does, so that the running stage is stopped too."""
    for request in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(request) != signal.SIG_IGN:  # under nohup SIGHUP is ignored
            signal.signal(request, signal.default_int_handler)


if __name__ == "__main__":
    stop_as_by_hand()
    run_command(main)
