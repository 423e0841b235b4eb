"""Experiments beyond the paper's, which ask why a claim does or does not hold at a scale."""

from itertools import pairwise, product
from statistics import fmean
from typing import Any

import numpy as np

from salaad.common.budgets import parse_budget
from salaad.common.formats import markdown_table, millions
from salaad.compression.variants import Variant
from salaad.config.commands import ALTERNATIONS
from salaad.evaluation.sweep import by_energy
from scripts.reproduction import pictures, trainings
from scripts.reproduction.deployments import found_and_true
from scripts.reproduction.evidence import Number, percent, span, structure_text
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import choose_kappas, evaluation, perplexity, post_hoc, summary
from scripts.shares import is_same_size

LEFT = (1, 0.6, 0.3)  # fractions of L's singular values and of S's entries to keep, the largest ones
RANKS, DENSITIES = (0, 0.05, 0.1, 0.15, 0.2, 1), (0, 0.05, 0.1, 0.2, 1)  # bounds of the ranges in the table
CORNER = 0.2  # rank ratio and density below which robust PCA can be expected to succeed
KEPT = (0.8, 0.65)  # fractions of the parameters of L + S inside the blocks that a cut keeps


def kappa_share(scale: Scale) -> Measured:
    """Measure κ* of trainings that differ in L's share of L + S: does κ* follow that share?"""
    rows = []
    for run in trainings.SHARES:
        measure = evaluation(run.folder(scale), scale)
        deployment = measure.deployment
        low_rank = sum(slr.rank * sum(slr.shape) for slr in deployment.parts.values())
        whole = low_rank + sum(slr.nnz for slr in deployment.parts.values())
        for kept in KEPT:
            [winner] = choose_kappas(measure, [deployment.fixed + round(kept * whole)])[1]
            rows.append(
                {
                    "run": run.name(scale),
                    "share": low_rank / whole,
                    "parameters": deployment.fixed + whole,
                    "kept": kept,
                    **{key: winner[key] for key in ("kappa", "perplexity", "tokens")},
                }
            )
    lines = [
        (
            row["run"],
            millions(row["parameters"]),
            f"{row['share']:.2f}",
            f"{row['kept']:g}",
            f"{row['kappa']:g}",
            f"{row['perplexity']:.2f}",
        )
        for row in rows
    ]
    header = ("training", "L + S", "share of L", "of it kept", "κ*", "PPL")
    pictures.kappa_share(rows, scale.results / "kappa_share.png")
    picture = {"κ* over the share of L in L + S": "kappa_share.png"}
    return Measured(rows, {"κ* and what L + S is made of": markdown_table(header, lines)}, picture)


def rpca_limit(scale: Scale) -> Measured:
    """Apply robust PCA to blocks, whole and cut to fewer units: up to which rank ratio and density does it find S?"""
    parts = evaluation(trainings.SALAAD.folder(scale), scale).deployment.parts
    rows = []
    for kept_L, kept_S in product(LEFT, repeat=2):
        cut = {name: slr.cut(round(kept_L * slr.rank), round(kept_S * slr.nnz)) for name, slr in parts.items()}
        rows += [{"kept_L": kept_L, "kept_S": kept_S, **row} for row in found_and_true(cut)]
    pictures.rpca_limit(rows, scale.results / "rpca_limit.png")
    cells = recovery(rows)
    header = ("rank ratio of L", *(f"density {span}" for span in dict.fromkeys(density for _, density in cells)))
    lines = [
        (rank, *(f"{found} of {of}" if of else "–" for (row, _), (found, of) in cells.items() if row == rank))
        for rank in dict.fromkeys(rank for rank, _ in cells)
    ]
    table = {"blocks whose density robust PCA finds to 0.1": markdown_table(header, lines)}
    return Measured(rows, table, {"how far off the density is that robust PCA finds": "rpca_limit.png"})


def one_training(scale: Scale) -> Measured:
    """Measure perplexity over size: SALAAD and full-rank + RPCA, cut by energy and refined, and small dense models."""
    rows = []
    for label, run, split in (
        ("SALAAD, one training", trainings.SALAAD, None),
        ("full-rank, one training, cut after robust PCA", trainings.VANILLA, post_hoc(trainings.VANILLA, scale)),
    ):
        measure = evaluation(run.folder(scale), scale, split)
        budgets = [parse_budget(budget, measure.deployment.dense) for budget in scale.budgets]
        refined = [variant for variant in by_energy(budgets, ALTERNATIONS) if variant.refine]
        variants = [Variant("X"), *([] if split else [Variant("L+S")]), *refined]
        rows += [{"label": label, **measure(variant)} for variant in variants]
    small = {"1": trainings.VANILLA, **trainings.small_dense(scale)}
    for budget, run in small.items():
        rows.append({"label": "dense, one training per size", **perplexity(run, scale, "X"), "budget": budget})
    pictures.one_training(rows, scale.results / "one_training.png")
    dense = next(row["parameters"] for row in rows)
    table = by_size(rows, [parse_budget(share, dense) for share in ("1", *scale.budgets)])
    notes = [f"cuts by energy, with {ALTERNATIONS} refinements; every model saw the same tokens; seed 0"]
    notes += ["–: L + S is smaller than this size"] if "–" in table else []
    tables = {"perplexity by parameters of the whole model": table}
    return Measured(rows, tables, {"perplexity over parameters": "one_training.png"}, notes)


def by_size(rows: list[dict[str, Any]], budgets: list[int]) -> str:
    """Return the table of the best perplexity of each label at each number of parameters; – where it has no model."""
    columns = list(dict.fromkeys(row["label"] for row in rows))
    lines = []
    for budget in budgets:
        near = [
            [row for row in rows if row["label"] == label and is_same_size(row["parameters"], budget)]
            for label in columns
        ]
        best = [min((row["perplexity"] for row in some), default=None) for some in near]
        lines.append((millions(budget), *("–" if value is None else f"{value:.2f}" for value in best)))
    return markdown_table(("parameters", *columns), lines)


def recovery(rows: list[dict[str, Any]]) -> dict[tuple[str, str], tuple[int, int]]:
    """Return (range of rank ratio, range of density) → (blocks whose density is found to 0.1, blocks in the range)."""
    cells = {}
    for (r0, r1), (d0, d1) in product(pairwise(RANKS), pairwise(DENSITIES)):
        mine = [row for row in rows if r0 <= row["true_rank_ratio"] < r1 and d0 <= row["true_density"] < d1]
        cells[f"{r0:g} to {r1:g}", f"{d0:g} to {d1:g}"] = (sum(map(_density_found, mine)), len(mine))
    return cells


def _density_found(row: dict[str, Any]) -> bool:
    return abs(row["density"] - row["true_density"]) <= 0.1


def limit_numbers(rows: list[dict[str, Any]]) -> list[Number]:
    """In how many blocks of low rank and few entries robust PCA finds the density, and in how many others."""
    inside = [row for row in rows if max(row["true_rank_ratio"], row["true_density"]) < CORNER]
    outside = [row for row in rows if row not in inside]
    return [
        Number(f"density found to 0.1: {what}", f"{sum(map(_density_found, mine))} of {len(mine)}")
        for what, mine in (
            (f"blocks, whole and cut, with rank ratio and density below {CORNER:g}", inside),
            ("others", outside),
        )
    ]


def embedding_why(scale: Scale) -> Measured:
    """Measure the embedding's rank ratio and density, and perplexity, under the scale's settings and stronger ones."""
    rows = []
    for setting, run in trainings.embedding_why(scale).items():
        ended = summary(run, scale)
        ends = ended["blocks"]
        [own] = [row for name, row in ends.items() if name.endswith("embed_tokens")]
        others = [row for row in ends.values() if row is not own]
        rows.append(
            {
                "setting": setting,
                "run": run.name(scale),
                **{key: own[key] for key in ("rank_ratio", "density")},
                **{f"others_{key}": fmean(row[key] for row in others) for key in ("rank_ratio", "density")},
                **{name: perplexity(run, scale, name)["perplexity"] for name in ("X", "L+S")},
                "parameters": ended["variants"]["L+S"]["parameters"],
            }
        )
    lines = [
        (
            row["setting"],
            *(f"{row[key]:.2f}" for key in ("rank_ratio", "density", "others_rank_ratio", "others_density")),
            *(f"{row[key]:.2f}" for key in ("X", "L+S")),
            millions(row["parameters"]),
        )
        for row in rows
    ]
    header = ("setting", "its rank ratio", "its density", "others' rank", "density", "PPL (X)", "PPL (L+S)", "L + S")
    table = {"the embedding under stronger settings": markdown_table(header, lines)}
    return Measured(rows, table)


def embedding_numbers(rows: list[dict[str, Any]]) -> list[Number]:
    """Return rank ratio and density of the embedding under every setting, and the change of the perplexity of X."""
    first = rows[0]
    return [
        Number(
            f"embedding, {row['setting']}: rank ratio, density; PPL of X over that of a training {first['setting']}",
            f"{structure_text(row)}; {percent(row['X'] / first['X'] - 1)}",
        )
        for row in rows
    ]


def kappa_numbers(rows: list[dict[str, Any]]) -> list[Number]:
    """Return how κ* depends on the share of L: ranges, difference, correlation and slope."""
    shares, kappas = (np.array([row[key] for row in rows]) for key in ("share", "kappa"))
    away = kappas - shares
    numbers = [
        Number("share of L in L + S over other trainings", span(shares)),
        Number("their κ*", span(kappas)),
        Number("κ* less the share", f"{away.mean():.2f} ± {away.std():.2f}"),
    ]
    if shares.std() and kappas.std():
        numbers.append(Number("correlation of κ* with the share", f"{np.corrcoef(shares, kappas)[0, 1]:.2f}"))
        numbers.append(Number("slope of κ* over the share", f"{np.polyfit(shares, kappas, 1)[0]:.2f}"))
    return numbers


# Item → function from its rows to a few numbers, for its section of the report and for the claim it explains.
NUMBERS = {"kappa_share": kappa_numbers, "rpca_limit": limit_numbers, "embedding_why": embedding_numbers}
