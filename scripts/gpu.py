"""Everything that only a GPU can tell, in one command: checks, benchmarks, and a training if there is time for it.

    bash scripts/gpu.sh                    two hours at the most; results/gpu/NAME, NAME that of the device
    bash scripts/gpu.sh --hours 12         with the training of 60m on Wikipedia text
    bash scripts/gpu.sh --device cpu --tiny --output runs/gpu   the same path with the smallest shapes, in minutes

Every stage is a command of its own that writes one JSON file. What is there is kept: the same command goes on after an
interruption. A stage that fails is told in the table, and the others go on. Send in the folder.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from salaad.common.errors import UserError, run_command
from salaad.common.files import read_json
from salaad.common.formats import markdown_table, megabytes
from scripts.devices import require_device
from scripts.trainings import ROOT

PRECISIONS = ("fp32", "tf32", "bf16-mixed", "bf16")
SIZES = {"60m": 32, "130m": 32, "350m": 16, "1b": 8}  # rows of 256 tokens in a step of the benchmark
TINY = ("--model.hidden_size=32", "--model.intermediate_size=48", "--model.vocab_size=4096", "--train.batch=2")
TEXT = ("--data.source=python-docs", "--data.packing=true", "--data.workers=0")


class Stage(NamedTuple):
    """One command.

    Args:
        name: of its JSON file and in the table.
        words: behind `python`; `--output FILE` is added unless `result` is given.
        minutes: that it takes at the most, as far as can be told; it is left out if less is left.
        result: the file it writes, if it has a place of its own.
    """

    name: str
    words: tuple[str, ...]
    minutes: float
    result: Path | None = None


def stages(device: str, tiny: bool) -> Iterator[Stage]:
    """All of them, those first that others rely on."""
    small = ("--device", device, *(("--tiny",) if tiny else ()))
    yield Stage("checks", ("scripts/gpu_checks.py", *small), 15)
    for size, batch in ({"nano": 2} if tiny else SIZES).items():
        for precision in PRECISIONS[:1] if tiny else PRECISIONS:
            words = ("scripts/bench_training.py", "--methods=salaad", f"--config={size}", *TEXT)
            words += TINY if tiny else (f"--train.batch={batch}", f"--train.micro_batch={batch}")
            words += (f"--train.precision={precision}", f"--steps={10 if tiny else 50}", "--salaad.every=10")
            yield Stage(f"training-{size}-{precision}", words, 10)
    for size in ("nano",) if tiny else SIZES:
        words = ("scripts/bench_admm.py", f"--config={size}", "--device", device, *(TINY if tiny else ()))
        yield Stage(f"admm-{size}", (*words, "--rounds=1") if tiny else words, 10)
    for size in ("nano",) if tiny else ("350m", "1b"):
        for dtype in ("float32",) if tiny else ("float32", "bfloat16"):
            words = ("scripts/bench_inference.py", f"--config={size}", f"--dtype={dtype}", "--device", device)
            words += (*TINY, "--salaad.embedding=true", "--rounds=1", "--tokens=2") if tiny else ()
            yield Stage(f"inference-{size}-{dtype}", words, 10)
    for size in ("nano",) if tiny else ("350m", "1b"):
        yield Stage(f"compression-{size}", ("scripts/bench_compression.py", f"--config={size}"), 10)
    if not tiny:
        result = ROOT / "results" / "60m-wikipedia" / "reproduce" / "table1.json"
        yield Stage("60m-wikipedia", ("scripts/reproduce.py", "--scale=60m-wikipedia", "table1"), 360, result)


def fetch_wikipedia() -> None:
    """The text of the training, unless it is there."""
    if not (ROOT / "runs" / "wikipedia").is_dir():
        subprocess.run([sys.executable, "scripts/fetch_text.py", "--output", "runs/wikipedia"], cwd=ROOT, check=True)


def done(stage: Stage, folder: Path) -> bool:
    """Whether its result is there."""
    return (stage.result or folder / f"{stage.name}.json").exists()


def perform(stage: Stage, folder: Path, hidden: bool) -> str:
    """Run a stage, its words in NAME.log; how it ended."""
    if stage.name == "60m-wikipedia":
        fetch_wikipedia()
    words = stage.words if stage.result else (*stage.words, "--output", str(folder / f"{stage.name}.json"))
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if hidden else {})
    with (folder / f"{stage.name}.log").open("w") as log:
        code = subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, stdout=log, stderr=log).returncode
    if not code:
        return "done"
    lines = (folder / f"{stage.name}.log").read_text().strip().splitlines()
    return f"exit code {code}: {lines[-1] if lines else 'nothing said'}"[:200]


def page(folder: Path, told: dict[str, str]) -> str:
    """What was found, as Markdown."""
    results = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    about = next(({key: found[key] for key in ("machine", "versions", "commit")} for found in results.values()), {})
    parts = [f"# {folder.name}", *(f"{key}: {value}" for key, value in about.items())]
    parts += [markdown_table(("stage", "outcome"), list(told.items()))]
    if "checks" in results:
        rows = [
            (row["name"], f"{row['limit']:.0e}", row["problem"] or f"{row['error']:.1e}")
            for row in results["checks"]["checks"]
        ]
        parts += ["## Checks", markdown_table(("check", "limit", "error"), rows)]
    trainings = {name.removeprefix("training-"): found for name, found in results.items() if "methods" in found}
    if trainings:
        header = ("training", "tokens/s", "SALAAD over full-rank", "ADMM update", "utilisation", "peak")
        parts += ["## Training", markdown_table(header, [training_row(*item) for item in trainings.items()])]
    return "\n\n".join(parts) + "\n"


def training_row(name: str, found: dict) -> tuple[str, ...]:
    """Full-rank training and SALAAD in one benchmark."""
    full, salaad = found["methods"]["full_rank"], found["methods"]["salaad"]
    return (
        name,
        f"{full['tokens_per_second']:,.0f}",
        f"{salaad['over_full_rank']:.3f}",
        f"{salaad['periodic_seconds'] * 1e3:,.1f} ms",
        f"{full['utilisation']:.0%}",
        megabytes(salaad["peak_bytes"]),
    )


def default_folder(device: str) -> Path:
    """results/gpu/NAME."""
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return ROOT / "results" / "gpu" / re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def main() -> None:
    """Perform what is missing and fits the hours, write the page.

    Raises:
        UserError: there is no such device, or a stage failed.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hours", type=float, default=2.0, help="that it may take; longer stages are left out")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, to check the path itself")
    parser.add_argument("--output", type=Path, help="folder to leave; results/gpu/NAME unless given")
    options = parser.parse_args()
    require_device(options.device)
    if options.hours <= 0:
        raise UserError(f"--hours is {options.hours:g}; give a number above 0")
    folder = options.output or default_folder(options.device)
    folder.mkdir(parents=True, exist_ok=True)
    end, told = time.monotonic() + 3600 * options.hours, {}
    for stage in stages(options.device, options.tiny):
        left = (end - time.monotonic()) / 60
        if done(stage, folder.absolute()):
            told[stage.name] = "done"
        elif left < stage.minutes:
            told[stage.name] = f"left out: takes up to {stage.minutes:.0f} minutes; give --hours"
        else:
            print(f"{stage.name}, {left:.0f} minutes left", flush=True)
            told[stage.name] = perform(stage, folder.absolute(), hidden=options.device == "cpu")
            print(f"{stage.name}: {told[stage.name]}", flush=True)
        (folder / "README.md").write_text(page(folder, told))
    print(f"\n{page(folder, told)}\nSend in {folder}")
    failed = [name for name, outcome in told.items() if outcome.startswith("exit")]
    if failed:
        raise UserError(f"{len(failed)} stages failed ({', '.join(failed)}); their logs lie in {folder}")


if __name__ == "__main__":
    run_command(main)
