"""The κ sweep and the elastic curve: which split is best at a budget, and what a size costs (paper, section 5).

Beside HPA stand the other ways to cut: by energy, then refined, then refined and calibrated.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from salaad.common.budgets import format_count
from salaad.common.formats import markdown_table, millions
from salaad.compression.variants import Variant
from salaad.evaluation.variant_perplexity import VariantEvaluation

Row = Mapping[str, Any]
REMOVED = 0.05  # of L + S at the least, for one κ to be better than another


def grid(budgets: Sequence[int], kappas: Sequence[float]) -> list[Variant]:
    """X, L + S and every cell."""
    cells = [Variant(f"{format_count(budget)}@{kappa:g}", budget, kappa) for budget in budgets for kappa in kappas]
    return [Variant("X"), Variant("L+S"), *cells]


def by_energy(budgets: Sequence[int], refine: int = 0, calibrated: bool = False) -> list[Variant]:
    """Every budget cut by energy, and again with so many alternations, and again calibrated, as far as asked for."""
    fits = [(0, False), *([(refine, False)] if refine else []), *([(refine, True)] if calibrated else [])]
    return [Variant(f"{format_count(budget)}@energy", budget).fitted(*fit) for fit in fits for budget in budgets]


def measure(evaluations: Mapping[str, VariantEvaluation], variants: Sequence[Variant]) -> dict[str, list[dict]]:
    """Perplexity of every variant for each of the named models; known cells cost nothing."""
    with tqdm(total=len(evaluations) * len(variants), desc="sweep", unit="cell", leave=False, disable=None) as bar:
        rows: dict[str, list[dict[str, Any]]] = {label: [] for label in evaluations}
        for label, evaluation in evaluations.items():
            for variant in variants:
                rows[label].append(evaluation(variant))
                bar.update()
                bar.set_postfix(of=label, perplexity=f"{rows[label][-1]['perplexity']:.2f}")
    return rows


def best(rows: Sequence[Row]) -> list[Row]:
    """The cell of κ* for every budget of one model's rows, the largest budget first."""
    cells = [row for row in rows if row["kappa"] is not None]
    budgets = sorted({row["budget"] for row in cells}, reverse=True)
    return [min((row for row in cells if row["budget"] == budget), key=_loss) for budget in budgets]


def ways(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The cells of one model by the way they were cut, the largest budget first: HPA at κ*, and those by energy."""
    found: dict[str, list[Row]] = {"HPA at κ*": best(rows)} if best(rows) else {}
    cells = [row for row in rows if row["budget"] is not None and row["kappa"] is None]
    for row in sorted(cells, key=lambda row: (bool(row["calibrate"]), row["refine"], -row["budget"])):
        fit = (", refined" if row["refine"] else "") + (", calibrated" if row["calibrate"] else "")
        found.setdefault(f"energy{fit}", []).append(row)
    return found


def _cell(row: Row, X: Row, whole: Row) -> str:
    everything = ", all" if row["parameters"] == whole["parameters"] else ""
    return f"{row['perplexity']:.2f} ({row['perplexity'] / X['perplexity'] - 1:+.1%}{everything})"


def ways_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """One line per model and budget, one column per way to cut; in brackets the perplexity relative to that of X.

    `all` stands where the budget is at or above L + S, so that nothing is cut.
    """
    cut = {label: ways(mine) for label, mine in rows.items()}
    names = list(dict.fromkeys(name for mine in cut.values() for name in mine))
    lines = []
    for label, mine in cut.items():
        X, whole = (next(row for row in rows[label] if row["variant"] == name) for name in ("X", "L+S"))
        for budget in sorted({row["budget"] for cells in mine.values() for row in cells}, reverse=True):
            cells = {name: row for name, some in mine.items() for row in some if row["budget"] == budget}
            shown = [_cell(cells[name], X, whole) if name in cells else "–" for name in names]
            lines.append((label, f"{X['perplexity']:.2f}", millions(budget), *shown))
    return markdown_table(("model", "X", "budget", *names), lines)


def _loss(row: Row) -> tuple[bool, float]:
    return math.isnan(row["perplexity"]), row["perplexity"]


def stable_band(rows: Sequence[Row]) -> tuple[float, float]:
    """The least and the greatest κ* over the budgets that remove something (`REMOVED`), the paper's gray band."""
    whole = next((row["parameters"] for row in rows if row["variant"] == "L+S"), math.inf)
    winners = best(rows)
    telling = [row for row in winners if row["parameters"] <= (1 - REMOVED) * whole] or winners
    kappas = [row["kappa"] for row in telling]
    return min(kappas), max(kappas)


def grid_table(rows: Sequence[Row]) -> str:
    """One line per budget, one column per κ, the best in bold."""
    kappas = sorted({row["kappa"] for row in rows if row["kappa"] is not None})
    lines = []
    for winner in best(rows):
        cells = {
            r["kappa"]: r["perplexity"] for r in rows if r["budget"] == winner["budget"] and r["kappa"] is not None
        }
        shown = [f"**{cells[k]:.2f}**" if k == winner["kappa"] else f"{cells[k]:.2f}" for k in kappas]
        lines.append((millions(winner["budget"]), *shown, f"{winner['kappa']:g}"))
    return markdown_table(("budget", *(f"κ = {kappa:g}" for kappa in kappas), "κ*"), lines)


def elastic_table(rows: Mapping[str, Sequence[Row]]) -> str:
    """X, L + S and every budget at its κ*, one line per size; per model perplexity, and parameters or κ*."""
    columns = []
    for mine in rows.values():
        whole = {row["variant"]: row for row in mine if row["budget"] is None}
        fixed = [(f"{whole[name]['perplexity']:.2f}", millions(whole[name]["parameters"])) for name in ("X", "L+S")]
        columns.append([*fixed, *((f"{row['perplexity']:.2f}", f"κ* = {row['kappa']:g}") for row in best(mine))])
    sizes = ["X", "L+S", *(millions(row["budget"]) for row in best(next(iter(rows.values()))))]
    lines = [(size, *(cell for cells in line for cell in cells)) for size, *line in zip(sizes, *columns, strict=True)]
    return markdown_table(("size", *(cell for label in rows for cell in (label, "size or κ*"))), lines)
