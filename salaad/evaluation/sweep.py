"""The κ sweep and the elastic curve: the best κ of HPA at every budget, and perplexity over size (paper, section 5).

The other ways to cut are compared with HPA: by energy, by energy and refined, also calibrated, and with head and
embedding too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from salaad.common.budgets import format_count
from salaad.common.formats import markdown_table, millions
from salaad.compression.variants import Variant
from salaad.evaluation.tables import keeps_all
from salaad.evaluation.variant_perplexity import VariantEvaluation

Row = Mapping[str, Any]
REMOVED = 0.05  # least part of L + S removed for which the choice of κ matters


def grid(budgets: Sequence[int], kappas: Sequence[float]) -> list[Variant]:
    """Return the variants of the sweep: X, L + S, and HPA at every budget with every κ."""
    cells = [Variant(f"{format_count(budget)}@{kappa:g}", budget, kappa) for budget in budgets for kappa in kappas]
    return [Variant("X"), Variant("L+S"), *cells]


def by_energy(budgets: Sequence[int], refine: int = 0, calibrated: bool = False, head: bool = False) -> list[Variant]:
    """Return the variants that cut every budget by energy, then those that add each further step asked for.

    Args:
        budgets: parameters.
        refine: alternating projections of the variants that add a refinement; 0 for no such variants.
        calibrated: add variants weighed on text, with the same refinement.
        head: add the last kind of variant once more with head and embedding split too.
    """
    fits = [(0, False), *([(refine, False)] if refine else []), *([(refine, True)] if calibrated else [])]
    ways = [(*fit, "") for fit in fits] + ([(*fits[-1], "+head")] if head else [])
    return [
        Variant(f"{format_count(budget)}@energy{also}", budget, head=bool(also)).fitted(alternations, text)
        for alternations, text, also in ways
        for budget in budgets
    ]


def measure(evaluations: Mapping[str, VariantEvaluation], variants: Sequence[Variant]) -> dict[str, list[dict]]:
    """Return label → results of every variant of the model with this label; cached results cost nothing."""
    with tqdm(total=len(evaluations) * len(variants), desc="sweep", unit="cell", leave=False, disable=None) as bar:
        rows: dict[str, list[dict[str, Any]]] = {label: [] for label in evaluations}
        for label, evaluation in evaluations.items():
            for variant in variants:
                rows[label].append(evaluation(variant))
                bar.update()
                bar.set_postfix(of=label, perplexity=f"{rows[label][-1]['perplexity']:.2f}")
    return rows


def best(rows: Sequence[Row]) -> list[Row]:
    """The result at κ* for every budget of one model's rows, the largest budget first."""
    budgets = sorted({row["budget"] for row in rows if row["kappa"] is not None}, reverse=True)
    return [
        min(hpa_cells(rows, budget), key=lambda row: (math.isnan(row["perplexity"]), row["perplexity"]))
        for budget in budgets
    ]


def hpa_cells(rows: Sequence[Row], budget: int) -> list[Row]:
    """The results of HPA at a budget, one per κ."""
    return [row for row in rows if row["budget"] == budget and row["kappa"] is not None]


def ways(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return way to cut → results of one model, the largest budget first: HPA at κ*, and every way by energy."""
    found: dict[str, list[Row]] = {"HPA at κ*": best(rows)} if best(rows) else {}
    cells = [row for row in rows if row["budget"] is not None and row["kappa"] is None]
    order = sorted(
        cells, key=lambda row: (row.get("head", False), bool(row["calibrate"]), row["refine"], -row["budget"])
    )
    for row in order:
        fit = (", refined" if row["refine"] else "") + (", calibrated" if row["calibrate"] else "")
        fit += ", head too" if row.get("head") else ""
        found.setdefault(f"energy{fit}", []).append(row)
    return found


def _cell(row: Row, X: Row) -> str:
    everything = ", all" if keeps_all(row) else ""
    return f"{row['perplexity']:.2f} ({row['perplexity'] / X['perplexity'] - 1:+.1%}{everything})"


def ways_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """A Markdown table, one line per model and budget, one column per way to cut.

    In brackets stands the perplexity relative to X, and `all` where the budget is at or above L + S, so nothing is cut.
    """
    cut = {label: ways(mine) for label, mine in rows.items()}
    names = list(dict.fromkeys(name for mine in cut.values() for name in mine))
    lines = []
    for label, mine in cut.items():
        X = next(row for row in rows[label] if row["variant"] == "X")
        for budget in sorted({row["budget"] for cells in mine.values() for row in cells}, reverse=True):
            cells = {name: row for name, some in mine.items() for row in some if row["budget"] == budget}
            shown = [_cell(cells[name], X) if name in cells else "–" for name in names]
            lines.append((label, f"{X['perplexity']:.2f}", millions(budget), *shown))
    return markdown_table(("model", "X", "budget", *names), lines)


def stable_band(rows: Sequence[Row]) -> tuple[float, float]:
    """The least and the greatest κ* over the budgets that remove at least `REMOVED`, the gray band of the paper."""
    whole = next((row["parameters"] for row in rows if row["variant"] == "L+S"), math.inf)
    winners = best(rows)
    clear = [row for row in winners if row["parameters"] <= (1 - REMOVED) * whole] or winners
    kappas = [row["kappa"] for row in clear]
    return min(kappas), max(kappas)


def grid_table(rows: Sequence[Row]) -> str:
    """A Markdown table of perplexity, one line per budget, one column per κ, the best in bold."""
    kappas = sorted({row["kappa"] for row in rows if row["kappa"] is not None})
    lines = []
    for winner in best(rows):
        cells = {row["kappa"]: row["perplexity"] for row in hpa_cells(rows, winner["budget"])}
        shown = [f"**{cells[k]:.2f}**" if k == winner["kappa"] else f"{cells[k]:.2f}" for k in kappas]
        lines.append((millions(winner["budget"]), *shown, f"{winner['kappa']:g}"))
    return markdown_table(("budget", *(f"κ = {kappa:g}" for kappa in kappas), "κ*"), lines)


def elastic_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """A Markdown table, one line for X, L + S and every budget; per model its perplexity, and its size or κ*."""
    columns = []
    for mine in rows.values():
        whole = {row["variant"]: row for row in mine if row["budget"] is None}
        fixed = [(f"{whole[name]['perplexity']:.2f}", millions(whole[name]["parameters"])) for name in ("X", "L+S")]
        columns.append([*fixed, *((f"{row['perplexity']:.2f}", f"κ* = {row['kappa']:g}") for row in best(mine))])
    sizes = ["X", "L+S", *(millions(row["budget"]) for row in best(next(iter(rows.values()))))]
    lines = [(size, *(cell for cells in line for cell in cells)) for size, *line in zip(sizes, *columns, strict=True)]
    return markdown_table(("size", *(cell for label in rows for cell in (label, "size or κ*"))), lines)
