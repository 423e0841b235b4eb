"""The tables of results/elastic: one training at every size, its costs, samples and copying."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, megabytes, millions
from scripts import in_context
from scripts.reproduction.freshness import mark_of, with_legend
from scripts.research import probe_allocation
from scripts.results_tables import RESULTS, row_commands
from scripts.results_tables.all_methods import bench_of, fair_table
from scripts.results_tables.measured import (
    COPIED,
    ELASTIC,
    REPORTED,
    Row,
    by_label,
    results,
    rows_of,
    score,
    seeds_text,
    size_of,
    ways_of,
    with_deviation,
)
from scripts.shares import all_shares

TRIED = ("nano-20-95", "nano-5")  # settings that were given up, or shorter runs: on tried.md, by their curves alone


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
    return found | {"probes": probes_table(probed), f"commands-{REPORTED}": row_commands.section()}


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


def curves_table(rows: Sequence[Row]) -> str:
    """Perplexity of X and at every share of the compressible parameters, and the elastic score."""
    lines, columns, models = [], all_shares(), by_label(rows)
    marks, legends = with_legend([mark_of(_commits(mine)) for mine in models.values()], "row")
    for mark, (label, mine) in zip(marks, models.items(), strict=True):
        whole = with_deviation([row["X"]["perplexity"] for row in mine])
        lines.append(
            (f"{label}{mark}", seeds_text(mine), millions(mine[0]["X"]["parameters"]), whole, *("",) * len(columns), "")
        )
        for way in ways_of(mine):
            there = [row for row in mine if way in row["ways"]]
            measured = ([size for row in there if (size := size_of(row, way, share))] for share in columns)
            sizes = [with_deviation([size["perplexity"] for size in some]) for some in measured]
            scores = [found for row in there if (found := score(rows, row, way)) is not None]
            lines.append(
                (f"{label}: {way}", seeds_text(there), "", "", *sizes, f"{fmean(scores):.2%}" if scores else "–")
            )
    tokens = rows[0]["X"]["tokens"]
    commits = ", ".join(sorted({*_commits(rows)}))
    machines = ", ".join(sorted({row["machine"] for row in rows}))
    told = (
        f"Perplexity over {tokens:,} validation tokens after {rows[0]['steps']:,} steps, by share of the "
        "compressible parameters, as means over the seeds, which can differ by more than models do: compare rows with "
        "the same seeds. ± is the root mean square deviation of the seeds from their mean. Commits of trainings and "
        "cuts: "
        f"{' '.join([f'{commits}; {machines}.', *legends])}"
    )
    header = ("model", "seeds", "parameters", "X", *(f"{share:.2f}" for share in columns), "elastic score")
    return f"{markdown_table(header, lines)}\n\n{told}"


def _commits(rows: Sequence[Row]) -> list[str]:
    """Return the commits of rows: of their trainings, and of their cuts where they were recorded."""
    return [commit for row in rows for commit in (row["commit"], *row.get("commits", {}).values())]


def cost_table(rows: Sequence[Row]) -> str:
    """Tokens, operations, bytes, minutes and machines of every training and every way to its sizes.

    Minutes include the measurements, bytes are those of the folders of all sizes that a way makes.

    Rows of older versions have no machines of ways; theirs are those of the trainings.
    """
    lines = []
    for label, mine in by_label(rows).items():
        for what in dict.fromkeys(what for row in mine for what in row["minutes"]):
            costs = [row["costs"][what] for row in mine if what in row.get("costs", {})]
            counts = (f"{costs[0]['tokens'] / 1e6:.2f} M", f"{costs[0]['operations']:.1e}") if costs else ("", "")
            folders = megabytes(costs[0]["bytes"]) if costs and "bytes" in costs[0] else ""
            minutes = fmean(row["minutes"][what] for row in mine if what in row["minutes"])
            named = (row.get("machines", {}).get(what, row["machine"]) for row in mine if what in row["minutes"])
            machines = sorted({machine.partition(",")[0] for machine in named})
            lines.append((label, what, *counts, folders, f"{minutes:.1f}", ", ".join(machines)))
    return markdown_table(("model", "step", "tokens", "operations", "folders", "minutes", "machine"), lines)
