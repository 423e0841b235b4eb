"""What a user should conclude, a sentence a purpose, made of the recorded numbers; left out where one is missing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import megabytes, millions
from scripts.reproduction.evidence import the_row
from scripts.results_tables.elastic import at, by_label, has

ELASTIC = "[elastic](elastic/README.md)"
HALF, FIFTH = 0.5, 0.2  # of the compressible parameters


class Trainings:
    """What compare_elastic.py measured at a scale, over full-rank training with the same seed.

    Args:
        path: its JSON, which may not be there yet.
    """

    def __init__(self, path: Path) -> None:
        rows = read_json(path)["rows"] if path.exists() else []
        self.rows = by_label(rows)
        self.reference = {row["seed"]: row["X"]["perplexity"] for row in self.rows.get("full-rank", ())}

    def over(self, label: str, way: str | None = None, share: float | None = None) -> float | None:
        """Mean over the seeds of perplexity over that of full-rank training, less 1; None where nothing is measured.

        Args:
            label: of the training.
            way: to a smaller size; the whole model without it.
            share: of the compressible parameters, with a way.
        """
        found = [
            (row["X"]["perplexity"] if way is None else at(row["ways"][way], share)) / self.reference[row["seed"]]
            for row in self.rows.get(label, ())
            if row["seed"] in self.reference and (way is None or has(row["ways"].get(way, ()), share))
        ]
        return fmean(found) - 1 if found else None


def conclusions(results: Path) -> list[str]:
    """The sentences whose numbers are there, each with the page that has them."""
    found = [sentence(results) for sentence in SENTENCES]
    return [sentence for sentence in found if sentence is not None]


def full_size(results: Path) -> str | None:
    """What SALAAD's X costs."""
    cost = Trainings(results / "elastic" / "nano-20.json").over("SALAAD")
    step = _json(results / "bench" / "methods-nano.json")
    if cost is None or step is None:
        return None
    state = {
        name: megabytes(row["optimizer_bytes"] + row["method_bytes"])
        for name, row in step["methods"].items()
        if name in ("salaad", "full_rank")
    }
    return (
        f"**The best model of full size**: train full-rank. SALAAD's X is {cost:+.1%} from it, a step takes "
        f"{step['methods']['salaad']['over_full_rank']:.2f} times as long, and training keeps {state['salaad']} of "
        f"state for {state['full_rank']} ({ELASTIC})."
    )


def rates(results: Path) -> str | None:
    """What slower projections are worth."""
    one = _json(results / "methods" / "nano.json")
    two = _json(results / "demo" / "sweep.json")
    if one is None or two is None:
        return None
    before = one["methods"]["full_rank"]["full"]["variants"]["X"]["perplexity"]
    after = the_row(two["rows"], label="vanilla + RPCA", variant="X")["perplexity"]
    return (
        f"**Before any method**: let the projections learn slower than embedding and head, which takes full-rank "
        f"training at nano from {before:.2f} to {after:.2f} ([methods](methods/README.md), [demo](demo/README.md))."
    )


def many_sizes(results: Path) -> str | None:
    """Cuts without text, of SALAAD and of a full-rank model."""
    trainings = Trainings(results / "elastic" / "nano-20.json")
    cuts = [
        trainings.over(label, way, share)
        for label, way in (("SALAAD", "cut, head"), ("full-rank", "rpca, head"))
        for share in (HALF, FIFTH)
    ]
    if None in cuts:
        return None
    ours, theirs = (f"{half:+.1%} and {fifth:+.1%}" for half, fifth in (cuts[:2], cuts[2:]))
    return (
        f"**Many sizes, no text**: what SALAAD's model is cut to is {ours} from the whole full-rank model at half and "
        f"a fifth of the compressible parameters; the full-rank model itself, split by robust PCA and cut with the "
        f"same tools, {theirs} ({ELASTIC})."
    )


def head(results: Path) -> str | None:
    """What splitting the head is worth."""
    trainings = Trainings(results / "elastic" / "nano-20.json")
    without, beside = (trainings.over("SALAAD", way, FIFTH) for way in ("cut", "cut, head"))
    if without is None or beside is None:
        return None
    return (
        f"**Below half**: let the cut have the head too, as it does by default: a fifth is {beside:+.1%} from the "
        f"whole full-rank model with it and {without:+.1%} with a dense head ({ELASTIC})."
    )


def with_text(results: Path) -> str | None:
    """Matched and distilled, every size by itself."""
    trainings = Trainings(results / "elastic" / "nano-20.json")
    ways = {
        "SALAAD": ("tuned, each", "head, tuned, each"),
        "full-rank": ("rpca, tuned, each", "rpca, head, tuned, each"),
    }
    said = []
    for label, names in ways.items():
        best = [
            min((value for name in names if (value := trainings.over(label, name, share)) is not None), default=None)
            for share in (HALF, FIFTH)
        ]
        if None in best:
            return None
        said.append(f"{label} {best[0]:+.1%} and {best[1]:+.1%}")
    return (
        f"**One size, and text**: match and distil it on a twentieth of the training tokens; from the whole full-rank "
        f"model half and a fifth are then {' and '.join(said)} ({ELASTIC})."
    )


def trained_small(results: Path) -> str | None:
    """Small dense models."""
    trainings = Trainings(results / "elastic" / "nano-20.json")
    small = {share: trainings.over(f"dense, {share:g}") for share in (HALF, FIFTH)}
    if None in small.values():
        return None
    return (
        f"**One size, known beforehand**: a dense model trained at it is {small[HALF]:+.1%} (half) and "
        f"{small[FIFTH]:+.1%} (a fifth) from the whole full-rank model ({ELASTIC})."
    )


def way_to_cut(results: Path) -> str | None:
    """HPA and energy at the smallest budget."""
    flexible = _json(results / "nano" / "reproduce" / "flexible.json")
    if flexible is None:
        return None
    rows = [row for row in flexible["rows"] if row["label"] == "SALAAD" and row["seed"] == 0 and row["budget"]]
    smallest = [row for row in rows if row["budget"] == min(row["budget"] for row in rows)]
    by_hpa, by_energy = (
        min(row["perplexity"] for row in smallest if (row["kappa"] is None) == energy) for energy in (False, True)
    )
    return (
        f"**How to cut**: by energy and refined, not by HPA: {by_energy:.1f} for {by_hpa:.1f} with "
        f"{millions(smallest[0]['budget'])} parameters at nano ([nano](nano/README.md))."
    )


def headline(results: Path) -> str | None:
    """L + S beside X and full-rank training."""
    table = _json(results / "nano" / "reproduce" / "table1.json")
    if table is None:
        return None
    rows = table["rows"]
    X, whole = (the_row(rows, method="salaad", variant=name) for name in ("X", "L+S"))
    dense = the_row(rows, method="full_rank")
    of = {name: row["perplexity"]["mean"] for name, row in (("X", X), ("L+S", whole), ("full", dense))}
    share = whole["parameters"]["mean"] / X["parameters"]["mean"]
    return (
        f"**The paper's model L + S** stands for X ({of['L+S'] / of['X'] - 1:+.1%} with {share:.0%} of its parameters "
        f"at nano) and is no better than full-rank training ({of['L+S'] / of['full'] - 1:+.1%}): see the claims below."
    )


def other_methods(results: Path) -> str | None:
    """The best of the others."""
    measured = _json(results / "methods" / "nano.json")
    if measured is None:
        return None
    others = {
        name: entry["full"]["variants"]["X"]
        for name, entry in measured["methods"].items()
        if name not in ("full_rank", "salaad") and entry.get("full")
    }
    best = min(others, key=lambda name: others[name]["perplexity"])
    return (
        f"**Other ways to train**: of {len(others)}, {best} is best at nano ({others[best]['perplexity']:.2f} with "
        f"{millions(others[best]['parameters'])} parameters), where there is one token a parameter "
        "([methods](methods/README.md))."
    )


def bfloat16(results: Path) -> str | None:
    """What training in bfloat16 costs both."""
    measured, table = (_json(results / "nano" / "reproduce" / f"{name}.json") for name in ("bf16", "table1"))
    if measured is None or table is None:
        return None
    costs = {}
    for method in ("salaad", "full_rank"):
        rounded = the_row(measured["rows"], method=method, variant="X", precision="bf16")["perplexity"]["mean"]
        costs[method] = rounded / the_row(table["rows"], method=method, variant="X")["perplexity"]["mean"] - 1
    return (
        f"**Weights in bfloat16 during training** cost SALAAD's X {costs['salaad']:+.1%} and full-rank training "
        f"{costs['full_rank']:+.1%} at nano: see the claims below."
    )


SENTENCES: Sequence[Callable[[Path], str | None]] = (
    full_size,
    many_sizes,
    head,
    with_text,
    trained_small,
    way_to_cut,
    headline,
    rates,
    other_methods,
    bfloat16,
)


def _json(path: Path) -> Mapping[str, Any] | None:
    return read_json(path) if path.exists() else None
