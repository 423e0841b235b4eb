"""The page of results/gpu/NAME: how every stage ended, and small tables of what it found."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, megabytes
from scripts.on_device.check import FAILED, Check
from scripts.results_tables.deployment import compression_table, inference_table

Results = Mapping[str, Mapping[str, Any]]


def page(folder: Path, outcomes: Mapping[str, str]) -> str:
    """Return the page of the results in a folder as Markdown.

    Args:
        folder: folder with the JSON files of the stages.
        outcomes: stage → how it ended.
    """
    results = {path.stem: read_json(path) for path in sorted(folder.glob("*.json"))}
    about = results.get("checks") or next(iter(results.values()), {})
    parts = [f"# {folder.name}", *(f"{key}: {about[key]}" for key in ("machine", "versions", "commit") if key in about)]
    commits = {name: found.get("commit", "") for name, found in results.items()}
    rows = [(name, in_a_cell(told), commits.get(name, "")) for name, told in outcomes.items()]
    parts += [
        "A check compares what the GPU computes with a reference; its error is relative to the reference, or a count. "
        "Stages that are not listed were not run.",
        markdown_table(("stage", "outcome", "commit"), rows),
    ]
    if "checks" in results:
        parts += ["## Checks", checks_table([Check.from_row(row) for row in results["checks"]["checks"]])]
    for title, stages, table in (
        ("Training", "training", training_table),
        ("ADMM", "admm", admm_table),
        (
            "Inference",
            "inference",
            lambda found: f"{inference_table(found)}\n\nFactored over dense, of random weights.",
        ),
        ("Compression", "compression", compression_table),
    ):
        found = of_kind(results, stages)
        parts += [f"## {title}", table(found)] if found else []
    if "60m-wikipedia" in results:
        parts += ["## 60m-wikipedia", reproduction(results["60m-wikipedia"])]
    return "\n\n".join(parts) + "\n"


def in_a_cell(text: str) -> str:
    """The text without what would end a cell of a table."""
    return text.replace("|", "/")


def of_kind(results: Results, kind: str) -> Results:
    """The results of the stages `kind`-NAME, by NAME."""
    return {name.removeprefix(f"{kind}-"): found for name, found in results.items() if name.startswith(f"{kind}-")}


def checks_table(checks: list[Check]) -> str:
    """Return a Markdown table, a line per check."""
    rows = []
    for check in checks:
        outcome = f"**{FAILED}**" if check.outcome == FAILED else check.outcome
        rows.append((check.name, f"{check.limit:.0e}", in_a_cell(check.found), outcome))
    return markdown_table(("check", "limit", "error", "outcome"), rows)


def training_table(results: Results) -> str:
    """Return a Markdown table of full-rank training and SALAAD side by side, a line per size and precision."""
    rows = []
    for name, found in results.items():
        if "left_out" in found:
            rows.append((name, found["left_out"], *[""] * 5))
            continue
        full, salaad = found["methods"]["full_rank"], found["methods"]["salaad"]
        rows.append(
            (
                name,
                f"{full['tokens_per_second']:,.0f}",
                f"{salaad['over_full_rank']:.3f}",
                f"{salaad['periodic_seconds'] * 1e3:,.1f} ms",
                f"{full['utilisation']:.0%}",
                megabytes(salaad["peak_bytes"]),
                "side by side" if found["side_by_side"] else "one after the other",
            )
        )
    header = ("training", "tokens/s", "SALAAD over full-rank", "ADMM update", "utilisation", "peak", "measured")
    return markdown_table(header, rows)


def admm_table(results: Results) -> str:
    """Return a Markdown table: time to update all blocks by phase, ours and the authors', and our largest error."""
    rows = []
    for name, found in results.items():
        for phase, seconds in found["rounds"].items():
            ours, theirs = seconds["update"], seconds["update of the authors"]
            timed = [row for row in found["rows"] if row["phase"] == phase and row["rung"] == "update"]
            times = f"{ours * 1e3:,.1f} ms", f"{theirs * 1e3:,.1f} ms", f"{theirs / ours:.1f}"
            solvers = ", ".join(dict.fromkeys(row["method"] for row in timed))
            rows.append((name, phase, *times, solvers, f"{max(row['error'] for row in timed):.1e}"))
    header = ("shapes", "phase", "all blocks", "the authors' way", "×", "solvers", "largest error of L")
    return markdown_table(header, rows)


def reproduction(found: Mapping[str, Any]) -> str:
    """Return the tables and notes of an item of `scripts/reproduce.py`, and a table of its trainings."""
    parts = [f"{caption}\n\n{table}" for caption, table in found["tables"].items()] + found["notes"]
    rows = [
        (run["name"], f"{run['tokens']:,}", f"{run['hours']:.1f}", run["machine"], run["commit"])
        for run in found["trainings"]
    ]
    return "\n\n".join([*parts, markdown_table(("training", "tokens", "hours", "machine", "commit"), rows)])
