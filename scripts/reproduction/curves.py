"""The paper's figures of training itself, drawn from the records of its runs."""

from salaad.common.formats import markdown_table
from scripts.reproduction import pictures, trainings
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import summary


def time_breakdown(scale: Scale) -> Measured:
    """Where the wall time of a run went."""
    summaries = {"SALAAD": summary(trainings.SALAAD, scale), "vanilla": summary(trainings.VANILLA, scale)}
    pictures.time_breakdown(summaries, scale.results / "time.png")
    rows = [{"method": label, **found["seconds"]} for label, found in summaries.items()]
    phases = [phase for phase in rows[0] if phase != "method"]
    lines = [(row["method"], *(f"{row[phase] / 60:.2f}" for phase in phases)) for row in rows]
    table = markdown_table(("minutes", *phases), lines)
    return Measured(rows, {"wall time": table}, {"wall time by phase": "time.png"})


def learning_dynamics(scale: Scale) -> Measured:
    """Loss, mean δ, and one block's structure and δ, over training."""
    pictures.learning_dynamics(trainings.SALAAD.folder(scale), scale.results / "dynamics.png")
    rows = []
    for seed in scale.seeds:
        blocks = pictures.blocks_of(trainings.SALAAD.seeded(seed).folder(scale))
        steps, deltas = pictures.mean_over_blocks(blocks)
        _, errors = pictures.mean_over_blocks(blocks, "error")
        course = [
            {"seed": seed, "step": step, "delta": delta, "error": error}
            for step, delta, error in zip(steps, deltas, errors, strict=True)
        ]
        rows += peaks(course, 200)
    return Measured(rows, {}, {"learning dynamics, seed 0": "dynamics.png"})


def peaks(course: list[dict[str, float]], stretches: int) -> list[dict[str, float]]:
    """The largest δ of each of so many stretches, and the end: a long course thinned, without losing its height."""
    length = -(-len(course) // stretches)
    highest = [max(course[i : i + length], key=lambda row: row["delta"]) for i in range(0, len(course), length)]
    return highest if highest[-1] is course[-1] else [*highest, course[-1]]
