"""The summary of a finished run, read from the run's own records."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from salaad.common.errors import UserError
from salaad.common.files import json_lines, read_json, read_json_lines, write_json
from salaad.common.formats import markdown_table, millions
from salaad.runs.checkpoints import name_of
from salaad.runs.records import PHASES
from salaad.runs.run import BEGUN_FROM, GONE_BACK

_WHOLE = "give a whole run"


def summary_of(folder: Path, after_last_line: Mapping[str, float]) -> dict[str, Any]:
    """Return a run's final perplexities, parameters, mean rank ratio and density, blocks, speed and time by phase.

    `final_loss` is the mean over the last twentieth of the lines of metrics.jsonl. `after_last_line` is the wall time
    by phase since the last of these lines.
    """
    metrics = read_json_lines(folder / "metrics.jsonl")
    if not metrics:
        raise UserError(f"{folder / 'metrics.jsonl'} has no lines, so there is nothing to sum up; give a whole run")
    last = metrics[-1]
    evaluations = [row for row in read_json_lines(folder / "evaluations.jsonl") if row["step"] == last["step"]]
    active = [sum(row["seconds"].values()) - row["seconds"]["evaluate"] for row in metrics]
    seconds = {phase: after_last_line[phase] + sum(row["seconds"][phase] for row in metrics) for phase in PHASES}
    return {
        "step": last["step"],
        "tokens": last["tokens"],
        "positions": last["positions"],
        "final_loss": _mean_loss(metrics[-max(1, len(metrics) // 20) :]),
        "variants": {row["variant"]: row for row in evaluations},
        "blocks": {row.pop("block"): row for row in json_lines(folder / "blocks.jsonl")},
        "tokens_per_second": sum(r["tokens_per_second"] * t for r, t in zip(metrics, active, strict=True))
        / sum(active),
        "seconds": seconds,
    }


def _mean_loss(lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the mean loss of the lines that have one; a line has no loss if all its steps were discarded."""
    losses = [line["loss"] for line in lines if line["loss"] is not None]
    return fmean(losses) if losses else None


def summarize(folder: Path, after_last_line: Mapping[str, float]) -> str:
    """Write summary.json into the run's folder and return it as Markdown."""
    summary = summary_of(folder, after_last_line)
    write_json(summary, folder / "summary.json", to_disk=True)  # a run that has it counts as finished
    return summary_table(summary)


def summary_table(summary: Mapping[str, Any]) -> str:
    """Return the content of a summary.json as Markdown."""
    variants = summary["variants"]
    # Shares that a method reports for its variants, as SALAAD does for L + S.
    shares = [key for key in ("rank_ratio", "density") if any(key in row for row in variants.values())]
    rows = [
        (
            name,
            "–" if row["perplexity"] is None else f"{row['perplexity']:.2f}",
            millions(row["parameters"]),
            *(f"{row[key]:.3f}" if key in row else "–" for key in shares),
            f"{row['tokens']:,}",
            row["precision"],
        )
        for name, row in variants.items()
    ]
    named = [key.replace("_", " ") for key in shares]
    header = ("variant", "perplexity", "parameters", *named, "validation tokens", "precision")
    remark = "".join(
        f"\n\n{name} has more parameters than X: in so few updates the thresholds did not come far enough. Cut it with "
        "compress.py --budget, or train with larger salaad.delta_alpha and salaad.delta_beta."
        for name, row in variants.items()
        if row.get("block_parameters", 0) > row.get("block_parameters_dense", 0)
    )
    total = sum(summary["seconds"].values())
    split = ", ".join(f"{phase} {seconds / total:.1%}" for phase, seconds in summary["seconds"].items())
    return (
        f"{markdown_table(header, rows)}\n\n{summary['step']} steps, {summary['tokens']:,} tokens without padding, "
        f"{summary['tokens_per_second']:,.0f} tokens/s; wall time {total:,.0f} s: {split}{remark}"
    )


def origin_of(folder: Path) -> dict[str, str]:
    """Return versions, commit and machine of a run's last start, which the run wrote above its configuration.

    The checkpoint that the run went on from is named as RUN/checkpoints/STEP, not by its full path on this machine.
    """
    lines = (folder / "config.yaml").read_text().splitlines()
    origin = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# ") and ": " in line)
    origin.pop(GONE_BACK, None)  # of any start, and for the next one alone
    if BEGUN_FROM in origin:
        origin[BEGUN_FROM] = "/".join(Path(origin[BEGUN_FROM]).parts[-3:])  # RUN/checkpoints/STEP
    return origin


def save_result(folder: Path, path: Path, command: str) -> None:
    """Write what a finished run measured as one JSON file: command, configuration, provenance, figures.

    The provenance is what the run itself wrote above its configuration, not that of this process.
    """
    result = {
        "command": command,
        "config": yaml.safe_load((folder / "config.yaml").read_text()),
        **origin_of(folder),
        "summary": read_json(folder / "summary.json", cure=_WHOLE),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(result, path)


def finished(folder: Path, resume: str, checkpoint: Path | None) -> str | None:
    """Return what to say of a run that is finished and asked to go on; None of any other.

    `checkpoint` is what `open_run` found for `resume`: a named one is gone back to, unless the run has ended with it.
    """
    path = folder / "summary.json"
    if not path.exists():
        return None
    summary = read_json(path, cure=_WHOLE)
    if resume != "auto" and (checkpoint is None or checkpoint.name != name_of(summary["step"])):
        return None
    return f"{folder} is finished:\n\n{summary_table(summary)}"
