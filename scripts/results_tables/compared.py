"""Ratios of the perplexities that compare_elastic.py measured, seed by seed, and the table of goals."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from statistics import fmean
from typing import Any, NamedTuple

from salaad.common.formats import markdown_table
from scripts.results_tables.measured import (
    COPIED,
    by_label,
    is_paired,
    named_seeds,
    not_copied,
    perplexity,
    results,
    rows_of,
    score,
    size_of,
)
from scripts.shares import SMALL, all_shares, is_same_size

HALF, FIFTH = 0.5, 0.2  # of the compressible parameters


class Model(NamedTuple):
    """A measured model: the training `label` whole, or cut by `way` to a share of the compressible parameters."""

    label: str
    way: str | None = None
    share: float | None = None


class Way(NamedTuple):
    """The name of a way for a SALAAD model, and of the matching way for a full-rank model."""

    salaad: str
    full_rank: str


FULL_RANK = Model("full-rank")
# Perplexities that differ by less count as equal: SALAAD's relative to full-rank training with the same seed differs
# by less than half of it from one seed to another.
LEVEL = 0.01
UNMEASURED = "–"
CHOSEN_ON = 0  # the seed with which settings of SALAAD were compared
WAYS = {
    "without text": Way("cut, head", "rpca, head"),
    "one folder, tuned": Way("head, tuned", "rpca, head, tuned"),
    "each size tuned": Way("head, tuned, each", "rpca, head, tuned, each"),
}


class Trainings:
    """The measurements of compare_elastic.py at one scale.

    Args:
        rows: rows of its JSON file.
        figure: the perplexity that is compared, from the figures of a model; None where it was not measured.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], figure: Callable[[Mapping[str, Any]], float | None] = perplexity
    ) -> None:
        self.rows, self._models, self._figure = rows, by_label(rows), figure
        self.labels = tuple(self._models)

    def figures(self, model: Model) -> dict[int, Mapping[str, Any]]:
        """Return seed → figures of the model, of the seeds that have any."""
        mine = self._models.get(model.label, ())
        sizes = {row["seed"]: row["X"] if model.way is None else size_of(row, *model[1:]) for row in mine}
        return {seed: size for seed, size in sizes.items() if size}

    def perplexities(self, model: Model) -> dict[int, float]:
        """Seed → perplexity, of the seeds that were measured."""
        found = self.figures(model)
        return {seed: value for seed, size in found.items() if (value := self._figure(size)) is not None}

    def parameters(self, model: Model) -> int | None:
        """Return the parameters of the model with its first seed; None if it was not measured."""
        return next((size["parameters"] for size in self.figures(model).values()), None)

    def seeds(self, *models: Model) -> list[int]:
        """Return the seeds over which these models are compared: those with which all of them were measured.

        A model that is not paired with others counts here only where none is paired; it has seeds of its own.
        """
        measured = {model: set(self.perplexities(model)) for model in models}
        counted = [found for model, found in measured.items() if is_paired(model.label)]
        return sorted(set.intersection(*(counted or measured.values()))) if all(measured.values()) else []

    def over(self, model: Model, other: Model = FULL_RANK) -> float | None:
        """Return perplexity / that of `other`, less 1, as of `all_over`; None without common seeds."""
        return self.all_over([model], other)[0] if self.seeds(model, other) else None

    def all_over(self, models: Sequence[Model], other: Model = FULL_RANK) -> list[float]:
        """Return each model's perplexity / that of `other`, less 1: means over the `seeds` of all these models.

        Of paired models it is the mean of the ratios of each seed, else the ratio of the means.
        """
        seeds = self.seeds(*models, other)
        return [self._ratio(model, other, seeds) - 1 for model in models]

    def _ratio(self, model: Model, other: Model, seeds: Sequence[int]) -> float:
        mine, theirs = (
            {seed: value for seed, value in self.perplexities(one).items() if seed in seeds or not is_paired(one.label)}
            for one in (model, other)
        )
        if is_paired(model.label) and is_paired(other.label):
            return fmean(mine[seed] / theirs[seed] for seed in seeds)
        return fmean(mine.values()) / fmean(theirs.values())

    def costs(self, label: str, way: str) -> tuple[float, int] | None:
        """Return a way's fitting operations over the training's, and the bytes of its folders; None if not known."""
        for row in self._models.get(label, ()):
            costs = row.get("costs", {})
            if costs.keys() >= {way, "train"} and "bytes" in costs[way]:
                return costs[way]["operations"] / costs["train"]["operations"], costs[way]["bytes"]
        return None

    def operations(self, label: str) -> float | None:
        """Return the operations of a training; None if not known."""
        costs = (row["costs"]["train"] for row in self._models.get(label, ()) if "train" in row.get("costs", {}))
        return next((of["operations"] for of in costs), None)

    def score(self, label: str, way: str) -> tuple[float, list[int]] | None:
        """Return the elastic score of a way, mean over the seeds with all sizes, and these; None without such seeds."""
        scores = {row["seed"]: score(self.rows, row, way) for row in self._models.get(label, ())}
        whole = {seed: found for seed, found in scores.items() if found is not None}
        return (fmean(whole.values()), sorted(whole)) if whole else None


MeanOver = tuple[float, list[int]]  # a figure and the seeds that it is a mean over
Measure = Callable[[Trainings, Way], MeanOver | None]
Other = Callable[[Trainings, Way, float], Model | None]  # the model to compare at a share with SALAAD's cut in a way


def of_size(share: float) -> Measure:
    """Return the measure of SALAAD's model at a share over the whole full-rank model."""
    return lambda trainings, way: _over(trainings, Model("SALAAD", way.salaad, share))


def _over(trainings: Trainings, model: Model, other: Model = FULL_RANK) -> MeanOver | None:
    over = trainings.over(model, other)
    return None if over is None else (over, trainings.seeds(model, other))


def at_worst(other: Other) -> Measure:
    """Return the measure of SALAAD's model over another of its size, at the share where this is largest."""

    def measure(trainings: Trainings, way: Way) -> MeanOver | None:
        rivals = {share: other(trainings, way, share) for share in all_shares()}
        found = (
            _over(trainings, Model("SALAAD", way.salaad, share), rival) for share, rival in rivals.items() if rival
        )
        return max((one for one in found if one), default=None)

    return measure


def dense_of_size(trainings: Trainings, way: Way, share: float) -> Model | None:
    """Return the dense model that was trained at the size of SALAAD's model at a share; None if there is none."""
    size = trainings.parameters(Model("SALAAD", way.salaad, share))
    small = {label: trainings.parameters(Model(label)) for label in trainings.labels if label.startswith(SMALL)}
    near = {label: abs(own - size) for label, own in small.items() if size and own and is_same_size(own, size)}
    return Model(min(near, key=near.get)) if near else None


def elastic_score(trainings: Trainings, way: Way) -> MeanOver | None:
    """Return the elastic score of SALAAD's model."""
    return trainings.score("SALAAD", way.salaad)


def uncut(trainings: Trainings, way: Way) -> MeanOver | None:
    """Return SALAAD's X over the full-rank model; None for ways that use text, since the uncut model is not tuned."""
    return _over(trainings, Model("SALAAD")) if way == WAYS["without text"] else None


against_dense = at_worst(dense_of_size)
GOALS: Mapping[str, tuple[float, Measure]] = {
    "uncut, over full-rank training": (0.0, uncut),
    "half, over full-rank training": (0.005, of_size(HALF)),
    "a fifth, over full-rank training": (0.05, of_size(FIFTH)),
    "the elastic score": (0.015, elastic_score),
    "over the dense model trained at the size": (0.0, against_dense),
    "over the full-rank model, split and cut the same way": (
        0.0,
        at_worst(lambda _, way, share: Model("full-rank", way.full_rank, share)),
    ),
    "over the cut that leaves the head dense": (
        0.0,
        at_worst(lambda _, way, share: Model("SALAAD", "cut", share)),
    ),
    "over the model trained as in the paper, cut by energy with equal weights": (
        0.0,
        at_worst(lambda _, way, share: Model("SALAAD, as in the paper", "energy", share)),
    ),
    "over the model trained as in the paper, cut the same way": (
        0.0,
        at_worst(lambda _, way, share: Model("SALAAD, as in the paper", way.salaad, share)),
    ),
}


def sections() -> dict[str, str]:
    """Return for every scale the table of goals and of what was reached."""
    return {f"elastic-goals-{scale}": goals_table(rows_of(path)) for scale, path in results().items()}


def goals_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table, a line per goal: its limit, and what each way to SALAAD's sizes reaches.

    A goal that was also measured over the tokens that are not copied has a second line.
    """
    over_all, over_others = Trainings(rows), Trainings(rows, not_copied)
    lines, copying = [], False
    for name, (limit, measure) in GOALS.items():
        found = [measure(over_all, way) for way in WAYS.values()]
        lines.append((name, f"{limit:.1%}", *(_judged(one, limit) for one in found)))
        besides = [measure(over_others, way) for way in WAYS.values()] if measure is not elastic_score else []
        if any(besides):
            copying = True
            judged = (_judged(one, limit, above) for one, above in zip(besides, found, strict=True))
            lines.append((f"{name}, not copied", f"{limit:.1%}", *judged))
    ways = [any(cell != UNMEASURED for cell in column) for column in zip(*lines, strict=True)]
    header, *lines = ([*compress(line, ways)] for line in (("goal", "at most", *WAYS), *lines))
    told = (
        "Perplexity of SALAAD's model over that of the other model, minus 1, as a mean over the seeds that both have; "
        "of small dense models, whose seeds have nothing in common with SALAAD's, mean over mean. Where no size is "
        "named, the worst size counts."
    )
    if copying:
        told += (
            f" *Not copied*: over the other tokens ({COPIED}), of models whole, at half and at a fifth alone, so the "
            "worst size may be another than in the line above; the seeds are named where they are others."
        )
    told += _of_other_seeds(rows)
    return f"{markdown_table(header, lines)}\n\n{told}"


def _of_other_seeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a sentence on the first three goals over the seeds with which no setting was chosen; empty without any.

    All three are over the seeds that have all of them.
    """
    others = Trainings([row for row in rows if row["seed"] != CHOSEN_ON])
    cuts = [Model("SALAAD", WAYS["without text"].salaad, share) for share in (HALF, FIFTH)]
    models = [Model("SALAAD"), *cuts]
    seeds = others.seeds(FULL_RANK, *models)
    if not seeds:
        return ""
    uncut, half, fifth = (f"{over:+.1%}" for over in others.all_over(models))
    return (
        f" SALAAD's settings were chosen with seed {CHOSEN_ON} and the same validation text; with "
        f"{named_seeds(seeds)} alone it is {uncut} uncut, {half} at half and {fifth} at a fifth without text."
    )


def _judged(found: MeanOver | None, limit: float, above: MeanOver | None = None) -> str:
    """Return a figure in percent, with two decimals where one would hide its sign, and whether it is in the limit.

    Its seeds are named where they are not those of the figure `above` it, if that is given.
    """
    if found is None:
        return UNMEASURED
    value, seeds = found
    digits = 1 if abs(value) >= 0.0005 else 2
    named = f", {named_seeds(seeds)}" if above and above[1] != seeds else ""
    return f"{value:+.{digits}%}, {'met' if value <= limit else 'missed'}{named}"
