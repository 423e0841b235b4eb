"""Pictures of the demo's runs and of the search for its settings, as PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from salaad.common.files import read_json_lines
from salaad.evaluation.figures import dress, loss_curve, save
from scripts.reproduction.pictures import LOOKS


def training_figure(runs: Mapping[str, Path], path: Path) -> None:
    """Draw four panels over the steps: training loss, rank ratio, density and reconstruction error.

    The last three show the mean over the blocks and the band from the lowest to the highest block.

    Args:
        runs: label → run folder; at most as many as there are `LOOKS`.
        path: the PNG to write.
    """
    figure, panels = plt.subplots(2, 2, figsize=(10, 6.5), sharex=True, layout="constrained")
    for (label, folder), look in zip(runs.items(), LOOKS, strict=False):
        panels[0, 0].plot(*loss_curve(folder), label=label, **look)
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
    """Draw perplexity over the parameters of L + S relative to the dense blocks, one color per learning rate.

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
