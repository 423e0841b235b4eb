"""What decides each claim of the paper: from the rows of the items to a verdict.

Every limit was set before the runs it judges, from the paper's own numbers where it prints any. A claim agrees only if
all its parts hold; those that do not are named in the note.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import fmean, pstdev
from typing import Any

from salaad.sweep import REMOVED, best, ways
from salaad.tables import millions

Row = Mapping[str, Any]
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


def verdict(value: str, parts: Mapping[str, bool], note: str = "") -> Verdict:
    """Agrees if every part holds; the note names those that do not."""
    failed = [part for part, holds in parts.items() if not holds]
    said = [f"does not hold: {'; '.join(failed)}"] if failed else []
    return Verdict(value, not failed, "; ".join([*said, *([note] if note else [])]))


def central(results: Results) -> Verdict:
    """L + S beside X, seed by seed."""
    X, whole = (_of(results["table1"]["rows"], method="salaad", variant=name) for name in ("X", "L+S"))
    vanilla = _of(results["table1"]["rows"], method="full_rank")
    worse, sizes = _relative(whole["perplexity"], X["perplexity"]), _shares(whole["parameters"], X["parameters"])
    value = f"PPL {_number(whole['perplexity'])} for {_number(X['perplexity'])} of X ({_percent(worse)}), "
    value += f"with {100 * _mean(sizes):.1f} % of its parameters"
    parts = {
        "L + S at most 2 % above X in every seed": all(one <= 0.02 for one in worse),
        "at most 95 % of the parameters in every seed": all(one <= 0.95 for one in sizes),
    }
    cost = _relative(X["perplexity"], vanilla["perplexity"])
    return verdict(value, parts, f"X itself stands {_percent(cost)} from full-rank training")


def elastic(results: Results) -> Verdict:
    """SALAAD and vanilla + RPCA at every budget and seed, by the paper's cut; beside it by the best that can be had."""
    rows = results["flexible"]["rows"]
    curves: dict[str, dict[tuple[int, int], tuple[float, float]]] = {}
    X: dict[int, tuple[float, float]] = {}
    whole: dict[tuple[int, int], tuple[float, float]] = {}
    for seed in _distinct(rows, "seed"):
        mine, other = (
            ways([row for row in rows if row["label"] == label and row["seed"] == seed])
            for label in ("SALAAD", "vanilla + RPCA")
        )
        X[seed], whole[seed, LARGEST] = (
            tuple(
                _of(rows, label=label, seed=seed, variant=name)["perplexity"] for label in ("SALAAD", "vanilla + RPCA")
            )
            for name in ("X", "L+S")
        )
        for way in mine:
            pairs = zip(mine[way], other[way], strict=True)
            curves.setdefault(way, {}).update(
                {(seed, ours["budget"]): (ours["perplexity"], theirs["perplexity"]) for ours, theirs in pairs}
            )
    hpa, fair = curves["HPA at κ*"], curves["energy, refined"]
    steps = [max(_steps(whole | hpa, side)) for side in (0, 1)]
    below = {name: sum(_below(*pair) for pair in curve.values()) for name, curve in (("HPA", hpa), ("fair", fair))}
    value = f"by HPA at κ*: below at {below['HPA']} of {len(hpa)} budgets × seeds, {_gaps(hpa)}; by energy, refined: "
    value += f"below at {below['fair']} of {len(fair)}, {_gaps(fair)}"
    parts = {
        "below vanilla + RPCA by HPA at every budget": below["HPA"] == len(hpa),
        "smoother than vanilla + RPCA by HPA": _below(*steps),
    }
    costs = [[_finite(pair[side] / X[key[0]][side] - 1) for key, pair in fair.items()] for side in (0, 1)]
    own = {key: tuple(pair[side] / X[key[0]][side] for side in (0, 1)) for key, pair in hpa.items()}
    holds = "holds" if below["fair"] == len(fair) else "does not hold"
    told = f"each beside its own X, SALAAD is below at {sum(_below(*pair) for pair in own.values())} of {len(own)}; "
    told += (
        f"largest step from L + S down, by HPA: ×{steps[0]:.2f}, vanilla + RPCA ×{steps[1]:.2f}; where both are cut "
    )
    told += f"by energy and refined, being below at every budget {holds}: the cut alone "
    told += f"costs SALAAD {_signed(min(costs[0]))} to {_signed(max(costs[0]))} of its X and vanilla "
    told += f"{_signed(min(costs[1]))} to {_signed(max(costs[1]))} of its own; SALAAD's X stands {_gaps(X)} from it"
    return verdict(value, parts, told)


def kappa(results: Results) -> Verdict:
    """Where κ* lies over all budgets and seeds, and what one κ for all of them costs."""
    winners, costs = [], {}
    for seed in _distinct(results["kappa"]["rows"], "seed"):
        rows = [row for row in results["kappa"]["rows"] if row["seed"] == seed]
        whole = _of(rows, variant="L+S")["parameters"]
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
    one = min(costs, key=lambda kappa: max(map(_finite, costs[kappa])))
    parts = {
        "a band of at most 0.3": high - low <= 0.3 + 1e-9,
        "all of it above 0.5": low > 0.5 + 1e-9,
    }
    value = f"κ* from {low:g} to {high:g}, {fmean(winners):.2f} on average of {len(winners)} budgets × seeds"
    return verdict(value, parts, f"κ = {one:g} everywhere costs at most {_signed(max(map(_finite, costs[one])))}")


def embedding(results: Results) -> Verdict:
    """With the embedding beside without, and how little of the embedding is left."""
    rows, value, parts = results["embedding"]["rows"], [], {}
    for name in ("X", "L+S"):
        inside, outside = (
            _of(rows, variant=name, blocks=label) for label in ("embedding included", "without the embedding")
        )
        worse = _relative(inside["perplexity"], outside["perplexity"])
        value.append(f"{_spaced(name)} {_percent(worse)}")
        parts[f"{_spaced(name)} at most 1 % above that without, in the mean"] = _mean(worse) <= 0.01
        if name == "L+S":
            sizes = [one["parameters"]["mean"] for one in (inside, outside)]
            value.append(f"{millions(sizes[0])} for {millions(sizes[1])}")
            parts["fewer parameters"] = all(a < b for a, b in _pairs(inside["parameters"], outside["parameters"]))
    block = _of(rows, variant="L+S", blocks="embedding included")
    own = {key: block[f"embedding_{key}"] for key in ("rank_ratio", "density")}
    told = (f"{key.replace('_', ' ')} {_number(spread)}" for key, spread in own.items())
    value.append(f"the embedding ends at {', '.join(told)}")
    largest = {key: max(map(_finite, spread["values"])) for key, spread in own.items()}
    parts["the embedding ends at a rank ratio and a density of at most 0.3 in every seed"] = _structured(largest)
    cut = [_of(rows, variant="L̃+S̃", blocks=label) for label in ("embedding included", "without the embedding")]
    found = [_number(one["perplexity"]) for one in cut]
    sizes = [millions(one["parameters"]["mean"]) for one in cut]
    told = f"cut by HPA, {found[0]} at {sizes[0]} with the embedding among the blocks, {found[1]} at {sizes[1]} without"
    return verdict("; ".join(value), parts, told)


def lm_head(results: Results) -> Verdict:
    """What the head as a block becomes and costs at two ρ, beside the embedding at the same two, over the seeds."""
    rows = sorted(results["lm_head"]["rows"], key=lambda row: row["rho"])
    rhos = _distinct(rows, "rho")
    heads, embeddings = (
        [_average(row for row in rows if row["block"] == block and row["rho"] == rho) for rho in rhos]
        for block in ("LM head", "embedding")
    )
    value, parts = [], {}
    for rho, head, without in zip(rhos, heads, embeddings, strict=True):
        worse = [head[name] / without[name] - 1 for name in ("X", "L+S")]
        value.append(f"{rho:g}·ρ: {_structure(head)}, X {_signed(worse[0])}, L + S {_signed(worse[1])}")
        parts[f"no benign structure at {rho:g}·ρ"] = not (_structured(head) and max(worse) <= 0.01)
        parts[f"the embedding no less structured than the head at {rho:g}·ρ"] = all(
            without[key] <= head[key] for key in ("rank_ratio", "density")
        )
    rises = [some[-1]["loss"] - some[0]["loss"] for some in (heads, embeddings)]
    courses = [[row for row in rows if row["seed"] == seed] for seed in _distinct(rows, "seed")]
    ends = [
        [row for row in course if row["block"] == block] for course in courses for block in ("LM head", "embedding")
    ]
    parts["the larger ρ lowers the head's rank ratio and density in every seed"] = all(
        some[-1][key] < some[0][key] for some in ends[::2] for key in ("rank_ratio", "density")
    )
    value.append(
        f"training loss {_change(rises[0])} from the smaller to the larger ρ, {_change(rises[1])} without the head"
    )
    parts["the larger ρ costs more training loss with the head, by more than 0.01"] = rises[0] - rises[1] > 0.01
    parts["it does so in every seed"] = all(
        head[-1]["loss"] - head[0]["loss"] > without[-1]["loss"] - without[0]["loss"]
        for head, without in zip(ends[::2], ends[1::2], strict=True)
    )
    structures = ", ".join(f"{_structure(row)} at {row['rho']:g}·ρ" for row in embeddings)
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
        "smaller": _share(larger["parameters"] < smaller["parameters"] for smaller, larger in pairs),
        "X higher": _share(larger["X"] > smaller["X"] for smaller, larger in pairs),
        "L + S higher": _share(larger["L+S"] > smaller["L+S"] for smaller, larger in pairs),
    }


def _told(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{what} {100 * part:.0f} %" for what, part in shares.items())


def frequency(results: Results) -> Verdict:
    """What more frequent ADMM updates do to structure, error and loss, in every seed."""
    rows = sorted(results["frequency"]["rows"], key=lambda row: row["K"])
    seeds = [[row for row in rows if row["seed"] == seed] for seed in _distinct(rows, "seed")]
    Ks = _distinct(rows, "K")
    means = [_average(row for row in rows if row["K"] == K) for K in Ks]
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
        "rank ratio grows with K": all(map(_rising, courses["rank_ratio"])),
        "parameters of L + S grow with K": all(map(_rising, courses["parameters"])),
        "mean δ falls with K": all(_rising(course[::-1]) for course in courses["delta"]),
        "final losses within 3 %": all(max(losses) <= 1.03 * min(losses) for losses in courses["loss"]),
    }
    return verdict(value + "; ".join(f"{what} {', '.join(cells)}" for what, cells in shown.items()), parts)


def bounded(results: Results) -> Verdict:
    """The course of the mean reconstruction error over training, in every seed."""
    rows = sorted(results["dynamics"]["rows"], key=lambda row: row["step"])
    courses = [[row for row in rows if row["seed"] == seed] for seed in _distinct(rows, "seed")]
    phases = [_phases([row["delta"] for row in course]) for course in courses]
    parts = {
        "in the second half never above 1.5 times the largest of the first": all(
            late <= 1.5 * early < math.inf for early, late, _, _ in phases
        ),
        "last quarter at most 10 % above the third": all(last <= 1.1 * third for *_, third, last in phases),
    }
    early, late, third, last = (_range(values) for values in zip(*phases, strict=True))
    value = f"mean δ: at most {early} in the first half, {late} in the second; on average {third} in the "
    value += f"third quarter, {last} in the last"
    errors = _range([100 * course[-1]["error"] for course in courses])
    return verdict(value, parts, f"at the end {errors} % of the weights' norm")


def _phases(deltas: Sequence[float]) -> tuple[float, float, float, float]:
    """Largest value of the first and of the second half, mean of the third and of the last quarter."""
    half, quarter = max(1, len(deltas) // 2), max(1, len(deltas) // 4)
    early, late = max(map(_finite, deltas[:half])), max(map(_finite, deltas[half:] or deltas))
    return early, late, _mean(deltas[half:-quarter] or deltas), _mean(deltas[-quarter:])


def bf16(results: Results) -> Verdict:
    """Training in bfloat16 beside float32, of both methods."""
    rows, value, parts = results["bf16"]["rows"], [], {}
    for method, name in (("salaad", "X"), ("salaad", "L+S"), ("full_rank", "X")):
        half, full = (_of(rows, method=method, variant=name, precision=precision) for precision in ("bf16", "fp32"))
        worse = _relative(half["perplexity"], full["perplexity"])
        label = _spaced(name) if method == "salaad" else "full-rank"
        value.append(f"{label} {_number(half['perplexity'])} for {_number(full['perplexity'])} ({_percent(worse)})")
        if method == "salaad":
            parts[f"{_spaced(name)} at most 10 % above float32, in the mean"] = _mean(worse) <= 0.1
    return verdict("; ".join(value), parts)


def rpca(results: Results) -> Verdict:
    """What robust PCA finds in vanilla weights, in noise, and in weights that have a structure to be found."""
    vanilla, salaad = (results[f"rpca_{name}"]["rows"] for name in ("vanilla", "salaad"))
    keys = ("rank_ratio", "density")
    split = [row for row in results["flexible"]["rows"] if row["label"] == "vanilla + RPCA"]
    sizes = [
        _of(split, seed=seed, variant="L+S")["parameters"] / _of(split, seed=seed, variant="X")["parameters"]
        for seed in _distinct(split, "seed")
    ]
    to_noise = {
        key: fmean(row[key] for row in vanilla) / fmean(row[f"control_{key}"] for row in vanilla) for key in keys
    }
    away = {key: fmean(abs(row[key] - row[f"true_{key}"]) for row in salaad) for key in keys}
    value = f"vanilla: {_both(vanilla)}, in noise {_both(vanilla, 'control_')}, "
    value += f"and L + S of {100 * _mean(sizes):.0f} % of X's parameters; SALAAD: found {_both(salaad)}, "
    value += f"trained {_both(salaad, 'true_')}, off by {away['rank_ratio']:.3f} and {away['density']:.3f} a block"
    parts = {
        "vanilla's L + S is no smaller than X": min(sizes) >= 1,
        "rank ratio of vanilla at least 0.8 of noise's": to_noise["rank_ratio"] >= 0.8,
        "density of vanilla at least 0.8 of noise's": to_noise["density"] >= 0.8,
        "SALAAD's rank ratio found to 0.1": away["rank_ratio"] <= 0.1,
        "SALAAD's density found to 0.1": away["density"] <= 0.1,
    }
    return verdict(value, parts)


Judge = Callable[[Results], Verdict]


def _of(rows: Sequence[Row], **values: Any) -> Row:
    """The one row that has these values."""
    return next(row for row in rows if all(row[key] == value for key, value in values.items()))


def _distinct(rows: Sequence[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _pairs(one: Row, other: Row) -> list[tuple[float, float]]:
    """The values of two spreads, seed by seed."""
    return list(zip(one["values"], other["values"], strict=True))


def _shares(one: Row, other: Row) -> list[float]:
    return [a / b for a, b in _pairs(one, other)]


def _relative(one: Row, other: Row) -> list[float]:
    return [share - 1 for share in _shares(one, other)]


def _finite(value: float) -> float:
    """A perplexity that overflowed is the worst there is, and no comparison with it may pass by accident."""
    return math.inf if math.isnan(value) else value


def _mean(values: Sequence[float]) -> float:
    return fmean(map(_finite, values))


def _average(rows: Iterable[Row]) -> Row:
    """A row of means over seeds; of what is no number, the first row's."""
    rows = list(rows)
    return {key: value if isinstance(value, str) else fmean(row[key] for row in rows) for key, value in rows[0].items()}


def _range(values: Sequence[float]) -> str:
    """The smallest and the largest of the seeds, or the one value."""
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _below(one: float, other: float) -> bool:
    return _finite(one) < _finite(other)


def _rising(values: Sequence[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def _share(cases: Iterable[bool]) -> float:
    """Part of the cases that hold; of none, none."""
    cases = list(cases)
    return sum(cases) / len(cases) if cases else 0.0


def _steps(curve: Mapping[tuple[int, int], tuple[float, float]], side: int) -> list[float]:
    """Factors of perplexity from each budget of a seed to the next smaller one."""
    factors = [1.0]
    for seed in {seed for seed, _ in curve}:
        falling = [curve[key][side] for key in sorted(curve, reverse=True) if key[0] == seed]
        factors += [_finite(b / a) for a, b in pairwise(falling)]
    return factors


def _gaps(curve: Mapping[Any, tuple[float, float]]) -> str:
    gaps = [ours / theirs - 1 for ours, theirs in curve.values()]
    return f"{_signed(min(gaps))} to {_signed(max(gaps))}"


def _number(spread: Row) -> str:
    """Mean ± deviation; of a single seed the mean alone."""
    deviation = f" ± {spread['deviation']:.2f}" if len(spread["values"]) > 1 else ""
    return f"{spread['mean']:.2f}{deviation}"


def _percent(values: Sequence[float]) -> str:
    """Mean ± deviation; of a single seed, and where one overflowed, the mean alone."""
    spread = len(values) > 1 and all(map(math.isfinite, values))
    deviation = f" ± {100 * pstdev(values):.1f}" if spread else ""
    return _signed(fmean(values)).replace(" %", f"{deviation} %")


def _signed(change: float) -> str:
    return f"{100 * change:+.1f} %".replace("-", "−")


def _change(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _spaced(name: str) -> str:
    return name.replace("+", " + ")


def _structured(row: Row) -> bool:
    return row["rank_ratio"] <= 0.3 and row["density"] <= 0.3


def _structure(row: Row) -> str:
    return f"rank ratio {row['rank_ratio']:.2f}, density {row['density']:.2f}"


def _both(rows: Sequence[Row], prefix: str = "") -> str:
    """Mean ± deviation over the matrices."""
    values = [[row[f"{prefix}{key}"] for row in rows] for key in ("rank_ratio", "density")]
    return " and ".join(
        f"{name} {fmean(v):.2f} ± {pstdev(v):.2f}" for name, v in zip(("rank", "density"), values, strict=True)
    )
