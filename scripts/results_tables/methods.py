"""The tables of results/methods: every way to train at one scale, and the search of its learning rate."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, megabytes, millions
from scripts.compare_methods import Rates, best_rates
from scripts.reproduction.freshness import CHANGED, mark_of
from scripts.results_tables import RESULTS

METHODS = RESULTS / "methods"
_SECOND_FACTOR = " In a × b, a is the learning rate and b the factor on it for projections."


def sections() -> dict[str, str]:
    """Return for every file the table of its search, and, if all was trained in full, those of methods and widths."""
    found = {}
    for path in sorted(METHODS.glob("*.json")):
        result = read_json(path)
        costs = RESULTS / "bench" / f"methods-{path.stem}.json"
        found[f"search-{path.stem}"] = search_table(result)
        if all("full" in entry for entry in result["methods"].values()):  # else only the search was asked for
            found[f"methods-{path.stem}"] = comparison_table(result, costs)
            found[f"widths-{path.stem}"] = widths_table(result)
    return found


def comparison_table(result: dict[str, Any], costs: Path) -> str:
    """Perplexity after a whole training at the best learning rate, parameters, bytes, and what a step costs."""
    cost = read_json(costs)["methods"] if costs.exists() else {}
    header = ("method", "learning rate", "perplexity", "stored (printed)", "trained", "bytes", "state", "step time")
    rows = []
    for method, entry in result["methods"].items():
        if not entry["full"]["variants"]:
            rows.append((method, _rates(entry["full"]), "diverged", *[""] * (len(header) - 3)))
        for name, row in entry["full"]["variants"].items():
            if name not in ("X", "L+S"):  # the widths of MatFormer have a table of their own
                continue
            own = cost.get(method) if name == "X" else None
            printed = row.get("parameters_printed")
            rows.append(
                (
                    method if name == "X" else f"{method}, {name}",
                    _rates(entry["full"]) if name == "X" else "",
                    f"{row['perplexity']:.2f}",
                    millions(row["parameters"]) + (f" ({millions(printed)})" if printed else ""),
                    millions(own["trained"]) if own else "",
                    megabytes(row["bytes"]) if "bytes" in row else "",
                    megabytes(own["optimizer_bytes"] + own["method_bytes"]) if own else "",
                    f"{own['over_full_rank']:.2f}" if own else "",
                )
            )
    finished = [entry["full"] for entry in result["methods"].values() if entry["full"]["variants"]]
    if not finished:
        return markdown_table(header, rows)
    some = finished[0]
    told = (
        f"Perplexity over {some['variants']['X']['tokens']:,} validation tokens after {some['steps']:,} steps, one "
        "seed. *Stored* and *trained* count parameters (in brackets the count in the method's paper, where it "
        "differs); *bytes* is the size of the model in float32; *state* is the memory of the optimizer and the method; "
        f"*step time* is relative to full-rank training. {_measured_at(finished)}"
    )
    told += _SECOND_FACTOR if any("×" in row[1] for row in rows) else ""
    return f"{markdown_table(header, rows)}\n\n{told}"


def _measured_at(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return sentences on the commits and machines of runs, and on changes of the code since."""
    commits, machines = (sorted({run[key] for run in runs}) for key in ("commit", "machine"))
    changed = " Some of the code behind these runs has changed since." if CHANGED in mark_of(commits) else ""
    return f"Commits: {', '.join(commits)}; {'; '.join(machines)}.{changed}"


def search_table(result: dict[str, Any]) -> str:
    """Return a table: the perplexity that every learning rate gave in a run of an eighth of the length."""
    rows = []
    for method, entry in result["methods"].items():
        found = {_rates(row): row["variants"].get("X", {}).get("perplexity", math.inf) for row in entry["search"]}
        taken = best_rates(entry["search"])
        best = next(_rates(row) for row in entry["search"] if Rates.of(row) == taken)
        shown = {rates: "diverged" if value == math.inf else f"{value:.1f}" for rates, value in found.items()}
        tried = (f"{rates}: " + (f"**{text}**" if rates == best else text) for rates, text in shown.items())
        rows.append((method, f"{entry['own_lr']:g}", len(found), ", ".join(tried) + _at_the_edge(entry["search"])))
    some = next(row for entry in result["methods"].values() for row in entry["search"] if row["variants"])
    runs = [row for entry in result["methods"].values() for row in entry["search"]]
    told = (
        f"Perplexity of X after {some['steps']} steps over {some['variants']['X']['tokens']:,} validation tokens. "
        f"{_measured_at(runs)}"
    )
    told += _SECOND_FACTOR if any("×" in row[3] for row in rows) else ""
    return f"{markdown_table(('method', 'default rate', 'runs', 'learning rate: perplexity'), rows)}\n\n{told}"


def _at_the_edge(search: list[dict[str, Any]]) -> str:
    """Return a remark if the best rate of a search is the least or the greatest tried, else an empty string."""
    best = best_rates(search)
    beside = [row["lr"] for row in search if Rates.of(row).projections == best.projections]
    return " (the best at the edge)" if best.lr in (min(beside), max(beside)) else ""


def _rates(row: dict[str, Any]) -> str:
    """Return the learning rate of a result as text, times the share of it for projections where that is not 1.

    The settings of the run that differ from the method's defaults follow.
    """
    rates = Rates.of(row)
    own = "".join(f", {short}" for short in rates.own)
    return f"{rates.lr:g}" + (f" × {rates.projections:g}" if rates.projections != 1 else "") + own


def widths_table(result: dict[str, Any]) -> str:
    """Return the table of MatFormer's narrower models, uniform and mixed."""
    variants = result["methods"].get("matformer", {"full": {"variants": {}}})["full"]["variants"]
    if not variants:
        return "Not measured."
    rows = [(name, millions(row["parameters"]), f"{row['perplexity']:.2f}") for name, row in variants.items()]
    return markdown_table(("widths", "parameters", "perplexity"), rows)
