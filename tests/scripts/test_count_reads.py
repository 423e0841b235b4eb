"""scripts/count_reads.py: what it counts is what the page of results/admm says, and no more than is promised."""

import json
from pathlib import Path

import pytest

from scripts.count_reads import all_counts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    return {row["what"]: row for row in all_counts()}


def test_nothing_is_read_in_a_step_or_a_forward_pass_and_once_in_a_stacked_round(rows):
    promised = {what: row["reads"] for what, row in rows.items() if "transformers" not in what}
    assert {reads for what, reads in promised.items() if "step" in what or "forward" in what or "token" in what} == {0}
    assert [reads for what, reads in promised.items() if "stacked" in what] == [1, 1]
    # The mask of transformers is what the counter has to see.
    assert [row["reads"] for what, row in rows.items() if "transformers" in what] == [1]


def test_every_block_is_updated_by_the_solver_that_its_row_names(rows):
    for what, row in rows.items():
        if "solvers" in row:
            assert row["solvers"] == [next((name for name in ("products", "subspace") if name in what), "gram")]


def test_what_is_recorded_is_what_is_counted_now(rows):
    """Reads alone: how many operators there are depends on the versions of torch and transformers too."""
    recorded = json.loads((ROOT / "results" / "admm" / "reads.json").read_text())["rows"]
    again = "run python scripts/count_reads.py --output results/admm/reads.json"
    assert {row["what"]: row["reads"] for row in recorded} == {what: row["reads"] for what, row in rows.items()}, again
