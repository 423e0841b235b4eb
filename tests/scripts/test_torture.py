"""The short version of scripts/torture.py: kills, and other numbers of processes. Its other drills have own tests."""

import json
import os
import sys
from pathlib import Path

import pytest

from scripts import torture
from scripts.reliability import drills as torture_drills
from scripts.reliability import fuzz
from scripts.reliability.drills import DRILLS, Drills
from scripts.reliability.fault_table import Row
from scripts.reliability.training_process import Broken, Training, differences
from tests.helpers.forked import Forked, run_on_ranks, run_script
from tests.helpers.training import run_training, train_on_ranks


@pytest.fixture
def drills(tmp_path) -> Drills:
    return Drills(tmp_path / "work", quick=True, seed=1)


def whole(self: Drills, name: str, arguments: list[str], processes: int = 1) -> Path:
    Unstarted(arguments, self.work / name, processes).finish()
    return self.work / name


class ForkedTraining(Training):
    """A training whose processes are forked, as a launcher and its processes take half a minute to start."""

    def _start(self, arguments: list[str], processes: int) -> Forked:
        return Forked(train_on, processes, [*arguments, f"--output={self.output}"])


def train_on(processes: int, words: list[str]) -> None:
    """Run train.py on this process or on children of it, with one pipe for all that is printed."""
    os.dup2(1, 2)
    if processes == 1:
        run_script("train.py", words)
    else:
        run_on_ranks("train.py", words, processes)


def test_kills_at_any_moment_leave_no_trace_in_one_process_and_in_two(drills, monkeypatch):
    monkeypatch.setattr(Drills, "whole", whole)  # the runs that are not killed
    monkeypatch.setattr(torture_drills, "Training", ForkedTraining)
    rows = list(drills.kill())
    assert [row.tries for row in rows] == [3, 2]
    assert [row.lost for row in rows] == [[], []]


class Unstarted:
    """A training in this process, or in forked ones, as a launcher and its processes take half a minute to start."""

    def __init__(self, arguments: list[str], output: Path, processes: int = 1) -> None:
        self.arguments, self.output, self.processes = arguments, output, processes

    def finish(self) -> None:
        if self.processes == 1:
            run_training(self.arguments, self.output)
        else:
            train_on_ranks([(self.arguments, self.output)], self.processes, self.output.parent)


def test_checkpoints_of_1_2_and_3_processes_go_on_with_1_2_and_3(drills, monkeypatch):
    monkeypatch.setattr(torture_drills, "Training", Unstarted)
    [row] = drills.world()
    # Seven of the nine pairs: the kills cover 1 to 1 and 2 to 2.
    assert (row.tries, row.lost) == (7, [])


def test_the_comparison_sees_a_difference(drills, monkeypatch):
    """A run with another seed differs, and so does a run of which one bit was flipped."""
    monkeypatch.setattr(torture_drills, "Training", Unstarted)
    one = drills.whole("one", drills.options(10))
    again = drills.whole("again", drills.options(10))
    assert differences(one, again) == []
    other = drills.whole("other", drills.options(10, seed=1))
    assert {"metrics.jsonl", "model/model.safetensors", "state/optimizer.pt"} <= set(differences(one, other))
    [weights] = (again / "checkpoints").glob("step-0000010/model/model.safetensors")
    flip(weights)
    assert differences(one, again) == ["model/model.safetensors"]


@pytest.fixture
def nothing_runs(monkeypatch) -> None:
    monkeypatch.setattr(torture, "Drills", None)
    monkeypatch.setattr(fuzz, "Fuzz", None)


def refused(ended: tuple[int, list[str], list[str]]) -> str:
    code, out, err = ended
    assert (code, out, len(err)) == (2, [], 1)
    return err[0]


NO_TABLES = ["[]", "5", '"rows"', "rows", "", '{"tables": []}', '{"rows": 5}', '{"rows": ["fault"]}']


def test_wrong_options_of_the_torture_are_refused_in_a_sentence(command, nothing_runs, tmp_path):
    said = refused(command(torture, "--drills", "kill,disc"))
    assert "'disc'" in said and all(name in said for name in DRILLS)
    refused(command(torture, "--drills", ""))
    path = tmp_path / "table.json"
    for content in NO_TABLES:
        path.write_text(content)
        assert f"--output {path} is there and no table" in refused(command(torture, "--output", path))
        assert path.read_text() == content
    for place in (tmp_path, path / "below.json", Path("/proc/table.json"), tmp_path / ("x" * 300)):
        assert f"--output {place.parent}" in refused(command(torture, "--output", place))
    code, _, err = command(torture, "--seed", "x")
    assert code == 2 and "--seed" in err[-1]


def test_without_hypothesis_no_drill_begins_where_one_of_them_needs_it(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    monkeypatch.setattr(Drills, "hostile", lambda self: pytest.fail("begins"))
    monkeypatch.setattr(Drills, "second", lambda self: iter([Row("second", tries=1)]))
    said = refused(command(torture, "--drills", "second,hostile"))
    assert "the drill hostile needs hypothesis" in said and "pip install -r tests/requirements.txt" in said
    assert command(torture, "--drills", "second")[0] == 0


NO_CASES = ["garbage", "", "5", "[]", "[1, 2, 3]", '["keys", 5]', '["keys", [[[], "x"]]]', '["odd", "x"]', "[" * 10**5]
NO_CASES += ['["dense", [], "x"]', '["dense", [[]], "left"]', '["x", [], "left"]', '["dense", [["json"]]]']


def test_wrong_options_of_the_fuzz_are_refused_in_a_sentence(command, nothing_runs, tmp_path):
    for option, values in {"--cases": (0, -3), "--seconds": (0, -1, "nan", "inf"), "--replay": NO_CASES}.items():
        for value in values:
            assert f"{option} {str(value)[:400]}" in refused(command(fuzz, option, value))
    for place in (tmp_path, "/proc/verdict.json", tmp_path / ("x" * 300)):
        assert f"--output {place}" in refused(command(fuzz, "--output", place))


def test_options_choose_drills_and_the_last_line_is_the_verdict(command, monkeypatch, tmp_path):
    path, lost = tmp_path / "new" / "table.json", []
    monkeypatch.setattr(Drills, "hub", lambda self: iter([Row("hub", tries=2, lost=list(lost))]))
    monkeypatch.setattr(Drills, "second", lambda self: iter([Row("second", tries=1)]))
    code, out, _ = command(torture, "--quick", "--drills", "hub,second,hub", "--output", path)
    assert (code, out[-1]) == (0, "2 faults, 3 tries: nothing was lost")
    lost.append("a document")
    code, out, _ = command(torture, "--quick", "--drills", "hub", "--output", path)
    assert (code, out[-1]) == (1, "LOST: hub (a document)")
    kept = {row["fault"]: row["lost"] for row in json.loads(path.read_text())["rows"]}
    assert kept == {"second": [], "hub": ["a document"]}


def test_options_of_a_drill_that_breaks_off_still_end_in_a_verdict(command, monkeypatch, tmp_path):
    def broken(self):
        yield Row("one process", tries=3)
        raise Broken("hangs")

    monkeypatch.setattr(Drills, "kill", broken)
    monkeypatch.setattr(Drills, "hub", lambda self: pytest.fail("goes on"))
    path = tmp_path / "table.json"
    code, out, err = command(torture, "--drills", "kill,hub", "--output", path)
    assert (code, out[-1]) == (1, "LOST: kill (the drill)") and "hangs" in err[-1]
    assert [row["fault"] for row in json.loads(path.read_text())["rows"]] == ["one process"]


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
