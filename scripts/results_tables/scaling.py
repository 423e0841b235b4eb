"""The tables of results/scaling: predicted hours of the paper's trainings on one GPU to 128, which nobody measured."""

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from salaad.common.formats import markdown_table
from salaad.common.gpus import GPUS
from salaad.config.command_line import read_command_line
from salaad.model.build import describe_model, outline
from salaad.spectral.cost import COLUMN_KERNELS, REFILL
from salaad.training.prediction import (
    BACKWARD,
    COUNTS,
    KERNELS,
    LAUNCH,
    MOVED,
    PER_MACHINE,
    REACHED,
    RECOMPUTED,
    predict,
    prediction_table,
)
from salaad.training.saving import RATE, plan_saving
from scripts.reproduction.grid import PAPERS


def sections() -> dict[str, str]:
    """Hours of every size, the parts of a step of one, and what all of it assumes."""
    config, _ = read_command_line(["--config", "350m"])
    description = describe_model(config.model, config.data.sequence_length)
    return {
        "scaling-hours": hours_table(),
        "scaling-350m": prediction_table(config, description, "h100"),
        "scaling-saving": saving_table(),
        "scaling-assumptions": assumptions(),
    }


def hours_table() -> str:
    """Hours of the whole run by size, device, precision and number of GPUs."""
    rows = []
    for size in PAPERS:
        own, _ = read_command_line(["--config", size])
        description = describe_model(own.model, own.data.sequence_length)
        for precision in ("fp32", "bf16-mixed"):
            config = replace(own, train=replace(own.train, precision=precision))
            for name in ("h100", "a100"):
                steps = [sum(predict(config, description, GPUS[name], count).values()) for count in COUNTS]
                hours = (config.train.steps * step / 3600 for step in steps)
                rows.append((size, precision, name, *(f"{h:,.0f}" if h >= 10 else f"{h:.2g}" for h in hours)))
    return markdown_table(("model", "precision", "GPU", *(f"{count}" for count in COUNTS)), rows)


def saving_table() -> str:
    """What a save of 1b takes of a disk at several numbers of processes, with a state that one writes or all do."""
    config, _ = read_command_line(["--config", "1b"])
    model, rows = outline(describe_model(config.model, config.data.sequence_length)), []
    for ranks in COUNTS[:3]:
        for shard in ("none", "optimizer") if ranks > 1 else ("none",):
            saving = plan_saving(replace(config, train=replace(config.train, shard=shard)), model, ranks)
            sizes = (saving.whole, saving.alone, saving.most)
            seconds = (f"{size / RATE:.1f}" for size in (saving.alone, saving.most, saving.whole))
            rows.append((f"{ranks}", shard, *(f"{size / 1e9:.2f}" for size in sizes), *seconds))
    parts = " and ".join(f"{size / 1e9:.2f} GB of {kind}" for kind, size in saving.parts.items())
    header = ("processes", "train.shard", "checkpoint, GB", "fullest, one writes", "fullest, all write")
    header += ("s, one writes", "s, all write", "s, one disk for all")
    return f"{markdown_table(header, rows)}\n\nA checkpoint is {parts}."


def assumptions() -> str:
    """What a prediction takes for granted of each device."""
    rows = [
        (
            name,
            *(f"{device.peaks[precision] / 1e12:g}" for precision in ("fp32", "tf32", "bf16")),
            f"{device.bandwidth / 1e12:g}",
            f"{device.memory / 1e9:g}",
            f"{device.link / 1e9:g}",
            f"{device.network / 1e9:g}",
        )
        for name, device in GPUS.items()
    ]
    header = ("GPU", "fp32, T/s", "tf32, T/s", "bf16, T/s", "memory, TB/s", "GB", "link, GB/s", "network, GB/s")
    return f"{markdown_table(header, rows)}\n\n" + "\n".join(f"- {assumed}" for assumed in _assumed())


def _assumed() -> Iterator[str]:
    """What a prediction takes for granted of all devices, by part of a step."""
    rates = GPUS["h100"].rates
    yield (
        f"**Products** reach {REACHED:.0%} of the peak, and take {KERNELS} kernels a layer and micro-batch, forward "
        f"and backward, of {LAUNCH * 1e6:g} µs at least. Where activations are recomputed, there are "
        f"{_share(RECOMPUTED)} of the operations."
    )
    yield f"**Activations** are moved through the memory {MOVED} times, forward and backward together."
    yield (
        f"**Exchange**: {PER_MACHINE} GPUs are in a machine; with more the network counts in place of the link. "
        f"Gradients are exchanged beside the backward pass, {_share(BACKWARD)} of the time of products and "
        "activations; only what is longer than that counts."
    )
    yield (
        f"**ADMM**: a call takes {rates.launch * 1e6:g} µs at least; products reach {rates.products:.0%} of the peak "
        f"of fp32, an eigensolver {rates.eigenvectors:.0%}, and it waits for {COLUMN_KERNELS} calls at every column, "
        f"and the device for {REFILL} calls of the host after it; so the thresholds are computed by products alone at "
        "the target rank (`salaad/spectral/cost.py`)."
    )
    yield f"**Saving**: a disk that all processes share takes {RATE / 1e9:g} GB/s."


def _share(value: float) -> str:
    """A simple fraction such as 2/3."""
    return str(Fraction(value).limit_denominator(10))
