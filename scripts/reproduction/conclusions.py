"""What a user should conclude, a sentence a purpose, made of the recorded numbers; left out where one is missing."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import megabytes, millions
from scripts.reproduction.evidence import the_row
from scripts.results_tables.compared import FIFTH, HALF, Model, Trainings

ELASTIC = "[elastic](elastic/README.md)"
PAIR = ("salaad", "full_rank")


def nano_20(results: Path) -> Trainings:
    """What is recorded of the sizes of one training, in the paper's regime."""
    return recorded(results, "nano-20")


def recorded(results: Path, scale: str) -> Trainings:
    """What is recorded of a scale, which may be nothing yet."""
    found = _json(results / "elastic" / f"{scale}.json")
    return Trainings(found["rows"] if found else ())


def conclusions(results: Path) -> list[str]:
    """The sentences whose numbers are there, each with the page that has them."""
    found = [sentence(results) for sentence in SENTENCES]
    return [sentence for sentence in found if sentence is not None]


def full_size(results: Path) -> str | None:
    """What SALAAD's X costs."""
    cost = nano_20(results).over(Model("SALAAD"))
    bench = _json(results / "bench" / "methods-nano.json")
    if cost is None or bench is None:
        return None
    methods = bench["methods"]
    state = {name: megabytes(methods[name]["optimizer_bytes"] + methods[name]["method_bytes"]) for name in PAIR}
    best = "full-rank" if cost > 0 else "with SALAAD"
    return (
        f"**The best model of full size**: train {best}. SALAAD's X is {cost:+.1%} "
        f"from full-rank training, a step takes {methods['salaad']['over_full_rank']:.2f} times as long, and training "
        f"keeps {state['salaad']} of state instead of {state['full_rank']} ({ELASTIC})."
    )


def rates(results: Path) -> str | None:
    """What rates of their own are worth."""
    for scale in ("nano-20", "nano"):
        trainings = recorded(results, scale)
        cost = trainings.over(Model("full-rank, one rate"))
        if cost is not None:
            return (
                f"**Before any method**: give embedding and head a higher learning rate than the projections. With one "
                f"rate for all, full-rank training at {scale} is {cost:+.1%} from that with two ({ELASTIC})."
            )
    return None


def many_sizes(results: Path) -> str | None:
    """Cuts without text, of SALAAD and of a full-rank model."""
    trainings = nano_20(results)
    cuts = [
        trainings.over(Model(label, way, share))
        for label, way in (("SALAAD", "cut, head"), ("full-rank", "rpca, head"))
        for share in (HALF, FIFTH)
    ]
    if None in cuts:
        return None
    ours, theirs = (f"{half:+.1%} and {fifth:+.1%}" for half, fifth in (cuts[:2], cuts[2:]))
    return (
        f"**Many sizes, no text**: cut to half and to a fifth of the compressible parameters, SALAAD's model is {ours} "
        f"from the whole full-rank model; the full-rank model itself, split by robust PCA and cut with the same tools, "
        f"is {theirs} ({ELASTIC})."
    )


def many_sizes_with_text(results: Path) -> str | None:
    """One elastic folder, matched and distilled."""
    trainings = nano_20(results)
    half, fifth = (trainings.over(Model("SALAAD", "head, tuned", share)) for share in (HALF, FIFTH))
    if half is None or fifth is None:
        return None
    return (
        f"**Many sizes, and text**: one folder of all sizes, matched and distilled on a twentieth of the training "
        f"tokens. Its half is {half:+.1%} and its fifth {fifth:+.1%} from the whole full-rank model ({ELASTIC})."
    )


def head(results: Path) -> str | None:
    """What splitting the head is worth."""
    trainings = nano_20(results)
    without, beside = (trainings.over(Model("SALAAD", way, FIFTH)) for way in ("cut", "cut, head"))
    if without is None or beside is None:
        return None
    return (
        f"**The head**: split it too for small sizes, as is the default. A fifth of the compressible parameters "
        f"is {beside:+.1%} from the whole full-rank model with it split and {without:+.1%} with it whole ({ELASTIC})."
    )


def with_text(results: Path) -> str | None:
    """Matched and distilled, every size by itself."""
    trainings = nano_20(results)
    ways = {
        "SALAAD": ("tuned, each", "head, tuned, each"),
        "full-rank": ("rpca, tuned, each", "rpca, head, tuned, each"),
    }
    said = []
    for label, names in ways.items():
        best = []
        for share in (HALF, FIFTH):
            measured = [trainings.over(Model(label, name, share)) for name in names]
            best.append(min((value for value in measured if value is not None), default=None))
        if None in best:
            return None
        said.append(f"{label}'s half is {best[0]:+.1%} from it and its fifth {best[1]:+.1%}")
    return (
        f"**One size, and text**: match the cut to the whole model and distil it on a twentieth of the training "
        f"tokens. Beside the whole full-rank model {', '.join(said)} ({ELASTIC})."
    )


def trained_small(results: Path) -> str | None:
    """Small dense models."""
    trainings = nano_20(results)
    small = {share: trainings.over(Model(f"dense, {share:g}")) for share in (HALF, FIFTH)}
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
        f"**How to cut**: at nano a cut to {millions(smallest[0]['budget'])} parameters has perplexity "
        f"{by_energy:.1f} by energy and refined, and {by_hpa:.1f} by HPA (below, *Flexible deployment*)."
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
        f"**The paper's model L + S** is at nano {of['L+S'] / of['X'] - 1:+.1%} from X, with {share:.0%} of its "
        f"parameters, and {of['L+S'] / of['full'] - 1:+.1%} from full-rank training (below, *Perplexity and "
        "parameters*)."
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
        f"**Weights in bfloat16 during training** change SALAAD's X by {costs['salaad']:+.1%} and "
        f"full-rank training by {costs['full_rank']:+.1%} at nano (below, *Training in bfloat16*)."
    )


SENTENCES: Sequence[Callable[[Path], str | None]] = (
    full_size,
    many_sizes,
    many_sizes_with_text,
    head,
    with_text,
    trained_small,
    way_to_cut,
    headline,
    rates,
    bfloat16,
)


def _json(path: Path) -> Mapping[str, Any] | None:
    return read_json(path) if path.exists() else None
