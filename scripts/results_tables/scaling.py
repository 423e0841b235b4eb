"""The tables of results/scaling: predicted hours of the paper's trainings on one GPU to 128, which nobody measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import get_args

from torch import Tensor, nn
from transformers import PretrainedConfig

from salaad.common.files import read_json
from salaad.common.formats import markdown_table
from salaad.common.gpus import GPUS, Gpu
from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig
from salaad.methods.salaad import ownership
from salaad.model.roles import find_blocks
from salaad.spectral.cost import COLUMN_KERNELS, REFILL
from salaad.training.fitting import changes_that_fit
from salaad.training.plan import KEPT_VALUES
from salaad.training.prediction import (
    BACKWARD,
    COUNTS,
    FORWARD,
    KERNELS,
    LAUNCH,
    MOVED,
    PER_MACHINE,
    REACHED,
    memory_of,
    memory_rows,
    predict,
    prediction_table,
)
from salaad.training.saving import RATE, STEPS_BEFORE, plan_saving, stop_seconds
from salaad.training.sharding import owners_of
from scripts.outlines import description_of, outline_of
from scripts.reproduction.grid import PAPERS
from scripts.results_tables import RESULTS

DEALT_AMONG = (8, 32, 64)  # numbers of processes among which the moments are dealt in a table


def sections() -> dict[str, str]:
    """Return every table of hours, memory and saving, the parts of a step of 350m, and the assumptions."""
    config, _ = read_command_line(["--config", "350m"])
    return {
        "scaling-hours": hours_table(),
        "scaling-350m": prediction_table(config, description_of(config), "h100"),
        "scaling-memory": memory_table(),
        "scaling-sharding": sharding_table(),
        "scaling-bf16": bf16_cost(),
        "scaling-saving": saving_table(),
        "scaling-stops": stops_table(),
        "scaling-assumptions": assumptions(),
    }


def hours_table() -> str:
    """Return a table: hours of a run by size, device, precision and number of GPUs, with the changes to make it fit."""
    rows = []
    for size in PAPERS:
        own, _ = read_command_line(["--config", size])
        description = description_of(own)
        for precision in ("fp32", "bf16-mixed"):
            config = replace(own, train=replace(own.train, precision=precision))
            for name in ("h100", "a100", "4090"):
                cells = (_hours_that_fit(config, description, GPUS[name], count) for count in COUNTS)
                rows.append((size, precision, name, *cells))
    return markdown_table(("model", "precision", "GPU", *(f"{count}" for count in COUNTS)), rows)


def _hours_that_fit(config: RunConfig, description: PretrainedConfig, device: Gpu, ranks: int) -> str:
    """Return the hours of a run as text; if it does not fit, the options with which it does and its hours with them."""
    words, changed = changes_that_fit(config, description, device.memory, ranks)
    if words is None:
        return "does not fit"
    hours = config.train.steps * sum(predict(changed, description, device, ranks).values()) / 3600
    told = f"{hours:,.0f}" if hours >= 10 else f"{hours:.2g}"
    return f"with {words.replace('--train.', '')}: {told}" if words else told


def memory_table() -> str:
    """GB of the fullest GPU by kind, size and number of GPUs, in float32, and in bf16-mixed of the largest size."""
    rows = []
    for size, precision in (*((size, "fp32") for size in PAPERS), (PAPERS[-1], "bf16-mixed")):
        config, _ = read_command_line(["--config", size, f"--train.precision={precision}"])
        found = [memory_of(config, description_of(config), count) for count in COUNTS]
        rows += [(size, precision, *row) for row in memory_rows(found)]
        rows.append((size, precision, "**together**", *(f"**{sum(kinds.values()) / 1e9:.2f}**" for kinds in found)))
    return markdown_table(("model", "precision", "GB of", *(f"{count}" for count in COUNTS)), rows)


def sharding_table() -> str:
    """Return a table: the fullest process's moments over the mean, by the way `train.shard optimizer` deals them."""
    rows = []
    for size in PAPERS[2:]:
        config, _ = read_command_line(["--config", size])
        model = outline_of(config)
        parameters, blocks = list(model.parameters()), find_blocks(model, config.salaad)
        for how in get_args(ownership.Dealing):
            dealt = [
                _fullest(parameters, _like_the_admm(parameters, blocks, ranks, how), ranks) for ranks in DEALT_AMONG
            ]
            rows.append((size, f"to the owners of the blocks, {how}", *(f"{ratio:.2f}" for ratio in dealt)))
        dealt = [_fullest(parameters, owners_of(parameters, ranks), ranks) for ranks in DEALT_AMONG]
        rows.append((size, "by bytes (used)", *(f"{ratio:.2f}" for ratio in dealt)))
    return markdown_table(("model", "moments dealt", *(f"{ranks} processes" for ranks in DEALT_AMONG)), rows)


def _like_the_admm(
    parameters: Sequence[nn.Parameter], blocks: Mapping[str, Tensor], ranks: int, how: ownership.Dealing
) -> list[int]:
    """Return the owner of each parameter: for a block its owner in the ADMM, else the process with least so far."""
    dealt = {id(blocks[name]): rank for name, rank in ownership.owners_of(blocks, ranks, how).items()}
    loads = [0] * ranks
    for parameter in sorted(parameters, key=lambda p: (id(p) not in dealt, -p.nbytes)):
        rank = dealt.setdefault(id(parameter), loads.index(min(loads)))
        loads[rank] += parameter.nbytes
    return [dealt[id(parameter)] for parameter in parameters]


def _fullest(parameters: Sequence[nn.Parameter], owners: Sequence[int], ranks: int) -> float:
    loads = [0] * ranks
    for parameter, owner in zip(parameters, owners, strict=True):
        loads[owner] += parameter.nbytes
    return max(loads) * ranks / sum(loads)


def bf16_cost() -> str:
    """What training in pure bf16 cost in perplexity, as `scripts/reproduce.py --scale nano bf16` measured it."""
    result, found = read_json(RESULTS / "nano" / "reproduce" / "bf16.json"), {}
    for row in result["rows"]:
        if row["variant"] == "X":
            found[row["method"], row["precision"]] = row["perplexity"]["mean"]
    rows = [
        (method, f"{found[method, 'fp32']:.2f}", f"{pure:.2f}", f"{pure / found[method, 'fp32'] - 1:+.1%}")
        for (method, precision), pure in found.items()
        if precision == "bf16"
    ]
    table = markdown_table(("nano, perplexity of X", "fp32", "pure bf16", "change"), rows)
    return f"{table}\n\n{result['notes'][0]}; {result['machine']}, commit {result['commit']}."


def saving_table() -> str:
    """Return a table: bytes and seconds of a save of 1b by number of processes, if one or all write the state."""
    config, _ = read_command_line(["--config", "1b"])
    model, rows = outline_of(config), []
    for ranks in COUNTS[:3]:
        for shard in ("none", "optimizer") if ranks > 1 else ("none",):
            saving = plan_saving(replace(config, train=replace(config.train, shard=shard)), model, ranks)
            sizes = (saving.whole, saving.alone, saving.most)
            seconds = (f"{size / RATE:.1f}" for size in (saving.alone, saving.most, saving.whole))
            rows.append((f"{ranks}", shard, *(f"{size / 1e9:.2f}" for size in sizes), *seconds))
    parts = ", ".join(f"{size / 1e9:.2f} GB of {kind}" for kind, size in saving.parts.items())
    header = ("processes", "train.shard", "checkpoint", "most, one writes", "most, all write")
    header += ("s, one writes", "s, all write", "s, one disk for all")
    return f"{markdown_table(header, rows)}\n\nA checkpoint consists of {parts}."


def stops_table() -> str:
    """Return a table: seconds until a run of 1b that is told to stop has ended, by device, precision and GPUs."""
    own, _ = read_command_line(["--config", "1b"])
    description, model, rows = description_of(own), outline_of(own), []
    for precision in ("fp32", "bf16-mixed"):
        config = replace(own, train=replace(own.train, precision=precision))
        for name in ("h100", "a100"):
            steps = [sum(predict(config, description, GPUS[name], count).values()) for count in COUNTS[1:]]
            savings = [plan_saving(config, model, count) for count in COUNTS[1:]]
            stops = (stop_seconds(step, saving) for step, saving in zip(steps, savings, strict=True))
            shown = (f"{STEPS_BEFORE * step:.1f}, {stop:.0f}" for step, stop in zip(steps, stops, strict=True))
            rows.append((precision, name, *shown))
    return markdown_table(("precision", "GPU", *(f"{count}" for count in COUNTS[1:])), rows)


def assumptions() -> str:
    """Return the table of what predictions assume of each device, and the list of other assumptions."""
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
    """Yield what predictions assume of all devices, by part of a step."""
    rates = GPUS["h100"].rates
    yield (
        f"**Products** reach {REACHED:.0%} of the peak, and take {KERNELS} kernels per layer and micro-batch, forward "
        f"and backward together, of at least {LAUNCH * 1e6:g} µs each."
    )
    yield (
        f"**Activations** ({KEPT_VALUES} times the model's width per layer and token) are moved through the memory "
        f"{MOVED} times, forward and backward together. Where they are recomputed, operations, launches and moved "
        f"bytes are {_share(1 + FORWARD)} of that."
    )
    yield (
        f"**Exchange**: a machine has {PER_MACHINE} GPUs; with more GPUs the network's rate applies instead of the "
        "link's. Gradients are exchanged during the backward pass of the last micro-batch, which takes "
        f"{_share(BACKWARD)} of the time of its products and activations; only an exchange beyond that time counts."
    )
    yield (
        f"**ADMM**: a call takes at least {rates.launch * 1e6:g} µs. Products reach {rates.products:.0%} of the fp32 "
        f"peak, an eigensolver {rates.eigenvectors:.0%}. The eigensolver waits for {COLUMN_KERNELS} calls at every "
        f"column, and after it the device waits for {REFILL} calls of the host; therefore the thresholds are computed "
        "by products alone, at the target rank (`salaad/spectral/cost.py`). A full SVD, if requested, takes 6·n²·m + "
        "20·n³ operations at the eigensolver's rate and waits at twice as many columns. With `salaad.overlap` a round "
        "is hidden for as long as the next forward pass takes."
    )
    yield (
        "**Not counted**: reading and writing L, S and the dual, time saved by `torch.compile`, merges of ReLoRA, "
        "projections of GaLore, waiting for text, and memory that the allocator loses to fragmentation."
    )
    yield (
        f"**Saving**: a disk takes {RATE / 1e9:g} GB/s, from one process or from all together. A core hashes at least "
        "as fast as the disk writes, as a core with SHA-256 instructions does (an older one takes twice as long). No "
        "file of the model, the optimizer or the surrogates is read again."
    )
    yield (
        f"**A stop**: the ranks finish up to {STEPS_BEFORE} steps before they have agreed to stop, since an answer is "
        "read one step later and a host runs one step ahead of its device; then all save to one disk."
    )


def _share(value: float) -> str:
    """A simple fraction such as 2/3."""
    return str(Fraction(value).limit_denominator(10))
