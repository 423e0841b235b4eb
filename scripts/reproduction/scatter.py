"""Scatter plots of many trainings: perplexity over size by setting; κ* over the share of L; errors of robust PCA."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import isfinite
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib import colormaps
from matplotlib.lines import Line2D

from salaad.evaluation.figures import dress, save
from scripts.reproduction.palette import OTHERS

MARKERS = "os^DvPX*<>hp"
REACH = 1.4  # a setting that is worse than the best by more than this factor would flatten all others


def ablation(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity of X and of L + S over the parameters of L + S, one mark per setting.

    Args:
        rows: with `rho`, `alpha` and `beta` (factors on ρ, Δα and Δβ), `X` and `L+S` (perplexities), `parameters`.
        path: the PNG to write.
    """
    rhos, alphas, betas = (sorted({row[key] for row in rows}) for key in ("rho", "alpha", "beta"))
    colors = dict(zip(rhos, colormaps["viridis"](_even(0, 0.9, len(rhos))), strict=True))
    markers = dict(zip(alphas, cycle(MARKERS), strict=False))
    sizes = dict(zip(betas, _even(5, 14, len(betas)), strict=True))
    figure, panels = plt.subplots(1, 2, figsize=(10.4, 5.4), sharex=True, sharey=True, layout="constrained")
    values = [row[variant] for row in rows for variant in ("X", "L+S") if isfinite(row[variant])]
    top = 1.01 * max(value for value in values if value <= REACH * min(values))
    for panel, variant in zip(panels, ("X", "L+S"), strict=True):
        for row in sorted(rows, key=lambda row: -row["beta"]):  # large marks first, so that they hide no small one
            look = {"color": colors[row["rho"]], "marker": markers[row["alpha"]], "markersize": sizes[row["beta"]]}
            panel.plot(row["parameters"] / 1e6, row[variant], **look, alpha=0.85, markeredgecolor="white")
        beyond = sum(not row[variant] <= top for row in rows)
        title = f"perplexity of {variant.replace('+', ' + ')}"
        panel.set_title(f"{title} ({beyond} above the frame)" if beyond else title)
        panel.set(xlabel="parameters of L + S, millions", ylim=(0.99 * min(values), top))
        dress(panel)
    panels[0].set_ylabel("validation perplexity")
    entries = []
    for letter, key, looks in (("ρ", "color", colors), ("Δα", "marker", markers), ("Δβ", "markersize", sizes)):
        entries.append(Line2D([], [], linestyle="none", label=f"factor on {letter}"))
        for factor, look in looks.items():
            plain = {"color": "0.5", "linestyle": "none", "marker": "o", "markersize": 9}
            entries.append(Line2D([], [], **plain | {key: look}, label=f"{factor:g}"))
    figure.legend(handles=entries, loc="outside right upper", frameon=False)
    save(figure, path)


def kappa_share(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """κ* over the share of L in L + S, one mark per training and size; on the dashed line the two are the same.

    Args:
        rows: with `share`, `kappa`, and `kept`, the part of L + S that is left.
        path: the PNG to write.
    """
    figure, panel = plt.subplots(figsize=(8.6, 5), layout="constrained")
    for kept, color, marker in zip(sorted({row["kept"] for row in rows}, reverse=True), OTHERS, MARKERS, strict=False):
        mine = [row for row in rows if row["kept"] == kept]
        label = f"{kept:.0%} of L + S kept"
        points = ([row["share"] for row in mine], [row["kappa"] for row in mine])
        panel.plot(*points, marker, color=color, alpha=0.7, markersize=8, markeredgecolor="white", label=label)
    panel.plot([0, 1], [0, 1], color="0.6", linestyle="--", zorder=0)
    panel.set(xlabel="share of L in the parameters of L + S", ylabel="κ*", xlim=(0, 1), ylim=(0, 1))
    dress(panel, legend=True)
    save(figure, path)


def rpca_limit(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the error of robust PCA's density over the true rank ratio and density, one mark per block and cut.

    Args:
        rows: with `true_rank_ratio`, `true_density`, and `density`, as found.
        path: the PNG to write.
    """
    figure, panel = plt.subplots(figsize=(8.6, 5), layout="constrained")
    points = [[row[key] for row in rows] for key in ("true_rank_ratio", "true_density")]
    off = [abs(row["density"] - row["true_density"]) for row in rows]
    cloud = panel.scatter(*points, c=off, cmap="viridis", vmin=0, s=36, edgecolors="white", linewidths=0.5)
    figure.colorbar(cloud, label="density found, off by")
    panel.set(xlabel="rank ratio of L", ylabel="density Υ(S)", xlim=(0, None), ylim=(0, None))
    dress(panel)
    save(figure, path)


def _even(low: float, high: float, count: int) -> list[float]:
    """`count` numbers from `low` to `high`."""
    return [low + (high - low) * i / max(1, count - 1) for i in range(count)]
