"""The table of all methods at a scale: each model whole, and cut to half and to a fifth, with their costs."""

from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, megabytes, millions
from scripts.elastic_trainings import DENSE_LIKE
from scripts.elastic_ways import FOLDERS, way_of_tuning
from scripts.reproduction.freshness import mark_of, with_legend
from scripts.results_tables import RESULTS
from scripts.results_tables.measured import (
    COPIED,
    RELATIVE,
    REPORTED,
    Row,
    by_label,
    figure_by_seed,
    is_paired,
    named_seeds,
    not_copied,
    over_reference,
    perplexity,
    rates_of_small,
    references_of,
    seeds_text,
    size_of,
    with_deviation,
)
from scripts.shares import NAMED, SEARCHED, SMALL, shares

FAIR_WAYS = (
    *("hpa", "hpa, head", "nested", "godec, head", "godec, head, tuned, each", "godec, head, tuned"),
    *("rpca, head", "rpca, tuned, each", "rpca, head, tuned, each", "rpca, head, tuned"),
    *("cut, head", "tuned, each", "head, tuned, each", "head, tuned"),
)
LIKE = {f"{SMALL}as {method}" for method in DENSE_LIKE}  # labels of the dense models of methods' sizes
PERPLEXITIES: Mapping[str, Callable[[Row], float | None]] = {
    "perplexity": perplexity,
    "legacy": lambda of: of.get("legacy_perplexity"),
    "C4": lambda of: of.get("other_perplexity"),
}


def bench_of(results: Path, scale: str) -> Path:
    """Return the file with every method's step time at a scale; if missing, that of its model with other batches."""
    own = results / "bench" / f"methods-{scale}.json"
    return own if own.exists() else own.with_name(f"methods-{scale.partition('-')[0]}.json")


def fair_table(rows: Sequence[Row], bench: Path, folder: str = "") -> str:
    """Return the table of all methods: each model whole, and its best cuts to half and to a fifth, with their costs.

    Args:
        rows: rows of compare_elastic.py.
        bench: JSON file with the step time of every method at these shapes; without it nothing is said of costs.
        folder: path to results/elastic from the page of the table.
    """
    timed = read_json(bench) if bench.exists() else {"methods": {}}
    costs = timed["methods"]
    lines = list(_fair_lines(rows, costs))
    marks, legends = with_legend([mark_of(commits) for _, commits, _ in lines], "row")
    shown = [(label + mark, *cells) for mark, (label, _, cells) in zip(marks, lines, strict=True)]
    header = (
        "model",
        "share",
        "seeds",
        *RELATIVE,
        *PERPLEXITIES,
        "tokens",
        "stored",
        "trained",
        "bytes",
        "state",
        "step time",
    )
    measured = [bool(any(column)) for column in zip(*shown, strict=True)]
    header, *shown = ([*compress(line, measured)] for line in (header, *shown))
    copying = [_how_copying_is_left_out(rows)] if "not copied" in header else []
    told = [
        "Compare rows by *over full-rank*: perplexity relative to full-rank training, of SALAAD with the same seed, as "
        "a mean over the seeds; ± is the root mean square deviation of the seeds from their mean. A figure over fewer "
        f"seeds than its row names them.{_how_seeds_differ(rows)}",
        *_models_compared(rows, folder),
        "*Share* is the part of the compressible parameters (those of embedding and projections) that a cut keeps.",
        *copying,
        "*Legacy* is the perplexity of older tables, from means of batches of 16 sequences, *C4* that on C4 text. "
        "*Tokens* are those of the training, and of fitting a cut.",
        "*Stored* and *trained* count parameters, *stored* of L + S those of all its factors and entries, which may be "
        "more than X has; *bytes* is the size of the model in float32, where a block is stored dense if that is less.",
        *_how_costs_were_measured(rows, timed, bench),
        *_how_rates_were_chosen(rows, folder),
    ]
    told += legends
    legend = "\n".join(f"- {line}" for line in told if line)
    return f"{markdown_table(header, shown)}\n\n{legend}"


def _models_compared(rows: Sequence[Row], folder: str) -> Iterator[str]:
    """Yield sentences on the models of the table of all methods.

    Args:
        rows: rows of compare_elastic.py.
        folder: path to results/elastic from the page of the table; empty on its own page, which defines the models.
    """
    labels = {row["label"] for row in rows}
    if folder:
        yield (
            "*Cut* is SALAAD's L + S, cut by energy; *rpca* and *godec* are the full-rank model, split after training "
            "and cut in the same way; *hpa*: cut by the paper's rule; *head*: the LM head is split too; *tuned*: "
            "fitted on more text, of SALAAD's cuts or the full-rank model's; *nested*: MatFormer's narrower models "
            f"([definitions]({folder}README.md), [a command for each row]({folder}README.md#commands))."
        )
    if "SALAAD, as in the paper" in labels:
        yield (
            "*SALAAD, as in the paper* has the embedding among its blocks; the paper's Table 1 leaves it out. κ* is "
            "HPA's allocation that was best on other text; its largest cut is about as large as models that store "
            "factors, whose perplexity alone is compared with it."
        )
    if any(label.startswith(SMALL) for label in labels):
        like = ", and *dense, as m* with as many parameters as method m stores," if LIKE & labels else ","
        searched = (
            " That of small ones was [searched for half and a fifth](methods/README.md#the-search)." if folder else ""
        )
        yield (
            f"*Dense, s* was trained small, with the share s of the compressible parameters{like} at "
            f"{rates_of_small(rows)}.{searched}"
        )


def _how_costs_were_measured(rows: Sequence[Row], timed: Mapping[str, Any], bench: Path) -> Iterator[str]:
    """Yield a sentence on the columns of costs, unless nothing was timed; `timed` is what the file `bench` holds."""
    if costs := timed["methods"]:
        relative = "full-rank training, of SALAAD while its weights are pulled"
        if "SALAAD" not in costs and any(row["label"] == "SALAAD" for row in rows):
            relative += "; here both are of the paper's settings, with the embedding among the blocks"
        compiled = "" if timed["config"]["train"]["compile"] else ", of steps that were not compiled"
        small = [row["label"] for row in rows if row["label"].startswith(SMALL)]
        by_size = "" if costs.keys() >= {*small} else " (of small dense models by their parameters)"
        yield (
            f"*State* is the memory of the optimizer, plus that of the method{by_size}; *step time* is relative to "
            f"{relative}{compiled} (results/bench/{bench.name}, commit {timed['commit']})."
        )


def _how_rates_were_chosen(rows: Sequence[Row], folder: str) -> Iterator[str]:
    """Yield a sentence on the searches, unless the table is on the elastic page (`folder` is empty), which has it."""
    if folder:
        yield (
            "The rates of the methods were searched [in runs of an eighth of the length](methods/README.md#the-search)"
            f", SALAAD's settings in [many more]({folder}tried.md), whose records are not kept, with seed 0 and "
            "the same validation text."
            f"{_at_configured_rates(rows)}"
        )


def _at_configured_rates(rows: Sequence[Row]) -> str:
    """Return a sentence, after a space, on what full-rank training has at its rates and at the best ones."""
    searched = RESULTS / "methods" / f"{REPORTED}.json"
    entry = read_json(searched)["methods"]["full_rank"] if searched.exists() else {"search": ()}
    found = [(row, row["variants"]["X"]["perplexity"]) for row in entry["search"] if row["variants"]]
    mine = [
        value
        for row, value in found
        if row["lr"] == entry["own_lr"] and row["projection_lr"] != 1 and not row.get("settings")
    ]
    if not mine:
        return ""
    return (
        f" Full-rank training has the configuration's rates, with which it had a perplexity of {min(mine):.1f} in this "
        f"search, and {min(value for _, value in found):.1f} with the best"
        f"{f', which *{SEARCHED}* has' if any(row['label'] == SEARCHED for row in rows) else ''}."
    )


def _fair_lines(
    rows: Sequence[Row], costs: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield label, commits and cells of every whole model, and of its cuts to half and to a fifth."""
    references = [references_of(rows, figure) for figure in RELATIVE.values()]

    def figures(
        there: Sequence[Row], of: Callable[[Row], Row], share: str = "", way: str | None = None
    ) -> tuple[str, ...]:
        of_seeds = {row["seed"]: of(row) for row in there}
        perplexities, sizes = _figures(there[0]["label"], of_seeds, references)
        return share, seeds_text(there), *perplexities, _tokens(there[0], way), *sizes

    for label, mine in by_label(rows).items():
        trained = tuple(row["commit"] for row in mine)
        if label.startswith(SMALL) and label not in costs:  # of this shape only the state per parameter is known
            cost = _state_of_small(mine[0]["X"]["parameters"], costs), ""
        else:
            cost = _cost(costs.get(label) or costs.get(mine[0]["method"]))
        if "X" in mine[0]:
            yield label, trained, (*figures(mine, itemgetter("X")), *cost)
        if "L+S" in mine[0]:
            yield f"{label}: L + S", trained, (*figures(mine, itemgetter("L+S")), "", "")
        for way in FAIR_WAYS:
            for share in _shown(mine, way):
                size = partial(size_of, way=way, share=share)
                there = [row for row in mine if size(row)]
                made = tuple(row.get("commits", {}).get(way, row["commit"]) for row in there)
                yield (
                    f"{label}: {way}{_kappas(map(size, there))}",
                    (*trained, *made),
                    (*figures(there, size, f"{share:.2g}", way), "", ""),
                )


def _shown(rows: Sequence[Row], way: str) -> Sequence[float]:
    """Return the shares of a way that the table of all methods shows: those in `NAMED`, of MatFormer its own widths.

    Of HPA it also shows the share at which models are about as large as those of methods that store factors, as in the
    paper's Table 1.
    """
    measured = dict.fromkeys(size["share"] for row in rows for size in row["ways"].get(way, ()))
    named = (*NAMED, shares()[1]) if way == "hpa" else NAMED
    return [share for share in measured if (share not in shares() if way == "nested" else share in named)]


def _kappas(sizes: Iterable[Row]) -> str:
    """Return κ* of cuts by HPA as text, one per seed; an empty string for other cuts, and where κ was not recorded."""
    kappas = [f"{size['kappa']:g}" for size in sizes if "kappa" in size]
    return f", κ* {', '.join(kappas)}" if kappas else ""


def _relative(
    label: str, of: Mapping[int, Row], figure: Callable[[Row], float | None], references: Mapping[int, float]
) -> str:
    """Return the cell of a perplexity relative to full-rank training."""
    over, same_seed = over_reference(label, figure_by_seed(of, figure), references)
    if not over or (figure is perplexity and is_paired(label) and not same_seed):
        return ""
    deviation = f" ± {pstdev(over.values()):.1%}" if len(over) > 1 else ""
    seeds = "" if over.keys() == of.keys() else f" ({named_seeds(over)})"
    return f"{'' if same_seed else '≈ '}{fmean(over.values()):+.1%}{deviation}{seeds}"


def _how_copying_is_left_out(rows: Sequence[Row]) -> str:
    """Return a sentence on the column of tokens that are not copied."""
    told = f"*Not copied* is the same over the other tokens: {COPIED}."
    references = references_of(rows, not_copied)
    lacking = sorted(references_of(rows).keys() - references.keys())
    if not lacking:
        return told
    return (
        f"{told} Of full-rank training {named_seeds(references)} alone have it (± {_deviation(references):.1%}), so "
        "rows of other seeds, SALAAD's too, are relative to their mean (≈)."
    )


def _how_seeds_differ(rows: Sequence[Row]) -> str:
    """Return a sentence, after a space, on what models are relative to that have no seed in common with another."""
    references = references_of(rows)
    if len(references) < 2 or all(is_paired(row["label"]) for row in rows):
        return ""
    return (
        f" ≈: relative to the mean of full-rank training's {named_seeds(references)}. These differ by "
        f"± {_deviation(references):.1%}, as trainings learn to copy at different times, those of other methods and "
        "shapes too; so a row of one seed may be off by twice as much."
    )


def _deviation(values: Mapping[int, float]) -> float:
    """Return the standard deviation of perplexities over their mean."""
    return pstdev(values.values()) / fmean(values.values())


def _tokens(row: Row, way: str | None) -> str:
    """Return the tokens of text that a model has read: in its training, and in that of a way to smaller models."""
    more = row.get("costs", {}).get(way, {}).get("tokens", 0)
    folders = FOLDERS.get(way_of_tuning(way or ""), ("one",))  # which have read as much each
    return f"{(row['text_tokens'] + more / len(folders)) / 1e6:.1f} M"


def _figures(
    label: str, of: Mapping[int, Row], references: Sequence[Mapping[int, float]]
) -> tuple[list[str], tuple[str, ...]]:
    """Return cells of perplexities over the seeds, and of parameters and bytes, from the figures of every seed.

    A perplexity that was not measured with all seeds names those with which it was. `references` has an entry for every
    figure in `RELATIVE`.
    """
    cells = [_relative(label, of, figure, theirs) for figure, theirs in zip(RELATIVE.values(), references, strict=True)]
    for figure in PERPLEXITIES.values():
        found = figure_by_seed(of, figure)
        seeds = "" if found.keys() == of.keys() else f" ({named_seeds(found)})"
        cells.append(f"{with_deviation([*found.values()])}{seeds}" if found else "")
    first = ChainMap(*of.values())  # of every figure that of the first seed that has it
    return cells, (
        millions(first["parameters"]),
        millions(first["trained"]) if "trained" in first else "",
        megabytes(first["bytes"]) if "bytes" in first else "",
    )


def _state_of_small(parameters: int, costs: Mapping[str, Any]) -> str:
    """Return the cell of a small dense model's state: per parameter as much as full-rank training's, if that is known.

    Both are pretrained by the same optimizer, which keeps as much for every parameter.
    """
    large = costs.get("full_rank", {})
    return megabytes(large["optimizer_bytes"] / large["trained"] * parameters) if "trained" in large else ""


def _cost(cost: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the cells of a method's state and step time; empty if it was not timed."""
    if cost is None:
        return "", ""
    own = f" + {megabytes(cost['method_bytes'])}" if cost["method_bytes"] else ""
    return f"{megabytes(cost['optimizer_bytes'])}{own}", f"{cost['over_full_rank']:.2f}"
