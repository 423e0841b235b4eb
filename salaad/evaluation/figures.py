"""Figures of runs and of sweeps, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from salaad.common.files import read_json_lines
from salaad.common.formats import millions
from salaad.evaluation.sweep import best, hpa_cells, stable_band, ways


def training_figure(runs: Mapping[str, Path], path: Path) -> None:
    """Four panels over the steps: training loss, rank ratio, density and reconstruction error.

    The last three show the mean over the blocks and the band from the lowest to the highest block.

    Args:
        runs: label → run folder.
        path: the PNG to write.
    """
    figure, panels = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for label, folder in runs.items():
        panels[0, 0].plot(*loss_curve(folder), label=label, linewidth=1.2)
        blocks = read_json_lines(folder / "blocks.jsonl")
        if blocks:
            _band(panels[0, 1], blocks, "rank_ratio", label)
            _band(panels[1, 0], blocks, "density", label)
            _band(panels[1, 1], blocks, "error", label)
    panels[0, 0].set(title="training loss (smoothed)", ylabel="nats per token")
    panels[0, 1].set(title="effective rank ratio Γ(L)", ylim=(0, 1.02))
    panels[1, 0].set(title="density Υ(S)", xlabel="step", ylim=(0, 1.02))
    panels[1, 1].set(title="reconstruction error ‖X−L−S‖ / ‖X‖", xlabel="step", ylim=(0, None))
    for panel in panels.flat:
        dress(panel, legend=bool(panel.lines))
    save(figure, path)


def loss_curve(run: Path) -> tuple[list[int], list[float]]:
    """Steps and the smoothed training loss (nats per token) of a run; lines without a loss are left out."""
    rows = [row for row in read_json_lines(run / "metrics.jsonl") if row["loss"] is not None]
    return [row["step"] for row in rows], _smooth([row["loss"] for row in rows])


def _smooth(values: list[float], weight: float = 0.8) -> list[float]:
    smoothed, mean = [], values[0]
    for value in values:
        mean = weight * mean + (1 - weight) * value
        smoothed.append(mean)
    return smoothed


def _band(panel: Axes, blocks: list[dict[str, Any]], key: str, label: str) -> None:
    by_step: dict[int, list[float]] = {}
    for row in blocks:
        by_step.setdefault(row["step"], []).append(row[key])
    steps = sorted(by_step)
    means = [sum(by_step[step]) / len(by_step[step]) for step in steps]
    panel.plot(steps, means, color="C1", label=f"{label}: mean over blocks", linewidth=1.4)
    lows, highs = ([pick(by_step[step]) for step in steps] for pick in (min, max))
    panel.fill_between(steps, lows, highs, color="C1", alpha=0.18, linewidth=0, label="lowest to highest block")


def frontier_figure(points: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity over the parameters of L + S relative to the dense blocks, one color per learning rate.

    Args:
        points: rows with `size`, `X`, `L+S`, `lr`, `vanilla` (of the vanilla run with that learning rate), `shipped`.
        path: the PNG to write.
    """
    figure, panel = plt.subplots(figsize=(8, 4.6), layout="constrained")
    rates = sorted({(point["lr"], point["vanilla"]) for point in points})
    for i, (lr, vanilla) in enumerate(rates):
        mine = [point for point in points if point["lr"] == lr]
        sizes = [point["size"] for point in mine]
        panel.scatter(sizes, [point["X"] for point in mine], color=f"C{i}", label=f"X, learning rate {lr:g}")
        panel.scatter(sizes, [point["L+S"] for point in mine], color=f"C{i}", marker="x", label="L + S of the same")
        panel.axhline(vanilla, color=f"C{i}", linewidth=1, linestyle="--", label="vanilla of the same")
    best = min(vanilla for _, vanilla in rates)
    panel.axhspan(best, 1.03 * best, color="0.5", alpha=0.15, linewidth=0, label="within 3 % of the lower of these")
    for point in points:
        if point["shipped"]:
            panel.scatter([point["size"]], [point["X"]], s=220, facecolors="none", edgecolors="C3", label="shipped")
    panel.set(xlabel="parameters of L + S over those of the dense blocks", ylabel="validation perplexity")
    dress(panel)
    figure.legend(loc="outside right upper", frameon=False)
    save(figure, path)


def sweep_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity over κ, one curve per budget, with κ* marked and a gray band from the least to the greatest κ*.

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
    """Perplexity over parameters, one panel per model and one color per way to cut, with X as a dashed line.

    Args:
        rows: label → results of one model.
        path: the PNG to write.
    """
    names = list(dict.fromkeys(way for mine in rows.values() for way in ways(mine)))
    figure, panels = plt.subplots(
        1, len(rows), figsize=(3 + 2.6 * len(rows), 4.4), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for panel, (label, mine) in zip(panels[0], rows.items(), strict=True):
        whole = {row["variant"]: row for row in mine if row["budget"] is None}
        X = whole["X"]
        for way, cells in ways(mine).items():
            curve = sorted((row["parameters"] / 1e6, row["perplexity"]) for row in (*cells, whole["L+S"]))
            panel.plot(*zip(*curve, strict=True), marker="o", markersize=4, color=f"C{names.index(way)}", label=way)
        panel.axhline(X["perplexity"], color="0.3", linewidth=1, linestyle="--", label="X")
        panel.set(title=label, xlabel="parameters, millions")
        panel.title.set_fontsize("medium")
    sizes = [row["parameters"] / 1e6 for mine in rows.values() for row in mine if row["variant"] != "L+S"]
    panels[0, 0].set_xlim(0.95 * min(sizes), 1.03 * max(sizes))
    panels[0, 0].set_ylabel("validation perplexity")
    _from_best_to_fourfold(panels[0, 0], [row["perplexity"] for mine in rows.values() for row in mine])
    _finish(figure, panels[0], path)


def _from_best_to_fourfold(panel: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis up to four times the lowest value, since one very bad value would flatten all others."""
    low = min(values)
    panel.set_yscale("log")
    panel.set_ylim(0.97 * low, min(4 * low, 1.05 * max(values)))


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
