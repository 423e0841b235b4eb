"""The tables of perplexity and accuracy, as Markdown and as JSON rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from salaad.common.files import only_finite, read_json, write_json
from salaad.common.formats import markdown_table, millions
from salaad.common.provenance import provenance


def perplexity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return perplexity and parameters of every variant in Markdown, as in the paper's Table 1."""
    lines = [
        (
            row["variant"] + _fit(row),
            f"{row['perplexity']:.2f}",
            millions(row["parameters"]),
            _kappa(row),
            f"{row['tokens']:,}",
            row["dtype"],
        )
        for row in rows
    ]
    table = markdown_table(("variant", "PPL", "PRM", "κ", "tokens", "dtype"), lines)
    has_parts = any(row["variant"] == "L+S" for row in rows)
    whole = ", ".join(row["variant"] for row in rows if has_parts and keeps_all(row))
    note = f"\n\nThe budget of {whole} is at or above L + S, so L + S is kept as it is." if whole else ""
    return f"{rows[0]['model']}, validation text: {rows[0]['text']}\n\n{table}{note}"


def keeps_all(row: Mapping[str, Any]) -> bool:
    """Whether the budget of a variant of a model with L + S is at or above these, so that nothing was cut."""
    return row["budget"] is not None and row["implied_kappa"] is None


def _fit(row: Mapping[str, Any]) -> str:
    """Return how a cut was fitted, to be added to its name."""
    refined = f", refined {row['refine']}" if row["refine"] else ""
    return refined + (f", calibrated {row['calibrate']}" if row["calibrate"] else "")


def _kappa(row: Mapping[str, Any]) -> str:
    """The κ asked for, or in brackets the κ that an allocation by energy amounts to."""
    if row["kappa"] is not None or row["budget"] is None or row["implied_kappa"] is None:
        return "–" if row["kappa"] is None else f"{row['kappa']:g}"
    return f"({row['implied_kappa']:.2f})"


def accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of accuracies in percent with the harness's standard errors."""

    def percent(value: float | None, error: float | None) -> str:
        return "–" if value is None else f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error is not None else "")

    others = any(row.get("others") for row in rows)
    lines = [
        (
            row["task"],
            row["variant"],
            percent(row["acc"], row["acc_stderr"]),
            percent(row["acc_norm"], row["acc_norm_stderr"]),
            *([", ".join(f"{key} {value:.4g}" for key, value in row.get("others", {}).items())] if others else []),
            f"{row['samples']:,}",
            row["version"],
        )
        for row in rows
    ]
    first = rows[0]
    columns = ("task", "variant", "acc, %", "acc_norm, %", *(["others"] if others else []), "rows", "version")
    table = markdown_table(columns, lines)
    return f"{first['model']}, zero-shot, {first['dtype']}, lm-evaluation-harness {first['harness']}\n\n{table}"


def keep_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write the rows of a table and their provenance into a JSON file, and return its path.

    Rows that the file holds already stay, except those that a new row with the same settings replaces. A row of an
    older version does not tell all settings; it is replaced if a new row agrees with those that it tells.
    """
    accuracies = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr", "others")
    figures = ("perplexity", "legacy_perplexity", "loss", "parameters", "implied_kappa", "tokens", *accuracies)
    structure = ("rank_ratio", "density", "control_rank_ratio", "control_density", "error")
    # No settings: rows that differ only in these replace each other.
    measured = (*figures, *structure, "device", "triton")

    def settings(row: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in row.items() if key not in measured}

    def replaces(new: Mapping[str, Any], old: Mapping[str, Any]) -> bool:
        told, now = settings(old), settings(new)
        return told.keys() <= now.keys() and all(now[key] == value for key, value in told.items())

    before = read_json(path)["rows"] if path.is_file() else []
    ordered = [next((new for new in rows if replaces(new, old)), old) for old in before]
    merged = {json.dumps(settings(row), sort_keys=True): row for row in (*ordered, *rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json({**provenance(), "rows": [only_finite(row) for row in merged.values()]}, path)
    return path
