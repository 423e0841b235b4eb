"""The numbers that the paper's tables are made of: from the records of finished trainings and from evaluations."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from salaad.common.budgets import parse_budget, parse_count
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant, parse_kappas
from salaad.config.commands import ALTERNATIONS
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.evaluation.sweep import best, by_energy, grid
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.runs.model_on_disk import ModelOnDisk
from scripts.reproduction.grid import Run, Scale

KAPPA_STEP = 0.05
KAPPAS = tuple(parse_kappas(f"0:1:{KAPPA_STEP}"))  # of which HPA's best is chosen


@lru_cache(maxsize=2)  # each entry holds a model with its L + S
def evaluation(
    folder: Path, scale: Scale, post_hoc: PostHoc | None = None, other_text: Path | None = None
) -> VariantEvaluation:
    """Return the evaluation of a run's variants, over the second half of its validation text or over `other_text`.

    κ* is chosen on the first half. The run's cache keeps the perplexities.
    """
    source = ModelOnDisk.open(folder)
    deployment = CheckpointDeployment(source, post_hoc)
    data = DataConfig(**source.run["data"])
    if other_text:
        data = replace(data, source="files", validation_files=(str(other_text),))
    half = None if other_text else "second"
    return VariantEvaluation(deployment, data, tokens=parse_count(scale.tokens), dtype=scale.dtype, batch=32, half=half)


def perplexity(run: Run, scale: Scale, name: str) -> dict[str, Any]:
    """Return the measured row (perplexity, parameters, …) of the variant `name`, X or L+S."""
    return evaluation(run.folder(scale), scale)(Variant(name))


def at_budget(run: Run, scale: Scale, budget: str) -> dict[str, Any]:
    """Return the measured row of L̃ + S̃, which is L + S cut to `budget` by HPA at κ*."""
    measure = evaluation(run.folder(scale), scale)
    [chosen] = choose_kappas(measure, [parse_budget(budget, measure.deployment.dense)])[1]
    return chosen


def choose_kappas(measure: VariantEvaluation, budgets: Sequence[int]) -> tuple[list[dict], list[dict]]:
    """Return rows of X, L + S and HPA's grid on the first half of the text, and at each budget's κ* on the second."""
    variants = grid(budgets, KAPPAS)
    measure.deployment.check(variants)
    rows = [measure.on_half("first")(variant) for variant in variants]
    chosen = {(row["budget"], row["kappa"]) for row in best(rows)}
    return rows, [measure(variant) for variant in variants if (variant.budget, variant.kappa) in chosen]


def on_other_text(run: Run, scale: Scale, row: dict[str, Any]) -> dict[str, Any]:
    """Return the measured row, over the scale's second text, of the variant that `row` is of."""
    variant = Variant(row["variant"], row["budget"], row["kappa"], row["refine"])
    return evaluation(run.folder(scale), scale, other_text=scale.other_text)(variant)


def post_hoc(run: Run, scale: Scale) -> PostHoc:
    """Return how to split a vanilla run by robust PCA: the same blocks that SALAAD has at this scale."""
    settings = run.kept(scale)["config"]["salaad"]
    return PostHoc(SalaadConfig(**settings), "rpca")


def elastic(run: Run, scale: Scale, split: PostHoc | None = None) -> list[dict[str, Any]]:
    """Return the rows of X and L + S, and at every budget of the scale of HPA at κ*, energy, and energy refined."""
    measure = evaluation(run.folder(scale), scale, split)
    budgets = [parse_budget(budget, measure.deployment.dense) for budget in scale.budgets]
    variants = [Variant("X"), Variant("L+S"), *by_energy(budgets, ALTERNATIONS)]
    measure.deployment.check(variants)
    return [*choose_kappas(measure, budgets)[1], *map(measure, variants)]


def summary(run: Run, scale: Scale) -> dict[str, Any]:
    """Return the summary.json of a training, as recorded."""
    return run.kept(scale)["summary"]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and the values themselves, one a seed."""
    return {"mean": float(np.mean(values)), "deviation": float(np.std(values)), "values": list(values)}


def shown(spread: dict[str, Any], digits: int = 2) -> str:
    """Mean ± deviation; the mean alone of a single seed."""
    mean = f"{spread['mean']:.{digits}f}"
    return f"{mean} ± {spread['deviation']:.{digits}f}" if len(spread["values"]) > 1 else mean
