"""The pictures of results/elastic: perplexity over parameters, one picture per scale."""

from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean

from matplotlib import pyplot as plt
from matplotlib.ticker import PercentFormatter

from salaad.evaluation.figures import dress, save
from scripts.elastic_trainings import CUTS, TUNED, of_a_split
from scripts.elastic_ways import SPLITS
from scripts.reproduction.palette import COLORS, OTHERS
from scripts.results_tables.measured import (
    ELASTIC,
    REFERENCE,
    Row,
    by_label,
    is_paired,
    over_reference,
    references_of,
    results,
    rows_of,
    seeds_text,
    ways_of,
)
from scripts.shares import NAMED, SMALL

POINT_COLORS = (*OTHERS[1:], "#9467BD", "#8C564B", "#17202A", "#BCBD22")  # of models that are not cut
# Of ways; those to cut a split full-rank model have the marker of the way to cut a SALAAD model that they match.
MARKERS = {
    **dict(zip((*CUTS, *TUNED), "osdpD", strict=True)),
    **{"tuned": "h", "hpa": "v", "hpa, head": "^", "energy": "X", "nested": "P"},
}
_MATCHING = {theirs: ours for split in SPLITS for theirs, ours in zip(of_a_split(split), (*CUTS, *TUNED), strict=True)}
_MATCHING |= {f"{split}, tuned": "tuned" for split in SPLITS}  # which no table has, but an option can ask for
_DASHED = "godec"
MOST_SHOWN = 0.6  # relative perplexity at which pictures end; small cuts without text are far above it


def draw_pictures() -> None:
    """Draw one picture per scale."""
    for scale, path in results().items():
        picture(rows_of(path), ELASTIC / f"{scale}.png")


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw perplexity over parameters: curves of the ways, points of whole models, a line of dense ones.

    A model has a color and a way has a marker.

    Perplexities are relative to that of full-rank training, of paired models with the same seed, and means over the
    seeds: two seeds can differ by more than two ways do.
    """
    figure, panel = plt.subplots(figsize=(8.6, 5), layout="constrained")
    colors = [*COLORS.values(), *OTHERS]
    references = references_of(rows)
    models = by_label([row for row in rows if row["seed"] in references or not is_paired(row["label"])])
    cut = dict(zip((label for label, mine in models.items() if ways_of(mine)), colors, strict=False))
    for label, color in cut.items():
        mine = models[label]
        for way in ways_of(mine):
            points = _points(mine, way, references)
            # A few sizes that were made one by one get no line, since there are no sizes between them.
            line = "none" if len(points) <= len(NAMED) else "dashed" if way.startswith(_DASHED) else "solid"
            panel.plot(
                *zip(*points, strict=True),
                linestyle=line,
                color=color,
                marker=MARKERS[_MATCHING.get(way, way)],
                markersize=5,
                label=f"{label}: {way} ({seeds_text([row for row in mine if way in row['ways']])})",
            )
    whole = {label: _whole_point(mine, references) for label, mine in models.items() if label != REFERENCE}
    small = sorted(point for label, point in whole.items() if label.startswith(SMALL))
    others = {label: point for label, point in whole.items() if not label.startswith(SMALL)}
    more = chain(POINT_COLORS, repeat("0.2"))
    for marker, (label, point) in zip("pPXHd<>sx1234^v", others.items(), strict=False):
        named, color = f"{label} ({seeds_text(models[label])})", cut.get(label) or next(more)
        panel.plot(*point, linestyle="none", color=color, marker=marker, markersize=8, label=named)
    if small:
        panel.plot(*zip(*small, strict=True), "k*:", markersize=9, label="trained dense at its size")
    panel.axhline(0, color="0.3", linewidth=1, linestyle="--", label=REFERENCE)
    heights = [y for line in panel.get_lines() for y in line.get_ydata()]
    shown = "" if max(heights) <= MOST_SHOWN else f", up to {MOST_SHOWN:+.0%}"
    panel.set(xlabel="parameters, millions", ylabel=f"perplexity relative to full-rank training{shown}")
    panel.set_ylim(min(heights) - 0.01, min(MOST_SHOWN, max(heights) + 0.01))
    panel.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    dress(panel, which="both")
    figure.set_figheight(max(5, 0.24 * len(panel.get_legend_handles_labels()[0]) + 0.5))  # room for every entry
    figure.legend(loc="outside right upper", frameon=False, title="model: way (seeds)")
    save(figure, path)


def _points(rows: Sequence[Row], way: str, references: Mapping[int, float]) -> list[tuple[float, float]]:
    """Millions of parameters and relative perplexity at every share, means over the seeds."""
    curves = {row["seed"]: row["ways"][way] for row in rows if way in row["ways"]}
    found = []
    for share in {size["share"] for sizes in curves.values() for size in sizes}:
        there = {seed: size for seed, sizes in curves.items() for size in sizes if size["share"] == share}
        found.append(_point(rows[0]["label"], there, references))
    return sorted(found)


def _whole_point(rows: Sequence[Row], references: Mapping[int, float]) -> tuple[float, float]:
    """Millions of parameters and relative perplexity of the whole model, means over the seeds."""
    return _point(rows[0]["label"], {row["seed"]: row["X"] for row in rows}, references)


def _point(label: str, models: Mapping[int, Row], references: Mapping[int, float]) -> tuple[float, float]:
    over, _ = over_reference(label, {seed: one["perplexity"] for seed, one in models.items()}, references)
    return fmean(one["parameters"] for one in models.values()) / 1e6, fmean(over.values())
