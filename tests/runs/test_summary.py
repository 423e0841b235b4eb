"""The table at the end of a run."""

import json
import tracemalloc

import pytest

from salaad.common.errors import UserError
from salaad.runs.records import PHASES
from salaad.runs.summary import origin_of, summary_of, summary_table


def summary(L_plus_S: int) -> dict:
    row = {"perplexity": 90.0, "parameters": 100, "tokens": 50, "precision": "fp32"}
    blocks = {"block_parameters": L_plus_S, "block_parameters_dense": 80, "rank_ratio": 0.4, "density": 0.7}
    seconds = {"train": 1.0, "admm": 1.0}
    about = {"step": 7, "tokens": 1000, "tokens_per_second": 500.0, "seconds": seconds}
    return {**about, "variants": {"X": row, "L+S": {**row, **blocks, "parameters": 20 + L_plus_S}}}


def test_a_run_too_short_for_its_thresholds_says_so_with_the_cure():
    assert "L+S has more parameters than X" in summary_table(summary(81))
    assert "compress.py --budget" in summary_table(summary(81))
    assert "more parameters" not in summary_table(summary(80))
    assert "train 50.0%, admm 50.0%" in summary_table(summary(80))


def test_a_run_without_records_is_named(tmp_path):
    with pytest.raises(
        UserError, match=r"metrics\.jsonl has no lines, so there is nothing to sum up; give a whole run"
    ):
        summary_of(tmp_path, {})


def test_where_a_run_went_on_from_is_told_without_a_path_of_the_machine(tmp_path):
    start = "# commit: abc\n# begun from: random weights\n"
    (tmp_path / "config.yaml").write_text(f"{start}seed: 1\n")
    assert origin_of(tmp_path) == {"commit": "abc", "begun from": "random weights"}
    again = "# commit: def\n# begun from: /home/me/runs/one/checkpoints/step-0000300\n"
    (tmp_path / "config.yaml").write_text(f"{start}{again}seed: 1\n")
    assert origin_of(tmp_path) == {"commit": "def", "begun from": "one/checkpoints/step-0000300"}


def test_the_summary_of_a_long_run_keeps_only_the_last_update_of_a_block(tmp_path):
    """350m with its 65,000 steps writes a million of these lines, which take gigabytes as Python objects."""
    seconds = dict.fromkeys(PHASES, 1.0)
    metrics = {"step": 20_000, "tokens": 9, "positions": 9, "loss": 1.0, "tokens_per_second": 1.0, "seconds": seconds}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n")
    with (tmp_path / "blocks.jsonl").open("w") as file:
        for step in range(1, 20_001):
            file.write(json.dumps({"step": step, "block": f"b{step % 2}", "density": 0.5}) + "\n")
    size = (tmp_path / "blocks.jsonl").stat().st_size
    tracemalloc.start()
    try:
        found = summary_of(tmp_path, seconds)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert {name: row["step"] for name, row in found["blocks"].items()} == {"b0": 20_000, "b1": 19_999}
    assert peak < size / 2
