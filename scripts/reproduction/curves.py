"""The paper's figures of training itself, drawn from the records of its runs."""

import math
from statistics import fmean
from typing import Any

from salaad.common.formats import markdown_table
from scripts.reproduction import pictures, trainings
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import summary


def time_breakdown(scale: Scale) -> Measured:
    """Measure the wall time of a SALAAD run and a vanilla run by phase."""
    summaries = {"SALAAD": summary(trainings.SALAAD, scale), "vanilla": summary(trainings.VANILLA, scale)}
    pictures.time_breakdown(summaries, scale.results / "time.png")
    rows = [{"method": label, **found["seconds"]} for label, found in summaries.items()]
    phases = [phase for phase in rows[0] if phase != "method"]
    lines = [(row["method"], *(f"{row[phase] / 60:.2f}" for phase in phases)) for row in rows]
    table = markdown_table(("minutes", *phases), lines)
    return Measured(rows, {"wall time": table}, {"wall time by phase": "time.png"})


def learning_dynamics(scale: Scale) -> Measured:
    """Draw loss and δ over training; measure the course of δ and, at its end, every block's error and growth of τ_S.

    With J = 1, X − L − S is the change of the dual, whose entries are at most τ_S: δ is bounded while τ_S is.
    """
    pictures.learning_dynamics(trainings.SALAAD.folder(scale), scale.results / "dynamics.png")
    rows = []
    for seed in scale.seeds:
        blocks = pictures.blocks_of(trainings.SALAAD.seeded(seed).folder(scale))
        steps, deltas = pictures.mean_over_blocks(blocks)
        _, errors = pictures.mean_over_blocks(blocks, "error")
        worst = [max(row["error"] for row in round_) for round_ in zip(*blocks.values(), strict=False)]
        course = [
            {"seed": seed, "step": step, "delta": delta, "error": error, "worst_error": largest}
            for step, delta, error, largest in zip(steps, deltas, errors, worst, strict=True)
        ]
        course[-1]["errors"] = {name: mine[-1]["error"] for name, mine in blocks.items()}
        course[-1]["tau_growth"] = {name: growth([row["beta"] for row in mine]) for name, mine in blocks.items()}
        rows += peaks(course, 200)
    return Measured(rows, {}, {"learning dynamics, seed 0": "dynamics.png"})


def growth(values: list[float]) -> float:
    """The mean of the last quarter of the values over that of the third quarter; 1 if both are zero."""
    quarter = max(1, len(values) // 4)
    third, last = fmean(values[-2 * quarter : -quarter] or values), fmean(values[-quarter:])
    return last / third if third else math.inf if last else 1.0


def peaks(course: list[dict[str, Any]], stretches: int) -> list[dict[str, Any]]:
    """Return the row of largest δ in each of `stretches` parts, and the last row: fewer rows with the same peaks."""
    length = -(-len(course) // stretches)
    highest = [max(course[i : i + length], key=lambda row: row["delta"]) for i in range(0, len(course), length)]
    return highest if highest[-1] is course[-1] else [*highest, course[-1]]
