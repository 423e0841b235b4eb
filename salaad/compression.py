"""From a checkpoint and a budget to a folder that opens anywhere, whole or not at all."""

from pathlib import Path

import torch

from salaad.config import SalaadConfig
from salaad.deployment import Deployment
from salaad.factored import factor, resident_bytes, slr_modules
from salaad.files import new_folder, require_new, write_checksums, write_json
from salaad.models import count_parameters, load_model
from salaad.options import CompressOptions
from salaad.run import provenance
from salaad.sources import RECORD, Source, open_source
from salaad.tables import markdown_table, megabytes, millions
from salaad.tokenizer import load_tokenizer
from salaad.variants import Variant, parse_budget


def compress(options: CompressOptions) -> str:
    """Make the folder `options.output` and say in Markdown how large it is, beside the dense model."""
    output = Path(options.output)
    require_new(output)
    source = open_source(Path(options.checkpoint))
    deployment = Deployment(source, blocks_to_split(source, options) if options.rpca else None)
    budget = None if options.budget is None else parse_budget(options.budget, deployment.dense)
    variant = variant_of(options, budget)
    deployment.check([variant])
    tokenizer = load_tokenizer(str(source.model))

    parts = deployment.cut(variant)
    model = load_model(source.model, getattr(torch, options.dtype))
    dense_bytes = resident_bytes(model)
    if options.format == "factored":
        factor(model, parts)
    else:
        for name, slr in parts.items():
            model.get_submodule(name).weight.copy_(slr.dense())

    with new_folder(output) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        sizes = {
            "parameters": (deployment.dense, deployment.parameters(parts)),
            "numbers_stored": (deployment.dense, count_parameters(model)),
            "bytes_on_disk": (dense_bytes, sum(path.stat().st_size for path in folder.glob("*.safetensors"))),
            "bytes_in_memory": (dense_bytes, resident_bytes(model)),
        }
        about = {"from": source.name, "digest": source.digest, "parts": deployment.kind}
        about |= {"variant": variant.name, "budget": variant.budget, "kappa": deployment.kappa(parts)}
        stored = {"dtype": options.dtype, "blocks": len(parts), "factored_blocks": len(slr_modules(model))}
        write_json({**about, **stored, **sizes, **provenance(), "run": source.run}, folder / RECORD)
        write_checksums(folder)
    whole = budget is not None and budget >= deployment.parameters(deployment.parts())
    return "\n\n".join(
        [
            size_table(f"{variant.name}, {options.format}", sizes),
            f"{stored['factored_blocks']} of {len(parts)} blocks are stored as U, V and S, the others dense"
            + (", since the budget is at or above L + S, all of L + S" if whole else "")
            + f"; weights in {options.dtype}.",
            f"{output} opens with AutoModelForCausalLM.from_pretrained"
            + (" after `import salaad`." if options.format == "factored" else "."),
        ]
    )


def variant_of(options: CompressOptions, budget: int | None) -> Variant:
    """What the options ask for; κ is a half unless told otherwise."""
    if budget is None:
        return Variant("L+S")
    if options.allocation == "energy":
        return Variant(f"{options.budget}@energy", budget)
    kappa = 0.5 if options.kappa is None else options.kappa
    return Variant(f"{options.budget}@{kappa:g}", budget, kappa)


def blocks_to_split(source: Source, options: CompressOptions) -> SalaadConfig:
    """The blocks that robust PCA splits: those named, or those of the run's configuration, or all projections."""
    if options.roles or options.embedding or "salaad" not in source.run:
        return SalaadConfig(roles=options.roles, embedding=options.embedding)
    return SalaadConfig(**source.run["salaad"])


def size_table(name: str, sizes: dict[str, tuple[int, int]]) -> str:
    """Parameters, bytes on disk and in memory of X and of the folder made, as Markdown."""
    columns = [
        (show(before), show(after), f"{after / before:.3f}")
        for show, (before, after) in zip((millions, millions, megabytes, megabytes), sizes.values(), strict=True)
    ]
    rows = list(zip(("X, dense", name, "ratio"), *columns, strict=True))
    return markdown_table(("model", "parameters", "numbers stored", "weights on disk", "weights in memory"), rows)
