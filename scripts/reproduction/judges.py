"""What decides each claim of the paper: from the rows of the items to a verdict.

Every limit was set before the runs it judges, from the paper's own numbers where it prints any. A claim agrees only if
all its parts hold; those that do not are named in the note.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean
from typing import Any

from salaad.common.formats import millions
from salaad.evaluation.sweep import REMOVED, best, ways
from scripts.reproduction.evidence import (
    Row,
    by_seed,
    changes,
    changes_text,
    difference,
    distinct,
    finite,
    found_text,
    is_below,
    is_rising,
    is_structured,
    mean_of,
    mean_row,
    part_of,
    percent,
    ratios,
    spaced,
    span,
    span_of_gaps,
    spread_text,
    structure_text,
    the_row,
)

Results = Mapping[str, Mapping[str, Any]]  # item → its result JSON

LARGEST = 2**62  # stands for the size of L + S, above every budget
KNOBS = {"alpha": "Δα", "beta": "Δβ", "rho": "ρ"}


@dataclass(frozen=True)
class Verdict:
    """What a claim came to.

    Args:
        value: ours, in a short text with numbers.
        agrees: None where it is not measured.
        note: which part does not hold, and what else has to be known.
    """

    value: str
    agrees: bool | None
    note: str = ""


Judge = Callable[[Results], Verdict]


def verdict(value: str, parts: Mapping[str, bool], note: str = "") -> Verdict:
    """Agrees if every part holds; the note names those that do not."""
    failed = [part for part, holds in parts.items() if not holds]
    said = [f"does not hold: {'; '.join(failed)}"] if failed else []
    return Verdict(value, not failed, "; ".join([*said, *([note] if note else [])]))


def central(results: Results) -> Verdict:
    """L + S beside X, seed by seed."""
    X, whole = (the_row(results["table1"]["rows"], method="salaad", variant=name) for name in ("X", "L+S"))
    vanilla = the_row(results["table1"]["rows"], method="full_rank")
    worse, sizes = changes(whole["perplexity"], X["perplexity"]), ratios(whole["parameters"], X["parameters"])
    value = f"PPL {spread_text(whole['perplexity'])} for {spread_text(X['perplexity'])} of X ({changes_text(worse)}), "
    value += f"with {100 * mean_of(sizes):.1f} % of its parameters"
    parts = {
        "L + S at most 2 % above X in every seed": all(one <= 0.02 for one in worse),
        "at most 95 % of the parameters in every seed": all(one <= 0.95 for one in sizes),
    }
    cost = changes(X["perplexity"], vanilla["perplexity"])
    return verdict(value, parts, f"X itself stands {changes_text(cost)} from full-rank training")


def elastic(results: Results) -> Verdict:
    """SALAAD and vanilla + RPCA at every budget and seed, by the paper's cut; beside it by the best that can be had."""
    rows = results["flexible"]["rows"]
    X, whole = (_whole_models(rows, name) for name in ("X", "L+S"))
    hpa, fair = (_elastic_curves(rows, way) for way in ("HPA at κ*", "energy, refined"))
    steps = [max(_steps(whole | hpa, side)) for side in (0, 1)]
    wins, fair_wins = (sum(is_below(*pair) for pair in curve.values()) for curve in (hpa, fair))
    value = f"by HPA at κ*: below at {wins} of {len(hpa)} budgets × seeds, {span_of_gaps(hpa)}; by energy, refined: "
    value += f"below at {fair_wins} of {len(fair)}, {span_of_gaps(fair)}"
    parts = {
        "below vanilla + RPCA by HPA at every budget": wins == len(hpa),
        "smoother than vanilla + RPCA by HPA": is_below(*steps),
    }
    own, costs = (_over_own_X(curve, X) for curve in (hpa, fair))
    cheapest, dearest = ([percent(end(pair[side] for pair in costs) - 1) for side in (0, 1)] for end in (min, max))
    told = f"each beside its own X, SALAAD is below at {sum(is_below(*pair) for pair in own)} of {len(own)}; "
    told += f"largest step from L + S down, by HPA: ×{steps[0]:.2f}, vanilla + RPCA ×{steps[1]:.2f}; "
    told += "where both are cut by energy and refined, being below at every budget "
    told += f"{'holds' if fair_wins == len(fair) else 'does not hold'}: the cut alone "
    told += f"costs SALAAD {cheapest[0]} to {dearest[0]} of its X and vanilla {cheapest[1]} to {dearest[1]} "
    told += f"of its own; SALAAD's X stands {span_of_gaps(X)} from it"
    return verdict(value, parts, told)


Curve = dict[tuple[int, int], tuple[float, float]]  # (seed, budget) → perplexity of SALAAD and of vanilla + RPCA
DEPLOYED = ("SALAAD", "vanilla + RPCA")


def _whole_models(rows: Sequence[Row], variant: str) -> Curve:
    """A variant of both before any cut."""
    return {
        (seed, LARGEST): tuple(the_row(rows, label=one, seed=seed, variant=variant)["perplexity"] for one in DEPLOYED)
        for seed in distinct(rows, "seed")
    }


def _elastic_curves(rows: Sequence[Row], way: str) -> Curve:
    """Both at every budget, cut in one way."""
    curve = {}
    for seed in distinct(rows, "seed"):
        mine, other = (ways([r for r in rows if (r["label"], r["seed"]) == (one, seed)])[way] for one in DEPLOYED)
        curve |= {
            (seed, ours["budget"]): (ours["perplexity"], theirs["perplexity"])
            for ours, theirs in zip(mine, other, strict=True)
        }
    return curve


def _over_own_X(curve: Curve, X: Curve) -> list[tuple[float, float]]:
    """Each perplexity over that of the same seed's X."""
    return [tuple(finite(one / x) for one, x in zip(curve[key], X[key[0], LARGEST], strict=True)) for key in curve]


def _steps(curve: Curve, side: int) -> list[float]:
    """Factors of perplexity from each budget of a seed to the next smaller one."""
    factors = [1.0]
    for seed in {seed for seed, _ in curve}:
        falling = [curve[key][side] for key in sorted(curve, reverse=True) if key[0] == seed]
        factors += [finite(b / a) for a, b in pairwise(falling)]
    return factors


def kappa(results: Results) -> Verdict:
    """Where κ* lies over all budgets and seeds, and what one κ for all of them costs."""
    winners, costs = [], {}
    for seed in distinct(results["kappa"]["rows"], "seed"):
        rows = [row for row in results["kappa"]["rows"] if row["seed"] == seed]
        whole = the_row(rows, variant="L+S")["parameters"]
        for winner in best(rows):
            if winner["parameters"] <= (1 - REMOVED) * whole:  # where next to nothing is removed, no κ is best
                winners.append(winner["kappa"])
                for row in rows:
                    if row["budget"] == winner["budget"] and row["kappa"] is not None:
                        costs.setdefault(row["kappa"], []).append(row["perplexity"] / winner["perplexity"] - 1)
    if not winners:
        return Verdict(
            "every budget is about L + S or above, so nothing is removed", None, "give the scale smaller ones"
        )
    low, high = min(winners), max(winners)
    one = min(costs, key=lambda kappa: max(map(finite, costs[kappa])))
    parts = {"a band of at most 0.3": high - low <= 0.3 + 1e-9, "all of it above 0.5": low > 0.5 + 1e-9}
    value = f"κ* from {low:g} to {high:g}, {fmean(winners):.2f} on average of {len(winners)} budgets × seeds"
    return verdict(value, parts, f"κ = {one:g} everywhere costs at most {percent(max(map(finite, costs[one])))}")


def embedding(results: Results) -> Verdict:
    """With the embedding beside without, and how little of the embedding is left."""
    rows, value, parts = results["embedding"]["rows"], [], {}
    for name in ("X", "L+S"):
        inside, outside = (
            the_row(rows, variant=name, blocks=label) for label in ("embedding included", "without the embedding")
        )
        worse = changes(inside["perplexity"], outside["perplexity"])
        value.append(f"{spaced(name)} {changes_text(worse)}")
        parts[f"{spaced(name)} at most 1 % above that without, in the mean"] = mean_of(worse) <= 0.01
        if name == "L+S":
            sizes = [one["parameters"]["mean"] for one in (inside, outside)]
            value.append(f"{millions(sizes[0])} for {millions(sizes[1])}")
            parts["fewer parameters"] = all(a < b for a, b in by_seed(inside["parameters"], outside["parameters"]))
    block = the_row(rows, variant="L+S", blocks="embedding included")
    own = {key: block[f"embedding_{key}"] for key in ("rank_ratio", "density")}
    told = (f"{key.replace('_', ' ')} {spread_text(spread)}" for key, spread in own.items())
    value.append(f"the embedding ends at {', '.join(told)}")
    largest = {key: max(map(finite, spread["values"])) for key, spread in own.items()}
    parts["the embedding ends at a rank ratio and a density of at most 0.3 in every seed"] = is_structured(largest)
    cut = [the_row(rows, variant="L̃+S̃", blocks=label) for label in ("embedding included", "without the embedding")]
    found = [spread_text(one["perplexity"]) for one in cut]
    sizes = [millions(one["parameters"]["mean"]) for one in cut]
    told = f"cut by HPA, {found[0]} at {sizes[0]} with the embedding among the blocks, {found[1]} at {sizes[1]} without"
    return verdict("; ".join(value), parts, told)


def lm_head(results: Results) -> Verdict:
    """What the head as a block becomes and costs at two ρ, beside the embedding at the same two, over the seeds."""
    rows = sorted(results["lm_head"]["rows"], key=lambda row: row["rho"])
    rhos = distinct(rows, "rho")
    heads, embeddings = (
        [mean_row(row for row in rows if row["block"] == block and row["rho"] == rho) for rho in rhos]
        for block in ("LM head", "embedding")
    )
    value, parts = [], {}
    for rho, head, without in zip(rhos, heads, embeddings, strict=True):
        worse = [head[name] / without[name] - 1 for name in ("X", "L+S")]
        value.append(f"{rho:g}·ρ: {structure_text(head)}, X {percent(worse[0])}, L + S {percent(worse[1])}")
        parts[f"no benign structure at {rho:g}·ρ"] = not (is_structured(head) and max(worse) <= 0.01)
        parts[f"the embedding no less structured than the head at {rho:g}·ρ"] = all(
            without[key] <= head[key] for key in ("rank_ratio", "density")
        )
    rises = [some[-1]["loss"] - some[0]["loss"] for some in (heads, embeddings)]
    courses = [[row for row in rows if row["seed"] == seed] for seed in distinct(rows, "seed")]
    ends = [
        [row for row in course if row["block"] == block] for course in courses for block in ("LM head", "embedding")
    ]
    parts["the larger ρ lowers the head's rank ratio and density in every seed"] = all(
        some[-1][key] < some[0][key] for some in ends[::2] for key in ("rank_ratio", "density")
    )
    value.append(
        f"training loss {difference(rises[0])} from the smaller to the larger ρ, "
        f"{difference(rises[1])} without the head"
    )
    parts["the larger ρ costs more training loss with the head, by more than 0.01"] = rises[0] - rises[1] > 0.01
    parts["it does so in every seed"] = all(
        head[-1]["loss"] - head[0]["loss"] > without[-1]["loss"] - without[0]["loss"]
        for head, without in zip(ends[::2], ends[1::2], strict=True)
    )
    structures = ", ".join(f"{structure_text(row)} at {row['rho']:g}·ρ" for row in embeddings)
    return verdict("; ".join(value), parts, f"the embedding: {structures}")


def knobs(results: Results) -> Verdict:
    """The grid of three decades: what the larger of two values does to size and perplexity; beside it, finer steps."""
    judged = _one_apart(results["ablation130m_pairs"]["rows"])
    finer = [_one_apart(results[name]["rows"]) for name in ("ablation350m", "ablation350m_rho", "ablation130m")]
    value, parts, told = [], {}, []
    for name in KNOBS.values():
        shares = _trades(judged[name])
        value.append(f"{name}: {_told(shares)} of {len(judged[name])} pairs")
        parts |= {f"{name}: {what} in three quarters of the pairs": part >= 0.75 for what, part in shares.items()}
        others = [pair for grid in finer for pair in grid[name]]
        told.append(f"{name} {_told(_trades(others))} of {len(others)}")
    return verdict("; ".join(value), parts, f"chance would give 50 %; in the other ablations: {'; '.join(told)}")


def _one_apart(rows: Sequence[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Knob → the pairs of settings that differ in it alone, the smaller value first."""
    grid = {tuple(row[knob] for knob in KNOBS): row for row in rows}
    pairs: dict[str, list[tuple[Row, Row]]] = {name: [] for name in KNOBS.values()}
    for one, other in combinations(sorted(grid), 2):
        differing = [name for name, a, b in zip(KNOBS.values(), one, other, strict=True) if a != b]
        if len(differing) == 1:
            pairs[differing[0]].append((grid[one], grid[other]))
    return pairs


def _trades(pairs: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    """In which part of the pairs the larger value gives a smaller L + S, a higher X, a higher L + S."""
    return {
        "smaller": part_of(larger["parameters"] < smaller["parameters"] for smaller, larger in pairs),
        "X higher": part_of(larger["X"] > smaller["X"] for smaller, larger in pairs),
        "L + S higher": part_of(larger["L+S"] > smaller["L+S"] for smaller, larger in pairs),
    }


def _told(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {100 * part:.0f} %" for what, part in shares.items())


def frequency(results: Results) -> Verdict:
    """What more frequent ADMM updates do to structure, error and loss, in every seed."""
    rows = sorted(results["frequency"]["rows"], key=lambda row: row["K"])
    seeds = [[row for row in rows if row["seed"] == seed] for seed in distinct(rows, "seed")]
    Ks = distinct(rows, "K")
    means = [mean_row(row for row in rows if row["K"] == K) for K in Ks]
    shown = {
        "loss": [f"{row['loss']:.3f}" for row in means],
        "mean δ": [f"{row['delta']:.2f}" for row in means],
        "rank ratio": [f"{row['rank_ratio']:.2f}" for row in means],
        "L + S": [millions(row["parameters"]) for row in means],
    }
    value = f"K/J = {', '.join(map(str, Ks))}: "
    courses = {
        key: [[row[key] for row in mine] for mine in seeds] for key in ("rank_ratio", "parameters", "delta", "loss")
    }
    parts = {
        "rank ratio grows with K": all(map(is_rising, courses["rank_ratio"])),
        "parameters of L + S grow with K": all(map(is_rising, courses["parameters"])),
        "mean δ falls with K": all(is_rising(course[::-1]) for course in courses["delta"]),
        "final losses within 3 %": all(max(losses) <= 1.03 * min(losses) for losses in courses["loss"]),
    }
    return verdict(value + "; ".join(f"{what} {', '.join(cells)}" for what, cells in shown.items()), parts)


def bounded(results: Results) -> Verdict:
    """The course of the mean reconstruction error over training, in every seed."""
    rows = sorted(results["dynamics"]["rows"], key=lambda row: row["step"])
    courses = [[row for row in rows if row["seed"] == seed] for seed in distinct(rows, "seed")]
    phases = [_phases([row["delta"] for row in course]) for course in courses]
    parts = {
        "in the second half never above 1.5 times the largest of the first": all(
            late <= 1.5 * early < math.inf for early, late, _, _ in phases
        ),
        "last quarter at most 10 % above the third": all(last <= 1.1 * third for *_, third, last in phases),
    }
    early, late, third, last = (span(values) for values in zip(*phases, strict=True))
    value = f"mean δ: at most {early} in the first half, {late} in the second; on average {third} in the "
    value += f"third quarter, {last} in the last"
    errors = span([100 * course[-1]["error"] for course in courses])
    return verdict(value, parts, f"at the end {errors} % of the weights' norm")


def _phases(deltas: Sequence[float]) -> tuple[float, float, float, float]:
    """Largest value of the first and of the second half, mean of the third and of the last quarter."""
    half, quarter = max(1, len(deltas) // 2), max(1, len(deltas) // 4)
    early, late = max(map(finite, deltas[:half])), max(map(finite, deltas[half:] or deltas))
    return early, late, mean_of(deltas[half:-quarter] or deltas), mean_of(deltas[-quarter:])


def bf16(results: Results) -> Verdict:
    """Training in bfloat16 beside float32, of both methods."""
    rows, value, parts = results["bf16"]["rows"], [], {}
    for method, name in (("salaad", "X"), ("salaad", "L+S"), ("full_rank", "X")):
        half, full = (the_row(rows, method=method, variant=name, precision=precision) for precision in ("bf16", "fp32"))
        worse = changes(half["perplexity"], full["perplexity"])
        label = spaced(name) if method == "salaad" else "full-rank"
        value.append(
            f"{label} {spread_text(half['perplexity'])} for {spread_text(full['perplexity'])} ({changes_text(worse)})"
        )
        if method == "salaad":
            parts[f"{spaced(name)} at most 10 % above float32, in the mean"] = mean_of(worse) <= 0.1
    return verdict("; ".join(value), parts)


def rpca(results: Results) -> Verdict:
    """What robust PCA finds in vanilla weights, in noise, and in weights that have a structure to be found."""
    vanilla, salaad = (results[f"rpca_{name}"]["rows"] for name in ("vanilla", "salaad"))
    keys = ("rank_ratio", "density")
    split = [row for row in results["flexible"]["rows"] if row["label"] == "vanilla + RPCA"]
    sizes = [
        the_row(split, seed=seed, variant="L+S")["parameters"] / the_row(split, seed=seed, variant="X")["parameters"]
        for seed in distinct(split, "seed")
    ]
    to_noise = {
        key: fmean(row[key] for row in vanilla) / fmean(row[f"control_{key}"] for row in vanilla) for key in keys
    }
    away = {key: fmean(abs(row[key] - row[f"true_{key}"]) for row in salaad) for key in keys}
    value = f"vanilla: {found_text(vanilla)}, in noise {found_text(vanilla, 'control_')}, "
    value += f"and L + S of {100 * mean_of(sizes):.0f} % of X's parameters; SALAAD: found {found_text(salaad)}, "
    value += f"trained {found_text(salaad, 'true_')}, off by {away['rank_ratio']:.3f} and {away['density']:.3f} a block"
    parts = {
        "vanilla's L + S is no smaller than X": min(sizes) >= 1,
        "rank ratio of vanilla at least 0.8 of noise's": to_noise["rank_ratio"] >= 0.8,
        "density of vanilla at least 0.8 of noise's": to_noise["density"] >= 0.8,
        "SALAAD's rank ratio found to 0.1": away["rank_ratio"] <= 0.1,
        "SALAAD's density found to 0.1": away["density"] <= 0.1,
    }
    return verdict(value, parts)
