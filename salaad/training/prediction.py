"""How long a run would take on a named GPU, by part, from counts of operations and bytes: `--dry-run --device h100`.

Nothing here was measured: peaks and bandwidths are those of the data sheets, and the fractions of them that are reached
are assumptions, the same for all devices. A prediction is good for comparing settings and for planning, to a factor of
two.

    products        operations of the model, divided by the fraction `REACHED` of the precision's peak
    activations     their bytes, written and read once forward and twice backward, divided by the memory's bandwidth
    optimizer       weights, gradients and moments, read and written
    exchange        the gradients' bytes through every link of a ring, as far as the last backward pass of a step does
                    not hide them; with train.shard the new weights too, which nothing hides
    periodic work   on the most loaded rank, divided by the method's period: for SALAAD an ADMM update of every block,
                    by the solver that is named, or the cheapest of `spectral.cost` at the target rank
    evaluation, saving   divided by their periods; a disk that all processes share takes 1 GB/s
    a stop          on a request: up to three steps until the ranks have agreed, then a save

Where activations are recomputed, the backward pass computes and moves all of a forward pass once more.
"""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from salaad.common import distributed
from salaad.common.formats import markdown_table
from salaad.common.gpus import GPUS, Gpu, gpu_called
from salaad.config.run import RunConfig
from salaad.methods.registry import method_of
from salaad.methods.work import Work
from salaad.training.fitting import changes_that_fit
from salaad.training.plan import (
    KEPT_VALUES,
    element_bytes,
    flops_of_pass,
    flops_of_passes,
    memory_by_kind,
    rebuilt_outline,
    rows_at_once,
)
from salaad.training.saving import PATIENCE, RATE, STEPS_BEFORE, plan_saving, stop_seconds

REACHED = 0.4  # fraction of the peak that the products of a well-tuned trainer reach
LAUNCH, KERNELS = 5e-6, 60  # least seconds of a kernel, and kernels of a layer, forward and backward together
FORWARD, BACKWARD = 1 / 3, 2 / 3  # shares of a pass's time without recomputation; gradients are exchanged in BACKWARD
MOVED = 3  # times that activations are written and read, forward and backward together
PER_MACHINE, COUNTS = 8, (1, 8, 32, 128)
_WORTH_SAYING = 0.1  # hours of a run below which no other precision is proposed


Seconds = dict[str, float]  # part of a step → its seconds


class Passes(NamedTuple):
    """The forward and backward passes of a step on one rank.

    Args:
        products: seconds of the matrix products of all passes.
        activations: seconds of moving the activations of all passes.
        count: the number of passes.
        again: the time of the passes relative to their time without recomputation.
    """

    products: float
    activations: float
    count: int
    again: float

    @property
    def forward(self) -> float:
        """Seconds of one forward pass."""
        return (self.products + self.activations) / self.count * FORWARD / self.again

    @property
    def backward(self) -> float:
        """Seconds of one backward pass, including what is recomputed in it."""
        return (self.products + self.activations) / self.count - self.forward


def predict(config: RunConfig, description: PretrainedConfig, device: Gpu, ranks: int) -> Seconds:
    """Return the seconds of an average step by part; `exchange` is what the backward pass does not hide."""
    model, train = rebuilt_outline(config, description), config.train
    work, memory = method_of(config).work(model, config, ranks, device.rates), memory_by_kind(config, model, ranks)
    passes = _passes(config, model, work, device, ranks)
    touched = sum(memory[kind] for kind in ("weights", "gradients", "optimizer state"))
    through = device.link if ranks <= PER_MACHINE else device.network
    exchange = 2 * (ranks - 1) / ranks * memory["gradients"] / through
    sent = memory["weights"] / through if train.shard == "optimizer" and ranks > 1 else 0.0
    evaluated = sum(flops_of_pass(model, size, config) for size in work.variants) * train.eval_tokens / 3
    hidden = min(work.periodic, passes.forward) if work.beside else 0.0
    return {
        "products": passes.products,
        "activations": passes.activations,
        "optimizer": 2 * touched / device.bandwidth,
        "exchange": max(0.0, exchange - passes.backward) + sent,
        "periodic work": work.share * (work.periodic - hidden) / work.every,
        "evaluation": evaluated / (_reached(config, device) * ranks) / (train.eval_every or train.steps),
        "saving": plan_saving(config, model, ranks).whole / RATE / (train.save_every or train.steps),
    }


def short_patience(config: RunConfig, description: PretrainedConfig, ranks: int) -> str | None:
    """Return a warning if the launcher is likely to kill the run before it has stopped on request; else None.

    Raises:
        UserError: the launcher's patience, as set in the environment, is no number.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # a launcher of another kind, or none, waits
        return None
    patience = distributed.from_environment("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", float(PATIENCE))
    step = 0.0  # unknown on a CPU
    if torch.cuda.is_available():
        step = sum(predict(config, description, gpu_called(torch.cuda.get_device_name()), ranks).values())
    saving = plan_saving(config, rebuilt_outline(config, description), ranks)
    stop = stop_seconds(step, saving)
    if stop <= patience:
        return None
    steps = f"{STEPS_BEFORE} steps of {step:.1f} s and " if step else ""
    return (
        f"when told to stop, this run takes about {stop:.0f} s ({steps}a checkpoint of {saving.whole / 1e9:.1f} GB at "
        f"{RATE / 1e9:g} GB/s), but its launcher kills it after {patience:g} s; start it with "
        f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={60 * math.ceil(2 * stop / 60)} in front of the command"
    )


def _passes(config: RunConfig, model: PreTrainedModel, work: Work, device: Gpu, ranks: int) -> Passes:
    train, length = config.train, config.data.sequence_length
    again = 1 + FORWARD if train.gradient_checkpointing else 1.0
    rows = train.batch / ranks
    count = math.ceil(rows / rows_at_once(config, ranks)) * len(work.passes)
    layers, width = model.config.num_hidden_layers, model.config.hidden_size
    launches = count * layers * KERNELS * LAUNCH * again
    flops = flops_of_passes(model, work, config) * rows * length * again
    moved = MOVED * again * len(work.passes) * rows * length * layers * width * KEPT_VALUES * element_bytes(config)
    return Passes(max(flops / _reached(config, device), launches), moved / device.bandwidth, count, again)


def _reached(config: RunConfig, device: Gpu) -> float:
    """The operations per second that products reach on the device."""
    return device.peaks[config.train.precision] * REACHED


def prediction_table(config: RunConfig, description: PretrainedConfig, name: str) -> str:
    """Return a Markdown table of a step's milliseconds by part, tokens a day, hours and memory, by number of GPUs."""
    device, train = GPUS[name], config.train
    counts = [count for count in COUNTS if train.batch % count == 0]
    found = [predict(config, description, device, count) for count in counts]
    rows = [(f"{part}, ms a step", *(f"{1000 * parts[part]:.1f}" for parts in found)) for part in found[0]]
    steps = [sum(parts.values()) for parts in found]
    day = train.batch * config.data.sequence_length * 86_400
    rows.append(("a step, ms", *(f"{1000 * step:.1f}" for step in steps)))
    rows.append(("positions a day", *(f"{day / step / 1e9:.2f} B" for step in steps)))
    model = rebuilt_outline(config, description)
    stops = (stop_seconds(step, plan_saving(config, model, count)) for step, count in zip(steps, counts, strict=True))
    rows.append(("a stop, s", *(f"{stop:.0f}" for stop in stops)))
    rows.append(("hours of the run", *(_hours(train.steps * step / 3600) for step in steps)))
    memory = [memory_by_kind(config, model, count) for count in counts]
    rows += [(f"{kind}, GB", *sizes) for kind, *sizes in memory_rows(memory)]
    needs = [sum(kinds.values()) for kinds in memory]
    shown = (f"{need / 1e9:.1f}" + ("" if need < device.memory else ", too much") for need in needs)
    rows.append((f"memory a GPU, GB of {device.memory / 1e9:.0f}", *shown))
    table = markdown_table((f"predicted on {name}", *(f"{c} GPU{'s' if c > 1 else ''}" for c in counts)), rows)
    return "\n\n".join([table, *_notes(config, description, device, counts)])


def _hours(hours: float) -> str:
    return f"{hours:,.1f}" if hours >= 1 else f"{hours:.2g}"


def memory_of(config: RunConfig, description: PretrainedConfig, ranks: int) -> dict[str, float]:
    """Return the bytes by kind on the rank that needs most."""
    return memory_by_kind(config, rebuilt_outline(config, description), ranks)


def memory_rows(memory: Sequence[Mapping[str, float]]) -> Iterator[tuple[str, ...]]:
    """Yield a row (kind, gigabytes in each of `memory`) for every kind of memory that any of them needs.

    All of `memory` have the same kinds.
    """
    for kind in memory[0]:
        if any(kinds[kind] for kinds in memory):
            yield kind, *(f"{kinds[kind] / 1e9:.2f}" for kinds in memory)


def _notes(config: RunConfig, description: PretrainedConfig, device: Gpu, counts: list[int]) -> list[str]:
    """Return notes on what does not fit and what would, what is not counted, and what another precision would do."""
    notes = []
    for ranks in counts:
        words, _ = changes_that_fit(config, description, device.memory, ranks)
        if words != "":
            on = f"On {ranks} GPU{'s' if ranks > 1 else ''} it does not fit"
            notes.append(
                f"{on}; {words} would." if words else f"{on}, whatever micro-batch, sharding or recomputation."
            )
    notes += method_of(config).work(rebuilt_outline(config, description), config, 1, device.rates).notes
    if config.train.compile:
        notes.append("What train.compile saves is not counted, nor the minutes of its first steps.")
    return [*notes, *unused_cores(config, description, device)]


def unused_cores(config: RunConfig, description: PretrainedConfig, device: Gpu) -> list[str]:
    """Return a note on what bf16-mixed would save and cost, if fp32 leaves most of a device unused; else nothing."""
    train = config.train
    if train.precision != "fp32" or device.peaks["bf16-mixed"] < 1.5 * device.peaks["fp32"]:
        return []
    mixed = replace(config, train=replace(train, precision="bf16-mixed"))
    ranks = next(count for count in reversed(COUNTS[:2]) if train.batch % count == 0)
    both = [sum(predict(one, description, device, ranks).values()) * train.steps / 3600 for one in (config, mixed)]
    if both[0] < _WORTH_SAYING or both[1] > 0.9 * both[0]:
        return []
    kinds = [memory_of(one, description, ranks) for one in (config, mixed)]
    needs, copies = [sum(kind.values()) / 1e9 for kind in kinds], kinds[1]["copies in bfloat16"] / 1e9
    return [
        f"fp32, the paper's setting, leaves the tensor cores unused: on {ranks} GPU{'s' if ranks > 1 else ''} "
        "--train.precision bf16-mixed (a second --config fast.yaml gives it) would take "
        f"{_hours(both[1])} h in place of {_hours(both[0])} h, and {needs[1]:.1f} GB in place of {needs[0]:.1f} GB: "
        f"activations halve, copies of the weights take {copies:.1f} GB more. Weights, moments and the ADMM stay in "
        "float32; products are rounded to three digits. What that costs in perplexity was not measured; what pure bf16 "
        "costs, which rounds the weights too, was at nano (results/scaling)."
    ]
