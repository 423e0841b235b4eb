"""Experiments beyond the paper's, which ask why a claim does or does not hold at a scale."""

from typing import Any

import numpy as np

from salaad.sweep import best, grid
from salaad.tables import markdown_table, millions
from scripts.reproduction import pictures, trainings
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import KAPPAS, evaluation

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
    return Measured(rows, {"κ* and what L + S is made of": markdown_table(header, lines)}, picture, [told(rows)])


def told(rows: list[dict[str, Any]]) -> str:
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
