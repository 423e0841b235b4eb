"""The two overviews of the method, drawn from boxes and arrows; the letters are the paper's."""

from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from salaad.evaluation.figures import save
from scripts.reproduction.palette import COLORS, OTHERS

_PLAIN, _CONTROL, _STAGE = "#333333", OTHERS[0], "#F3F3F3"
_PENALTY = r"$\ell_\rho(X)=\frac{\rho}{2}\,\|X-L-S+Y/\rho\|_F^2$"
_COUPLED = r"$\ell_c=\ell+\ell_\rho$"
_LOW_RANK = r"$L\leftarrow U\,\mathcal{T}_{\alpha/\rho}(s)\,V^\top$" + "\n" + r"of $X-S+Y/\rho$"
_SPARSE = r"$S\leftarrow\mathcal{T}_{\beta/\rho}(X-L+Y/\rho)$"
_DUAL = r"$Y\leftarrow Y+\rho\,(X-L-S)$" + "\n" + r"(kept as $Y/\rho$)"
_ALPHA = r"$\alpha\leftarrow\alpha+\rho\,(\Gamma_L^\gamma-\hat{\Gamma})\,\Delta\alpha$"
_BETA = r"$\beta\leftarrow\beta+\rho\,(\Upsilon_S-\hat{\Upsilon})\,\Delta\beta$"
_RATIOS = (r"$\phi_L=\dfrac{\kappa\,C}{C_L}$", r"$\phi_S=\dfrac{(1-\kappa)\,C}{C_S}$")
_SLR = r"$\tilde{L}+\tilde{S}$"
Place = tuple[float, float]


def pretraining_overview(path: Path) -> None:
    """Algorithm 1: guided learning of X, and per block the update of L, S and Y and the I-controller."""
    figure, panel = _canvas(100, 66)
    model, penalty = _guided_learning(panel)
    svt, dual = _adaptation(panel)
    _path(panel, [model.bottom(), (29, 33.2), (17.5, 33.2), svt.top()], "$X$", (23, 33.2))
    _path(panel, [dual.top(), (84, 33.2), (60, 33.2), penalty.bottom()], r"$L,\ S,\ Y$", (72, 33.2))
    save(figure, path)


def _guided_learning(panel: Axes) -> tuple["_Box", "_Box"]:
    """Stage 1; the model and the penalty, where stage 2 is tied to it."""
    _stage(panel, (0, 36, 100, 29.5), "stage 1, guided learning: K steps of the optimizer")
    data = _box(panel, (2, 46, 13, 9), "minibatch\nof data")
    model = _box(panel, (20, 44, 18, 13), "model with\ndense weights\n$X$", COLORS["X"])
    loss = _box(panel, (45, 51.5, 24, 7.5), r"task loss  $\ell(X)$", COLORS["X"])
    penalty = _box(panel, (45, 39, 30, 9), f"penalty towards $L+S$\n{_PENALTY}")
    step = _box(panel, (81, 44, 17, 13), f"gradient of\n{_COUPLED},\nany optimizer")
    _arrow(panel, data.right(), model.left())
    _arrow(panel, model.right(0.8), loss.left())
    _arrow(panel, model.right(0.2), penalty.left(0.7))
    _arrow(panel, loss.right(), step.left(0.8))
    _arrow(panel, penalty.right(), step.left(0.2))
    _path(panel, [step.top(), (89.5, 61), (29, 61), model.top()], "next $X_k$", (60, 61))
    return model, penalty


def _adaptation(panel: Axes) -> tuple["_Box", "_Box"]:
    """Stage 2 and the I-controller; where X comes in, and where L, S and Y go out."""
    _stage(panel, (0, 0, 100, 30.5), "stage 2, after every K steps: J updates of each block", indent=32)
    svt = _box(panel, (4, 14, 27, 11), f"singular value threshold\n{_LOW_RANK}", COLORS["L"])
    soft = _box(panel, (37, 14, 27, 11), f"soft threshold\n{_SPARSE}", COLORS["S"])
    dual = _box(panel, (71, 14, 26, 11), f"dual\n{_DUAL}")
    alpha = _box(panel, (4, 1.5, 27, 6.5), _ALPHA, _CONTROL)
    beta = _box(panel, (37, 1.5, 27, 6.5), _BETA, _CONTROL)
    panel.text(
        68, 4.75, "I-controller, after these updates:\nrank and density to the target", va="center", color=_CONTROL
    )
    _arrow(panel, svt.right(), soft.left(), "$L$")
    _arrow(panel, soft.right(), dual.left(), "$S$")
    loops = ((svt, alpha, r"$\Gamma_L^\gamma$", r"$\alpha$"), (soft, beta, r"$\Upsilon_S$", r"$\beta$"))
    for box, control, seen, given in loops:
        _arrow(panel, box.bottom(0.35), control.top(0.35), seen)
        _arrow(panel, control.top(0.65), box.bottom(0.65), given)
    return svt, dual


def deployment_overview(path: Path) -> None:
    """One checkpoint, a budget, the two global ratios, and what every block loses of its L and its S."""
    figure, panel = _canvas(100, 48)
    checkpoint = _box(panel, (0.5, 12, 16, 24), "")
    panel.text(8.5, 33, "checkpoint", ha="center", va="center")
    for letter, y, note in (("X", 26, "training only"), ("L", 20, ""), ("S", 14, "")):
        _box(panel, (3, y - 0.3, 11, 4.6), f"${letter}$  {note}".strip(), COLORS[letter], size=9 if note else 11)
    budget = _box(panel, (21, 38.5, 13, 7.5), "budget $C$\nto remove")
    kappa = _box(panel, (36, 38.5, 9.5, 7.5), "split $\\kappa$\nin [0, 1]")
    hpa = _box(panel, (23, 12, 20.5, 20), "\n\n\n".join(("HPA", *_RATIOS)), _CONTROL)
    _arrow(panel, (checkpoint.right()[0], 22), hpa.left(), "$L,\\,S$", lift=2)
    _arrow(panel, budget.bottom(), (budget.bottom()[0], 32))
    _arrow(panel, kappa.bottom(), (kappa.bottom()[0], 32))
    _stage(panel, (49, 0.5, 32, 47), "the same ratios in every block")
    _arrow(panel, hpa.right(), (49, 22), r"$\phi_L,\,\phi_S$", lift=2)
    panel.text(59.5, 40.3, "singular values of $L$", ha="center", color=COLORS["L"], fontsize=9.5)
    panel.text(73.7, 40.3, "entries of $S$", ha="center", color=COLORS["S"], fontsize=9.5)
    for y, name, rank, entries in ((29.5, "1", 10, 24), (18.5, "2", 6, 32), (4, "N", 8, 14)):
        _block(panel, y, name, rank, entries)
    panel.text(65, 1.9, "solid: kept, hollow: removed", ha="center", va="center", fontsize=9.5)
    panel.text(65, 15.2, "⋮", ha="center", va="center", fontsize=15)
    sizes = ((32.5, 15, 12, f"{_SLR}\n$C$ small"), (17.5, 11.5, 9, _SLR), (5, 8, 6, f"{_SLR}\n$C$ large"))
    for y, width, height, text in sizes:
        box = _box(panel, (91.5 - width / 2, y, width, height), text)
        _arrow(panel, (81, y + height / 2), box.left())
    panel.text(91.5, 1.5, "no retraining", ha="center", va="center", fontsize=9.5)
    save(figure, path)


def _block(panel: Axes, y: float, name: str, rank: int, entries: int, kept_L: float = 0.5, kept_S: float = 0.7) -> None:
    """Singular values as falling bars and entries as cells of a grid; what is removed is hollow."""
    panel.text(51.3, y + 4, f"block\n{name}", va="center", ha="center", fontsize=9)
    for i in range(rank):
        _cell(panel, (54.3 + i * 1.05, y), 0.8, 8.5 * 0.82**i, COLORS["L"], i < round(kept_L * rank))
    columns, side = 8, 1.55
    # A stride without a common factor with the 40 cells scatters the entries, the same way at every call.
    for i in range(entries):
        row, column = divmod(i * 17 % 40, columns)
        _cell(
            panel,
            (67.5 + column * side, y + row * side),
            0.8 * side,
            0.8 * side,
            COLORS["S"],
            i < round(kept_S * entries),
        )


def _cell(panel: Axes, corner: Place, width: float, height: float, color: str, kept: bool) -> None:
    face = color if kept else "white"
    panel.add_patch(Rectangle(corner, width, height, facecolor=face, edgecolor=color, linewidth=0.8))


class _Box:
    """Where a box lies; its sides take the part of the way along them, from left or from below."""

    def __init__(self, x: float, y: float, width: float, height: float) -> None:
        self.x, self.y, self.width, self.height = x, y, width, height

    def left(self, part: float = 0.5) -> Place:
        return self.x, self.y + part * self.height

    def right(self, part: float = 0.5) -> Place:
        return self.x + self.width, self.y + part * self.height

    def top(self, part: float = 0.5) -> Place:
        return self.x + part * self.width, self.y + self.height

    def bottom(self, part: float = 0.5) -> Place:
        return self.x + part * self.width, self.y


def _canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """A panel without axes whose units are hundredths of the picture's width."""
    figure = plt.figure(figsize=(10.4, 10.4 * height / width))
    panel = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    panel.set(xlim=(-0.3, width + 0.3), ylim=(-0.3, height + 0.3))
    panel.axis("off")
    return figure, panel


def _stage(panel: Axes, area: tuple[float, float, float, float], title: str, indent: float = 1.5) -> None:
    x, y, width, height = area
    panel.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0,rounding_size=1", color=_STAGE, zorder=0))
    panel.text(x + indent, y + height - 2.3, title, va="center", fontweight="bold", fontsize=10.5)


def _box(
    panel: Axes, area: tuple[float, float, float, float], text: str, color: str = _PLAIN, size: float = 11
) -> _Box:
    x, y, width, height = area
    style = "round,pad=0,rounding_size=0.8"
    panel.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor="white", edgecolor=color, linewidth=1.8))
    panel.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=size, linespacing=1.35)
    return _Box(x, y, width, height)


def _arrow(panel: Axes, start: Place, end: Place, label: str = "", lift: float = 0) -> None:
    """A straight arrow, its label in the middle on white, or as far above as `lift`."""
    panel.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=13, color=_PLAIN, shrinkA=0, shrinkB=0)
    )
    if label:
        _label(panel, label, ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + lift))


def _path(panel: Axes, corners: list[Place], label: str, where: Place) -> None:
    """An arrow around corners."""
    panel.plot(*zip(*corners[:-1], strict=True), color=_PLAIN, linewidth=1, solid_joinstyle="round")
    _arrow(panel, corners[-2], corners[-1])
    _label(panel, label, where)


def _label(panel: Axes, text: str, where: Place) -> None:
    panel.text(*where, text, ha="center", va="center", bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})
