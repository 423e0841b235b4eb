"""The short version of scripts/torture.py: kills, and other numbers of processes. Its other drills have own tests."""

from pathlib import Path

import pytest

from scripts.torture import Drills, differences


@pytest.fixture
def drills(tmp_path) -> Drills:
    return Drills(tmp_path / "work", quick=True, seed=1)


def test_kills_at_any_moment_leave_no_trace_in_one_process_and_in_two(drills):
    rows = list(drills.kill())
    assert [row.tries for row in rows] == [3, 2]
    assert [row.lost for row in rows] == [[], []]


def test_checkpoints_of_1_2_and_3_processes_go_on_with_1_2_and_3(drills):
    [row] = drills.world()
    # From 1 to 1 and from 2 to 2 are what the kills do.
    assert (row.tries, row.lost) == (7, [])


def test_the_comparison_sees_a_difference(drills):
    """A run with another seed is not the same; nor is one of which a bit was turned over."""
    one = drills.whole("one", drills.options(10))
    again = drills.whole("again", drills.options(10))
    assert differences(one, again) == []
    other = drills.whole("other", drills.options(10, seed=1))
    assert {"metrics.jsonl", "model/model.safetensors", "state/optimizer.pt"} <= set(differences(one, other))
    [weights] = (again / "checkpoints").glob("step-0000010/model/model.safetensors")
    flip(weights)
    assert differences(one, again) == ["model/model.safetensors"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
