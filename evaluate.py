"""What a checkpoint is worth at every size: perplexity, the κ sweep, zero-shot accuracy, and its structure."""

from functools import partial

from salaad.common.errors import UserError, run_command
from salaad.common.validation import check, split_list
from salaad.config.command_line import read_options
from salaad.config.commands import (
    EvaluationOptions,
    LmEvalOptions,
    OutputOptions,
    PerplexityOptions,
    RpcaOptions,
    SweepOptions,
    TextOptions,
)
from salaad.evaluation.task_names import require_known

COMMANDS = {"perplexity": PerplexityOptions, "sweep": SweepOptions, "lm-eval": LmEvalOptions, "rpca": RpcaOptions}
read = partial(read_options, "evaluate.py", __doc__, COMMANDS, with_data=("perplexity", "sweep"))


def check_early() -> None:
    """Print the help or raise the errors of the options before the imports below, which take seconds."""
    command = read(None)
    if command.name == "lm-eval":
        require_known(split_list(command.options.tasks))


if __name__ == "__main__":
    run_command(check_early)

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import logging

from salaad.common.budgets import parse_count
from salaad.common.files import at_home, require_writable
from salaad.compression.card import add_perplexity
from salaad.compression.deployment import Deployment, best_device
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.opening import open_deployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant, parse_budgets, parse_kappas, parse_variants
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.data.tokenizer import load_tokenizer, tokenizer_digest
from salaad.evaluation import lm_harness, sweep
from salaad.evaluation.figures import elastic_figure, sweep_figure
from salaad.evaluation.structure import RpcaRow, model_statistics, structure_table
from salaad.evaluation.tables import accuracy_table, keep_rows, perplexity_table
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.model.folder_formats import is_any_size, is_fixed_size
from salaad.model.roles import find_blocks
from salaad.runs.model_on_disk import ModelOnDisk


def perplexity(options: PerplexityOptions, source: ModelOnDisk, data: DataConfig) -> None:
    """Measure the perplexity of X, L + S and any number of cuts, as in the paper's Table 1, and print the table."""
    deployment = open_deployment(source)
    names = options.variants or deployment.default_variants
    variants = fitted_variants(deployment, names, options.refine, options.calibrate)
    if any(variant.calibrated for variant in variants):
        deployment.calibrate(data, options.calibrate)
    path = result_file(source, options, "perplexity")
    evaluation = evaluation_of(deployment, options, data)
    rows = [evaluation(variant) for variant in variants]
    show(f"{perplexity_table(rows)}\n\n{texts_read(evaluation, rows)}", rows, path)
    add_perplexity(source.folder.path, perplexity_table(rows))


def sweep_kappa(options: SweepOptions, source: ModelOnDisk, data: DataConfig) -> None:
    """Measure the grid of budgets × κ, the best κ per budget and the curve of every way to cut; of --vanilla too."""
    own = open_deployment(source)
    label = "SALAAD" if own.kind == "trained" else source.run.get("method", source.name)
    deployments = {label: own}
    budgets = parse_budgets(options.budgets, own.dense)
    grid = sweep.grid(budgets, parse_kappas(options.kappas))
    variants = [*grid, *sweep.by_energy(budgets, options.refine, options.calibrate > 0, options.lm_head)]
    own.check(variants)
    if options.vanilla is not None:
        vanilla = ModelOnDisk.open(Path(options.vanilla), "--vanilla")
        if (method := vanilla.run.get("method", "full_rank")) != "full_rank":
            raise UserError(f"--vanilla {options.vanilla} is of method {method}; give a run of method full_rank")
        for method in options.ways_to_split:
            split = PostHoc(source.blocks, method)
            deployments[f"vanilla + {split.label}"] = CheckpointDeployment(vanilla, split)
    for deployment in deployments.values():
        deployment.check(variants)
    if options.calibrate:
        for deployment in deployments.values():
            deployment.calibrate(data, options.calibrate)
    path = result_file(source, options, "sweep", "sweep.png", "elastic.png")
    evaluations = {label: evaluation_of(deployment, options, data) for label, deployment in deployments.items()}
    rows = sweep.measure(evaluations, variants)
    tables = [f"{label}\n\n{sweep.grid_table(mine)}" for label, mine in rows.items()]
    flat = [{"label": label, **row} for label, mine in rows.items() for row in mine]
    read = f"κ* is chosen on the text on which it is measured. {texts_read(evaluations[label], rows[label])}"
    show("\n\n".join([*tables, sweep.elastic_table(rows), sweep.ways_table(rows), read]), flat, path)
    pictures = [path.with_name(name) for name in ("sweep.png", "elastic.png")]
    sweep_figure(rows[label], pictures[0])
    elastic_figure(rows, pictures[1])
    print(f"pictures: {pictures[0]}, {pictures[1]}")


def lm_eval(options: LmEvalOptions, source: ModelOnDisk) -> None:
    """Measure zero-shot accuracies with the installed lm-evaluation-harness and print their table."""
    tasks = split_list(options.tasks)
    task_data = at_home(options.task_data) if options.task_data else None
    lm_harness.check_max_length(source.folder.config, options.max_length, source.name)
    lm_harness.check_tasks(tasks, task_data)
    deployment = open_deployment(source)
    variants = fitted_variants(deployment, options.variants, options.refine)
    path = result_file(source, options, "lm-eval")
    tokenizer = load_tokenizer(str(source.folder.path))
    size = options.batch_size if options.batch_size == "auto" else int(options.batch_size)
    dtype = dtype_of(options)
    rows: list[dict[str, Any]] = []
    for variant in variants:
        with deployment.of(variant).opened(variant, getattr(torch, dtype)) as opened:
            scores = lm_harness.evaluate_tasks(
                opened.model,
                tokenizer,
                tasks,
                task_data=task_data,
                limit=options.limit,
                batch_size=size,
                max_length=options.max_length,
            )
        about = {"model": source.name, "digest": source.digest[:16], "variant": variant.name, "dtype": dtype}
        about |= {"refine": variant.refine, "limit": options.limit, "max_length": options.max_length}
        about |= {"tokenizer": tokenizer_digest(tokenizer)}
        rows += [{**about, **asdict(score), "harness": lm_harness.harness_version()} for score in scores]
        keep_rows(rows, path)  # as the next variant may take hours and be interrupted
    show(accuracy_table(rows), rows, path)


def rpca_statistics(options: RpcaOptions, source: ModelOnDisk) -> None:
    """Print the rank and density that robust PCA finds in the weights and in noise of the same shapes."""
    entry = getattr(source.folder.config, "quantization_config", None)
    if is_fixed_size(entry) or is_any_size(entry):
        activation = entry.get("activation")
        why = "of which robust PCA would see the dense weights alone; give the dense model it was made of"
        if activation is not None:
            why = f"with a {activation} between the factors, so no weight is there to split; give another model"
        raise UserError(f"{source.name} is stored in parts, {why}")
    path = result_file(source, options, "rpca")
    model = source.folder.load(torch.float32, best_device())
    blocks = find_blocks(model, SalaadConfig(roles=options.roles, embedding=options.embedding))
    statistics = model_statistics(blocks, growth=options.growth)
    about = {"model": source.name, "digest": source.digest[:16], "growth": options.growth}
    found: list[RpcaRow] = []
    for row in tqdm(statistics, total=len(blocks), desc="robust PCA", unit="matrix", leave=False, disable=None):
        found.append(row)
        keep_rows([{**about, **asdict(row)}], path)
    show(structure_table(found), [{**about, **asdict(row)} for row in found], path)


def fitted_variants(deployment: Deployment, names: str, refine: int, calibrate: int = 0) -> list[Variant]:
    """Return the variants of these names that `deployment` gives, those that are cut with this refinement and text."""
    variants = [variant.fitted(refine, calibrate > 0) for variant in parse_variants(names, deployment.dense)]
    cut = any(variant.budget is not None for variant in variants)
    for option, value in (("--refine", refine), ("--calibrate", calibrate)):
        nothing = f"{option} is {value}, but nothing is cut; give --variants a budget too, such as 0.5@energy"
        check(cut or not value, nothing)
    deployment.check(variants)
    return variants


def evaluation_of(deployment: Deployment, options: TextOptions, data: DataConfig) -> VariantEvaluation:
    """Return the `VariantEvaluation` that measures perplexities of `deployment` with the options of this command."""
    tokens = parse_count(options.tokens, "--tokens")
    return VariantEvaluation(deployment, data, tokens=tokens, dtype=dtype_of(options), batch=options.batch)


def dtype_of(options: EvaluationOptions) -> str:
    """Return the dtype asked for; without --dtype bfloat16 on a GPU and float32 on a CPU."""
    return options.dtype or ("bfloat16" if best_device().type == "cuda" else "float32")


def texts_read(evaluation: VariantEvaluation, rows: Sequence[dict[str, Any]]) -> str:
    """Return a sentence that names the validation text and the text that calibrated the cuts."""
    sentence = f"Measured on {rows[0]['tokens']:,} tokens of {evaluation.data.name_of('validation')}."
    calibration = evaluation.deployment.calibration
    return sentence if calibration is None else f"{sentence} Calibrated on {calibration.described}."


def result_file(source: ModelOnDisk, options: OutputOptions, name: str, *pictures: str) -> Path:
    """Return the path of a table's JSON file; a UserError before measuring if it or a picture may not be written."""
    path = (at_home(options.output) if options.output else source.output) / f"{name}.json"
    require_writable(path, [path.with_name(picture) for picture in pictures])
    return path


def show(table: str, rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Print the table and add its rows to those in the JSON file `path`."""
    print(table)
    print(f"\nrows: {keep_rows(rows, path)}")


def main() -> None:
    """Run the subcommand."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    run = {"perplexity": perplexity, "sweep": sweep_kappa, "lm-eval": lm_eval, "rpca": rpca_statistics}
    command = read(ModelOnDisk.open)
    if command.data is not None:
        run[command.name](command.options, command.model, command.data)
    else:
        run[command.name](command.options, command.model)


if __name__ == "__main__":
    run_command(main)
