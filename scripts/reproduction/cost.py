"""What a training takes: operations, and hours on a few kinds of machine."""

from pathlib import Path

from salaad.files import read_json
from scripts.reproduction.grid import Run, Scale

# Sustained operations per second: two cores as measured on this project's own runs, GPUs at 40 % of their peak in
# bfloat16 (an H200 and an H100 have 989e12), which is what well-tuned trainers reach.
LAUNCHES = 0.03  # seconds that a step takes on a GPU however small it is
MACHINES = {"2 cores": 9e10, "1 H200": 0.4 * 989e12, "8 H100": 8 * 0.4 * 989e12}


def hours(run: Run, scale: Scale, machine: str) -> float:
    """Hours of a training; measured where such a machine has trained it, else estimated from its operations."""
    if machine == "2 cores" and run.recorded(scale):
        return measured_hours(run.record(scale))
    least = 0 if machine == "2 cores" else LAUNCHES * scale.config.train.steps
    return max(least, run.flops(scale) / MACHINES[machine]) / 3600


def measured_hours(record: Path) -> float:
    """Wall time of a recorded training."""
    return sum(read_json(record)["summary"]["seconds"].values()) / 3600
