"""scripts/count_reads.py: its counts are those recorded in results/admm, and no higher than promised."""

import json
from pathlib import Path

import pytest

from salaad.common.provenance import provenance
from scripts.count_reads import KINDS, as_one, counts_here, table

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "results" / "admm" / "reads.json").read_text())
# The masks and the `generate` of transformers read from the device, whatever the model's layers are.
OF_TRANSFORMERS = ("use_cache", "attention_mask", "generate")


@pytest.fixture(scope="module")
def now() -> dict[str, dict]:
    return dict(counts_here())


def test_nothing_is_read_in_a_step_or_a_forward_pass_and_once_in_a_stacked_round(now):
    ours = {what: row["reads"] for what, row in now.items() if not any(name in what for name in OF_TRANSFORMERS)}
    assert {reads for what, reads in ours.items() if "step" in what or "forward" in what or "token" in what} == {0}
    assert [reads for what, reads in ours.items() if "stacked" in what] == [1] * 4
    assert [row["eigensolvers"] for what, row in now.items() if "products" in what] == [0, 0]


def test_what_transformers_read_is_the_same_of_a_dense_and_of_a_factored_model(now):
    theirs = {what: row["reads"] for what, row in now.items() if any(name in what for name in OF_TRANSFORMERS)}
    dense = {what: reads for what, reads in theirs.items() if "dense" in what}
    assert len(dense) == 3 and set(dense.values()) == {1}
    assert {what.replace("dense", "factored"): reads for what, reads in dense.items()} == {
        what: reads for what, reads in theirs.items() if "factored" in what
    }


def test_operators_of_a_round_go_by_its_stacks(now):
    """A block more in a stack costs only views, and copies out of the stack."""
    for how in ("stacked, by eigenvectors", "stacked, by products alone"):
        few, many = (now[f"an ADMM round of {blocks} blocks, {how}"]["operators"] for blocks in (10, 168))
        assert many < few * 6 / 2 + 50 * (168 - 10)  # six stacks in place of two
        assert many < now["an ADMM round of 168 blocks, one after the other"]["operators"]


def test_what_is_recorded_is_what_is_counted_now(now):
    """Operators are compared only with equal versions of torch and transformers, on which their number depends."""
    same = [kind for kind in KINDS if kind != "operators" or RECORDED["versions"] == provenance()["versions"]]
    again = "run python scripts/count_reads.py --other CHECKOUT --output results/admm/reads.json, CHECKOUT of 7add67b"
    recorded = {row["what"]: {kind: row["now"][kind] for kind in same} for row in RECORDED["rows"]}
    assert recorded == {what: {kind: row[kind] for kind in same} for what, row in now.items()}, again


def test_what_is_stacked_now_went_one_after_the_other_before(now):
    alone = {"reads": 110, "eigensolvers": 10, "uploads": 50, "operators": 1258}
    rows = as_one(now, {"an ADMM round of 10 blocks, one after the other": alone})
    found = {row["what"]: row["before"] for row in rows if "10 blocks" in row["what"]}
    assert len(found) == 3 and all(before == alone for before in found.values())
    [line] = [line for line in table(rows).splitlines() if "10 blocks, stacked, by eigenvectors" in line]
    assert "110, 1 " in line and "50, 0 " in line
    assert RECORDED["other"].startswith("7add67b") and all(row["before"] for row in RECORDED["rows"])
