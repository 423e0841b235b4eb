"""The pictures of a reproduction of the paper: each function draws run folders or plain rows as one PNG.

In all of them L is blue, S is vermilion and X is gray; anything else has other colors or a line style of its own.
"""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from salaad.common.errors import UserError
from salaad.common.files import read_json, read_json_lines
from salaad.evaluation.figures import dress, loss_curve, save
from salaad.methods.salaad.storage import read_surrogates
from salaad.methods.salaad.surrogate import low_rank_of
from salaad.runs.checkpoints import Checkpoints
from scripts.reproduction.bars import dress_bars, hpa_blocks, layer_of, rpca, rpca_truth, trio
from scripts.reproduction.palette import COLORS, OTHERS
from scripts.reproduction.scatter import ablation, kappa_share, rpca_limit

__all__ = [
    "ablation",
    "embedding",
    "hpa_blocks",
    "kappa_share",
    "learning_dynamics",
    "lm_head",
    "one_training",
    "rpca",
    "rpca_limit",
    "rpca_truth",
    "time_breakdown",
    "update_frequency",
]

# Wide pale lines below thin dashed ones, so that two curves can be told apart even where they coincide.
LOOKS = (
    {"linewidth": 3.5, "alpha": 0.4},
    {"linewidth": 1.3, "linestyle": (0, (4, 1.5))},
    {"linewidth": 1.6, "linestyle": ":"},
    {"linewidth": 1.3, "linestyle": "-."},
)
ALONE = {"linewidth": 1.4}
PHASES = {"train": "#BBBBBB", "admm": OTHERS[0], "sync": OTHERS[2], "save": OTHERS[3]}
LOSS, ERROR = "training loss (smoothed)", "reconstruction error δ = ‖X−L−S‖$_F$"
SINGULAR_VALUES = 50  # as many as the paper shows


def embedding(with_embedding: Path, without: Path, path: Path) -> None:
    """A run with the embedding among its blocks beside one without: losses, structure, singular values of one block."""
    runs = {"with embedding": with_embedding, "without": without}
    blocks = {label: blocks_of(run) for label, run in runs.items()}
    block = _middle_block(blocks["without"])
    figure, panels = plt.subplots(2, 2, figsize=(10, 8), layout="constrained")
    for (label, run), look in zip(runs.items(), LOOKS, strict=False):
        _losses(panels[0, 0], run, label, look)
        _structure(panels[1, 0], blocks[label][block], look, f", {label}")
        values = _singular_values(run, block)
        panels[1, 1].plot(range(1, len(values) + 1), values, color=COLORS["L"], label=label, **look)
    _structure(panels[0, 1], blocks["with embedding"][_named(blocks["with embedding"], "embed_tokens")])
    panels[0, 0].set_title(LOSS)
    panels[0, 1].set_title("the embedding")
    panels[1, 0].set_title(_short(block))
    panels[1, 1].set(title=f"{_short(block)}: the {len(values)} largest singular values of L", xlabel="number")
    panels[1, 1].set_ylim(0, None)
    _finish(figure, panels.flat, path)


def time_breakdown(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Where the time of each run went, evaluations left out.

    Args:
        runs: label → what its summary.json holds.
        path: the PNG to write.
    """
    figure, panel = plt.subplots(figsize=(9, 1.7 + 0.5 * len(runs)), layout="constrained")
    ends = [0.0] * len(runs)
    for phase, color in PHASES.items():
        minutes = [run["seconds"][phase] / 60 for run in runs.values()]
        name = "ADMM" if phase == "admm" else phase
        panel.barh(list(runs), minutes, left=ends, height=0.6, color=color, label=name)
        ends = [end + more for end, more in zip(ends, minutes, strict=True)]
    for i, (run, end) in enumerate(zip(runs.values(), ends, strict=True)):
        share = run["seconds"]["admm"] / 60 / end
        panel.text(end + 0.01 * max(ends), i, f"{end:,.1f} min, ADMM {share:.1%}", va="center")
    panel.invert_yaxis()
    panel.set(xlabel="minutes", xlim=(0, 1.3 * max(ends)))
    dress_bars(panel, names="y")
    figure.legend(loc="outside upper center", ncols=len(PHASES), frameon=False)
    save(figure, path)


def learning_dynamics(run: Path, path: Path) -> None:
    """Loss, mean reconstruction error, and the structure and reconstruction error of the middle layer's gate."""
    blocks = blocks_of(run)
    block = _middle_block(blocks)
    figure, panels = plt.subplots(2, 2, figsize=(10, 7.6), layout="constrained")
    _losses(panels[0, 0], run, "X")
    _errors(panels[0, 1], *mean_over_blocks(blocks), f"mean over {len(blocks)} blocks")
    _structure(panels[1, 0], blocks[block])
    steps, deltas = zip(*((row["step"], row["delta"]) for row in blocks[block]), strict=True)
    _errors(panels[1, 1], steps, deltas, _short(block))
    panels[0, 0].set_title(LOSS)
    panels[0, 1].set_title(f"mean {ERROR}")
    panels[1, 0].set_title(_short(block))
    panels[1, 1].set_title(f"{_short(block)}: its δ")
    _finish(figure, panels.flat, path)


def lm_head(heads: Mapping[float, Path], embeddings: Mapping[float, Path], path: Path) -> None:
    """What ρ does to the loss and to the LM head, beside what it does to the embedding.

    Args:
        heads: factor on ρ → run that has the LM head among its blocks.
        embeddings: factor on ρ → run that has the embedding among its blocks, and not the head.
        path: the PNG to write.
    """
    figure, panels = plt.subplot_mosaic(
        [["loss", "loss"], ["head", "embedding"]], figsize=(10, 8), layout="constrained"
    )
    factors = sorted({*heads, *embeddings}, reverse=True)
    looks = dict(zip(factors, cycle(LOOKS), strict=False))
    sides = (
        (heads, "head", "lm_head", "LM head", OTHERS[1]),
        (embeddings, "embedding", "embed_tokens", "embedding", COLORS["X"]),
    )
    for runs, panel, end, what, color in sides:
        for factor in sorted(runs, reverse=True):
            _losses(panels["loss"], runs[factor], f"{what}, {factor:g}·ρ", looks[factor], color)
            blocks = blocks_of(runs[factor])
            _structure(panels[panel], blocks[_named(blocks, end)], looks[factor], f", {factor:g}·ρ")
        panels[panel].set_title(f"the {what}")
    panels["loss"].set_title(f"{LOSS}, with the LM head or the embedding among the blocks")
    _finish(figure, list(panels.values()), path)


def update_frequency(runs: Mapping[int, Path], path: Path) -> None:
    """Loss and mean reconstruction error over the number of ADMM updates, one curve per K at J = 1.

    Args:
        runs: K → run folder.
        path: the PNG to write.
    """
    figure, panels = plt.subplots(1, 2, figsize=(10, 4.6), layout="constrained")
    for (K, run), color in zip(sorted(runs.items()), cycle((*OTHERS, COLORS["X"])), strict=False):
        for panel, (steps, values) in zip(panels, (loss_curve(run), mean_over_blocks(blocks_of(run))), strict=True):
            label = f"K/J = {K} (ends at {values[-1]:.2f})"
            panel.plot([step / K for step in steps], values, color=color, label=label, **ALONE)
    panels[0].set(title=LOSS, ylabel="nats per token")
    panels[1].set(title=f"mean {ERROR}", ylim=(0, None))
    _finish(figure, panels, path, "ADMM updates")


def one_training(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Perplexity over parameters of models that come from one training and of models trained size by size."""
    figure, panel = plt.subplots(figsize=(7, 4.4), layout="constrained")
    labels = dict.fromkeys(row["label"] for row in rows)
    for label, marker, color in zip(labels, "osD", OTHERS[:3], strict=True):
        curve = sorted((row["parameters"] / 1e6, row["perplexity"]) for row in rows if row["label"] == label)
        panel.plot(*zip(*curve, strict=True), marker=marker, markersize=4, color=color, label=label, **ALONE)
    low = min(row["perplexity"] for row in rows)
    panel.set_ylim(0.98 * low, 1.3 * low)  # a model cut too far would flatten the others
    panel.set(xlabel="parameters, millions", ylabel="validation perplexity")
    dress(panel, legend=True)
    save(figure, path)


def blocks_of(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return block → its ADMM updates in order, from blocks.jsonl.

    Raises:
        UserError: there are none, or they end before the last ones that summary.json has.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for row in read_json_lines(run / "blocks.jsonl"):
        found.setdefault(row["block"], []).append(row)
    if not found:
        raise UserError(f"{run} has no ADMM updates; give the folder of a SALAAD run that has come past its onset")
    summary = run / "summary.json"
    ends = read_json(summary)["blocks"] if summary.exists() else {}
    for name, last in ends.items():
        if not found.get(name) or found[name][-1]["step"] != last["step"]:
            raise UserError(
                f"{run / 'blocks.jsonl'} lacks the update of block {name} after step {last['step']}; restore the file, "
                "or train anew"
            )
    return found


def mean_over_blocks(
    blocks: Mapping[str, Sequence[Mapping[str, Any]]], key: str = "delta"
) -> tuple[list[int], list[float]]:
    """Steps and the mean of a column over all blocks; a staggered round counts from the step of its last block."""
    rounds = list(zip(*blocks.values(), strict=False))
    steps = [max(row["step"] for row in rows) for rows in rounds]
    return steps, [fmean(row[key] for row in rows) for rows in rounds]


def _singular_values(run: Path, block: str) -> list[float]:
    """The largest singular values of the block's L in the newest checkpoint."""
    newest = Checkpoints(run / "checkpoints").latest()
    if newest is None:
        raise UserError(f"{run} has no checkpoint; give the folder of a run that saved one")
    state = read_surrogates(newest / "surrogate", (block,))[block]
    if "sigma" in state:
        sigma = state["sigma"]
    else:
        sigma = torch.linalg.svdvals(low_rank_of(state["target"], state["residual"], state["thresholds"][2]))
    return sigma.sort(descending=True).values[:SINGULAR_VALUES].tolist()


def _named(blocks: Mapping[str, Any], end: str) -> str:
    """Return the first block whose name ends with `end`; raise a UserError if there is none."""
    found = next((name for name in blocks if name.endswith(end)), None)
    if found is None:
        raise UserError(f"no block is named {end}; give runs that have it among their blocks")
    return found


def _middle_block(blocks: Mapping[str, Any]) -> str:
    """The gate projection of the middle layer."""
    _, middle, _ = trio(blocks)
    return _named(blocks, f".{middle}.mlp.gate_proj")


def _short(name: str) -> str:
    return f"layer {layer_of(name)}, {name.rpartition('.')[2]}"


def _losses(panel: Axes, run: Path, label: str, look: Mapping[str, Any] = ALONE, color: str = COLORS["X"]) -> None:
    steps, values = loss_curve(run)
    panel.plot(steps, values, color=color, label=f"{label} (ends at {values[-1]:.2f})", **look)
    panel.set_ylabel("nats per token")


def _structure(
    panel: Axes, rows: Sequence[Mapping[str, Any]], look: Mapping[str, Any] = ALONE, label: str = ""
) -> None:
    steps = [row["step"] for row in rows]
    for key, name, letter in (("rank_ratio", "rank ratio Γ(L)", "L"), ("density", "density Υ(S)", "S")):
        panel.plot(steps, [row[key] for row in rows], color=COLORS[letter], label=f"{name}{label}", **look)
    panel.set_ylim(0, 1.02)


def _errors(panel: Axes, steps: Sequence[int], deltas: Sequence[float], label: str) -> None:
    panel.plot(steps, deltas, color=OTHERS[0], label=f"{label} (ends at {deltas[-1]:.2f})", **ALONE)
    panel.set_ylim(0, None)


def _finish(figure: Figure, panels: Sequence[Axes], path: Path, xlabel: str = "step") -> None:
    """Label the panels and save them, with legends below: early in a run the curves are everywhere in a panel."""
    for panel in panels:
        panel.set_xlabel(panel.get_xlabel() or xlabel)
        panel.title.set_fontsize("medium")
        dress(panel)
        columns = 1 + (len(panel.lines) > 1)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=columns, frameon=False, fontsize="small")
    save(figure, path)
