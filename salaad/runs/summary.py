"""What a finished run amounts to, read from its own records."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from salaad.common.files import read_json, write_json
from salaad.common.formats import markdown_table, megabytes, millions
from salaad.rpca import RpcaRow, Spread, summarise
from salaad.runs.records import PHASES, read_lines
from salaad.runs.run import provenance


def summary_of(folder: Path, after_last_line: Mapping[str, float]) -> dict[str, Any]:
    """Where a run ended: perplexities, parameters, mean rank ratio and density, every block; speed and time by phase.

    Its `final_loss` is the mean over the last twentieth of the lines of metrics.jsonl. `after_last_line` is the wall
    time by phase that no line of it holds.
    """
    metrics = read_lines(folder / "metrics.jsonl")
    last = metrics[-1]
    evaluations = [row for row in read_lines(folder / "evaluations.jsonl") if row["step"] == last["step"]]
    active = [sum(row["seconds"].values()) - row["seconds"]["evaluate"] for row in metrics]
    seconds = {phase: after_last_line[phase] + sum(row["seconds"][phase] for row in metrics) for phase in PHASES}
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "positions": last["positions"],
        "final_loss": _mean_loss(metrics[-max(1, len(metrics) // 20) :]),
        "variants": {row["variant"]: row for row in evaluations},
        "blocks": {row.pop("block"): row for row in read_lines(folder / "blocks.jsonl")},
        "tokens_per_second": sum(r["tokens_per_second"] * t for r, t in zip(metrics, active, strict=True))
        / sum(active),
        "seconds": seconds,
    }


def _mean_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Of the lines that have one: where every step was skipped, a line has none."""
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    return fmean(losses) if losses else None


def summarize(folder: Path, after_last_line: Mapping[str, float]) -> str:
    """Write summary.json into the run's folder and return it as Markdown."""
    summary = summary_of(folder, after_last_line)
    write_json(summary, folder / "summary.json")
    return summary_table(summary)


def summary_table(summary: Mapping[str, Any]) -> str:
    """The Markdown of a summary.json."""
    rows = [
        (
            name,
            f"{row['perplexity']:.2f}",
            millions(row["parameters"]),
            f"{row['rank_ratio']:.3f}" if "rank_ratio" in row else "–",
            f"{row['density']:.3f}" if "density" in row else "–",
            f"{row['tokens']:,}",
            row["precision"],
        )
        for name, row in summary["variants"].items()
    ]
    header = ("variant", "perplexity", "parameters", "rank ratio", "density", "validation tokens", "precision")
    total = sum(summary["seconds"].values())
    split = ", ".join(f"{phase} {seconds / total:.1%}" for phase, seconds in summary["seconds"].items())
    return (
        f"{markdown_table(header, rows)}\n\n{summary['step']} steps, {summary['tokens']:,} tokens without padding, "
        f"{summary['tokens_per_second']:,.0f} tokens/s; wall time {total:,.0f} s: {split}"
    )


def save_result(folder: Path, path: Path, command: str) -> None:
    """Write what a finished run measured as one JSON file: command, configuration, provenance, figures.

    The provenance is what the run itself wrote above its configuration, not that of this process.
    """
    text = (folder / "config.yaml").read_text()
    result = {
        "command": command,
        "config": yaml.safe_load(text),
        **dict(line[2:].split(": ", 1) for line in text.splitlines() if line.startswith("# ")),
        "summary": read_json(folder / "summary.json"),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, path)


def perplexity_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Perplexity and parameters of every variant, as in the paper's Table 1."""
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
    trained = next((row["parameters"] for row in rows if row["variant"] == "L+S"), None)
    whole = ", ".join(row["variant"] for row in rows if row["budget"] and row["parameters"] == trained)
    said = f"\n\nThe budget of {whole} is at or above L + S, so L + S is kept as it is." if whole else ""
    return f"{rows[0]['model']}, validation text: {rows[0]['text']}\n\n{table}{said}"


def _fit(row: Mapping[str, Any]) -> str:
    """What followed a cut."""
    refined = f", refined {row['refine']}" if row["refine"] else ""
    return refined + (f", calibrated {row['calibrate']}" if row["calibrate"] else "")


def _kappa(row: Mapping[str, Any]) -> str:
    """κ as it was asked for, or as an allocation by energy implies it."""
    if row["kappa"] is not None or row["budget"] is None or row["implied_kappa"] is None:
        return "–" if row["kappa"] is None else f"{row['kappa']:g}"
    return f"({row['implied_kappa']:.2f})"


def accuracy_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accuracies in percent with their standard errors, as the harness gives them."""

    def percent(value: float | None, error: float | None) -> str:
        return "–" if value is None else f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error is not None else "")

    lines = [
        (
            row["task"],
            row["variant"],
            percent(row["acc"], row["acc_stderr"]),
            percent(row["acc_norm"], row["acc_norm_stderr"]),
            f"{row['samples']:,}",
            row["version"],
        )
        for row in rows
    ]
    first = rows[0]
    table = markdown_table(("task", "variant", "acc, %", "acc_norm, %", "rows", "version"), lines)
    return f"{first['model']}, zero-shot, {first['dtype']}, lm-evaluation-harness {first['harness']}\n\n{table}"


def structure_table(rows: Sequence[RpcaRow]) -> str:
    """Mean ± deviation of what robust PCA found, by matrix type and by depth, each beside that of Gaussian noise."""

    def line(group: object, spread: Mapping[str, Spread]) -> tuple[str, ...]:
        cells = (spread[key] for key in ("rank_ratio", "control_rank_ratio", "density", "control_density"))
        shown = [f"{cell.mean:.3f} ± {cell.deviation:.3f}" for cell in cells]
        return str(group), f"{spread['density'].matrices}", *shown

    groups = {kind: spread for by in ("kind", "depth") for kind, spread in summarise(rows, by).items()}
    lines = [line(f"layer {group}" if isinstance(group, int) else group or "–", s) for group, s in groups.items()]
    header = ("matrices", "number", "rank ratio", "of noise", "density of S", "of noise")
    return markdown_table(header, [*lines, line("all", summarise(rows)[None])])


def keep_rows(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Write rows of a table into a JSON file with where they come from; other rows that are there already stay."""
    accuracies = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    measured = ("perplexity", "legacy_perplexity", "loss", "parameters", "implied_kappa", "tokens", *accuracies)

    def identity(row: Mapping[str, Any]) -> str:
        return json.dumps({key: value for key, value in row.items() if key not in measured}, sort_keys=True)

    before = read_json(path)["rows"] if path.is_file() else []
    merged = {identity(row): row for row in (*before, *rows)}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json({**provenance(), "rows": list(merged.values())}, path)
    return path


def deployment_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """What a run deploys, a line per model and size: `label`, `kappa`, `perplexity`, `parameters`, `bytes` of a row."""
    lines = [
        (
            row["label"],
            f"{row['kappa']:g}" if row["kappa"] is not None else "–",
            f"{row['perplexity']:.2f}",
            millions(row["parameters"]),
            megabytes(row["bytes"]),
        )
        for row in rows
    ]
    table = markdown_table(("model", "κ*", "perplexity", "parameters", "bytes"), lines)
    first = rows[0]
    return (
        f"{table}\n\nPerplexity over {first['tokens']:,} validation tokens; weights in {first['dtype']}, bytes on disk"
    )
