"""What a checkpoint holds, who writes how much of it and how long that takes, counted from shapes alone.

The first process writes the weights; the optimizer's state is dealt to all (`optimizer_files`), and each writes the
ADMM's state of its blocks. Tokenizer, records and random generators are small.
"""

from dataclasses import dataclass

from transformers import PreTrainedModel

from salaad.config.run import RunConfig
from salaad.methods.registry import method_of
from salaad.training.optimizer_files import writers_of
from salaad.training.sharding import owners_of

RATE = 1e9  # bytes a second of a disk, assumed, and no less of a core that hashes what is written
STEPS_BEFORE = 3  # at most, after a request: the ranks agree a step later, and a host runs a step ahead of its device
PATIENCE = 30  # seconds that torch's launcher waits unless it is told otherwise


@dataclass(frozen=True)
class Saving:
    """The bytes of one checkpoint.

    Args:
        parts: what is saved → its bytes.
        most: bytes that the process writes that has most to write.
        alone: bytes that the first process would write if it wrote the optimizer's state alone.
    """

    parts: dict[str, float]
    most: float
    alone: float

    @property
    def whole(self) -> float:
        """All bytes."""
        return sum(self.parts.values())


def stop_seconds(step: float, saving: Saving) -> float:
    """How long a run takes to end that is told to stop, with steps of so many seconds, on a disk that all share."""
    return STEPS_BEFORE * step + saving.whole / RATE


def plan_saving(config: RunConfig, model: PreTrainedModel, ranks: int) -> Saving:
    """The checkpoint of a run on so many processes; `model` is the rebuilt one without numbers."""
    method = method_of(config)
    memory, admm = method.memory(model, config, 1), method.memory(model, config, ranks).get("ADMM", 0.0)
    weights = memory["weights"] * (2 if method.replaces_modules else 1)
    trained = [p for p in model.parameters() if p.requires_grad]
    each = memory["optimizer state"] / sum(p.numel() for p in trained)
    sizes = {i: round(each * p.numel()) for i, p in enumerate(trained)}
    if config.train.shard == "optimizer":
        writers = dict(enumerate(owners_of(trained, ranks)))
    else:
        writers = writers_of(sizes, ranks, round(weights))
    loads = [weights] + [0.0] * (ranks - 1)
    for i, writer in writers.items():
        loads[writer] += sizes[i]
    parts = {"weights": weights, "optimizer state": memory["optimizer state"]}
    if "ADMM" in memory:
        parts["L, S and dual"] = memory["ADMM"]
    return Saving(parts, max(loads) + admm, sum(sizes.values()) + weights + admm)


def saving_rows(saving: Saving) -> list[tuple[str, str]]:
    """Rows of --dry-run."""
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
