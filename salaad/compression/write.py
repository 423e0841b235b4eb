"""From a checkpoint and a budget to a folder that opens anywhere, whole or not at all."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from salaad.common.budgets import format_count, parse_budget
from salaad.common.errors import UserError
from salaad.common.files import new_folder, require_new, write_checksums, write_json
from salaad.common.formats import markdown_table, megabytes, millions
from salaad.common.provenance import provenance
from salaad.compression.deployment import Deployment
from salaad.compression.elastic_deployment import ElasticDeployment, open_deployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.data.tokenizer import load_tokenizer
from salaad.factored.any_size import save_elastic
from salaad.factored.fixed_size import factor, memory_bytes, resident_bytes, slr_modules, tied_modules
from salaad.model.build import count_parameters, load_model
from salaad.runs.model_on_disk import RECORD, Source, open_source


def compress(options: CompressOptions, data: DataConfig | None = None) -> str:
    """Make the folder `options.output` and say in Markdown how large it is, beside the dense model.

    Args:
        options: what to make of what.
        data: where the text is that --calibrate reads.
    """
    output = Path(options.output)
    require_new(output)
    source = open_source(Path(options.checkpoint))
    deployment = open_deployment(source, split_of(source, options))
    budget = None if options.budget is None else parse_budget(options.budget, deployment.dense)
    is_elastic = isinstance(deployment, ElasticDeployment)
    if is_elastic:
        _require_plain(options, source)
    variant = Variant(options.budget or "L+S", budget, stored=is_elastic and budget is not None)
    deployment.check([variant])
    if options.calibrate:
        deployment.calibrate(data or DataConfig(), options.calibrate)
    tokenizer = load_tokenizer(str(source.model))
    if is_elastic:
        made = _of_elastic(deployment, variant, options)
    else:
        variant = variant_of(options, budget, deployment)
        made = (_elastic if options.elastic else _of_one_size)(deployment, variant, options)

    with new_folder(output) as folder:
        made.save(folder)
        tokenizer.save_pretrained(folder)
        on_disk = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        dense_bytes = deployment.dense * getattr(torch, options.dtype).itemsize
        sizes = {
            "parameters": (deployment.dense, made.parameters),
            "numbers_stored": (deployment.dense, made.numbers),
            "bytes_on_disk": (dense_bytes, on_disk),
            "bytes_in_memory": (dense_bytes, made.bytes_in_memory),
        }
        about = {"from": source.name, "digest": source.digest, "parts": deployment.kind}
        about |= {"variant": variant.name, "budget": variant.budget, "kappa": made.kappa}
        about |= {"refine": options.refine, "calibrate": options.calibrate, "elastic": options.elastic}
        about |= {"calibration": deployment.calibration.digest if options.calibrate else None}
        stored = {"dtype": options.dtype, "blocks": made.blocks, "factored_blocks": made.factored}
        write_json({**about, **stored, **sizes, **provenance(), "run": source.run}, folder / RECORD)
        write_checksums(folder)
    name = "all units" if options.elastic else f"{variant.name}, {options.format}"
    return "\n\n".join([size_table(name, sizes), *made.notes, opening(output, options)])


@dataclass
class Made:
    """What is about to be written: how, and how large it is by every measure."""

    save: Callable[[Path], Any]
    parameters: int
    numbers: int
    bytes_in_memory: int
    blocks: int
    factored: int
    kappa: float | None
    notes: list[str]


def _of_one_size(deployment: Deployment, variant: Variant, options: CompressOptions) -> Made:
    parts = deployment.cut(variant)
    model = load_model(deployment.source.model, getattr(torch, options.dtype))
    if options.format == "factored":
        factor(model, parts)
    else:
        for name, slr in parts.items():
            model.get_submodule(name).weight.copy_(slr.dense())
    whole = variant.budget is not None and variant.budget >= deployment.whole
    return _made(model, deployment.parameters(parts), len(parts), deployment.kappa(parts), options, whole)


def _of_elastic(deployment: ElasticDeployment, variant: Variant, options: CompressOptions) -> Made:
    with deployment.opened(variant, getattr(torch, options.dtype)) as (model, parameters, kappa):
        return _made(model, parameters, len(deployment.entry.blocks), kappa, options)


def _made(
    model: PreTrainedModel,
    parameters: int,
    blocks: int,
    kappa: float | None,
    options: CompressOptions,
    whole: bool = False,
) -> Made:
    factored = len(slr_modules(model))
    note = (
        f"{factored} of {blocks} blocks are stored as U, V and S, the others dense"
        + (", since the budget is at or above L + S, all of L + S" if whole else "")
        + f"; weights in {options.dtype}."
    )
    sizes = (parameters, count_parameters(model), resident_bytes(model))
    return Made(model.save_pretrained, *sizes, blocks, factored, kappa, [note])


def _elastic(deployment: Deployment, variant: Variant, options: CompressOptions) -> Made:
    parts, line = deployment.elastic(variant)
    model = load_model(deployment.source.model, getattr(torch, options.dtype))
    if set(parts) <= tied_modules(model):
        raise UserError(
            f"all blocks of {deployment.source.name} are tied weights, dense at every size; leave --elastic out"
        )
    save = partial(save_elastic, model, parts, line, deployment.fixed)
    total, element = deployment.parameters(parts), getattr(torch, options.dtype).itemsize
    in_memory = deployment.fixed * element + sum(memory_bytes(slr, element) for slr in parts.values())
    fitted = f", fitted to {format_count(variant.budget)}" if variant.refine else ""
    note = (
        f"It opens at every size from {format_count(deployment.fixed)} to {format_count(total, up=False)}, each the "
        f"beginning of the next{fitted}; weights in {options.dtype}."
    )
    return Made(save, total, total, in_memory, len(parts), len(parts), None, [note])


def _require_plain(options: CompressOptions, source: Source) -> None:
    """Refuse what an elastic folder cannot be asked for."""
    asked = {
        "--kappa": options.kappa is not None,
        "--allocation energy": options.allocation == "energy",
        "--refine": options.refine,
        "--calibrate": options.calibrate,
        "--elastic": options.elastic,
        "--format dense": options.format == "dense",
    }
    wrong = [name for name, given in asked.items() if given]
    if wrong:
        raise UserError(
            f"{source.name} is an elastic folder, which is cut as it is, without {wrong[0]}; leave that out, or give "
            "the checkpoint the folder was made of"
        )


def opening(output: Path, options: CompressOptions) -> str:
    """How the folder is used."""
    if options.format == "dense":
        return f"{output} opens with AutoModelForCausalLM.from_pretrained."
    asked = f'from_pretrained("{output}", budget=0.5)' if options.elastic else "from_pretrained"
    return f"{output} opens with AutoModelForCausalLM.{asked} after `import salaad`."


def variant_of(options: CompressOptions, budget: int | None, deployment: Deployment) -> Variant:
    """What the options ask for; unless told otherwise κ is that at which L and S lose the same fraction."""
    refine, calibrated = options.refine, options.calibrate > 0
    if budget is None:
        return Variant("L+S", refine=refine, calibrated=calibrated)
    if options.elastic or options.allocation == "energy":
        return Variant(f"{options.budget}@energy", budget, None, refine, calibrated)
    # Rounded, so that the name says all of it and the same cut can be asked for by it.
    kappa = round(deployment.share, 3) if options.kappa is None else options.kappa
    return Variant(f"{options.budget}@{kappa:g}", budget, kappa, refine, calibrated)


def split_of(source: Source, options: CompressOptions) -> PostHoc | None:
    """How the model is to be split after the fact: the blocks named, or those of the run, or all projections."""
    if not (options.rpca or options.godec):
        return None
    if options.roles or options.embedding or "salaad" not in source.run:
        blocks = SalaadConfig(roles=options.roles, embedding=options.embedding)
    else:
        blocks = SalaadConfig(**source.run["salaad"])
    method = "rpca" if options.rpca else "godec"
    given = {"rank_ratio": options.rank_ratio, "density": options.density}
    return PostHoc(blocks, method, **{name: value for name, value in given.items() if value is not None})


def size_table(name: str, sizes: dict[str, tuple[int, int]]) -> str:
    """Parameters, bytes on disk and in memory of X and of the folder made, as Markdown."""
    columns = [
        (show(before), show(after), f"{after / before:.3f}")
        for show, (before, after) in zip((millions, millions, megabytes, megabytes), sizes.values(), strict=True)
    ]
    rows = list(zip(("X, dense", name, "ratio"), *columns, strict=True))
    return markdown_table(("model", "parameters", "numbers stored", "weights on disk", "weights in memory"), rows)
