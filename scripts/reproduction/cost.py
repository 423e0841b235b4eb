"""The hours that a training takes on a few kinds of machine, measured or estimated from its operations."""

from collections.abc import Mapping
from typing import Any

from salaad.common.gpus import GPUS as DATA_SHEETS
from scripts.reproduction.grid import Run, Scale

CORES = 9e10  # operations per second of two cores, as measured on this project's own runs
GPUS = {"1 H200": 1, "8 H100": 8}
PEAK = DATA_SHEETS["h100"].peaks  # precision → operations per second of an H100 or H200; well-tuned trainers reach 40 %
REACHED = 0.4
LAUNCHES = 0.03  # least seconds of a step on a GPU, however small the model
MACHINES = ("2 cores", *GPUS)


def hours(run: Run, scale: Scale, machine: str) -> float:
    """Return the hours of a training: for "2 cores" those on record, if any; else an estimate from its operations."""
    if machine == "2 cores" and run.recorded(scale):
        return measured_hours(run.kept(scale)["summary"])
    if machine == "2 cores":
        return run.flops(scale) / CORES / 3600
    train = scale.config.train
    speed = GPUS[machine] * REACHED * PEAK[dict(run.settings).get("train.precision", train.precision)]
    return max(LAUNCHES * train.steps, run.flops(scale) / speed) / 3600


def measured_hours(summary: Mapping[str, Any]) -> float:
    """Return the wall time, in hours, of a training, from its summary.json."""
    return sum(summary["seconds"].values()) / 3600
