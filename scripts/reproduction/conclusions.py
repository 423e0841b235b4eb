"""What a user should conclude: a sentence per purpose, made of recorded numbers; None if a number is missing.

A sentence compares models over the seeds that all of them were measured with.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import megabytes
from salaad.config.methods import SETTINGS
from scripts.compare_methods import best_run
from scripts.reproduction.evidence import the_row
from scripts.reproduction.grid import SCALES
from scripts.results_tables.all_methods import bench_of
from scripts.results_tables.compared import FIFTH, FULL_RANK, HALF, LEVEL, Model, Trainings
from scripts.results_tables.measured import OTHER_RATES, REPORTED, named_seeds, not_copied, rows_of
from scripts.shares import SEARCHED

FIRST = "[first table](#methods-at-the-papers-tokens-per-parameter-nano-20)"
COSTS = f"[costs](elastic/README.md#costs-at-{REPORTED})"
METHODS = "[methods](methods/README.md#the-search)"
PAIR = ("salaad", "full_rank")
PREFERRED = (REPORTED, "nano")  # in order of preference: the longer training, if it is measured
ALL_SCALES = (*PREFERRED, "micro")
PAPERS_TOKENS = (REPORTED, "micro-20")  # 20 per parameter
NO_CHOICE = ("dense, ", *OTHER_RATES)  # beginnings of labels: smaller models, and full-rank training at other rates
ABOUT = (
    f"Figures are perplexities relative to the uncut full-rank model at {REPORTED}, unless they name another, with the "
    "seeds of the tables that they link (of other methods, sizes and rates relative to the mean of its seeds); those "
    "in parentheses are over the tokens that are not copied. *Half* and *a fifth* are shares of the compressible "
    f"parameters. Models less than {LEVEL:.0%} apart count as equally good; another seed could move a model of one "
    "seed by more."
)


def reported(results: Path) -> Trainings:
    """Return the trainings recorded at the reported scale, which has the paper's tokens per parameter."""
    return recorded(results, REPORTED)


def recorded(results: Path, scale: str) -> Trainings:
    """Return the trainings that compare_elastic.py recorded at a scale; there may be none yet."""
    path = results / "elastic" / f"{scale}.json"
    return Trainings(rows_of(path) if path.exists() else ())


def conclusions(results: Path) -> list[str]:
    """Return the sentences whose numbers are recorded; each names the page that has them."""
    found = [sentence(results) for sentence in SENTENCES]
    return [sentence for sentence in found if sentence is not None]


def full_size(results: Path) -> str | None:
    """Return the sentence on what to train for the best model of full size, and on what SALAAD's X costs."""
    trainings = reported(results)
    bench = _json(bench_of(results, REPORTED))
    costs = {
        label: cost
        for label in trainings.labels
        if not label.startswith(NO_CHOICE) and (cost := trainings.over(Model(label))) is not None
    }
    if "SALAAD" not in costs or bench is None:
        return None
    best = min(costs, key=costs.get)
    better = costs[best] <= -LEVEL
    how = f"train {best} ({costs[best]:+.1%})" if better else f"train full-rank, as no method is {LEVEL:.0%} better"
    methods = dict(bench["methods"])
    methods["salaad"] = methods.get("SALAAD", methods["salaad"])  # timed with the settings of the rows, if it was
    state = {name: megabytes(methods[name]["optimizer_bytes"] + methods[name]["method_bytes"]) for name in PAIR}
    searched = Model(SEARCHED)
    more = ""
    if trainings.seeds(searched):
        besides = Trainings(trainings.rows, not_copied).over(searched)
        copies = besides is not None and trainings.over(searched) <= -LEVEL < besides
        more = (
            f" At the best rates of its search full-rank training is {_with_others(trainings, searched)} with "
            f"{named_seeds(trainings.seeds(searched))}{', as it copies more' if copies else ''}."
        )
    longer = methods["salaad"]["over_full_rank"]
    return (
        f"**The best model at full size**: {how}.{more} SALAAD's X is {_with_others(trainings, Model('SALAAD'))}; its "
        f"steps take {longer:.2f} times as long, and optimizer and method keep {state['salaad']} in memory instead of "
        f"{state['full_rank']} ({FIRST})."
    )


def others(results: Path) -> str | None:
    """Return the sentence on the other methods trained in full, the best first, and on dense models of their sizes."""
    trainings = reported(results)
    costs = {method: over for method in SETTINGS if (over := trainings.over(Model(method))) is not None}
    if not costs:
        return None
    named = [f"{method} {_with_others(trainings, Model(method))}" for method in sorted(costs, key=costs.get)]
    named += [
        f"a dense model of {method}'s size {_with_others(trainings, dense)}"
        for method in costs
        if trainings.seeds(dense := Model(f"dense, as {method}"))
    ]
    better = f"none is {LEVEL:.0%} better than full-rank training: " if min(costs.values()) > -LEVEL else ""
    return f"**Other methods** after as many tokens: {better}{', '.join(named)} ({FIRST})."


def many_sizes(results: Path) -> str | None:
    """Return the sentence on cuts without text, of SALAAD and of a full-rank model."""
    found = _rivals(reported(results), "cut, head", "rpca, head")
    if found is None:
        return None
    advice, ours, theirs = found
    return (
        f"**Many sizes, no text**: {advice}. Cut to half and to a fifth, SALAAD's model is {ours}; a full-rank "
        f"model, split by robust PCA and cut with the same tools, is {theirs} ({FIRST})."
    )


def many_sizes_with_text(results: Path) -> str | None:
    """Return the sentence on one elastic folder, matched and distilled."""
    trainings = reported(results)
    found, costs = _rivals(trainings, "head, tuned", "rpca, head, tuned"), trainings.costs("SALAAD", "head, tuned")
    if found is None or costs is None:
        return None
    advice, ours, theirs = found
    return (
        f"**Many sizes, with text**: {advice}; then make one folder of all sizes ({megabytes(costs[1])}), "
        f"matched and distilled on a twentieth of the tokens, for {costs[0]:.0%} of the training's operations. Half "
        f"and a fifth are {ours} in SALAAD's folder, and {theirs} in one made of the full-rank model ({FIRST}, "
        f"{COSTS})."
    )


def trained_small(results: Path) -> str | None:
    """Return the sentence on small dense models: what they reach and cost beside cuts of SALAAD's model."""
    trainings = reported(results)
    dense = [Model(f"dense, {share:g}") for share in (HALF, FIFTH)]
    cuts = [Model("SALAAD", "cut, head", share) for share in (HALF, FIFTH)]
    whole, *small = (trainings.operations(model.label) for model in (FULL_RANK, *dense))
    if None in (whole, *small) or not trainings.seeds(FULL_RANK, *dense, *cuts):
        return None
    differences = [trainings.over(ours, theirs) for ours, theirs in zip(cuts, dense, strict=True)]
    advice = _advice(differences, "a dense model of that size")
    if max(differences) <= -LEVEL:
        advice = "cut a large model, as for many sizes, instead of training a small one"
    reached = " and ".join(_with_others(trainings, model) for model in dense)
    operations = " and ".join(f"{one / whole:.0%}" for one in small)
    of_bytes = (
        next(iter(trainings.figures(one).values()))["bytes"] / next(iter(trainings.figures(cut).values()))["bytes"]
        for one, cut in zip(dense, cuts, strict=True)
    )
    return (
        f"**One size, known beforehand**: {advice}. Dense models trained at half and at a fifth are {reached} after as "
        f"many tokens, for {operations} of the large one's operations, and have "
        f"{' and '.join(f'{of:.0%}' for of in of_bytes)} of the bytes of SALAAD's cuts without text, which store "
        f"positions too ({FIRST}, {COSTS})."
    )


def few_tokens(results: Path) -> str | None:
    """Return the sentence on nano and micro, with a twentieth and a tenth of the tokens.

    None unless small dense models are better at nano.
    """
    trainings = recorded(results, "nano")
    pairs = [(Model("SALAAD", "cut, head", share), Model(f"dense, {share:g}")) for share in (HALF, FIFTH)]
    found = [trainings.over(*pair) for pair in pairs]
    if None in found or min(found) < LEVEL:
        return None
    return (
        f"**Few tokens** (1.1 per parameter, nano): train small. SALAAD's cuts to half and to a fifth are "
        f"{found[0]:+.1%} and {found[1]:+.1%} relative to dense models of their sizes ([elastic]"
        f"(elastic/README.md#nano)).{_at_micro(results, pairs)}"
    )


def _at_micro(results: Path, pairs: Sequence[tuple[Model, Model]]) -> str:
    """Return a sentence, after a space, on the same pairs at micro, and on cuts of a full-rank model; empty if none."""
    trainings = recorded(results, "micro")
    cuts = [ours._replace(label=FULL_RANK.label, way="rpca, head") for ours, _ in pairs]
    small, large = (
        [trainings.over(ours, other) for (ours, _), other in zip(pairs, others, strict=True)]
        for others in ([dense for _, dense in pairs], cuts)
    )
    if None in (*small, *large):
        return ""
    return (
        f" With 2 per parameter (micro) they are {small[0]:+.1%} and {small[1]:+.1%}, and {large[0]:+.1%} and "
        f"{large[1]:+.1%} relative to cuts of a full-rank model ([elastic](elastic/README.md#micro))."
    )


def way_to_cut(results: Path) -> str | None:
    """Return the sentence on HPA and our cut of one model, which is trained as in the paper."""
    ways = ("cut, head", "hpa", "hpa, head")
    models = [Model("SALAAD, as in the paper", way, share) for way in ways for share in (HALF, FIFTH)]
    for scale in ALL_SCALES:
        trainings = recorded(results, scale)
        if trainings.seeds(FULL_RANK, *models):
            over = trainings.all_over(models)
            ours, hpa, split = (f"{over[i]:+.1%} and {over[i + 1]:+.1%}" for i in (0, 2, 4))
            return (
                "**How to cut**: with the defaults, by energy with weighted entries, refined, the LM head split. The "
                f"paper's model, cut to half and to a fifth, is {ours} so, {hpa} by HPA at κ*, and {split} by HPA with "
                f"the head split ([elastic](elastic/README.md#{scale}))."
            )
    return None


def headline(results: Path) -> str | None:
    """Return the sentence on L + S against X and full-rank training, of every scale with the paper's tokens."""
    tables = {scale: _json(SCALES[scale].results_in(results) / "table1.json") for scale in PAPERS_TOKENS}
    told = [f"{_whole(table['rows'])} at {scale} ({_page(scale)})" for scale, table in tables.items() if table]
    return f"**The paper's L + S** is {'; '.join(told)}." if told else None


def _whole(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return what L + S is relative to X and to full-rank training, from the rows of Table 1."""
    X, whole = (the_row(rows, method="salaad", variant=name) for name in ("X", "L+S"))
    dense = the_row(rows, method="full_rank")
    of_x, of_dense = (whole["perplexity"]["mean"] / other["perplexity"]["mean"] - 1 for other in (X, dense))
    share = whole["parameters"]["mean"] / X["parameters"]["mean"]
    return (
        f"{of_x:+.1%} relative to X, with {share:.0%} of its parameters, and {of_dense:+.1%} relative to full-rank "
        "training"
    )


def bfloat16(results: Path) -> str | None:
    """Return the sentence on what training in bfloat16 costs SALAAD and full-rank training."""
    scale, measured = _first(results, "bf16")
    if measured is None:
        return None
    costs = {}
    for method in ("salaad", "full_rank"):
        rows = [the_row(measured["rows"], method=method, variant="X", precision=name) for name in ("bf16", "fp32")]
        costs[method] = rows[0]["perplexity"]["mean"] / rows[1]["perplexity"]["mean"] - 1
    return (
        f"**Weights in bfloat16** during training cost {costs['salaad']:+.1%} at {scale} for SALAAD's X, and "
        f"{costs['full_rank']:+.1%} for full-rank training, relative to the same in float32 ({_page(scale)})."
    )


def rates(results: Path) -> str | None:
    """Return the sentence on what a higher learning rate of embedding and head is worth, both searched."""
    searched = _json(results / "methods" / f"{REPORTED}.json")
    runs = [row for row in searched["methods"]["full_rank"]["search"] if row["variants"]] if searched else []
    runs = [row for row in runs if not row.get("settings")]  # which would count as a gain by the rates
    of_kind = {kind: [row for row in runs if (row["projection_lr"] == 1) is kind] for kind in (True, False)}
    if not all(of_kind.values()):
        return None
    one_rate, two_rates = (best_run(found)["variants"]["X"]["perplexity"] for found in of_kind.values())
    return (
        "**Before any method**: give embedding and head a higher learning rate than the projections. After an eighth "
        f"of the length, full-rank training with the best one rate for all is {one_rate / two_rates - 1:+.1%} relative "
        f"to that with the best two ({METHODS})."
    )


SENTENCES: Sequence[Callable[[Path], str | None]] = (
    full_size,
    others,
    many_sizes,
    many_sizes_with_text,
    trained_small,
    few_tokens,
    way_to_cut,
    headline,
    rates,
    bfloat16,
)


def _rivals(trainings: Trainings, ours: str, theirs: str) -> tuple[str, str, str] | None:
    """Return which to train, and half and a fifth of both as text; None if no seed has all.

    Args:
        trainings: the measurements.
        ours: the way to cut SALAAD's model.
        theirs: the way to cut the full-rank model.
    """
    cuts = [(Model("SALAAD", ours, share), Model("full-rank", theirs, share)) for share in (HALF, FIFTH)]
    models = [model for pair in cuts for model in pair]
    seeds = trainings.seeds(FULL_RANK, *models)
    if not seeds:
        return None
    common = Trainings([row for row in trainings.rows if row["seed"] in seeds])
    advice = _advice([common.over(*pair) for pair in cuts], "full-rank")
    return advice, *(" and ".join(_with_others(common, model) for model in side) for side in zip(*cuts, strict=True))


def _advice(differences: Sequence[float], rival: str) -> str:
    """Return what to train for half and for a fifth, from SALAAD's perplexities over the rival's, less 1."""
    half, fifth = ("either model" if abs(of) < LEVEL else "SALAAD" if of < 0 else rival for of in differences)
    return f"train {half}" if half == fifth else f"for half train {half}, for a fifth {fifth}"


def _with_others(trainings: Trainings, model: Model) -> str:
    """Return what a model is relative to full-rank training; in parentheses, if measured, over tokens not copied."""
    besides = Trainings(trainings.rows, not_copied).over(model)
    return f"{trainings.over(model):+.1%}" + ("" if besides is None else f" ({besides:+.1%})")


def _first(results: Path, item: str) -> tuple[str, Mapping[str, Any] | None]:
    """Return the first scale that has a result of this item, and the result; "" and None if none has."""
    for scale in PREFERRED:
        if (found := _json(SCALES[scale].results_in(results) / f"{item}.json")) is not None:
            return scale, found
    return "", None


def _page(scale: str) -> str:
    return f"[{scale}]({SCALES[scale].results_in(Path())}/README.md)"


def _json(path: Path) -> Mapping[str, Any] | None:
    return read_json(path) if path.exists() else None
