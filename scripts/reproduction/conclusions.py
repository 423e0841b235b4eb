"""What a user should conclude: a sentence per purpose, made of recorded numbers; None if a number is missing.

A phrase compares models over the seeds that all of them were measured with, and names these seeds.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import megabytes
from salaad.config.methods import SETTINGS
from scripts.compare_methods import best_run, is_only_shown
from scripts.reproduction.evidence import the_row
from scripts.reproduction.grid import SCALES
from scripts.results_tables.all_methods import bench_of
from scripts.results_tables.compared import (
    FIFTH,
    FULL_RANK,
    HALF,
    LEVEL,
    Model,
    Trainings,
    not_copied_over,
)
from scripts.results_tables.measured import (
    REPORTED,
    named_seeds,
    not_copied,
    rates_of_small,
    rows_of,
    with_seeds,
)

FIRST = "[first table](#methods-at-the-papers-tokens-per-parameter-nano-20)"
ELASTIC = f"[elastic](elastic/README.md#{REPORTED})"
METHODS = "[methods](methods/README.md#the-search)"
PAIR = ("salaad", "full_rank")
RIVALS = {"ours": "SALAAD", "theirs": "full-rank"}  # field of a sentence → what to train
PREFERRED = (REPORTED, "nano")  # in order of preference: the longer training, if it is measured
CUT_BOTH_WAYS = (*PREFERRED, "micro")  # scales whose model as in the paper may be cut by HPA and in our way
# Beginnings of labels: of smaller models, and of the training with one learning rate for all weights.
NO_CHOICE = ("dense, ", "full-rank, one rate")


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
    if costs[best] > -LEVEL:  # the methods that are no better cost time or memory
        best = FULL_RANK.label
    how = (
        best
        if best == FULL_RANK.label
        else f"{best} ({costs[best]:+.1%} in perplexity relative to full-rank training, "
        f"{named_seeds(trainings.seeds(Model(best)))})"
    )
    methods = dict(bench["methods"])
    methods["salaad"] = methods.get("SALAAD", methods["salaad"])  # timed with the settings of the rows, if it was
    state = {name: megabytes(methods[name]["optimizer_bytes"] + methods[name]["method_bytes"]) for name in PAIR}
    return (
        f"**The best model at full size**: of the methods trained in full, train {how}. SALAAD's X is "
        f"{costs['SALAAD']:+.1%} in perplexity relative to full-rank training{_besides(trainings)}, its steps take "
        f"{methods['salaad']['over_full_rank']:.2f} times as long, and the optimizer and the "
        f"method keep {state['salaad']} in memory instead of {state['full_rank']} ({FIRST}, "
        f"{_seeds(trainings, Model('SALAAD'))}).{_dearer(results)}"
    )


def _dearer(results: Path) -> str:
    """Return a sentence on settings that were searched, but not taken in full, and beat full-rank training's best."""
    searched = _json(results / "methods" / f"{REPORTED}.json")
    best = best_run(searched["methods"]["full_rank"]["search"]) if searched else {"variants": None}
    if not best["variants"]:
        return ""
    over = {
        f"{method} with {', '.join(option.partition('.')[2] for option in row['settings'])}": of_X(row, best)
        for method, entry in searched["methods"].items()
        for row in entry["search"]
        if row["variants"] and is_only_shown(row)
    }
    better = {name: cost for name, cost in over.items() if cost <= -LEVEL}
    return (
        f" After an eighth of the length, relative to full-rank training at its best rate: {_listed(better)}, but for "
        f"several times the operations or with fewer sizes ({METHODS})."
        if better
        else ""
    )


def of_X(row: Mapping[str, Any], best: Mapping[str, Any]) -> float:
    """Return the perplexity of X in a run of a search over that in another, less 1."""
    return row["variants"]["X"]["perplexity"] / best["variants"]["X"]["perplexity"] - 1


def _besides(trainings: Trainings) -> str:
    """Return in parentheses what SALAAD's X is over the tokens that are not copied; empty if not measured."""
    others = not_copied_over(trainings.rows, Model("SALAAD"))
    return "" if others is None else f" (over the tokens that are not copied: {others})"


def others(results: Path) -> str | None:
    """Return the sentence on the other methods: trained in full, and otherwise in runs of an eighth of the length."""
    trainings, searched = reported(results), _json(results / "methods" / f"{REPORTED}.json")
    costs = {method: trainings.over(Model(method)) for method in SETTINGS}
    whole = {method: over for method, over in costs.items() if over is not None}
    if not whole or searched is None:
        return None
    runs = {method: best_run(entry["search"])["variants"] for method, entry in searched["methods"].items()}
    best = {method: variants["X"]["perplexity"] for method, variants in runs.items() if variants}
    rest = best.keys() - whole.keys() - set(PAIR) if "full_rank" in best else ()
    short = {method: best[method] / best["full_rank"] - 1 for method in rest}
    besides = {method: _roughly_not_copied(trainings, method) for method in whole}
    named = [
        (f"{method} {whole[method]:+.1%}{besides[method]}", trainings.seeds(Model(method))) for method in _rising(whole)
    ]
    aside = " (in parentheses over the tokens that are not copied)" if any(besides.values()) else ""
    told = (
        f"**Other methods** are in perplexity, relative to the mean of full-rank training's "
        f"{named_seeds(trainings.seeds(FULL_RANK))}{aside}: {with_seeds(named, FIRST)}."
    )
    if short:
        told += (
            " The rest were trained for an eighth of the length alone, with one seed; relative to full-rank training "
            f"of that length, each at the best rates found: {_listed(short)} ({METHODS})."
        )
        both = {method: best[method] / best["full_rank"] - 1 for method in whole if method in best}
        if both:
            told += f" After an eighth the others, to compare the rest with, are {_listed(both)}."
    return told


def _roughly_not_copied(trainings: Trainings, method: str) -> str:
    """Return in parentheses a method's perplexity over the tokens not copied, relative to full-rank training."""
    over = Trainings(trainings.rows, not_copied).over(Model(method))
    return "" if over is None else f" ({over:+.1%})"


def _listed(costs: Mapping[str, float]) -> str:
    return ", ".join(f"{method} {costs[method]:+.1%}" for method in _rising(costs))


def _rising(costs: Mapping[str, float]) -> list[str]:
    """Return the methods, that with the lowest perplexity first."""
    return sorted(costs, key=costs.get)


def rates(results: Path) -> str | None:
    """Return the sentence on what a higher learning rate of embedding and head is worth, both searched."""
    searched = _json(results / "methods" / f"{REPORTED}.json")
    runs = [row for row in searched["methods"]["full_rank"]["search"] if row["variants"]] if searched else []
    of_kind = {kind: [row for row in runs if (row["projection_lr"] == 1) is kind] for kind in (True, False)}
    if not all(of_kind.values()):
        return None
    one_rate, two_rates = (best_run(found) for found in of_kind.values())
    return (
        "**Before any method**: give embedding and head a higher learning rate than the projections. With the best one "
        f"rate for all, full-rank training is {of_X(one_rate, two_rates):+.1%} in perplexity relative to that with the "
        f"best two, after an eighth of the length ({METHODS}, seed 0)."
    )


def many_sizes(results: Path) -> str | None:
    """Return the sentence on cuts without text, of SALAAD and of a full-rank model."""
    return _half_and_fifth(
        results,
        "**Many sizes, no text**: cut to half and to a fifth of the compressible parameters, SALAAD's model is {ours} "
        "in perplexity relative to the uncut full-rank model; the full-rank model, split by robust PCA and cut with "
        "the same tools, is {theirs}",
        ours=("SALAAD", "cut, head"),
        theirs=("full-rank", "rpca, head"),
    )


def many_sizes_with_text(results: Path) -> str | None:
    """Return the sentence on one elastic folder, matched and distilled."""
    costs = reported(results).costs("SALAAD", "head, tuned")
    size, price = "", ""
    if costs is not None:
        size, price = f" ({megabytes(costs[1])})", f", for {costs[0]:.0%} of the training's operations"
    return _half_and_fifth(
        results,
        f"**Many sizes, with text**: make one folder of all sizes{size}, matched and distilled on a twentieth of "
        f"the training tokens{price}. At half and at a fifth SALAAD's folder is {{ours}} in perplexity relative to "
        "the uncut full-rank model, and a folder made of the full-rank model is {theirs}",
        ours=("SALAAD", "head, tuned"),
        theirs=("full-rank", "rpca, head, tuned"),
    )


def with_text(results: Path) -> str | None:
    """Return the sentence on cuts of which every size is matched and distilled by itself."""
    return _half_and_fifth(
        results,
        "**One size, with text**: match the cut to the uncut model and distill it on a twentieth of the training "
        "tokens. At half and at a fifth SALAAD's model is {ours} in perplexity relative to the uncut full-rank model, "
        "and the full-rank model is {theirs}",
        ours=("SALAAD", "head, tuned, each"),
        theirs=("full-rank", "rpca, head, tuned, each"),
    )


def head(results: Path) -> str | None:
    """Return the sentence on what splitting the LM head is worth."""
    trainings = reported(results)
    models = [Model("SALAAD", way, FIFTH) for way in ("cut, head", "cut")]
    if not trainings.seeds(FULL_RANK, *models):
        return None
    beside, without = trainings.all_over(models)
    return (
        "**The LM head**: split it too for small sizes, as is the default. At a fifth of the compressible parameters, "
        f"SALAAD's model is {beside:+.1%} in perplexity relative to the uncut full-rank model with the head split, and "
        f"{without:+.1%} with the head left dense ({ELASTIC}, {_seeds(trainings, *models)})."
    )


def trained_small(results: Path) -> str | None:
    """Return the sentences on small dense models: what they reach and cost, and where they beat our cuts."""
    trainings = reported(results)
    models = [Model(f"dense, {share:g}") for share in (HALF, FIFTH)]
    if not trainings.seeds(FULL_RANK, *models):
        return None
    half, fifth = trainings.all_over(models)
    seeds = named_seeds(trainings.seeds(FULL_RANK))
    return (
        f"**One size, known beforehand**: a dense model trained at that size, with {rates_of_small(trainings.rows)}, "
        f"is {half:+.1%} (half) and {fifth:+.1%} (a fifth) in perplexity relative to the mean of the full-rank model's "
        f"{seeds} ({FIRST}, {named_seeds(trainings.seeds(*models))}).{_without_copies(trainings, models)}"
        f"{_operations(trainings, models)}{_bytes_beside(trainings, models)}{_after_few_tokens(results)}"
    )


def _operations(trainings: Trainings, dense: Sequence[Model]) -> str:
    """Return a sentence on the operations of small trainings and of SALAAD's tuned folder; empty if not recorded."""
    whole, *small = (trainings.operations(model.label) for model in (FULL_RANK, *dense))
    tuned = trainings.costs("SALAAD", "head, tuned")
    if None in (whole, tuned, *small):
        return ""
    half, fifth = (f"{one / whole:.0%}" for one in small)
    return (
        f" Its training takes {half} and {fifth} of the operations of the large one, which SALAAD needs for all sizes "
        f"without text; with a tuned folder it needs {1 + tuned[0]:.0%}."
    )


def _after_few_tokens(results: Path) -> str:
    """Return a sentence on nano, which has a twentieth of the tokens; empty if not measured."""
    trainings = recorded(results, "nano")
    cuts = [(Model("SALAAD", "cut, head", share), Model(f"dense, {share:g}")) for share in (HALF, FIFTH)]
    found = [trainings.over(*pair) for pair in cuts]
    if None in found or min(found) < LEVEL:
        return ""
    return (
        f" After 1.1 tokens per parameter (nano) SALAAD's cuts without text are {found[0]:+.1%} and {found[1]:+.1%} "
        "relative to dense models of their sizes ([elastic](elastic/README.md#nano), seed 0): so few tokens are better "
        "spent on a small model."
    )


def _bytes_beside(trainings: Trainings, dense: Sequence[Model]) -> str:
    """Return a sentence on the bytes of half and a fifth trained small and of SALAAD's cuts; empty if not recorded."""
    models = [*dense, *(Model("SALAAD", "cut, head", share) for share in (HALF, FIFTH))]
    stored = [next(iter(trainings.figures(model).values()), {}).get("bytes") for model in models]
    if None in stored:
        return ""
    small, cut = (" and ".join(map(megabytes, pair)) for pair in (stored[:2], stored[2:]))
    return f" It takes {small}, SALAAD's cuts with as many parameters {cut}, since they store positions too."


def _without_copies(trainings: Trainings, dense: Sequence[Model]) -> str:
    """Return a sentence on small dense models over the tokens that cannot be copied; empty if not measured."""
    others = Trainings(trainings.rows, not_copied)
    if not others.seeds(FULL_RANK, *dense):
        return ""
    half, fifth = others.all_over(dense)
    return (
        f" Over the tokens that are not copied it is {half:+.1%} and {fifth:+.1%}; the rest of the distance is in "
        "copied tokens."
    )


def way_to_cut(results: Path) -> str | None:
    """Return the sentences on HPA and our cut of one model, which is trained as in the paper."""
    label, ways = "SALAAD, as in the paper", ("hpa", "energy", "cut, head")
    models = [Model(label, way, share) for way in ways for share in (HALF, FIFTH)]
    said, equal_is_worse = [], []
    for scale in CUT_BOTH_WAYS:
        trainings = recorded(results, scale)
        if trainings.seeds(FULL_RANK, *models):
            over = trainings.all_over(models)
            hpa, equal, ours = (f"{over[i]:+.1%} and {over[i + 1]:+.1%}" for i in (0, 2, 4))
            equal_is_worse.append(over[3] > over[1])
            said.append(
                f"at {scale} it is {hpa} by HPA at κ*, {equal} by energy with equal weights and the head dense, {ours} "
                f"with our defaults ([elastic](elastic/README.md#{scale}), {_seeds(trainings, *models)})"
            )
    if not said:
        return None
    told = (
        "**How to cut**: with our defaults (by energy with weighted entries, refined, the head split) rather than by "
        "HPA as in the paper. A model trained as in the paper, cut to half and to a fifth, in perplexity relative to "
        f"the uncut full-rank model: {'; '.join(said)}."
    )
    if all(equal_is_worse):
        told += (
            " So energy alone is worse than HPA at a fifth: weights and the split head are what helps. HPA was not "
            "tried with them."
        )
    return told


def headline(results: Path) -> str | None:
    """Return the sentence on L + S against X and full-rank training."""
    scale, (table,) = _first(results, "table1")
    if table is None:
        return None
    rows = table["rows"]
    X, whole = (the_row(rows, method="salaad", variant=name) for name in ("X", "L+S"))
    dense = the_row(rows, method="full_rank")
    of = {name: row["perplexity"]["mean"] for name, row in (("X", X), ("L+S", whole), ("full", dense))}
    share = whole["parameters"]["mean"] / X["parameters"]["mean"]
    return (
        f"**The paper's model L + S** at {scale} is {of['L+S'] / of['X'] - 1:+.1%} in perplexity relative to X, with "
        f"{share:.0%} of X's parameters, and {of['L+S'] / of['full'] - 1:+.1%} relative to full-rank training "
        f"({_page(scale)}; a training of its own, not that of the table above)."
    )


def bfloat16(results: Path) -> str | None:
    """Return the sentence on what training in bfloat16 costs SALAAD and full-rank training."""
    scale, (measured,) = _first(results, "bf16")
    if measured is None:
        return None
    costs = {}
    for method in ("salaad", "full_rank"):
        rows = [the_row(measured["rows"], method=method, variant="X", precision=name) for name in ("bf16", "fp32")]
        costs[method] = rows[0]["perplexity"]["mean"] / rows[1]["perplexity"]["mean"] - 1
    return (
        f"**Weights in bfloat16 during training** change perplexity at {scale} by {costs['salaad']:+.1%} for SALAAD's "
        f"X and by {costs['full_rank']:+.1%} for full-rank training ({_page(scale)})."
    )


SENTENCES: Sequence[Callable[[Path], str | None]] = (
    full_size,
    others,
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


def _half_and_fifth(results: Path, sentence: str, **ways: tuple[str, str]) -> str | None:
    """Return a sentence on how far half and a fifth by each way are from the full-rank model; None if no seed has all.

    Args:
        results: folder of all results.
        sentence: format string with a field for every way.
        ways: field → label of the model and way to cut it; the field gets the changes from the whole full-rank model.
    """
    trainings = reported(results)
    models = [Model(label, way, share) for label, way in ways.values() for share in (HALF, FIFTH)]
    seeds = trainings.seeds(FULL_RANK, *models)
    if not seeds:
        return None
    over = iter(trainings.all_over(models))
    pairs = {place: f"{next(over):+.1%} and {next(over):+.1%}" for place in ways}
    said = f"{sentence.format(**pairs)} ({FIRST}, {named_seeds(seeds)})."
    common = Trainings([row for row in trainings.rows if row["seed"] in seeds])
    return said + _advice(common, ways) if ways.keys() >= RIVALS.keys() else said


def _advice(trainings: Trainings, ways: Mapping[str, tuple[str, str]]) -> str:
    """Return a sentence on which model to train for half and for a fifth, by perplexities over all tokens."""
    choices = {}
    for name, share in (("half", HALF), ("a fifth", FIFTH)):
        ours, theirs = (Model(*ways[rival], share) for rival in RIVALS)
        difference = trainings.over(ours, theirs)
        level = abs(difference) < LEVEL
        choices[name] = "either" if level else RIVALS["ours" if difference < 0 else "theirs"]
    half, fifth = choices.values()
    sizes = f"{half} for both sizes" if half == fifth else f"{half} for half, and {fifth} for a fifth"
    return f" So, judged over all tokens, train {sizes}."


def _seeds(trainings: Trainings, *models: Model) -> str:
    return named_seeds(trainings.seeds(FULL_RANK, *models))


def _first(results: Path, *items: str) -> tuple[str, list[Mapping[str, Any] | None]]:
    """Return the first scale that has results of all these items, and the results; "" and None for each if none has."""
    for scale in PREFERRED:
        found = [_json(SCALES[scale].results_in(results) / f"{item}.json") for item in items]
        if None not in found:
            return scale, found
    return "", [None] * len(items)


def _page(scale: str) -> str:
    return f"[{scale}]({SCALES[scale].results_in(Path())}/README.md)"


def _json(path: Path) -> Mapping[str, Any] | None:
    return read_json(path) if path.exists() else None
