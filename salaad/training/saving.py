"""What a checkpoint holds, how much of it each process writes and how long that takes, counted from shapes alone.

The first process writes the weights; the optimizer's state is divided among all (`optimizer_files`), and each writes
the ADMM's state of its blocks. Tokenizer, records and random generators are small.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from salaad.config.run import RunConfig
from salaad.methods.registry import method_of
from salaad.training.optimizer_files import writers_of
from salaad.training.sharding import owners_of

RATE = 1e9  # bytes per second that a disk is assumed to write; a core hashes no more slowly
STEPS_BEFORE = 3  # most steps after a request to stop: ranks agree a step later, a host runs a step ahead of its device
PATIENCE = 30  # seconds that torch's launcher waits unless it is told otherwise


@dataclass(frozen=True)
class Saving:
    """The bytes of one checkpoint.

    Args:
        parts: what is saved → its bytes.
        most: bytes that are written by the process that writes most.
        alone: bytes that the first process would write if no other wrote a part of the optimizer's state.
    """

    parts: dict[str, float]
    most: float
    alone: float

    @property
    def whole(self) -> float:
        """The bytes of the whole checkpoint."""
        return sum(self.parts.values())


def stop_seconds(step: float, saving: Saving) -> float:
    """Seconds from a request to stop to the end of the run, with steps of `step` seconds and a disk that all share."""
    return STEPS_BEFORE * step + saving.whole / RATE


def plan_saving(config: RunConfig, model: PreTrainedModel, ranks: int) -> Saving:
    """Return the sizes of a checkpoint of a run on `ranks` ranks; `model` is the rebuilt model on the meta device."""
    method = method_of(config)
    memory, admm = method.memory(model, config, 1), method.memory(model, config, ranks).get("ADMM", 0.0)
    weights, beside = memory["weights"], method.bytes_beside(model, config)
    trained = [p for p in model.parameters() if p.requires_grad]
    each = memory["optimizer state"] / sum(p.numel() for p in trained)
    sizes = {i: round(each * p.numel()) for i, p in enumerate(trained)}
    if config.train.shard == "optimizer":
        writers = dict(enumerate(owners_of(trained, ranks)))
    else:
        writers = writers_of(sizes, ranks, round(weights + beside))
    loads = [weights + beside] + [0.0] * (ranks - 1)
    for i, writer in writers.items():
        loads[writer] += sizes[i]
    parts = {"weights": weights, "optimizer state": memory["optimizer state"]}
    if "ADMM" in memory:
        parts["L, S and dual"] = memory["ADMM"]
    if beside:
        parts[f"other tensors of {config.method}"] = beside
    return Saving(parts, max(loads) + admm, sum(sizes.values()) + weights + beside + admm)


def saving_rows(saving: Saving) -> list[tuple[str, str]]:
    """Return the rows on saving in the table of --dry-run."""
    parts = ", ".join(f"{kind} {size / 1e9:.2f}" for kind, size in saving.parts.items())
    return [
        ("a checkpoint", f"{saving.whole / 1e9:.2f} GB ({parts}), {saving.most / 1e9:.2f} by the fullest process"),
        (
            "seconds of a save",
            f"{saving.most / RATE:.1f} where a process writes {RATE / 1e9:g} GB/s, {saving.whole / RATE:.1f} where all "
            "together do",
        ),
        (
            "when told to stop",
            f"up to {STEPS_BEFORE} steps, then a save; a launcher waits {PATIENCE} s unless "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more",
        ),
    ]
