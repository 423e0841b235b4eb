"""The tables of results/scaling: predicted hours of the paper's trainings on one GPU to 128, which nobody measured."""

from dataclasses import replace

from salaad.common.formats import markdown_table
from salaad.common.gpus import GPUS
from salaad.config.command_line import read_command_line
from salaad.model.build import describe_model, outline
from salaad.spectral.cost import COLUMN_KERNELS
from salaad.training.prediction import COUNTS, REACHED, predict, prediction_table
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
    rates = GPUS["h100"].rates
    told = (
        f"Products reach {REACHED:.0%} of the peak. In the ADMM a call takes {rates.launch * 1e6:g} µs at least, and "
        f"an eigensolver reaches {rates.eigenvectors:.0%} of the peak of fp32 and waits for {COLUMN_KERNELS} calls at "
        "every column; so the thresholds are computed by products alone (`salaad/spectral/cost.py`)."
    )
    return f"{markdown_table(header, rows)}\n\n{told}"
