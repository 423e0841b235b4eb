"""Figures of runs and of sweeps, as PNG."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from salaad.common.errors import UserError
from salaad.common.files import read_json_lines
from salaad.common.formats import millions
from salaad.evaluation.sweep import best, hpa_cells, stable_band, ways


def loss_curve(run: Path) -> tuple[list[int], list[float]]:
    """Return steps and smoothed training loss (nats per token) of a run; lines without a loss are left out.

    Raises:
        UserError: no line of metrics.jsonl has a loss.
    """
    rows = [row for row in read_json_lines(run / "metrics.jsonl") if row["loss"] is not None]
    if not rows:
        raise UserError(f"{run / 'metrics.jsonl'} has no losses; give the folder of a run that has logged some")
    return [row["step"] for row in rows], _smooth([row["loss"] for row in rows])


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    smoothed, mean = [], values[0]
    for value in values:
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean)
    return smoothed


def sweep_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw perplexity over κ, a curve per budget, with κ* marked and a gray band from the least to the greatest κ*.

    Args:
        rows: results of one model with `budget`, `kappa`, `perplexity`; those of X and L + S have no budget.
        path: the PNG to write.
    """
    figure, panel = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for i, winner in enumerate(best(rows)):
        cells = sorted((row["kappa"], row["perplexity"]) for row in hpa_cells(rows, winner["budget"]))
        panel.plot(
            *zip(*cells, strict=True), marker="o", markersize=3.5, color=f"C{i}", label=millions(winner["budget"])
        )
        panel.plot(winner["kappa"], winner["perplexity"], marker="*", markersize=15, color=f"C{i}", linestyle="none")
    low, high = stable_band(rows)
    panel.axvspan(low - 0.01, high + 0.01, color="0.5", alpha=0.2, linewidth=0, label="κ* (stars)")
    whole = next(row for row in rows if row["variant"] == "L+S")
    label = f"L + S, {millions(whole['parameters'])}"
    panel.axhline(whole["perplexity"], color="0.3", linewidth=1, linestyle="--", label=label)
    _from_best_to_fourfold(panel, [row["perplexity"] for row in rows if row["kappa"] is not None])
    panel.set(xlabel="κ: part of the removed parameters that L gives", ylabel="validation perplexity")
    _finish(figure, [panel], path)


def elastic_figure(rows: Mapping[str, Sequence[Mapping[str, Any]]], path: Path) -> None:
    """Draw perplexity over parameters, one panel per model and one color per way to cut, with X as a dashed line.

    Args:
        rows: label → results of one model.
        path: the PNG to write.
    """
    names = list(dict.fromkeys(way for mine in rows.values() for way in ways(mine)))
    figure, panels = plt.subplots(
        1, len(rows), figsize=(3 + 2.6 * len(rows), 4.4), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    drawn: list[float] = []
    for panel, (label, mine) in zip(panels[0], rows.items(), strict=True):
        whole = {row["variant"]: row for row in mine if row["budget"] is None}
        X = whole["X"]
        for way, cells in ways(mine).items():
            curve = sorted((row["parameters"] / 1e6, row["perplexity"]) for row in (*cells, whole["L+S"]))
            panel.plot(*zip(*curve, strict=True), marker="o", markersize=4, color=f"C{names.index(way)}", label=way)
            drawn += [perplexity for _, perplexity in curve]
        panel.axhline(X["perplexity"], color="0.3", linewidth=1, linestyle="--", label="X")
        drawn.append(X["perplexity"])
        panel.set(title=label, xlabel="parameters, millions")
        panel.title.set_fontsize("medium")
    sizes = [row["parameters"] / 1e6 for mine in rows.values() for row in mine if row["variant"] != "L+S"]
    panels[0, 0].set_xlim(0.95 * min(sizes), 1.03 * max(sizes))
    panels[0, 0].set_ylabel("validation perplexity")
    _from_best_to_fourfold(panels[0, 0], drawn)
    _finish(figure, panels[0], path)


def _from_best_to_fourfold(panel: Axes, values: Sequence[float]) -> None:
    """Set a logarithmic y axis up to four times the lowest value: one very bad value would flatten all others."""
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        panel.set_yscale("log")
        panel.set_ylim(0.97 * min(finite), min(4 * min(finite), 1.05 * max(finite)))


def _finish(figure: Figure, panels: Sequence[Axes], path: Path) -> None:
    for panel in panels:
        dress(panel, which="both")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.yaxis.set_minor_formatter("{x:g}")
    shown = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    figure.legend(shown.values(), shown.keys(), loc="outside right upper", frameon=False)
    save(figure, path)


def dress(panel: Axes, *, legend: bool = False, which: str = "major") -> None:
    """Give a panel a faint grid and no box, and a legend if wanted."""
    panel.grid(alpha=0.25, which=which)
    panel.spines[["top", "right"]].set_visible(False)
    if legend:
        panel.legend(frameon=False)


def save(figure: Figure, path: Path) -> None:
    """Write the figure as PNG and close it."""
    figure.savefig(path, dpi=130)
    plt.close(figure)
