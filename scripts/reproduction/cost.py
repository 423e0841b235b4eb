"""What a training takes: operations, and hours on a few kinds of machine."""

from pathlib import Path

from salaad.common.files import read_json
from salaad.common.gpus import GPUS as DATA_SHEETS
from scripts.reproduction.grid import Run, Scale

CORES = 9e10  # operations per second of two cores, as measured on this project's own runs
GPUS = {"1 H200": 1, "8 H100": 8}
PEAK = DATA_SHEETS["h100"].peaks  # operations per second of either by precision; well-tuned trainers reach 40 % of it
REACHED = 0.4
LAUNCHES = 0.03  # seconds that a step takes on a GPU however small it is
MACHINES = ("2 cores", *GPUS)


def hours(run: Run, scale: Scale, machine: str) -> float:
    """Hours of a training; measured where such a machine has trained it, else estimated from its operations."""
    if machine == "2 cores" and run.recorded(scale):
        return measured_hours(run.record(scale))
    if machine == "2 cores":
        return run.flops(scale) / CORES / 3600
    train = scale.config.train
    speed = GPUS[machine] * REACHED * PEAK[dict(run.settings).get("train.precision", train.precision)]
    return max(LAUNCHES * train.steps, run.flops(scale) / speed) / 3600


def measured_hours(record: Path) -> float:
    """Wall time of a recorded training."""
    return sum(read_json(record)["summary"]["seconds"].values()) / 3600
