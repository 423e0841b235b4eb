"""What a run would do, without doing it: `train.py --dry-run`."""

import torch
from transformers import PretrainedConfig

from salaad.common.formats import markdown_table, millions
from salaad.config.run import RunConfig
from salaad.methods.base import METHODS
from salaad.methods.optimizer import optimizer_class
from salaad.methods.salaad import ownership
from salaad.model.build import count_parameters, outline, training_flops
from salaad.model.loss import SummedLoss
from salaad.model.roles import find_blocks

# Bytes per parameter: weights, gradients, the optimizer's two moments.
_BYTES = {"fp32": (4, 4, 8), "tf32": (4, 4, 8), "bf16-mixed": (4, 4, 8), "bf16": (2, 2, 4)}
_ADMM_BYTES = 10  # R and T of `Surrogate`, in float32, and singular vectors of up to half the short side


def plan_table(config: RunConfig, description: PretrainedConfig, ranks: int) -> str:
    """Parameters, tokens, steps, blocks per owner, memory per rank by kind, operations: a Markdown table."""
    model = outline(description)
    train, length = config.train, config.data.sequence_length
    parameters, positions = count_parameters(model), train.steps * train.batch * length
    rows = [
        ("method", config.method),
        ("parameters", millions(parameters)),
        ("steps", f"{train.steps:,}"),
        ("sequences per step", f"{train.batch} of {length} tokens, {train.batch // ranks} per rank"),
        ("tokens, padding included", f"{positions / 1e9:.3f} B"),
        ("processes", str(ranks)),
        ("floating-point operations", f"{training_flops(model, length) * positions:.3g}"),
    ]
    blocks = find_blocks(model, config.salaad) if config.method == "salaad" else {}
    in_blocks = sum(X.numel() for X in blocks.values())
    rows += [
        (f"memory per rank: {kind}", amount)
        for kind, amount in _memory(config, description, parameters, in_blocks, ranks)
    ]
    if config.method == "salaad":
        rows += _block_rows(config, blocks, ranks)
    return markdown_table(("plan", "value"), rows)


def check_run(config: RunConfig, description: PretrainedConfig) -> None:
    """Find what is wrong with a configuration that its sections cannot see each for itself, before anything is made.

    Raises:
        UserError: roles that match nothing in this model, an optimizer that torch does not have or that does not take
            float32 gradients where they are needed, or a model with logits the loss does not know.
    """
    optimizer_class(config.optimizer.name)
    model = outline(description)
    SummedLoss(model)
    METHODS[config.method].check(model, config)


def _memory(
    config: RunConfig, description: PretrainedConfig, parameters: int, in_blocks: int, ranks: int
) -> list[tuple[str, str]]:
    kinds = ("weights", "gradients", "optimizer state")
    sizes = dict(zip(kinds, _BYTES[config.train.precision], strict=True))
    # In pure bf16 the blocks keep gradients and moments in float32.
    block_sizes = sizes if config.train.precision != "bf16" else sizes | {"gradients": 4, "optimizer state": 8}
    rows = [
        (kind, _mebibytes((parameters - in_blocks) * sizes[kind] + in_blocks * block_sizes[kind])) for kind in kinds
    ]
    rows_at_once = min(config.train.micro_batch, config.train.batch // ranks)
    # About 34 values of the hidden size are kept per token and layer (17 in half precision), or one when recomputed.
    kept = 1 if config.train.gradient_checkpointing else 34
    size = 2 if config.train.precision.startswith("bf16") else 4
    tokens = rows_at_once * config.data.sequence_length
    activations = tokens * description.num_hidden_layers * description.hidden_size * kept * size
    return [*rows, ("activations (estimate)", _mebibytes(activations))]


def _block_rows(config: RunConfig, blocks: dict[str, torch.nn.Parameter], ranks: int) -> list[tuple[str, str]]:
    costs = {name: ownership.update_cost(*X.shape) for name, X in blocks.items()}
    owners = ownership.assign_owners(costs, ranks)
    counts, sizes = [0] * ranks, [0] * ranks
    for name, owner in owners.items():
        counts[owner] += 1
        sizes[owner] += blocks[name].numel()
    return [
        ("memory per rank: ADMM", f"{_mebibytes(max(sizes) * _ADMM_BYTES)} at the most"),
        ("blocks", f"{len(blocks)}, {millions(sum(sizes))} parameters"),
        ("blocks per owner", ", ".join(map(str, counts))),
        ("imbalance of the owners", f"{ownership.imbalance(costs, owners, ranks):.3f} (largest cost over mean)"),
        ("ADMM updates", f"{config.train.steps // config.salaad.every:,} per block, {config.salaad.schedule}"),
    ]


def _mebibytes(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
