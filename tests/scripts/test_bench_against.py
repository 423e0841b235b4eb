"""scripts/bench_against.py on two checkouts whose benchmarks are stand-ins: turns, ratios, records, refusals."""

import json

import pytest

from salaad.common.errors import UserError
from scripts import bench_against, bench_startup, count_reads

# Writes what a benchmark writes; the second process of a checkout takes twice the time of the first, and so on.
STAND_IN = """
import json, os, pathlib, sys
here = pathlib.Path.cwd()
assert os.environ["PYTHONPATH"] == str(here)
with (here.parent / "order").open("a") as order:
    order.write(f"{here.name} {pathlib.Path(__file__).stem}\\n")
times = (here.parent / "order").read_text().count(f"{here.name} {pathlib.Path(__file__).stem}")
about = {"commit": here.name, "machine": "one", "versions": "some"}
found = WRITTEN
pathlib.Path(sys.argv[sys.argv.index("--output") + 1]).write_text(json.dumps(about | found))
"""
TRAINING = '{"methods": {"full_rank": {"seconds_per_step": 0.1 * FACTOR * times}}}'
INFERENCE = '{"rows": [{"work": "decode", "batch": 4, "dense": 500, "factored": 1000 / FACTOR}]}'


@pytest.fixture
def call(tmp_path, monkeypatch):
    """A function that runs the script; in `before`, a step takes half and a factored token twice the time of `now`."""
    for name, factors in {"now": ("2", "1"), "before": ("1", "2")}.items():
        scripts = tmp_path / name / "scripts"
        scripts.mkdir(parents=True)
        for script, written, factor in zip(bench_against.SCRIPTS, (TRAINING, INFERENCE), factors, strict=True):
            (scripts / f"{script}.py").write_text(STAND_IN.replace("WRITTEN", written).replace("FACTOR", factor))
    monkeypatch.setattr(bench_against, "ROOT", tmp_path / "now")

    def run(*words: str) -> dict:
        own = [f"--other={tmp_path / 'before'}", f"--output={tmp_path / 'found.json'}"]
        monkeypatch.setattr("sys.argv", ["bench_against.py", *own, *words])
        bench_against.main()
        return json.loads((tmp_path / "found.json").read_text())

    return run


def test_checkouts_take_turns_and_go_first_in_turn(call, tmp_path):
    call("--rounds=2")
    order = [line.split() for line in (tmp_path / "order").read_text().splitlines()]
    assert [name for name, script in order if script == "bench_training"] == ["before", "now", "now", "before"]
    assert len(order) == 8


def test_ratios_are_of_neighbours_and_what_was_compared_is_named(call, capsys):
    found = call("--rounds=3")
    rows = {row["what"]: row for row in found["rows"]}
    step, token = rows["a step, full_rank"], rows["a token, decode, factored, batch 4"]
    assert step["other"] == pytest.approx([100, 200, 300]) and step["here"] == pytest.approx([200, 400, 600])
    assert token["other"] == pytest.approx([2, 2, 2]) and token["here"] == pytest.approx([1, 1, 1])
    assert (found["other"]["commit"], found["here"]["commit"]) == ("before", "now")
    lines = {line.split("|")[1].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert "200 ms" in lines["a step, full_rank"] and " 2.000 " in lines["a step, full_rank"]
    assert " 0.500 " in lines["a token, decode, factored, batch 4"]
    assert " 1.000 " in lines["a token, decode, dense, batch 4"]


def test_a_benchmark_that_fails_is_said_and_nothing_is_written(call, tmp_path):
    (tmp_path / "before" / "scripts" / "bench_inference.py").write_text("raise SystemExit('no such option')")
    with pytest.raises(UserError, match=r"bench_inference.py of .*before ended with code 1 and said no such option"):
        call("--rounds=1")
    assert not (tmp_path / "found.json").exists()


def test_what_is_no_checkout_is_refused(call, tmp_path):
    (tmp_path / "before" / "scripts" / "bench_training.py").unlink()
    with pytest.raises(UserError, match=r"has no scripts/bench_training.py; give a checkout of this project"):
        call("--rounds=1")


@pytest.mark.parametrize("script", [bench_startup, count_reads])
def test_a_checkout_without_a_commit_is_refused_before_anything_is_measured(script, tmp_path, monkeypatch):
    (tmp_path / "salaad").mkdir()
    (tmp_path / "train.py").write_text("")
    words = [f"--other={tmp_path}", *(["--checkpoint=x"] if script is bench_startup else [])]
    monkeypatch.setattr("sys.argv", [script.__file__, *words])
    monkeypatch.setattr(script, "python_in", lambda *_: pytest.fail("measured"))
    with pytest.raises(UserError, match="has no commit"):
        script.main()
