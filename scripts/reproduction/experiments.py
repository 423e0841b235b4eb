"""Experiments beyond the paper's, which ask why a claim does or does not hold at a scale."""

from statistics import fmean
from typing import Any

import numpy as np

from salaad.sweep import best, grid
from salaad.tables import markdown_table, millions
from scripts.reproduction import pictures, trainings
from scripts.reproduction.deployments import found_and_true
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import KAPPAS, evaluation, summary

THINNED = (1, 0.75, 0.5, 0.25, 0.1)  # of the entries of S, the largest
KEPT = (0.8, 0.65)  # of the parameters of L + S inside the blocks


def kappa_share(scale: Scale) -> Measured:
    """κ* of trainings whose L + S holds more or less of L: does κ* go by the share of L?"""
    rows = []
    for run in trainings.kappa_share(scale):
        measure = evaluation(run.folder(scale), scale)
        deployment = measure.deployment
        low_rank = sum(slr.rank * sum(slr.shape) for slr in deployment.parts.values())
        whole = low_rank + sum(slr.nnz for slr in deployment.parts.values())
        for kept in KEPT:
            cells = grid([deployment.fixed + round(kept * whole)], KAPPAS[2:-1])[2:]
            deployment.check(cells)
            winner = best([measure(cell) for cell in cells])[0]
            rows.append(
                {
                    "run": run.name(scale),
                    "share": low_rank / whole,
                    "parameters": deployment.fixed + whole,
                    "kept": kept,
                    **{key: winner[key] for key in ("kappa", "perplexity")},
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
    return Measured(rows, {"κ* and what L + S is made of": markdown_table(header, lines)}, picture, [kappa_told(rows)])


def rpca_limit(scale: Scale) -> Measured:
    """Robust PCA of the same blocks with fewer and fewer entries of S: up to which density does it find them?"""
    parts = evaluation(trainings.SALAAD.folder(scale), scale).deployment.parts
    rows = []
    for share in THINNED:
        thin = {name: slr.cut(slr.rank, round(share * slr.nnz)) for name, slr in parts.items()}
        rows += [{"share": share, **row} for row in found_and_true(thin)]
    pictures.rpca_limit(rows, scale.results / "rpca_limit.png")
    keys = ("true_rank_ratio", "rank_ratio", "true_density", "density")
    lines = [
        (f"{share:g}", *(f"{fmean(row[key] for row in mine):.3f}" for key in keys)) for share, mine in thinned(rows)
    ]
    header = ("part of S kept", "rank ratio", "found", "density", "found")
    table = {"robust PCA of L and the largest entries of S, mean over the blocks": markdown_table(header, lines)}
    picture = {"density that robust PCA finds, over the true one": "rpca_limit.png"}
    return Measured(rows, table, picture, [limit_told(rows)])


def thinned(rows: list[dict[str, Any]]) -> list[tuple[float, list[dict[str, Any]]]]:
    """Part of S that is kept → its rows."""
    shares = dict.fromkeys(row["share"] for row in rows)
    return [(share, [row for row in rows if row["share"] == share]) for share in shares]


def limit_told(rows: list[dict[str, Any]]) -> str:
    """How far off robust PCA is at every part of S, in a sentence."""
    parts = []
    for share, mine in thinned(rows):
        off = [fmean(abs(row[key] - row[f"true_{key}"]) for row in mine) for key in ("rank_ratio", "density")]
        parts.append(
            f"{share:.0%} (density {fmean(row['true_density'] for row in mine):.2f}): {off[0]:.3f} and {off[1]:.3f}"
        )
    return (
        "rank ratio and density found in the same blocks of seed 0, with that part of S kept, are off by "
        + "; ".join(parts)
    )


def embedding_why(scale: Scale) -> Measured:
    """The embedding's structure, and what it costs, under settings stronger than those of Table 1."""
    rows = []
    for setting, run in trainings.embedding_why(scale).items():
        ended = summary(run, scale)
        ends, variants = ended["blocks"], ended["variants"]
        [own] = [row for name, row in ends.items() if name.endswith("embed_tokens")]
        others = [row for row in ends.values() if row is not own]
        rows.append(
            {
                "setting": setting,
                "run": run.name(scale),
                **{key: own[key] for key in ("rank_ratio", "density")},
                **{f"others_{key}": fmean(row[key] for row in others) for key in ("rank_ratio", "density")},
                **{name: variants[name]["perplexity"] for name in ("X", "L+S")},
                "parameters": variants["L+S"]["parameters"],
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
    return Measured(rows, table, notes=[embedding_told(rows)])


def embedding_told(rows: list[dict[str, Any]]) -> str:
    """What every setting makes of the embedding, and what it costs, in a sentence."""
    first, *others = rows
    parts = [
        f"{row['setting']}: {row['rank_ratio']:.2f} and {row['density']:.2f} for {row['X'] / first['X'] - 1:+.1%} of X"
        for row in others
    ]
    return (
        f"rank ratio and density of the embedding, {first['rank_ratio']:.2f} and {first['density']:.2f} as in Table 1 "
        f"(the other blocks {first['others_rank_ratio']:.2f} and {first['others_density']:.2f}), become with "
        + "; ".join(parts)
    )


def kappa_told(rows: list[dict[str, Any]]) -> str:
    """How κ* goes with the share of L, in a sentence."""
    shares, kappas = (np.array([row[key] for row in rows]) for key in ("share", "kappa"))
    if len(set(shares.tolist())) < 2 or len(set(kappas.tolist())) < 2:
        return f"κ* {kappas.mean():.2f} on average of {len(rows)} cells, all alike in κ* or in the share of L"
    r, slope = np.corrcoef(shares, kappas)[0, 1], np.polyfit(shares, kappas, 1)[0]
    away = kappas - shares
    return (
        f"over {len(rows)} cells whose L is {shares.min():.0%} to {shares.max():.0%} of L + S, the correlation of κ* "
        f"with that share is {r:.2f}, the slope {slope:.2f}, κ* minus the share {away.mean():.2f} ± {away.std():.2f}"
    )
