"""What a run would do and read, without doing it: `train.py --dry-run`."""

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from salaad.common.errors import UserError
from salaad.common.formats import markdown_table, mebibytes, megabytes, millions
from salaad.config.run import DataConfig, RunConfig
from salaad.data.text import open_text
from salaad.data.tokenizer import text_pieces
from salaad.methods.registry import method_of
from salaad.methods.work import Work
from salaad.model.build import is_rotary, outline, require_positions, training_flops
from salaad.model.folder_formats import is_any_size, is_fixed_size
from salaad.model.loss import SummedLoss, loss_bytes
from salaad.model.parameters import cast, count_parameters
from salaad.spectral.cost import RATES
from salaad.training.saving import plan_saving, saving_rows
from salaad.training.sharding import largest_share

KEPT_VALUES = 34  # values that a layer keeps per token for its backward pass, in units of the hidden size


def plan_table(config: RunConfig, description: PretrainedConfig, ranks: int, on_gpu: bool = False) -> str:
    """Parameters, tokens, steps, memory per rank by kind, operations and the method's own rows: a Markdown table."""
    method, model = method_of(config), rebuilt_outline(config, description)
    train, length = config.train, config.data.sequence_length
    positions = train.steps * train.batch * length
    memory = memory_by_kind(config, model, ranks, on_gpu)
    work = method.work(model, config, ranks, RATES["cpu"])  # of which the passes alone are shown, the same at all rates
    rows = [
        ("method", config.method),
        ("parameters", millions(count_parameters(model))),
        ("sizes", sizes_in_words(description)),
        ("steps", f"{train.steps:,}"),
        ("sequences per step", f"{train.batch} of {length} tokens, {train.batch // ranks} per rank"),
        ("tokens, padding included", f"{positions / 1e9:.3f} B"),
        ("processes", str(ranks)),
        ("floating-point operations", f"{flops_of_passes(model, work, config) * positions:.3g}"),
        *((f"memory per rank: {kind}", mebibytes(size)) for kind, size in memory.items()),
        *saving_rows(plan_saving(config, model, ranks)),
        *method.plan(model, config, ranks),
    ]
    return markdown_table(("plan", "value"), rows)


def rebuilt_outline(config: RunConfig, description: PretrainedConfig) -> PreTrainedModel:
    """Return the model as the method trains it, on the meta device, to read only: the next call may return it again."""
    dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
    key = (config.method, repr(config.settings), dtype, description.to_json_string(use_diff=False))
    if key not in _outlines:  # which takes a tenth of a second, and a plan asks for the same one ten times
        model = outline(description)
        method_of(config).rebuild(model, config)
        _outlines.clear()
        _outlines[key] = cast(model, dtype)
    return _outlines[key]


_outlines: dict[tuple[Any, ...], PreTrainedModel] = {}


def text_table(config: DataConfig, vocab_size: int) -> str:
    """Return a Markdown table of the text that a run would read; raises the errors of `open_text`."""
    text = open_text(config, vocab_size=vocab_size)
    rows = []
    for part, files in (("training", text.train_files), ("validation", text.validation_files)):
        size = sum(text.sizes.get(file, 0) for file in files)
        known = f", {megabytes(size)}" if size else ""
        rows.append((f"{part} text", f"{config.name_of(part)}: {len(files)} files{known}"))
    rows.append(("tokenizer", f"{text_pieces(text.tokenizer):,} pieces, for a vocabulary of {vocab_size:,}"))
    return "\n" + markdown_table(("text", "value"), rows)


def check_run(config: RunConfig, description: PretrainedConfig) -> None:
    """Check a configuration for errors that no section can find by itself, before anything is built.

    Raises:
        UserError: the model of model.path has fewer positions than a row, or blocks of U·V + S where the method takes
            dense layers; the loss cannot compute the model's logits;
            the method cannot train this configuration, for example as torch has no such optimizer; or the optimizer is
            to be sharded, but the method reads all of its state.
    """
    if config.model.path is not None and not is_rotary(description):  # a new model has as many positions as a row
        require_positions(description, config.data.sequence_length, f"model.path {config.model.path}")
    model, method = outline(description), method_of(config)
    entry = getattr(description, "quantization_config", None)
    trains_factors = config.method == "full_rank" or (config.method == "salaad" and config.settings.roles)
    if (is_fixed_size(entry) or is_any_size(entry)) and not trains_factors:
        raise UserError(
            f"model.path {config.model.path} is a compressed folder, but method {config.method} takes dense layers; "
            "give a dense model, such as this one after dequantize() and save_pretrained(), or method full_rank, or "
            "method salaad with --salaad.roles for weights that are still dense"
        )
    SummedLoss(model)
    method.check(model, config)
    if config.train.shard == "optimizer" and method.reads_moments:
        raise UserError(
            f"train.shard is optimizer, but method {config.method} reads moments that another process would keep; "
            "leave it out, or choose another method"
        )


def memory_by_kind(config: RunConfig, model: PreTrainedModel, ranks: int, on_gpu: bool = True) -> dict[str, float]:
    """Return the peak bytes by kind on the rank that needs most; `model` is the rebuilt model on the meta device."""
    method, train = method_of(config), config.train
    memory = method.memory(model, config, ranks)
    if train.shard == "optimizer":
        trained = [p for p in model.parameters() if p.requires_grad]
        memory["optimizer state"] *= largest_share(trained, ranks)
    head, rows = model.get_output_embeddings().weight, rows_at_once(config, ranks)
    if train.precision == "bf16-mixed":  # autocast keeps a copy of every matrix that a product takes
        embedding = model.get_input_embeddings().weight
        memory["copies in bfloat16"] = 2 * sum(
            p.numel() for p in model.parameters() if p.ndim > 1 and (p is not embedding or p is head)
        )
    size = loss_bytes(rows * config.data.sequence_length, head.shape[1], head.shape[0], element_bytes(config))
    passing = {
        "logits and their gradients": size,
        "activations (estimate)": activation_bytes(config, model.config, ranks),
    }
    moment, beside = method.memory_for_a_moment(model, config, ranks) if on_gpu else (0.0, False)
    if moment:
        # Periodic work takes memory that a forward and a backward pass have released, or (`beside`) adds to theirs.
        where, taken = ("beside", 0) if beside else ("beyond", sum(passing.values()))
        passing[f"periodic work, {where} activations"] = max(0.0, moment - taken)
    return memory | passing


def flops_of_passes(model: PreTrainedModel, work: Work, config: RunConfig) -> float:
    """Operations per token of all forward and backward passes of a step of the rebuilt `model`."""
    return sum(flops_of_pass(model, size, config) for size in work.passes)


def flops_of_pass(model: PreTrainedModel, parameters: float, config: RunConfig) -> float:
    """Operations per token of a forward and a backward pass in which this number of parameters takes part."""
    return training_flops(model, config.data.sequence_length) + 6 * (parameters - count_parameters(model))


def sizes_in_words(description: PretrainedConfig) -> str:
    """Return the sizes of a model in words; for another architecture than LLaMA, the sizes that have the same names."""
    names = {
        "hidden_size": "width",
        "intermediate_size": "feed-forward width",
        "num_hidden_layers": "layers",
        "num_attention_heads": "heads",
        "vocab_size": "vocabulary",
    }
    return ", ".join(f"{word} {value}" for name, word in names.items() if (value := getattr(description, name, None)))


def activation_bytes(config: RunConfig, description: PretrainedConfig, ranks: int) -> float:
    """Bytes of activations kept for a backward pass; with recomputation, the layers' inputs and all of one layer."""
    layers = description.num_hidden_layers
    kept = layers + KEPT_VALUES if config.train.gradient_checkpointing else layers * KEPT_VALUES
    tokens = rows_at_once(config, ranks) * config.data.sequence_length
    return tokens * description.hidden_size * kept * element_bytes(config)


def rows_at_once(config: RunConfig, ranks: int) -> int:
    """The number of rows in a micro-batch of one rank."""
    return min(config.train.micro_batch, config.train.batch // ranks)


def element_bytes(config: RunConfig) -> int:
    """Bytes of an element of the activations."""
    return 2 if config.train.precision.startswith("bf16") else 4
