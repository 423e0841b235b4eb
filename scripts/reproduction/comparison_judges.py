"""The judges of claims by what compare_elastic.py and compare_methods.py measured, where there is no item for them."""

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from salaad.common.files import read_json
from salaad.common.formats import millions
from salaad.evaluation.sweep import REMOVED
from scripts.elastic_trainings import DENSE_SHARES
from scripts.reproduction import criteria
from scripts.reproduction.deployment_judges import beside_dense, where_kappa_lies
from scripts.reproduction.evidence import NOT_SHOWN, Number, Row, finite, percent
from scripts.results_tables.measured import rows_of
from scripts.shares import is_same_size

SEED = 0
OURS = "SALAAD, as in the paper"
FULL_SIZE = {"lora": "LoRA", "relora": "ReLoRA", "galore": "GaLore"}
STRUCTURED = {"loro": "LORO", "cola": "CoLA", "sltrain": "SLTrain", "lost": "LOST"}


class Found(NamedTuple):
    """Numbers on a claim, and the commits at which they were measured."""

    numbers: list[Number]
    commits: list[str]


NOTHING = Found([], [])


class Compared(NamedTuple):
    """What was compared at a scale.

    Args:
        rows: label → row of compare_elastic.py with the seed `SEED`.
        methods: method → results of compare_methods.py.
        papers: rows of the model trained as in the paper, of all seeds.
    """

    rows: Mapping[str, Row]
    methods: Mapping[str, Any]
    papers: Sequence[Row]

    @classmethod
    def at(cls, results: Path, scale: str) -> "Compared":
        """Return what lies in the folder of all results; nothing where a comparison is missing."""
        elastic, methods = (results / folder / f"{scale}.json" for folder in ("elastic", "methods"))
        rows = rows_of(elastic) if elastic.exists() else []
        return cls(
            {row["label"]: row for row in rows if row["seed"] == SEED},
            read_json(methods)["methods"] if methods.exists() else {},
            [row for row in rows if row["label"] == OURS],
        )


def small_dense(compared: Compared) -> Found:
    """Judge every cut of the model trained as in the paper beside the dense model of its size.

    Nothing is found as long as a cut with weighted entries, or a dense model, is missing.
    """
    dense = [compared.rows[label] for share in DENSE_SHARES if (label := f"dense, {share:g}") in compared.rows]
    paper = compared.rows.get(OURS, {"ways": {}})
    if "cut" not in paper["ways"] or len(dense) < len(DENSE_SHARES):
        return NOTHING
    judged, split = (_of_one_size(paper, way, [row["X"] for row in dense]) for way in ("cut", "cut, head"))
    more = [
        Number("entries are weighted by the optimizer's second moments, as in elastic/README.md", "yes"),
        *(
            Number(
                f"PPL of the cut with the head split too over the dense model's at {millions(size)}",
                percent(cut / rival - 1),
            )
            for size, cut, rival in split
            if cut is not None
        ),
    ]
    return Found([*beside_dense(judged), *more], [*(row["commit"] for row in dense), *_commits(paper, "cut")])


def _of_one_size(paper: Row, way: str, dense: Sequence[Row]) -> list[tuple[int, float | None, float]]:
    """Return parameters, perplexity of the cut, if there is one, and of the dense model, for those below L + S."""
    found = []
    for X in dense:
        size = X["parameters"]
        cuts = (cut["perplexity"] for cut in paper["ways"].get(way, ()) if is_same_size(cut["parameters"], size))
        if size < paper["L+S"]["parameters"]:
            found.append((size, next(cuts, None), X["perplexity"]))
    return found


def kappa(compared: Compared) -> Found:
    """Judge κ* of the model trained as in the paper, which is chosen on other text than that of the measurement."""
    winners, commits = [], []
    for paper in compared.papers:
        sizes = paper["ways"].get("hpa", ())
        if not sizes or not all("kappa" in size for size in sizes):
            return NOTHING
        most = (1 - REMOVED) * paper["L+S"]["parameters"]
        winners += [size["kappa"] for size in sizes if size["parameters"] <= most]
        commits += _commits(paper, "hpa")
    return Found(where_kappa_lies(winners), commits) if commits else NOTHING


def other_methods(compared: Compared) -> Found:
    """Judge L + S beside methods whose models are as large as X, and the cut by HPA beside those with smaller ones.

    The cut is the largest one that is no larger than the method's model, and not much smaller.
    """
    paper, cuts, beside = compared.rows.get(OURS), [], []
    names = FULL_SIZE | STRUCTURED
    rivals = {method: compared.rows[method]["X"] for method in names if method in compared.rows}
    commits = [compared.rows[method]["commit"] for method in rivals]
    if paper and rivals:
        whole, cuts = paper["L+S"], paper["ways"].get("hpa", [])
        commits += _commits(paper, "hpa")
    elif (full := _full_runs(compared.methods)).keys() >= {"salaad", "full_rank"}:
        whole = full["salaad"]["variants"]["L+S"]
        rivals = {method: full[method]["variants"]["X"] for method in names if method in full}
        commits = [full[method]["commit"] for method in ("salaad", *rivals)]
        dense = full["full_rank"]["variants"]["X"]["perplexity"]
        beside = [
            Number(
                "PPL of full-rank training, which like SALAAD has one learning rate for all weights there, over "
                f"{name}'s",
                percent(dense / rivals[method]["perplexity"] - 1),
            )
            for method, name in FULL_SIZE.items()
            if method in rivals
        ]
    else:
        return NOTHING
    numbers = [
        _beside(f"PPL of L + S over {name}'s", whole, rivals.get(method), criteria.WHOLE_OVER_METHODS)
        for method, name in FULL_SIZE.items()
    ]
    for method, name in STRUCTURED.items():
        most = rivals[method]["parameters"] if method in rivals else 0
        near = [one for one in cuts if criteria.LEAST_OF_SIZE * most <= one["parameters"] <= most]
        cut = max(near, key=lambda one: one["parameters"], default=None)
        what = f"PPL of L + S, cut by HPA to at most its size, over {name}'s"
        numbers.append(_beside(what, cut, rivals.get(method), criteria.CUT_OVER_METHODS))
    return Found([*numbers, *beside], commits)


def _full_runs(methods: Mapping[str, Any]) -> dict[str, Any]:
    """Return method → full run, of the methods whose full run has ended without diverging."""
    return {method: entry["full"] for method, entry in methods.items() if entry.get("full", {}).get("variants")}


def _beside(what: str, ours: Row | None, theirs: Row | None, most: float) -> Number:
    limit = f"at most {percent(most)}"
    if theirs is None:
        return Number(what, "there is no model of the method", limit, NOT_SHOWN)
    if ours is None:
        return Number(what, "there is no cut of this size", limit, NOT_SHOWN)
    over = finite(ours["perplexity"]) / theirs["perplexity"] - 1
    if ours["parameters"] > theirs["parameters"]:
        return Number(what, f"{percent(over)}, with more parameters", limit, False)
    return Number(what, percent(over), limit, over <= most if isfinite(theirs["perplexity"]) else NOT_SHOWN)


def _commits(row: Row, way: str) -> list[str]:
    """Return the commits of a training and of a way to cut it."""
    return [row["commit"], *([row["commits"][way]] if way in row.get("commits", {}) else [])]
