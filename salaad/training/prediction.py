"""How long a run would take on a named GPU, by part, from counts of operations and bytes: `--dry-run --device h100`.

Nothing here was measured: peaks and bandwidths are those of the data sheets, and the parts of them that are reached are
assumptions, the same for all devices. A prediction is good for comparing settings and for planning, to a factor of two.

    products        operations of the model over the peak of the precision, of which `REACHED` is reached
    activations     their bytes, written and read once forward and twice backward, over the memory's bandwidth
    optimizer       weights, gradients and moments, read and written
    exchange        the gradients' bytes through every link of a ring, of which the backward pass hides what it can;
                    with train.shard the new weights too, which nothing hides
    ADMM            of the most loaded rank every K steps, by the cheapest solver of `spectral.cost` at the target rank
    evaluation, saving   by their periods; a disk that all processes share takes 1 GB/s
"""

from dataclasses import replace

from transformers import PretrainedConfig, PreTrainedModel

from salaad.common.formats import markdown_table
from salaad.common.gpus import GPUS, Gpu
from salaad.config.methods import SalaadConfig
from salaad.config.run import RunConfig
from salaad.methods.registry import method_of
from salaad.methods.salaad import ownership
from salaad.model.build import outline, training_flops
from salaad.model.roles import find_blocks
from salaad.spectral.cost import cheapest, seconds
from salaad.spectral.products import width_of
from salaad.training.plan import activation_bytes, memory_by_kind
from salaad.training.saving import RATE, plan_saving

REACHED = 0.4  # of a peak, by the products of a well-tuned trainer
LAUNCH, KERNELS = 5e-6, 60  # seconds of a kernel however small, and how many a layer takes, forward and backward
BACKWARD = 2 / 3  # of the model's time, beside which gradients are exchanged
MOVED = 3  # times that activations are written and read
RECOMPUTED = 4 / 3  # operations over those without recomputation, which takes the forward pass once more
PER_MACHINE, COUNTS = 8, (1, 8, 32, 128)


Parts = dict[str, float]  # part of a step → its seconds


def predict(config: RunConfig, description: PretrainedConfig, device: Gpu, ranks: int) -> Parts:
    """Seconds of an average step by part; `exchange` is what the backward pass does not hide."""
    method, model = method_of(config), outline(description)
    method.rebuild(model, config)
    train, length = config.train, config.data.sequence_length
    peak, memory = device.peaks[train.precision] * REACHED, memory_by_kind(config, model, ranks)
    flops, rows = training_flops(model, length), train.batch / ranks
    again = RECOMPUTED if train.gradient_checkpointing else 1
    micro_batches = max(1.0, rows / train.micro_batch)
    launches = micro_batches * description.num_hidden_layers * KERNELS * LAUNCH
    products = max(flops * rows * length * again / peak, launches)
    activations = MOVED * micro_batches * activation_bytes(config, description, ranks) / device.bandwidth
    touched = sum(memory[kind] for kind in ("weights", "gradients", "optimizer state"))
    through = device.link if ranks <= PER_MACHINE else device.network
    exchange = 2 * (ranks - 1) / ranks * memory["gradients"] / through
    sent = memory["weights"] / through if train.shard == "optimizer" and ranks > 1 else 0.0
    variants = 2 if config.method == "salaad" else 1
    evaluations = variants * train.eval_tokens * flops / 3 / (peak * ranks) / (train.eval_every or train.steps)
    return {
        "products": products,
        "activations": activations,
        "optimizer": 2 * touched / device.bandwidth,
        "exchange": max(0.0, exchange - BACKWARD * (products + activations)) + sent,
        "ADMM": _admm(config.settings, model, device, ranks) if config.method == "salaad" else 0.0,
        "evaluation": evaluations,
        "saving": plan_saving(config, model, ranks).whole / RATE / (train.save_every or train.steps),
    }


def _admm(settings: SalaadConfig, model: PreTrainedModel, device: Gpu, ranks: int) -> float:
    """Seconds a step of the rank that has most to update."""
    blocks = find_blocks(model, settings)
    owners = ownership.owners_of(blocks, ranks, settings.owners)
    loads = [0.0] * ranks
    for name, X in blocks.items():
        n, m = sorted(X.shape)
        q = width_of(round(settings.rank_ratio * n), n)
        solver = cheapest(n, m, q, device.rates)
        loads[owners[name]] += settings.inner * seconds(solver, n, m, q, device.rates)
    return max(loads) / settings.every


def prediction_table(config: RunConfig, description: PretrainedConfig, name: str) -> str:
    """Milliseconds of a step by part, tokens a day, hours and memory on several numbers of a device, as Markdown."""
    device, train = GPUS[name], config.train
    counts = [count for count in COUNTS if train.batch % count == 0]
    found = [predict(config, description, device, count) for count in counts]
    rows = [(f"{part}, ms a step", *(f"{1000 * parts[part]:.1f}" for parts in found)) for part in found[0]]
    steps = [sum(parts.values()) for parts in found]
    day = train.batch * config.data.sequence_length * 86_400
    rows.append(("a step, ms", *(f"{1000 * step:.1f}" for step in steps)))
    rows.append(("positions a day", *(f"{day / step / 1e9:.2f} B" for step in steps)))
    rows.append(("hours of the run", *(f"{train.steps * step / 3600:.1f}" for step in steps)))
    needs = [memory_of(config, description, count) for count in counts]
    shown = (f"{need / 1e9:.1f} GB" + ("" if need < device.memory else ", too much") for need in needs)
    rows.append((f"memory a GPU, of {device.memory / 1e9:.0f} GB", *shown))
    table = markdown_table((f"predicted on {name}", *(f"{c} GPU{'s' if c > 1 else ''}" for c in counts)), rows)
    return "\n\n".join([table, *unused_cores(config, description, name)])


def memory_of(config: RunConfig, description: PretrainedConfig, ranks: int) -> float:
    """Bytes a rank needs, all kinds together, when it needs most."""
    method, model = method_of(config), outline(description)
    method.rebuild(model, config)
    activations = activation_bytes(config, description, ranks)
    moment, beside = method.memory_for_a_moment(model, config, ranks)
    passing = activations + moment if beside else max(activations, moment)
    return sum(memory_by_kind(config, model, ranks).values()) + passing


def unused_cores(config: RunConfig, description: PretrainedConfig, name: str) -> list[str]:
    """What another precision would take, where this one leaves most of a device unused."""
    device, train = GPUS[name], config.train
    if train.precision != "fp32" or device.peaks["bf16-mixed"] < 1.5 * device.peaks["fp32"]:
        return []
    mixed = replace(config, train=replace(train, precision="bf16-mixed"))
    ranks = next(count for count in reversed(COUNTS[:2]) if train.batch % count == 0)
    hours = [train.steps * sum(predict(one, description, device, ranks).values()) / 3600 for one in (config, mixed)]
    return [
        f"fp32, the paper's setting, leaves the tensor cores unused: on {ranks} GPUs --train.precision bf16-mixed "
        f"(a second --config fast.yaml gives it) would take {hours[1]:.1f} h in place of {hours[0]:.1f} h. Weights, "
        "moments and the ADMM stay in float32; products are rounded to three digits."
    ]
