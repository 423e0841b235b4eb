"""Compressing a model on disk into a folder of its own, which is written whole or not at all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch

from salaad.common.budgets import format_count, parse_budget, parse_count
from salaad.common.files import at_home, new_folder, require_place, tokenizer_errors, write_checksums, write_json
from salaad.common.formats import markdown_table, megabytes, millions
from salaad.common.provenance import provenance
from salaad.common.validation import split_list
from salaad.compression.card import Usage, history, in_words, not_smaller, write_card
from salaad.compression.deployment import Deployment, FittedOnText, take_over
from salaad.compression.opening import open_deployment
from salaad.compression.variants import Variant
from salaad.compression.what_to_split import split_of
from salaad.config.commands import CompressOptions
from salaad.config.run import DataConfig
from salaad.data.tokenizer import can_read_text, tokenizer_to_copy
from salaad.factored.any_size import save_elastic
from salaad.factored.fixed_size import mark_factored, slr_modules
from salaad.factored.replacement import always_dense
from salaad.factored.smaller_form import form_for_file, memory_bytes, opened_bytes, takes_dense_form
from salaad.model.folders import carry_over, has_tokenizer
from salaad.model.parameters import count_parameters
from salaad.runs.model_on_disk import RECORD, ModelOnDisk


@dataclass(frozen=True)
class FolderContent:
    """The content of a folder to be written: the function that writes it, and its size by every measure.

    Args:
        save: writes the weights and config.json into a folder.
        parameters: the parameters as the allocation counts.
        numbers: floating-point numbers stored.
        bytes_in_memory: bytes of the opened model's weights.
        blocks: number of blocks.
        factored: number of blocks that are stored as U, V and S.
        kappa: the κ that the cut amounts to, if any.
        note: a sentence for the user.
    """

    save: Callable[[Path], Any]
    parameters: int
    numbers: int
    bytes_in_memory: int
    blocks: int
    factored: int
    kappa: float | None
    note: str


def compress(options: CompressOptions, source: ModelOnDisk, data: DataConfig | None = None) -> str:
    """Write the folder `options.output`; return Markdown on its size beside the dense model's, and on how to open it.

    Args:
        options: the options of compress.py.
        source: the model that --checkpoint names, opened.
        data: where the text is that --calibrate, --match and --distill read.
    """
    output = at_home(options.output)
    options = replace(options, output=str(output))
    require_place(output)
    deployment, budgets = _opened(source, options)
    asked = [(replace(options, budget=word), budget) for word, budget in budgets.items()] or [(options, None)]
    variants = [deployment.variant_for(one, budget) for one, budget in asked]
    deployment.check(variants)
    if options.calibrate:
        deployment.calibrate(data or DataConfig(), options.calibrate)
    if options.match or options.distill:
        tokens = parse_count(options.distill) if options.distill else 0
        deployment.tune(data or DataConfig(), FittedOnText(options.match, tokens, options.text_share))
    tokenizer = tokenizer_to_copy(source.folder.path) if has_tokenizer(source.folder.path) else None
    variants = [deployment.settled(one, options) for one in variants]
    variant = variants[0]
    content = _all_sizes(deployment, variants, options) if options.elastic else _one_size(deployment, variant, options)

    with new_folder(output) as folder:
        content.save(folder)
        if tokenizer is not None:
            with tokenizer_errors(folder):
                tokenizer.save_pretrained(folder)
        carry_over(source.folder.path, folder)
        sizes = _sizes(deployment, content, options, folder)
        write_json(_record(deployment, content, options, variants) | sizes | provenance(), folder / RECORD)
        write_checksums(folder)
        name = "all units" if options.elastic else f"{variant.name}, {options.format}"
        kept_dense = content.blocks - content.factored
        warning = not_smaller(options, deployment.kind, kept_dense, content.blocks, *sizes["bytes_on_disk"])
        read = [f"Calibrated on {deployment.calibration.described}."] if variant.calibrated else []
        found = "\n\n".join([size_table(name, sizes), content.note, *read, *warning])
        usage = usage_of(deployment, options, content, tokenizer is not None and can_read_text(tokenizer))
        how = history(source.name, deployment.kind, deployment.activation, options, variants)
        write_card(folder, usage, how=how, sizes=found, base=source.base)
    deployment.written()
    missing = "" if tokenizer is not None else f"\n\nNo tokenizer was written, since {source.name} has none."
    return f"{found}{missing}\n\n{usage.said()}"


def _opened(source: ModelOnDisk, options: CompressOptions) -> tuple[Deployment, dict[str, int]]:
    """Return the deployment and the requested sizes (see `budgets_of`); GoDec's L + S has room for the largest size."""
    split = split_of(source, options)
    command = str(replace(options, checkpoint="", output=""))  # the same command, wherever it reads and writes
    deployment = open_deployment(source, split, command)
    budgets = budgets_of(options, deployment.dense)
    largest = next(iter(budgets.values()), None)
    if options.godec and largest is not None:
        raised = [name for name in ("rank_ratio", "density") if getattr(options, name) is None]
        split = split.with_room(deployment.shapes.values(), largest - deployment.fixed, raised)
        deployment = open_deployment(source, split, command)
    return deployment, budgets


def _sizes(
    deployment: Deployment, content: FolderContent, options: CompressOptions, folder: Path
) -> dict[str, tuple[int, int]]:
    """Return measure → (size of the dense model, size of the folder)."""
    element = getattr(torch, options.float_dtype).itemsize
    dense_bytes = deployment.dense * element
    return {
        "parameters": (deployment.dense, content.parameters),
        "numbers_stored": (deployment.dense, content.numbers),
        "bytes_on_disk": (dense_bytes, sum(path.stat().st_size for path in folder.glob("*.safetensors"))),
        "bytes_in_memory": (dense_bytes, content.bytes_in_memory),
    }


def _record(
    deployment: Deployment, content: FolderContent, options: CompressOptions, variants: Sequence[Variant]
) -> dict[str, Any]:
    """Return what compression.json says of the folder's source and of how the source was cut."""
    source, variant, calibrated = deployment.source, variants[0], any(one.calibrated for one in variants)
    cost = deployment.tuning_cost(len(variants) if options.elastic else None)
    return {
        "from": source.name,
        "base": source.base,
        "digest": source.digest,
        "run": source.run,
        "parts": deployment.kind,
        "variant": variant.name,
        "budget": variant.budget,
        "kappa": content.kappa,
        "refine": max(one.refine for one in variants),
        "elastic": options.elastic,
        "ranges_from": [one.budget for one in variants if one.budget] if options.elastic else None,
        "calibrate": options.calibrate if calibrated else 0,
        "calibration": deployment.calibration.digest if calibrated else None,
        "match": options.match,
        "distill": options.distill,
        "text_share": options.text_share,
        "tuning": cost and cost._asdict(),
        "dtype": options.dtype,
        "blocks": content.blocks,
        "factored_blocks": content.factored,
    }


def budgets_of(options: CompressOptions, dense: int) -> dict[str, int]:
    """Return the requested sizes: each as the user wrote it → parameters, the largest first, without duplicates."""
    words = () if options.budget is None else split_list(options.budget) or (options.budget,)
    sizes = {parse_budget(word, dense): word for word in words}
    return {sizes[size]: size for size in sorted(sizes, reverse=True)}


def _one_size(deployment: Deployment, variant: Variant, options: CompressOptions) -> FolderContent:
    in_int8 = options.dtype == "int8"
    with form_for_file("int8" if in_int8 else "float"):
        sized = deployment.sized(variant, getattr(torch, options.float_dtype), options.format == "factored")
    mark_factored(sized.model, sized.parameters, in_int8)
    stored = slr_modules(sized.model)
    kinds = "U, V and S in int8, all else in bfloat16" if options.dtype == "int8" else f"weights in {options.dtype}"
    others = ", the others dense" if len(stored) < sized.blocks else ""
    note = f"{len(stored)} of {sized.blocks} blocks are stored as U, V and S{others}; {kinds}."
    if opened_dense := sum(takes_dense_form(layer, layer.U.element_size()) for layer in stored.values()):
        note += f" {opened_dense} of them become dense when the folder is opened, which takes less memory."
    note = sized.note or note
    if options.budget is not None and variant.name == "L+S":
        note += " The budget is at or above L + S, so all of L + S is there."
    numbers, memory = count_parameters(sized.model), opened_bytes(sized.model)
    save = sized.model.save_pretrained
    return FolderContent(save, sized.parameters, numbers, memory, sized.blocks, len(stored), sized.kappa, note)


def _all_sizes(deployment: Deployment, variants: Sequence[Variant], options: CompressOptions) -> FolderContent:
    ranges = deployment.all_sizes(variants)
    parts = ranges[0].parts
    model = deployment.source.folder.load(getattr(torch, options.dtype))
    take_over(model, ranges[0].vectors)
    stays_dense = always_dense(model)
    save = partial(save_elastic, model, ranges, deployment.fixed)
    total = deployment.fixed + ranges[0].queue.parameters
    vectors = sum(vector.numel() for one in ranges[1:] for vector in one.vectors.values())
    numbers = deployment.fixed + sum(one.queue.numbers for one in ranges) + vectors
    element = getattr(torch, options.dtype).itemsize
    in_memory = deployment.fixed * element + sum(
        prod(slr.shape) * element if name in stays_dense else memory_bytes(slr, element) for name, slr in parts.items()
    )
    refined = [one for one in variants if one.refine]
    fitted = f", fitted to {in_words(refined)}" if refined else ""
    contained = " of the same range" if len(ranges) > 1 else ""
    note = (
        f"It opens at every size from {format_count(deployment.fixed)} to {format_count(total, up=False)}, each "
        f"contained in the next{contained}{fitted}; weights in {options.dtype}."
    )
    return FolderContent(save, total, numbers, in_memory, len(parts), len(parts), None, note)


def usage_of(deployment: Deployment, options: CompressOptions, content: FolderContent, reads_text: bool) -> Usage:
    """Return how to open and measure the folder, an elastic one at its largest given budget or a middle size."""
    source, size, evaluation = deployment.source, None, None
    if options.elastic:
        most, budgets = content.parameters, budgets_of(options, deployment.dense)
        size = next((word for word, budget in budgets.items() if budget <= most), None)
        if size is None:
            middle = (deployment.fixed + most) // 2
            size = format_count(middle) if parse_count(format_count(middle)) <= most else str(middle)
    if reads_text:
        positions = getattr(source.folder.config, "max_position_embeddings", None)
        shorter = "data" not in source.run and positions is not None and positions < DataConfig().sequence_length
        evaluation = ("--data.sequence_length", str(positions)) if shorter else ()
    return Usage(options.output, options.elastic or content.factored > 0, size, evaluation)


def size_table(name: str, sizes: dict[str, tuple[int, int]]) -> str:
    """Return a Markdown table of parameters, numbers stored, bytes on disk and in memory, of X and of the folder."""
    columns = [
        (show(before), show(after), f"{after / before:.3f}")
        for show, (before, after) in zip((millions, millions, megabytes, megabytes), sizes.values(), strict=True)
    ]
    rows = list(zip(("X, dense", name, "ratio"), *columns, strict=True))
    return markdown_table(("model", "parameters", "numbers stored", "weights on disk", "weights in memory"), rows)
