"""What a checkpoint is worth at every size: perplexity, the κ sweep, zero-shot accuracy."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, logging

from salaad import harness, sweep
from salaad.cli import read_options
from salaad.config import DataConfig, SalaadConfig
from salaad.deployment import Deployment, deployed
from salaad.errors import run_command
from salaad.evaluation import VariantEvaluation
from salaad.figures import elastic_figure, sweep_figure
from salaad.models import load_model
from salaad.options import EvaluationOptions, LmEvalOptions, PerplexityOptions, SweepOptions
from salaad.report import accuracy_table, keep_rows, perplexity_table
from salaad.sources import Source, open_source
from salaad.variants import parse_budgets, parse_count, parse_kappas, parse_variants

COMMANDS = {"perplexity": PerplexityOptions, "sweep": SweepOptions, "lm-eval": LmEvalOptions}


def perplexity(options: PerplexityOptions, data: DataConfig) -> None:
    """X, L + S and any number of HPA cuts, as the paper's Table 1 has them."""
    source = open_source(Path(options.checkpoint))
    deployment = Deployment(source)
    names = options.variants or ("X,L+S" if source.surrogate else "X")
    variants = parse_variants(names, deployment.dense)
    deployment.check(variants)
    evaluation = evaluation_of(deployment, options, data)
    rows = [evaluation(variant) for variant in variants]
    show(perplexity_table(rows), rows, output_of(source, options), "perplexity")


def sweep_kappa(options: SweepOptions, data: DataConfig) -> None:
    """The grid of budgets × κ, κ* per budget, the elastic curve; beside them those of vanilla + RPCA, if asked for."""
    source = open_source(Path(options.checkpoint))
    deployments = {"SALAAD": Deployment(source)}
    if options.vanilla is not None:
        blocks = SalaadConfig(**source.run["salaad"])
        deployments["vanilla + RPCA"] = Deployment(open_source(Path(options.vanilla)), post_hoc=blocks)
    budgets = parse_budgets(options.budgets, deployments["SALAAD"].dense)
    kappas = parse_kappas(options.kappas)
    for deployment in deployments.values():
        deployment.check(sweep.grid(budgets, kappas))
    rows = sweep.measure(
        {label: evaluation_of(deployment, options, data) for label, deployment in deployments.items()}, budgets, kappas
    )
    output = output_of(source, options)
    tables = [f"{label}\n\n{sweep.grid_table(mine)}" for label, mine in rows.items()]
    flat = [{"label": label, **row} for label, mine in rows.items() for row in mine]
    show("\n\n".join([*tables, sweep.elastic_table(rows)]), flat, output, "sweep")
    sweep_figure(rows["SALAAD"], output / "sweep.png")
    elastic_figure(rows, output / "elastic.png")
    print(f"pictures: {output / 'sweep.png'}, {output / 'elastic.png'}")


def lm_eval(options: LmEvalOptions) -> None:
    """Accuracies of the installed lm-evaluation-harness, zero-shot."""
    tasks = [name.strip() for name in options.tasks.split(",")]
    task_data = Path(options.task_data) if options.task_data else None
    source = open_source(Path(options.checkpoint))
    deployment = Deployment(source)
    variants = parse_variants(options.variants, deployment.dense)
    deployment.check(variants)
    harness.check_tasks(tasks, task_data)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(source.model, getattr(torch, options.dtype), device)
    tokenizer = AutoTokenizer.from_pretrained(source.model)
    size = options.batch_size if options.batch_size == "auto" else int(options.batch_size)
    rows: list[dict[str, Any]] = []
    for variant in variants:
        with deployed(model, deployment.cut(variant)):
            scores = harness.evaluate_tasks(
                model, tokenizer, tasks, task_data=task_data, limit=options.limit, batch_size=size
            )
        about = {"model": source.name, "variant": variant.name, "dtype": options.dtype, "limit": options.limit}
        rows += [{**about, **asdict(score), "harness": harness.harness_version()} for score in scores]
    show(accuracy_table(rows), rows, output_of(source, options), "lm-eval")


def evaluation_of(
    deployment: Deployment, options: PerplexityOptions | SweepOptions, data: DataConfig
) -> VariantEvaluation:
    """Perplexities of one model with the options of this command."""
    tokens = parse_count(options.tokens)
    return VariantEvaluation(deployment, data, tokens=tokens, dtype=options.dtype, batch=options.batch)


def output_of(source: Source, options: EvaluationOptions) -> Path:
    """The folder for tables and pictures."""
    return Path(options.output) if options.output else source.output


def show(table: str, rows: Sequence[dict[str, Any]], output: Path, name: str) -> None:
    """Print the table and keep its rows, beside those that were there, as JSON."""
    print(table)
    print(f"\nrows: {keep_rows(rows, output / f'{name}.json')}")


def main() -> None:
    """Run the subcommand."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    command, options, data = read_options("evaluate.py", __doc__, COMMANDS, with_data=("perplexity", "sweep"))
    if command == "lm-eval":
        lm_eval(options)
    else:
        {"perplexity": perplexity, "sweep": sweep_kappa}[command](options, data)


if __name__ == "__main__":
    run_command(main)
