"""The judges of the claims about training: functions from the rows of items to numbers, some of which have limits.

The limits are in `criteria`. A claim agrees only if all numbers with a limit keep it. Claims about what a checkpoint
deploys are judged in `deployment_judges`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from salaad.common.formats import millions
from scripts.reproduction import criteria
from scripts.reproduction.evidence import (
    EVERY_SEED,
    NOT_SHOWN,
    Lacking,
    Number,
    Row,
    changes,
    difference,
    each_seed,
    finite,
    is_rising,
    is_structured,
    mean_change,
    mean_of,
    mean_row,
    part_of,
    percent,
    percents,
    ratios,
    shares,
    span,
    structure_text,
    the_row,
    values_of,
)
from scripts.reproduction.records import shown

Results = Mapping[str, Mapping[str, Any]]  # item → its result JSON
Judge = Callable[[Results], list[Number]]

NAMES_OF_KNOBS = {"alpha": "Δα", "beta": "Δβ", "rho": "ρ"}
BLOCKS = ("embedding included", "without the embedding")
STRUCTURE = ("rank_ratio", "density")


def central(results: Results) -> list[Number]:
    """Judge L + S against X, seed by seed."""
    rows = results["table1"]["rows"]
    X, whole = (the_row(rows, method="salaad", variant=name) for name in ("X", "L+S"))
    pairs = list(zip(*(ratios(whole[key], X[key]) for key in ("perplexity", "parameters")), strict=True))
    reached = [any(a <= b and c <= d for b, d in criteria.WHOLE_OVER_X) for a, c in pairs]
    cost = changes(X["perplexity"], the_row(rows, method="full_rank")["perplexity"])
    return [
        Number("PPL of X", shown(X["perplexity"])),
        Number("PPL of L + S", shown(whole["perplexity"])),
        Number(
            "PPL of L + S over X and parameters of L + S over X's",
            ", ".join(f"{percent(cost - 1)} at {share:.1%}" for cost, share in pairs),
            f"both at most those of one of the paper's models {EVERY_SEED}",
            all(reached),
        ),
        Number("PPL of X over full-rank training", percents(cost)),
    ]


def against_full_rank(results: Results) -> list[Number]:
    """Judge L + S against full-rank training, seed by seed; report X too."""
    rows = results["table1"]["rows"]
    vanilla = the_row(rows, method="full_rank")["perplexity"]
    X, whole = (the_row(rows, method="salaad", variant=name)["perplexity"] for name in ("X", "L+S"))
    better = changes(whole, vanilla)
    return [
        Number("PPL of full-rank training", shown(vanilla)),
        Number(
            "PPL of L + S over full-rank training",
            percents(better),
            f"at most {percent(criteria.WHOLE_OVER_FULL_RANK)} {EVERY_SEED}",
            all(one <= criteria.WHOLE_OVER_FULL_RANK for one in better),
        ),
        Number("PPL of X over full-rank training", percents(changes(X, vanilla))),
    ]


def embedding(results: Results) -> list[Number]:
    """Judge what the embedding costs as a block, the size of L + S, and rank ratio and density of the embedding."""
    rows, numbers = results["embedding"]["rows"], []
    for name, most in criteria.EMBEDDING_COST.items():
        inside, outside = (the_row(rows, variant=name, blocks=blocks) for blocks in BLOCKS)
        worse = changes(inside["perplexity"], outside["perplexity"])
        what = f"PPL of {name.replace('+', ' + ')} over that without the embedding"
        numbers.append(Number(what, mean_change(worse), f"mean at most {percent(most)}", mean_of(worse) <= most))
    sizes = ratios(inside["parameters"], outside["parameters"])
    own = {key: inside[f"embedding_{key}"] for key in STRUCTURE}
    largest = {key: max(map(finite, spread["values"])) for key, spread in own.items()}
    cut = [the_row(rows, variant="L̃+S̃", blocks=blocks) for blocks in BLOCKS]
    return [
        *numbers,
        Number(
            "parameters of L + S with and without the embedding",
            ", ".join(millions(one["parameters"]["mean"]) for one in (inside, outside)),
            f"fewer with it {EVERY_SEED}",
            all(share < 1 for share in sizes),
        ),
        Number(
            "rank ratio and density of the embedding",
            ", ".join(map(shown, own.values())),
            f"at most {structure_text(criteria.EMBEDDING_STRUCTURE)} {EVERY_SEED}",
            all(largest[key] <= most for key, most in criteria.EMBEDDING_STRUCTURE.items()),
        ),
        *(
            Number(
                f"PPL of the cut by HPA to {millions(row['parameters']['mean'])}, {blocks}",
                shown(row["perplexity"]),
            )
            for row, blocks in zip(cut, BLOCKS, strict=True)
        ),
    ]


def lm_head(results: Results) -> list[Number]:
    """Judge rank ratio, density and cost of the LM head as a block at two ρ, against the embedding, in every seed."""
    rows = sorted(results["lm_head"]["rows"], key=lambda row: row["rho"])
    if len(values_of(rows, "rho")) < 2:
        raise Lacking("a row of each of two ρ")
    heads, others = (each_seed([row for row in rows if row["block"] == block]) for block in ("LM head", "embedding"))
    numbers = []
    for i, rho in enumerate(values_of(rows, "rho")):
        pairs = [(head[i], other[i]) for head, other in zip(heads, others, strict=True)]
        worse = [[head[name] / other[name] - 1 for name in ("X", "L+S")] for head, other in pairs]
        benign = [
            is_structured(head) and max(map(finite, cost)) <= criteria.HEAD_COST
            for (head, _), cost in zip(pairs, worse, strict=True)
        ]
        meaningful = all(is_structured(other) for _, other in pairs)
        numbers += [
            Number(
                f"{rho:g}·ρ: rank ratio and density of the head, PPL of X and L + S over those without the head",
                "; ".join(
                    f"{structure_text(head)}, {percents(cost)}" for (head, _), cost in zip(pairs, worse, strict=True)
                ),
                f"in no seed structure at most {criteria.HEAD_STRUCTURE} and PPL at most {percent(criteria.HEAD_COST)}",
                False if any(benign) else True if meaningful else NOT_SHOWN,
            ),
            Number(
                f"{rho:g}·ρ: rank ratio and density of the embedding",
                "; ".join(structure_text(other) for _, other in pairs),
                f"at most those of the head {EVERY_SEED}",
                (meaningful or NOT_SHOWN)
                if all(other[key] <= head[key] for head, other in pairs for key in STRUCTURE)
                else False,
            ),
        ]
    rises = [[one[-1]["loss"] - one[0]["loss"] for one in pair] for pair in zip(heads, others, strict=True)]
    more = [head - other for head, other in rises]
    structured = sum(all(head[-1][key] < head[0][key] for key in STRUCTURE) for head in heads)
    return [
        *numbers,
        Number(
            "rise of the training loss from the smaller to the larger ρ, with the head minus without it",
            ", ".join(map(difference, more)),
            f"over {criteria.HEAD_LOSS} {EVERY_SEED}",
            all(one > criteria.HEAD_LOSS for one in more),
        ),
        Number(
            "seeds in which the larger ρ lowers the head's rank ratio and density",
            f"{structured} of {len(heads)}",
            "all",
            structured == len(heads),
        ),
    ]


def knobs(results: Results) -> list[Number]:
    """Judge what a larger Δα, Δβ or ρ does to size and perplexity in the 130M grid; report the other ablations too."""
    judged = _one_apart(results["ablation130m_pairs"]["rows"])
    finer = [_one_apart(results[name]["rows"]) for name in ("ablation350m", "ablation350m_rho", "ablation130m")]
    numbers, beside = [], []
    for name, least in criteria.KNOBS.items():
        pairs = judged[name]
        for what, part in _trades(pairs).items():
            limit = least[what] / criteria.KNOB_PAIRS
            text = f"larger {name}: {what}, share of {len(pairs)} pairs"
            numbers.append(Number(text, shares([part], 0), f"at least {limit:.0%}", part >= limit))
        others = [pair for grid in finer for pair in grid[name]]
        what = f"larger {name}, other ablations ({len(others)} pairs): {', '.join(_trades([]))}"
        beside.append(Number(what, shares(_trades(others).values(), 0)))
    return numbers + beside


def _one_apart(rows: Sequence[Row]) -> dict[str, list[tuple[Row, Row]]]:
    """Return Δα, Δβ or ρ → the pairs of rows that differ in this setting alone, the smaller value first."""
    grid = {tuple(row[knob] for knob in NAMES_OF_KNOBS): row for row in rows}
    pairs: dict[str, list[tuple[Row, Row]]] = {name: [] for name in NAMES_OF_KNOBS.values()}
    for one, other in combinations(sorted(grid), 2):
        differing = [name for name, a, b in zip(NAMES_OF_KNOBS.values(), one, other, strict=True) if a != b]
        if len(differing) == 1:
            pairs[differing[0]].append((grid[one], grid[other]))
    return pairs


def _trades(pairs: Sequence[tuple[Row, Row]]) -> dict[str, float]:
    """Return three fractions of pairs: where the larger value gives a smaller L + S, a higher PPL of X, of L + S."""
    return {
        "fewer parameters": part_of(larger["parameters"] < smaller["parameters"] for smaller, larger in pairs),
        "higher PPL of X": part_of(larger["X"] > smaller["X"] for smaller, larger in pairs),
        "higher PPL of L + S": part_of(larger["L+S"] > smaller["L+S"] for smaller, larger in pairs),
    }


def frequency(results: Results) -> list[Number]:
    """What more frequent ADMM updates do to structure, error and loss, in every seed."""
    rows = sorted(results["frequency"]["rows"], key=lambda row: row["K"])
    seeds, Ks = each_seed(rows), values_of(rows, "K")
    if len(Ks) < 2 or any(values_of(mine, "K") != Ks for mine in seeds):
        raise Lacking("a row of every K and seed")
    means = [mean_row(row for row in rows if row["K"] == K) for K in Ks]
    limits = {
        "rank_ratio": ("rank ratio", "rises with K", "{:.2f}".format, is_rising),
        "parameters": ("parameters of L + S", "rise with K", millions, is_rising),
        "density": ("density", "rises with K", "{:.2f}".format, is_rising),
        "delta": ("mean δ", "falls with K", "{:.2f}".format, lambda course: is_rising(course[::-1])),
        "loss": (
            "final loss",
            f"within {criteria.LOSSES_OVER_K:.2f} nats",
            "{:.3f}".format,
            lambda losses: max(map(finite, losses)) - min(losses) <= criteria.LOSSES_OVER_K,
        ),
    }
    numbers = [Number("K/J", ", ".join(map(str, Ks)))]
    for key, (what, limit, written, holds) in limits.items():
        kept = all(holds([row[key] for row in mine]) for mine in seeds)
        numbers.append(Number(what, ", ".join(written(row[key]) for row in means), f"{limit} {EVERY_SEED}", kept))
    return numbers


def bounded(results: Results) -> list[Number]:
    """The course of the mean reconstruction error over training, in every seed."""
    courses = each_seed(sorted(results["dynamics"]["rows"], key=lambda row: row["step"]))
    early, late, third, last = zip(*(_phases([row["delta"] for row in course]) for course in courses), strict=True)
    within = all(b <= criteria.LATE_OVER_EARLY * a < math.inf for a, b in zip(early, late, strict=True))
    settled = all(b <= criteria.LAST_OVER_THIRD * a for a, b in zip(third, last, strict=True))
    return [
        Number("largest mean δ of the first half", span(early)),
        Number(
            "largest mean δ of the second half",
            span(late),
            f"at most {criteria.LATE_OVER_EARLY} times the former {EVERY_SEED}",
            within,
        ),
        Number("average mean δ of the third quarter", span(third)),
        Number(
            "average mean δ of the last quarter",
            span(last),
            f"at most {criteria.LAST_OVER_THIRD} times the former {EVERY_SEED}",
            settled,
        ),
        Number("‖X−L−S‖ over ‖X‖ at the end, mean over the blocks", _percents(c[-1]["error"] for c in courses)),
        *_every_block([course[-1] for course in courses]),
    ]


def _every_block(ends: Sequence[Row]) -> list[Number]:
    """Judge the worst block, and the growth of τ_S: with J = 1 no entry of X − L − S exceeds 2·τ_S, which bounds δ."""
    error = ("‖X−L−S‖ over ‖X‖ of the worst block at the end", f"at most {criteria.WORST_BLOCK:.0%} {EVERY_SEED}")
    growth = (
        "mean τ_S of the last quarter over that of the third, largest over the blocks",
        f"at most {criteria.THRESHOLD_GROWTH} {EVERY_SEED}",
    )
    if not all("errors" in end for end in ends):
        return [Number(what, "not recorded", limit, NOT_SHOWN) for what, limit in (error, growth)]
    worst, grown = ([max(map(finite, end[key].values())) for end in ends] for key in ("errors", "tau_growth"))
    above = [sum(one > criteria.WORST_BLOCK for one in end["errors"].values()) for end in ends]
    return [
        Number(error[0], _percents(worst), error[1], all(one <= criteria.WORST_BLOCK for one in worst)),
        Number(f"blocks above {criteria.WORST_BLOCK:.0%}", f"{', '.join(map(str, above))} of {len(ends[0]['errors'])}"),
        Number(growth[0], span(grown), growth[1], all(one <= criteria.THRESHOLD_GROWTH for one in grown)),
    ]


def _percents(parts: Iterable[float]) -> str:
    return f"{span(100 * part for part in parts)} %"


def _phases(deltas: Sequence[float]) -> tuple[float, float, float, float]:
    """Largest value of the first and of the second half, mean of the third and of the last quarter."""
    half, quarter = max(1, len(deltas) // 2), max(1, len(deltas) // 4)
    early, late = max(map(finite, deltas[:half])), max(map(finite, deltas[half:] or deltas))
    return early, late, mean_of(deltas[half:-quarter] or deltas), mean_of(deltas[-quarter:])


def bf16(results: Results) -> list[Number]:
    """Judge SALAAD's training in bfloat16 against float32; report full-rank training too."""
    rows, numbers = results["bf16"]["rows"], []
    for method, name in (("salaad", "X"), ("salaad", "L+S"), ("full_rank", "X")):
        half, full = (the_row(rows, method=method, variant=name, precision=precision) for precision in ("bf16", "fp32"))
        worse = changes(half["perplexity"], full["perplexity"])
        label = name.replace("+", " + ") if method == "salaad" else "full-rank training"
        both = ", ".join(shown(row["perplexity"]) for row in (half, full))
        numbers.append(Number(f"PPL of {label}, bfloat16 and float32", both))
        what = f"PPL of {label}, bfloat16 over float32"
        if method == "salaad":
            most = criteria.BF16_COST[name]
            numbers.append(Number(what, mean_change(worse), f"mean at most {percent(most)}", mean_of(worse) <= most))
        else:
            numbers.append(Number(what, mean_change(worse)))
    return numbers
