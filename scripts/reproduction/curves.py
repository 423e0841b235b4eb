"""The paper's figures of training itself, drawn from the records of its runs."""

from salaad.common.formats import markdown_table
from scripts.reproduction import pictures, tables, trainings
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import summary


def embedding(scale: Scale) -> Measured:
    """The table with and without the embedding, and the four panels."""
    measured = tables.embedding(scale)
    folders = (run.folder(scale) for run in (trainings.WITH_EMBEDDING, trainings.WITHOUT_EMBEDDING))
    pictures.embedding(*folders, scale.results / "embedding.png")
    measured.pictures["with and without the embedding, seed 0"] = "embedding.png"
    return measured


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


def lm_head(scale: Scale) -> Measured:
    """The LM head among the blocks at two ρ."""
    measured = tables.lm_head(scale)
    heads, embeddings = (
        {rho: run.folder(scale) for rho, run in zip(trainings.HEAD_RHOS, runs, strict=True)}
        for runs in (trainings.HEADS, trainings.EMBEDDINGS)
    )
    pictures.lm_head(heads, embeddings, scale.results / "lm_head.png")
    measured.pictures["the LM head at two ρ, seed 0"] = "lm_head.png"
    return measured


def update_frequency(scale: Scale) -> Measured:
    """Three K: table and curves over the number of ADMM updates."""
    measured = tables.update_frequency(scale)
    Ks = dict.fromkeys(row["K"] for row in measured.rows)
    folders = {K: run.folder(scale) for K, run in zip(Ks, trainings.FREQUENCIES, strict=True)}
    pictures.update_frequency(folders, scale.results / "frequency.png")
    measured.pictures["over the number of ADMM updates, seed 0"] = "frequency.png"
    return measured


def ablation_pairs(scale: Scale) -> Measured:
    """The grid of ρ, Δα and Δβ, and every point of it in one picture."""
    measured = tables.ablation_pairs_130m(scale)
    pictures.ablation(measured.rows, scale.results / "ablation.png")
    measured.pictures["perplexity of L + S over its size"] = "ablation.png"
    return measured


def overview(scale: Scale) -> Measured:
    """The two pipelines."""
    pictures.pretraining_overview(scale.results / "pretraining.png")
    pictures.deployment_overview(scale.results / "deployment.png")
    return Measured(pictures={"pretraining": "pretraining.png", "deployment": "deployment.png"})
