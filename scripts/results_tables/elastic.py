"""The tables of results/elastic: one training at every size, small dense models and other methods."""

import math
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from operator import itemgetter
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from salaad.common.errors import UserError
from salaad.common.files import REMAKE, read_json, read_object
from salaad.common.formats import markdown_table, megabytes, millions
from scripts import in_context
from scripts.reproduction.freshness import with_legend
from scripts.research import probe_allocation
from scripts.results_tables import RESULTS
from scripts.shares import NAMED, all_shares, shares

ELASTIC = RESULTS / "elastic"
FAIR_WAYS = (
    *("hpa", "nested", "godec, head", "godec, head, tuned, each"),
    *("rpca, head", "rpca, tuned, each", "rpca, head, tuned, each", "rpca, head, tuned"),
    *("cut, head", "tuned, each", "head, tuned, each", "head, tuned"),
)
REFERENCE = "full-rank"
REPORTED = "nano-20"  # the scale whose table of all methods opens results/README.md and is not repeated
TRIED = ("nano-20-95", "nano-5")  # settings that were given up, or shorter runs: on tried.md, by their curves alone
COPIED = "a token is *copied* if it and the token before it already stood side by side in its sequence"
SMALL = "dense, "  # prefix of the labels of dense models that were trained at a smaller size

Row = Mapping[str, Any]


def perplexity(of: Row) -> float:
    """The perplexity over all tokens, from the figures of a model."""
    return of["perplexity"]


def not_copied(of: Row) -> float | None:
    """The perplexity over the tokens that are not `COPIED`; None if not measured."""
    return math.exp(of["in_context"]["other"][0]) if "in_context" in of else None


# Heading of a column → the perplexity that it shows relative to full-rank training, or as it is; None if not measured.
RELATIVE: Mapping[str, Callable[[Row], float | None]] = {"over full-rank": perplexity, "not copied": not_copied}
PERPLEXITIES: Mapping[str, Callable[[Row], float | None]] = {
    "perplexity": perplexity,
    "legacy": lambda of: of.get("legacy_perplexity"),
    "C4": lambda of: of.get("other_perplexity"),
}


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a JSON file of compare_elastic.py.

    Raises:
        UserError: the file is damaged or has no rows.
    """
    rows = read_object(path, cure=REMAKE).get("rows")
    if not rows:
        raise UserError(f"{path} has no rows; restore it, or delete it and measure again with compare_elastic.py")
    return rows


def results() -> dict[str, Path]:
    """Return scale → JSON file of the measurements at it."""
    return {path.stem: path for path in sorted(ELASTIC.glob("*.json"))}


def sections() -> dict[str, str]:
    """Return for every scale the tables of curves and, unless in `TRIED`, costs, all methods, samples and copying."""
    found = {}
    for scale, path in results().items():
        rows = rows_of(path)
        found[f"elastic-{scale}"] = curves_table(rows)
        if scale in TRIED:
            continue
        found[f"elastic-cost-{scale}"] = cost_table(rows)
        if any(row.get("samples") for row in rows):
            found[f"elastic-samples-{scale}"] = samples_table(rows)
        if scale != REPORTED:
            found[f"fair-{scale}"] = fair_table(rows, bench_of(RESULTS, scale))
    for path in sorted((ELASTIC / "in-context").glob("*.json")):
        found[f"in-context-{path.stem}"] = in_context_table(read_json(path))
    probed = {path.stem: read_json(path) for path in sorted((ELASTIC / "probes").glob("*.json"))}
    return found | {"probes": probes_table(probed)}


def probes_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table of scripts/research/probe_allocation.py from scale → its results."""
    rows = [row | {"model": f"{scale}: {row['model']}"} for scale, result in results.items() for row in result["rows"]]
    commits, machines = (", ".join(sorted({of[key] for of in results.values()})) for key in ("commit", "machine"))
    told = f"Perplexity by share of the compressible parameters. Commits of the measurements: {commits}; {machines}."
    return f"{probe_allocation.table(rows)}\n\n{told}"


def in_context_table(result: Mapping[str, Any]) -> str:
    """Return the table of scripts/in_context.py, with the number of tokens of each kind."""
    rows = result["rows"]
    _, copied = rows[0]["copied"]
    _, others = rows[0]["other"]
    commits, machines = (", ".join(sorted({row[key] for row in rows})) for key in ("commit", "machine"))
    told = (
        f"Mean loss in nats over {copied:,} validation tokens that are copied and {others:,} that are not: {COPIED}. "
        f"Commits of the measurements: {commits}; {machines}."
    )
    return f"{in_context.table(rows)}\n\n{told}"


def bench_of(results: Path, scale: str) -> Path:
    """Return the file with every method's step time at a scale; if missing, that of its model with other batches."""
    own = results / "bench" / f"methods-{scale}.json"
    return own if own.exists() else own.with_name(f"methods-{scale.partition('-')[0]}.json")


def samples_table(rows: Sequence[Row]) -> str:
    """Return a table of what the smallest and the largest size of each elastic folder make of the same beginning."""
    lines = [
        (
            f"{row['label']}: {way}",
            row["seed"],
            millions(sample["parameters"]),
            " ".join(sample["text"].replace("|", "\\|").split()),
        )
        for row in rows
        for way, samples in row.get("samples", {}).items()
        for sample in samples
    ]
    return markdown_table(("folder", "seed", "size", "text"), lines)


def fair_table(
    rows: Sequence[Row], bench: Path, mark_of: Callable[[Sequence[str]], str] = lambda _: "", folder: str = ""
) -> str:
    """Return the table of all methods: each model whole, and its best cuts to half and to a fifth, with their costs.

    Args:
        rows: rows of compare_elastic.py.
        bench: JSON file with the step time of every method at these shapes; without it nothing is said of costs.
        mark_of: the mark of measurements at some commits, of code that has changed since or was not committed.
        folder: path to results/elastic from the page of the table.
    """
    costs = read_json(bench)["methods"] if bench.exists() else {}
    lines = list(_fair_lines(rows, costs))
    marks, legends = with_legend([mark_of(commits) for _, commits, _ in lines], "row")
    shown = [(label + mark, *cells) for mark, (label, _, cells) in zip(marks, lines, strict=True)]
    tokens = rows[0]["text_tokens"]
    header = (
        "model",
        "share",
        "seeds",
        *RELATIVE,
        *PERPLEXITIES,
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
        f"After {tokens / 1e6:.1f} M tokens. Seeds can differ by more than models do, so compare rows by *over "
        "full-rank*: perplexity relative to full-rank training with the same seed, as a mean over the seeds; ± is the "
        "root mean square deviation of the seeds from their mean. A figure names its seeds if its row has more.",
        *_models_compared(lines, folder),
        "*Share* is the part of the compressible parameters (those of embedding and projections) that a cut keeps.",
        *copying,
        "*Legacy* is the perplexity of older tables, from means of batches of 16 sequences, *C4* that on C4 text.",
        "*Stored* and *trained* count parameters, *stored* of L + S those of all its factors and entries, which may be "
        "more than X has; *bytes* is the size of the model in float32, where a block is stored dense if that is less.",
        *_how_costs_were_measured(rows, costs, bench),
        *_how_rates_were_chosen(folder),
    ]
    told += legends
    legend = "\n".join(f"- {line}" for line in told if line)
    return f"{markdown_table(header, shown)}\n\n{legend}"


def _models_compared(lines: Sequence[tuple[str, tuple[str, ...], tuple[str, ...]]], folder: str) -> Iterator[str]:
    """Yield sentences on the models of the table of all methods.

    Args:
        lines: label, commits and cells of every model.
        folder: path to results/elastic from the page of the table; empty on its own page, which defines the models.
    """
    labels = {label for label, *_ in lines}
    if folder:
        yield (
            "*Cut* is SALAAD's L + S, cut by energy; *rpca* and *godec* are the full-rank model, split after training "
            "and cut in the same way; *head*: the LM head is split too; *tuned*: fitted on more text, of SALAAD's cuts "
            f"or the full-rank model's ([definitions and commands]({folder}README.md))."
        )
    if "SALAAD, as in the paper" in labels:
        yield (
            "*SALAAD, as in the paper* has the embedding among its blocks; the paper's Table 1 leaves it out. κ* is "
            "HPA's allocation that was best on other text."
        )
    if any(label.startswith(SMALL) for label in labels):
        yield (
            "*Dense, s* was trained small, with the share s of the compressible parameters, at the learning rates of "
            f"the large model, not at its own best ([a search]({'' if folder else '../'}methods/README.md#the-search))."
        )


def _how_costs_were_measured(rows: Sequence[Row], costs: Mapping[str, Any], bench: Path) -> Iterator[str]:
    """Yield a sentence on the columns of costs, unless nothing was timed."""
    if costs:
        timed = "full-rank training, of SALAAD while its weights are pulled"
        if "SALAAD" not in costs and any(row["label"] == "SALAAD" for row in rows):
            timed += "; here both are of the paper's settings, with the embedding among the blocks"
        yield (
            f"*State* is the memory of the optimizer and the method; *step time* is relative to {timed} "
            f"(results/bench/{bench.name})."
        )


def _how_rates_were_chosen(folder: str) -> Iterator[str]:
    """Yield a sentence on the searches, unless the table is on the elastic page (`folder` is empty), which has it."""
    if folder:
        yield (
            "The rates of the methods were searched [in runs of an eighth of the length](methods/README.md#the-search)"
            f", SALAAD's settings in [many more]({folder}tried.md), with seed 0 and the same validation text."
            f"{_at_configured_rates()}"
        )


def _at_configured_rates() -> str:
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
        f" Full-rank training has the configuration's rates, with which it had {min(mine):.1f} in this search, and "
        f"{min(value for _, value in found):.1f} with the best."
    )


def _fair_lines(
    rows: Sequence[Row], costs: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Yield label, commits and cells of every whole model, and of its cuts to half and to a fifth."""
    references = [references_of(rows, figure) for figure in RELATIVE.values()]

    def figures(there: Sequence[Row], of: Callable[[Row], Row], share: str = "") -> tuple[str, ...]:
        return share, seeds_text(there), *_figures({row["seed"]: of(row) for row in there}, references)

    for label, mine in by_label(rows).items():
        trained, cost = tuple(row["commit"] for row in mine), ("", "")
        if not label.startswith(SMALL):  # a small dense model has other shapes than those timed
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
                    (*figures(there, size, f"{share:.2g}"), "", ""),
                )


def _shown(rows: Sequence[Row], way: str) -> Sequence[float]:
    """Return the shares of a way that the table of all methods shows: those in `NAMED`, of MatFormer its own widths."""
    measured = dict.fromkeys(size["share"] for row in rows for size in row["ways"].get(way, ()))
    return [share for share in measured if (share not in shares() if way == "nested" else share in NAMED)]


def seeds_text(rows: Sequence[Row]) -> str:
    """Return the seeds of rows as text."""
    return ", ".join(str(row["seed"]) for row in rows)


def named_seeds(seeds: Iterable[int]) -> str:
    """Return some seeds as words: "seed 2", or "seeds 1, 2"."""
    numbers = [str(seed) for seed in seeds]
    return f"seed{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"


def with_seeds(told: Sequence[tuple[str, Sequence[int]]], page: str = "") -> str:
    """Return phrases with their seeds in parentheses, behind the last where all have the same, else behind each.

    Args:
        told: phrases and the seeds of each; at least one.
        page: link to the page that has the figures, which the last parentheses name.
    """
    if len({tuple(seeds) for _, seeds in told}) == 1:
        source = ", ".join(filter(None, (page, named_seeds(told[0][1]))))
        return f"{', '.join(phrase for phrase, _ in told)} ({source})"
    return ", ".join(f"{phrase} ({named_seeds(seeds)})" for phrase, seeds in told) + (f" ({page})" if page else "")


def _kappas(sizes: Iterable[Row]) -> str:
    """Return κ* of cuts by HPA as text, one per seed; an empty string for other cuts, and where κ was not recorded."""
    kappas = [f"{size['kappa']:g}" for size in sizes if "kappa" in size]
    return f", κ* {', '.join(kappas)}" if kappas else ""


def references_of(rows: Sequence[Row], figure: Callable[[Row], float | None] = perplexity) -> dict[int, float]:
    """Return seed → perplexity of full-rank training, of the seeds with which it was measured."""
    return _measured({row["seed"]: row["X"] for row in rows if row["label"] == REFERENCE}, figure)


def _measured(of: Mapping[int, Row], figure: Callable[[Row], float | None]) -> dict[int, float]:
    return {seed: value for seed, one in of.items() if (value := figure(one)) is not None}


def over_reference(of: Mapping[int, float], references: Mapping[int, float]) -> tuple[dict[int, float], bool]:
    """Return seed → perplexity relative to full-rank training, less 1, and whether that had the same seed.

    Seeds without a reference are left out. If no seed has one, all are relative to the mean of the references: over
    tokens that are not copied seeds differ little, and full-rank training was not measured with every one of them.
    """
    same = {seed: value / references[seed] - 1 for seed, value in of.items() if seed in references}
    if same or not references:
        return same, True
    mean = fmean(references.values())
    return {seed: value / mean - 1 for seed, value in of.items()}, False


def _relative(of: Mapping[int, Row], figure: Callable[[Row], float | None], references: Mapping[int, float]) -> str:
    """Return the cell of a perplexity relative to full-rank training."""
    over, same_seed = over_reference(_measured(of, figure), references)
    if not over or (figure is perplexity and not same_seed):
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
    away = pstdev(references.values()) / fmean(references.values())
    return (
        f"{told} ≈: relative to the mean of full-rank training's {named_seeds(references)} (± {away:.1%}), as its "
        f"{named_seeds(lacking)} was not measured."
    )


def _figures(of: Mapping[int, Row], references: Sequence[Mapping[int, float]]) -> tuple[str, ...]:
    """Return cells of perplexities over the seeds, parameters and bytes, from the figures of every seed.

    A perplexity that was not measured with all seeds names those with which it was. `references` has an entry for every
    figure in `RELATIVE`.
    """
    cells = [_relative(of, figure, theirs) for figure, theirs in zip(RELATIVE.values(), references, strict=True)]
    for figure in PERPLEXITIES.values():
        found = _measured(of, figure)
        seeds = "" if found.keys() == of.keys() else f" ({named_seeds(found)})"
        cells.append(f"{_with_deviation([*found.values()])}{seeds}" if found else "")
    first = ChainMap(*of.values())  # of every figure that of the first seed that has it
    return (
        *cells,
        millions(first["parameters"]),
        millions(first["trained"]) if "trained" in first else "",
        megabytes(first["bytes"]) if "bytes" in first else "",
    )


def _cost(cost: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the cells of a method's state and step time; empty if it was not timed."""
    if cost is None:
        return "", ""
    return megabytes(cost["optimizer_bytes"] + cost["method_bytes"]), f"{cost['over_full_rank']:.2f}"


def curves_table(rows: Sequence[Row]) -> str:
    """Perplexity of X and at every share of the compressible parameters, and the elastic score."""
    lines, columns = [], all_shares()
    for label, mine in by_label(rows).items():
        whole = _with_deviation([row["X"]["perplexity"] for row in mine])
        lines.append((label, seeds_text(mine), millions(mine[0]["X"]["parameters"]), whole, *("",) * len(columns), ""))
        for way in ways_of(mine):
            there = [row for row in mine if way in row["ways"]]
            measured = ([size for row in there if (size := size_of(row, way, share))] for share in columns)
            sizes = [_with_deviation([size["perplexity"] for size in some]) for some in measured]
            scores = [found for row in there if (found := score(rows, row, way)) is not None]
            lines.append(
                (f"{label}: {way}", seeds_text(there), "", "", *sizes, f"{fmean(scores):.2%}" if scores else "–")
            )
    tokens = rows[0]["X"]["tokens"]
    commits = ", ".join(sorted({commit for row in rows for commit in _commits(row)}))
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    told = (
        f"Perplexity over {tokens:,} validation tokens after {rows[0]['steps']:,} steps, by share of the "
        "compressible parameters, as means over the seeds, which can differ by more than models do: compare rows with "
        "the same seeds. ± is the root mean square deviation of the seeds from their mean. Commits of trainings and "
        "cuts: "
        f"{commits}; {machines}."
    )
    header = ("model", "seeds", "parameters", "X", *(f"{share:.2f}" for share in columns), "elastic score")
    return f"{markdown_table(header, lines)}\n\n{told}"


def _commits(row: Row) -> tuple[str, ...]:
    """Return the commits of a row: of its training, and of its cuts where they were recorded."""
    return row["commit"], *row.get("commits", {}).values()


def cost_table(rows: Sequence[Row]) -> str:
    """Tokens, operations, minutes and machines of every training and every way to its sizes, measurements included.

    Rows of older versions have no machines of ways; theirs are those of the trainings.
    """
    lines = []
    for label, mine in by_label(rows).items():
        for what in dict.fromkeys(what for row in mine for what in row["minutes"]):
            costs = [row["costs"][what] for row in mine if what in row.get("costs", {})]
            counts = (f"{costs[0]['tokens'] / 1e6:.2f} M", f"{costs[0]['operations']:.1e}") if costs else ("", "")
            minutes = fmean(row["minutes"][what] for row in mine if what in row["minutes"])
            named = (row.get("machines", {}).get(what, row["machine"]) for row in mine if what in row["minutes"])
            machines = sorted({machine.partition(",")[0] for machine in named})
            lines.append((label, what, *counts, f"{minutes:.1f}", ", ".join(machines)))
    return markdown_table(("model", "step", "tokens", "operations", "minutes", "machine"), lines)


def ways_of(rows: Sequence[Row]) -> list[str]:
    """The ways to smaller sizes that were measured with any seed."""
    return list(dict.fromkeys(way for row in rows for way in row["ways"]))


def by_label(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Label → its rows, one per seed."""
    return {label: [row for row in rows if row["label"] == label] for label in dict.fromkeys(r["label"] for r in rows)}


def size_of(row: Row, way: str, share: float) -> Row | None:
    """Return the figures of a way at a share; None if it was not measured there."""
    return next((size for size in row["ways"].get(way, ()) if size["share"] == share), None)


def score(rows: Sequence[Row], row: Row, way: str) -> float | None:
    """Return the mean over the eight sizes of log(perplexity / full-rank's with this seed); None if one is missing."""
    reference = [r["X"]["perplexity"] for r in rows if r["label"] == REFERENCE and r["seed"] == row["seed"]]
    sizes = [size_of(row, way, share) for share in shares()]
    if not reference or None in sizes:
        return None
    return fmean(math.log(size["perplexity"] / reference[0]) for size in sizes)


def _with_deviation(values: Sequence[float]) -> str:
    if not values:
        return "–"
    return f"{fmean(values):.2f}" + (f" ± {pstdev(values):.2f}" if len(values) > 1 else "")
