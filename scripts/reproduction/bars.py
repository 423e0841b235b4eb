"""The pictures that compare blocks: what robust PCA finds in them, and what HPA leaves of them."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from salaad.evaluation.figures import dress, save
from salaad.evaluation.structure import RpcaRow, summarise
from scripts.reproduction.palette import COLORS

KINDS = ("embed", "q", "k", "v", "o", "gate", "up", "down")  # in the order of the forward pass; the LM head is last
NAMED_BLOCKS = 42  # more names than this under one picture cannot be read
SOLID = {letter: {"color": color} for letter, color in COLORS.items()}
HATCHED = {letter: {"facecolor": "white", "edgecolor": color, "hatch": "/////"} for letter, color in COLORS.items()}
Bars = Mapping[str, tuple[str, Mapping[str, Any]]]


def rpca(rows: Sequence[RpcaRow], path: Path) -> None:
    """What robust PCA finds in a shallow, a middle and a deep layer, and in Gaussian noise of the same shapes."""
    inside = [row for row in rows if row.depth is not None]
    bars = {"rank_ratio": ("rank ratio Γ(L)", SOLID["L"]), "density": ("density Υ(S)", SOLID["S"])}
    marks = {"rank_ratio": "control_rank_ratio", "density": "control_density"}
    figure = _layers({row.name: asdict(row) for row in inside}, bars, marks)
    spreads = summarise(inside)[None]
    found = {key: f"{100 * spread.mean:.1f} ± {100 * spread.deviation:.1f}%" for key, spread in spreads.items()}
    figure.suptitle(
        f"mean of all {len(inside)} matrices in layers: rank ratio {found['rank_ratio']} (noise "
        f"{found['control_rank_ratio']}), density {found['density']} (noise {found['control_density']})",
        fontsize=10,
    )
    save(figure, path)


def rpca_truth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw rank ratio and density as found by robust PCA and the true ones, in a shallow, a middle and a deep layer.

    Args:
        rows: with `block`, `rank_ratio`, `density`, `true_rank_ratio` and `true_density`.
        path: the PNG to write.
    """
    bars = {
        "rank_ratio": ("rank ratio, found", SOLID["L"]),
        "true_rank_ratio": ("rank ratio, its own", HATCHED["L"]),
        "density": ("density, found", SOLID["S"]),
        "true_density": ("density, its own", HATCHED["S"]),
    }
    inside = [row for row in rows if layer_of(row["block"]) is not None]
    figure = _layers({row["block"]: row for row in inside}, bars)
    means = {key: f"{fmean(row[key] for row in inside):.1%}" for key in bars}
    figure.suptitle(
        f"mean of all {len(inside)} matrices in layers: rank ratio {means['rank_ratio']} found, "
        f"{means['true_rank_ratio']} its own; density {means['density']} found, {means['true_density']} its own",
        fontsize=10,
    )
    save(figure, path)


def hpa_blocks(
    before: Mapping[str, tuple[int, int, int, int]], after: Mapping[str, tuple[int, int]], path: Path
) -> None:
    """What HPA leaves of every block, as a share of the dense block: solid is kept, hatched removed.

    Args:
        before: name → (n, m, rank, nnz).
        after: name → (rank kept, nnz kept).
        path: the PNG to write.
    """
    figure, panel = plt.subplots(figsize=(10.4, 4.8), layout="constrained")
    names = sorted(before, key=_place)
    floor, shares = [0.0] * len(names), {}
    for side, letter in enumerate("LS"):
        # Parameters of one unit: a singular value has its two vectors, an entry of S is one number.
        unit = [sum(before[name][:2]) if letter == "L" else 1 for name in names]
        whole = [cost * before[name][2 + side] for cost, name in zip(unit, names, strict=True)]
        kept = [cost * after[name][side] for cost, name in zip(unit, names, strict=True)]
        removed = [total - part for total, part in zip(whole, kept, strict=True)]
        shares[letter] = sum(removed) / max(1, sum(whole))
        for parts, what, look in ((kept, "kept", SOLID[letter]), (removed, "removed", HATCHED[letter])):
            heights = [part / (before[name][0] * before[name][1]) for part, name in zip(parts, names, strict=True)]
            panel.bar(range(len(names)), heights, 0.8, floor, linewidth=0.5, label=f"{letter}, {what}", **look)
            floor = [low + height for low, height in zip(floor, heights, strict=True)]
    _name_blocks(panel, names)
    panel.set(ylabel="parameters over n·m of the block", xlim=(-0.7, len(names) - 0.3))
    panel.set_title(rf"removed of every block: $\phi_L$ = {shares['L']:.1%} of L, $\phi_S$ = {shares['S']:.1%} of S")
    dress_bars(panel, names="x")
    figure.legend(loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)


def dress_bars(panel: Axes, names: str) -> None:
    """Format a panel of bars: grid lines behind the bars, and none for `names`, the axis with the names of the bars."""
    dress(panel)
    panel.set_axisbelow(True)
    panel.grid(visible=False, axis=names)


def layer_of(name: str) -> int | None:
    """Return the number of the layer in a block's name; None for the embedding and the LM head."""
    number = re.search(r"\.(\d+)\.", name)
    return int(number[1]) if number else None


def trio(names: Iterable[str]) -> tuple[int, int, int]:
    """The first, the middle and the last layer among these blocks."""
    depths = sorted({depth for name in names if (depth := layer_of(name)) is not None})
    return depths[0], depths[len(depths) // 2], depths[-1]


def _layers(rows: Mapping[str, Mapping[str, Any]], bars: Bars, marks: Mapping[str, str] | None = None) -> Figure:
    """Draw a panel for each of the first, the middle and the last layer, with a group of bars per kind of projection.

    Args:
        rows: block name → values.
        bars: key of a value → label and look.
        marks: key of a bar → key of the value that is drawn as a line across the bar.
    """
    depths = dict(zip(trio(rows), ("shallow", "middle", "deep"), strict=True))
    names, width = sorted(rows, key=_place), 0.8 / len(bars)
    kinds = list(dict.fromkeys(map(_kind, names)))
    figure, panels = plt.subplots(
        len(depths), 1, figsize=(10, 1 + 2.1 * len(depths)), sharex=True, layout="constrained", squeeze=False
    )
    for panel, (depth, where) in zip(panels.flat, depths.items(), strict=True):
        mine = [name for name in names if layer_of(name) == depth]
        for i, (key, (label, look)) in enumerate(bars.items()):
            places = [kinds.index(_kind(name)) + (i - (len(bars) - 1) / 2) * width for name in mine]
            panel.bar(places, [rows[name][key] for name in mine], 0.9 * width, label=label, **look)
            if marks:
                marked = [rows[name][marks[key]] for name in mine]
                ends = ([place + side * width for place in places] for side in (-0.47, 0.47))
                panel.hlines(marked, *ends, color="black", linewidth=2, label="found in Gaussian noise")
        panel.set(title=f"{where}: layer {depth}", ylim=(0, 1.02), xticks=range(len(kinds)), xticklabels=kinds)
        dress_bars(panel, names="x")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    shown = dict(sorted(zip(labels, handles, strict=True), key=lambda entry: entry[0] not in dict(bars.values())))
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=len(shown), frameon=False)
    return figure


def _kind(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_proj").removesuffix("_tokens")


def _place(name: str) -> tuple[float, int]:
    """Return the sort key of a block: its place in the forward pass."""
    kind, depth = _kind(name), layer_of(name)
    if depth is None:
        depth = -1 if kind == "embed" else float("inf")
    return depth, KINDS.index(kind) if kind in KINDS else len(KINDS)


def _name_blocks(panel: Axes, names: list[str]) -> None:
    """Every block by its layer and kind; where they are too many, only the layers, in the middle of their blocks."""
    layers: dict[int | str, list[int]] = {}
    for i, name in enumerate(names):
        depth = layer_of(name)
        layers.setdefault(_kind(name) if depth is None else depth, []).append(i)
    for places in list(layers.values())[1:]:
        panel.axvline(places[0] - 0.5, color="0.8", linewidth=0.8, zorder=0)
    if len(names) <= NAMED_BLOCKS:
        labels = [" ".join(str(part) for part in (layer_of(name), _kind(name)) if part is not None) for name in names]
        panel.set_xticks(range(len(names)), labels, rotation=90)
    else:
        # The name of a block outside the layers goes one line lower, where it may be wider than the bar.
        labels = [f"\n{layer}" if isinstance(layer, str) else f"{layer}" for layer in layers]
        panel.set_xticks([sum(places) / len(places) for places in layers.values()], labels)
        panel.set_xlabel("layer")
