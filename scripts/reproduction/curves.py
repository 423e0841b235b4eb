"""The paper's figures of training itself, drawn from the records of its runs."""

from salaad.files import read_json
from salaad.tables import markdown_table
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
    run = trainings.SALAAD
    pictures.learning_dynamics(run.folder(scale), scale.results / "dynamics.png")
    blocks = pictures.blocks_of(run.folder(scale))
    steps, deltas = pictures.mean_over_blocks(blocks)
    _, errors = pictures.mean_over_blocks(blocks, "error")
    rows = [
        {"step": step, "delta": delta, "error": error} for step, delta, error in zip(steps, deltas, errors, strict=True)
    ]
    thinned = [*rows[: -1 : max(1, len(rows) // 200)], rows[-1]]
    return Measured(thinned, {}, {"learning dynamics": "dynamics.png"}, ["seed 0"])


def lm_head(scale: Scale) -> Measured:
    """The LM head among the blocks at two ρ."""
    measured = tables.lm_head(scale)
    folders: dict[str, dict] = {"LM head": {}, "embedding": {}}
    for run, row in zip(trainings.lm_head(scale), measured.rows, strict=True):
        folders[row["block"]][row["rho"]] = run.folder(scale)
    pictures.lm_head(folders["LM head"], folders["embedding"], scale.results / "lm_head.png")
    measured.pictures["the LM head at two ρ"] = "lm_head.png"
    return measured


def update_frequency(scale: Scale) -> Measured:
    """Three K: table and curves over the number of ADMM updates."""
    measured = tables.update_frequency(scale)
    runs = trainings.update_frequency(scale)
    folders = {read_json(run.record(scale))["config"]["salaad"]["every"]: run.folder(scale) for run in runs}
    pictures.update_frequency(folders, scale.results / "frequency.png")
    measured.pictures["over the number of ADMM updates"] = "frequency.png"
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
