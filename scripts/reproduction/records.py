"""What finished trainings recorded, and what they deploy: the numbers that the paper's tables are made of."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from salaad.common.budgets import parse_budget, parse_count
from salaad.common.files import read_json
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.evaluation.sweep import best, by_energy, grid
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.runs.model_on_disk import ModelOnDisk
from scripts.reproduction.grid import Run, Scale

KAPPAS = tuple(k / 20 for k in range(21))
REFINE = 20  # alternations of the refined cuts


@lru_cache(maxsize=2)  # each holds a model with its parts
def evaluation(
    folder: Path, scale: Scale, post_hoc: PostHoc | None = None, other_text: Path | None = None
) -> VariantEvaluation:
    """Perplexities of a run over the second half of its validation text, or another text; the run's cache keeps them.

    The first half is what κ* is chosen on.
    """
    source = ModelOnDisk.open(folder)
    deployment = CheckpointDeployment(source, post_hoc)
    data = DataConfig(**source.run["data"])
    if other_text:
        data = replace(data, source="files", validation_files=(str(other_text),))
    half = None if other_text else "second"
    return VariantEvaluation(deployment, data, tokens=parse_count(scale.tokens), dtype=scale.dtype, batch=32, half=half)


def perplexity(run: Run, scale: Scale, name: str) -> dict[str, Any]:
    """The row of X or L+S."""
    return evaluation(run.folder(scale), scale)(Variant(name))


def at_budget(run: Run, scale: Scale, budget: str) -> dict[str, Any]:
    """The row of L̃ + S̃: HPA at κ*."""
    measure = evaluation(run.folder(scale), scale)
    [chosen] = choose_kappas(measure, [parse_budget(budget, measure.deployment.dense)])[1]
    return chosen


def choose_kappas(measure: VariantEvaluation, budgets: Sequence[int]) -> tuple[list[dict], list[dict]]:
    """HPA's grid with X and L + S over the first half of the text; what is at κ* of each budget over the second."""
    variants = grid(budgets, KAPPAS)
    measure.deployment.check(variants)
    rows = [measure.on_half("first")(variant) for variant in variants]
    chosen = {(row["budget"], row["kappa"]) for row in best(rows)}
    return rows, [measure(variant) for variant in variants if (variant.budget, variant.kappa) in chosen]


def on_other_text(run: Run, scale: Scale, row: dict[str, Any]) -> dict[str, Any]:
    """The row of the same variant over the scale's second text."""
    variant = Variant(row["variant"], row["budget"], row["kappa"], row["refine"])
    return evaluation(run.folder(scale), scale, other_text=scale.other_text)(variant)


def post_hoc(run: Run, scale: Scale) -> PostHoc:
    """The split of a vanilla run into the blocks that SALAAD has at this scale."""
    settings = read_json(run.record(scale))["config"]["salaad"]
    return PostHoc(SalaadConfig(**settings), "rpca")


def elastic(run: Run, scale: Scale, split: PostHoc | None = None) -> list[dict[str, Any]]:
    """X, L + S, HPA at κ*, energy, and energy refined, at every budget of the scale."""
    measure = evaluation(run.folder(scale), scale, split)
    budgets = [parse_budget(budget, measure.deployment.dense) for budget in scale.budgets]
    variants = [Variant("X"), Variant("L+S"), *by_energy(budgets, REFINE)]
    measure.deployment.check(variants)
    return [*choose_kappas(measure, budgets)[1], *map(measure, variants)]


def summary(run: Run, scale: Scale) -> dict[str, Any]:
    """Its summary.json, as it was recorded."""
    return read_json(run.record(scale))["summary"]


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation and the values themselves, one a seed."""
    return {"mean": float(np.mean(values)), "deviation": float(np.std(values)), "values": list(values)}


def shown(spread: dict[str, Any], digits: int = 2) -> str:
    """Mean ± deviation; the mean alone of a single seed."""
    mean = f"{spread['mean']:.{digits}f}"
    return f"{mean} ± {spread['deviation']:.{digits}f}" if len(spread["values"]) > 1 else mean
