"""The judges of the claims about deployment: the elastic curve, small dense models, κ, robust PCA."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from statistics import fmean

from salaad.common.formats import millions
from salaad.evaluation.sweep import REMOVED, best, ways
from scripts.reproduction import criteria
from scripts.reproduction.evidence import (
    EVERY_SEED,
    NOT_SHOWN,
    Lacking,
    Number,
    Row,
    difference,
    each_seed,
    finite,
    found_text,
    is_below,
    percent,
    percent_span,
    shares,
    span,
    the_row,
    values_of,
)
from scripts.reproduction.judges import STRUCTURE, Results
from scripts.reproduction.records import KAPPA_STEP
from scripts.shares import is_same_size

Curve = dict[tuple[int, int], tuple[float, float]]  # (seed, budget) → perplexity of SALAAD and of vanilla + RPCA

LARGEST = 2**62  # stands for the budget of a model that is not cut, above every budget
DEPLOYED = ("SALAAD", "vanilla + RPCA")
_OF_A_STEP = 1e-9  # tolerance of κ, which is a multiple of 0.05 only up to rounding


def elastic_by_hpa(results: Results) -> list[Number]:
    """Judge SALAAD against vanilla + RPCA at every budget below L + S and every seed, cut by HPA as in the paper."""
    return _elastic(results, "HPA at κ*")


def elastic_by_energy(results: Results) -> list[Number]:
    """Judge SALAAD against vanilla + RPCA at every budget below L + S and every seed, cut by energy and refined."""
    return _elastic(results, "energy, refined")


def _elastic(results: Results, way: str) -> list[Number]:
    rows = results["flexible"]["rows"]
    X, whole = (_whole_models(rows, name) for name in ("X", "L+S"))
    curve = _elastic_curve(rows, way)
    if not curve:
        return [Number("cuts below L + S, over all budgets and seeds", "0", "at least 1", NOT_SHOWN)]
    steps = [max(_steps(whole | curve, side)) for side in (0, 1)]
    wins, own = sum(is_below(*pair) for pair in curve.values()), _over_own_X(curve, X)
    least = criteria.CUT_PARAMETERS * the_row(rows, label=DEPLOYED[0], variant="X")["parameters"]
    costs = [pair[0] - 1 for (_, budget), pair in zip(curve, own, strict=True) if budget >= least]
    return [
        *_text_of_kappa(rows, way),
        Number(
            "budgets below L + S, over all seeds, at which PPL is below vanilla + RPCA's",
            f"{wins} of {len(curve)}",
            "all",
            wins == len(curve),
        ),
        Number("PPL of SALAAD over vanilla + RPCA", _gaps(curve)),
        Number(
            "largest ratio of PPL of neighbouring sizes from L + S down, SALAAD's and vanilla + RPCA's",
            f"×{steps[0]:.2f}, ×{steps[1]:.2f}",
            "the first below the second",
            is_below(*steps),
        ),
        Number(
            f"PPL of SALAAD over its own X with at least {criteria.CUT_PARAMETERS:.0%} of its parameters",
            percent_span(costs) if costs else "not measured",
            f"at most {percent(criteria.CUT_OVER_X)} {EVERY_SEED}",
            max(costs) <= criteria.CUT_OVER_X if costs else NOT_SHOWN,
        ),
        *(
            Number(f"PPL of {name} over its own X", percent_span([pair[side] - 1 for pair in own]))
            for side, name in enumerate(DEPLOYED)
        ),
        Number("PPL of SALAAD's X over vanilla's X", _gaps(X)),
    ]


def _text_of_kappa(rows: Sequence[Row], way: str) -> list[Number]:
    """Judge on which text κ* was chosen: the rows of a budget have every κ where that is the text they are of."""
    if not way.startswith("HPA"):
        return []
    cells = [(row["label"], row["seed"], row["budget"]) for row in rows if row["kappa"] is not None]
    same = len(cells) > len(set(cells))
    text = "the text of the measurement" if same else "other text"
    return [Number("text on which κ* is chosen", text, "not that of the measurement", NOT_SHOWN if same else True)]


def against_small_dense(results: Results) -> list[Number]:
    """Judge every cut of one training beside the dense model that was trained at its size, where there is one."""
    rows = results["one_training"]["rows"]
    salaad, _, dense = ([row for row in rows if row["label"] == label] for label in values_of(rows, "label"))
    whole = the_row(salaad, variant="L+S")["parameters"]
    cuts = [row for row in salaad if row["budget"] and row["budget"] < whole]
    pairs = [(cut, min(dense, key=lambda row, of=cut: abs(row["parameters"] - of["budget"]))) for cut in cuts]
    return beside_dense(
        [
            (cut["budget"], cut["perplexity"], rival["perplexity"])
            if is_same_size(rival["parameters"], cut["budget"])
            else (cut["budget"], None, None)
            for cut, rival in pairs
        ]
    )


def beside_dense(sizes: Sequence[tuple[int, float | None, float | None]]) -> list[Number]:
    """Return a number per size, given as parameters and the perplexities of the cut and of the dense model, or None."""
    numbers = []
    for parameters, cut, dense in sizes:
        number = partial(Number, f"PPL of the cut over the dense model's at {millions(parameters)}", limit="below 0 %")
        if None in (cut, dense):
            numbers.append(number("a model of this size was not measured", holds=NOT_SHOWN))
        else:
            holds = is_below(cut, dense) if isfinite(dense) else NOT_SHOWN
            numbers.append(number(percent(cut / dense - 1), holds=holds))
    return numbers or [Number("budgets below L + S", "0", "at least 1", NOT_SHOWN)]


def _whole_models(rows: Sequence[Row], variant: str) -> Curve:
    """Return the perplexities of X or L+S before any cut, for every seed, with LARGEST as the budget."""
    return {
        (seed, LARGEST): tuple(the_row(rows, label=one, seed=seed, variant=variant)["perplexity"] for one in DEPLOYED)
        for seed in values_of(rows, "seed")
    }


def _elastic_curve(rows: Sequence[Row], way: str) -> Curve:
    """Return the perplexities at every seed and every budget below SALAAD's L + S, cut in one way."""
    curve = {}
    for seed in values_of(rows, "seed"):
        whole = the_row(rows, label=DEPLOYED[0], seed=seed, variant="L+S")["parameters"]
        mine, other = (ways([r for r in rows if (r["label"], r["seed"]) == (one, seed)])[way] for one in DEPLOYED)
        curve |= {
            (seed, ours["budget"]): (ours["perplexity"], theirs["perplexity"])
            for ours, theirs in zip(mine, other, strict=True)
            if ours["budget"] < whole
        }
    return curve


def _gaps(curve: Curve) -> str:
    """Return the least and the largest relative change of perplexity from vanilla + RPCA to SALAAD, as text."""
    return percent_span([ours / theirs - 1 for ours, theirs in curve.values()])


def _over_own_X(curve: Curve, X: Curve) -> list[tuple[float, float]]:
    """Return each perplexity over that of X of the same model and seed."""
    return [tuple(finite(one / x) for one, x in zip(curve[key], X[key[0], LARGEST], strict=True)) for key in curve]


def _steps(curve: Curve, side: int) -> list[float]:
    """Return 1 and, of all seeds, the factors of perplexity from each budget to the next smaller one.

    `side` is 0 for SALAAD and 1 for vanilla + RPCA.
    """
    factors = [1.0]
    for seed in {seed for seed, _ in curve}:
        falling = [curve[key][side] for key in sorted(curve, reverse=True) if key[0] == seed]
        factors += [finite(b / a) for a, b in pairwise(falling)]
    return factors


def kappa(results: Results) -> list[Number]:
    """Where κ* lies over all budgets and seeds, and what one κ for all of them costs."""
    winners, costs = [], {}
    coarse = max(b - a for a, b in pairwise(sorted({row["kappa"] for row in results["kappa"]["rows"]} - {None})))
    if coarse > KAPPA_STEP + _OF_A_STEP:
        raise Lacking(f"a grid of κ with steps of {KAPPA_STEP}")
    for rows in each_seed(results["kappa"]["rows"]):
        whole = the_row(rows, variant="L+S")["parameters"]
        for winner in best(rows):
            if winner["parameters"] <= (1 - REMOVED) * whole:  # where next to nothing is removed, no κ is best
                winners.append(winner["kappa"])
                for row in rows:
                    if row["budget"] == winner["budget"] and row["kappa"] is not None:
                        costs.setdefault(row["kappa"], []).append(row["perplexity"] / winner["perplexity"] - 1)
    numbers = where_kappa_lies(winners)
    if not winners:
        return numbers
    one = min(costs, key=lambda kappa: max(map(finite, costs[kappa])))
    return [
        *numbers,
        Number(
            f"largest rise of PPL with κ = {one:g} everywhere, on the half on which κ* is chosen",
            percent(max(map(finite, costs[one]))),
        ),
    ]


def where_kappa_lies(winners: Sequence[float]) -> list[Number]:
    """Judge κ* of all cuts that remove enough of L + S to have one."""
    counted = Number(f"cuts that remove at least {REMOVED:.0%} of L + S, over all budgets and seeds", f"{len(winners)}")
    if not winners:
        return [counted]
    low, high = min(winners), max(winners)
    return [
        counted,
        Number(
            "κ*",
            span(winners),
            f"in a band of at most {criteria.KAPPA_BAND}",
            high - low <= criteria.KAPPA_BAND + _OF_A_STEP,
        ),
        Number(
            "smallest κ*",
            f"{low:g}",
            f"at least {criteria.LEAST_KAPPA}",
            low >= criteria.LEAST_KAPPA - _OF_A_STEP,
        ),
        Number("mean κ*", f"{fmean(winners):.2f}"),
    ]


def rpca(results: Results) -> list[Number]:
    """Judge what robust PCA finds in vanilla weights, against noise, and in SALAAD weights, against their L and S."""
    vanilla, both = (results[f"rpca_{name}"]["rows"] for name in ("vanilla", "salaad"))
    salaad, cut = ([row for row in both if row.get("of", "L+S") == of] for of in ("L+S", "L̃+S̃"))
    split = [row for row in results["flexible"]["rows"] if row["label"] == "vanilla + RPCA"]
    sizes = [
        the_row(rows, variant="L+S")["parameters"] / the_row(rows, variant="X")["parameters"]
        for rows in each_seed(split)
    ]
    numbers = [
        Number(
            "parameters of vanilla's L + S over X", shares(sizes, 0), f"at least 100 % {EVERY_SEED}", min(sizes) >= 1
        ),
        Number("vanilla: rank ratio and density found", found_text(vanilla)),
        Number("Gaussian noise: rank ratio and density found", found_text(vanilla, "control_")),
        Number("SALAAD: rank ratio and density found", found_text(salaad)),
        Number("SALAAD: true rank ratio and density", found_text(salaad, "true_")),
    ]
    if cut:
        numbers.append(Number("SALAAD, cut as in Table 1: rank ratio and density found", found_text(cut)))
        numbers.append(Number("SALAAD, cut as in Table 1: true rank ratio and density", found_text(cut, "true_")))
    for key in STRUCTURE:
        to_noise = fmean(row[key] for row in vanilla) / fmean(row[f"control_{key}"] for row in vanilla)
        name = key.replace("_", " ")
        least = criteria.VANILLA_OVER_NOISE
        numbers.append(
            Number(f"{name} of vanilla over noise", f"{to_noise:.2f}", f"at least {least}", to_noise >= least)
        )
        for label, rows in (("L + S", salaad), ("the cut", cut)):
            numbers += _found_less_true(f"{name} of SALAAD, {label}: found minus true", key, rows)
    return numbers


def _found_less_true(what: str, key: str, rows: Sequence[Row]) -> list[Number]:
    """Judge the error of the found `key`: its mean over the blocks, as in the paper, and its mean absolute value."""
    most = criteria.FOUND_LESS_TRUE[key]
    mean = (f"{what}, mean", f"at most ±{most}")
    absolute = (f"{what}, mean absolute value", f"at most {criteria.FOUND_OF_A_BLOCK}")
    if not rows:
        return [Number(name, "not measured", limit, NOT_SHOWN) for name, limit in (mean, absolute)]
    away = [row[key] - row[f"true_{key}"] for row in rows]
    overall, of_a_block = fmean(away), fmean(map(abs, away))
    return [
        Number(mean[0], difference(overall), mean[1], abs(overall) <= most),
        Number(absolute[0], f"{of_a_block:.3f}", absolute[1], of_a_block <= criteria.FOUND_OF_A_BLOCK),
    ]
