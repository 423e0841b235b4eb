"""scripts/reproduce.py from the command line, with a stand-in for train.py: what is trained, reused, measured."""

import json
import re
import sys
from dataclasses import replace
from time import sleep

import pytest
import yaml

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from scripts import reproduce
from scripts import trainings as starts
from scripts.reproduction import grid, trainings
from scripts.reproduction.freshness import LEGENDS
from scripts.reproduction.items import Item, Measured

BOTH = trainings.once(trainings.VANILLA, trainings.SALAAD)
# Writes what the reports of this project read of a finished run; the run that the file `broken` names fails.
TRAIN = """
import json, pathlib, sys
words = sys.argv[1:]
folder = pathlib.Path(words[words.index("--output") + 1])
if (folder / "summary.json").exists():
    sys.exit()
with open("trained", "a") as log:
    log.write(folder.name + "\\n")
if pathlib.Path("broken").exists() and folder.name == pathlib.Path("broken").read_text():
    sys.exit("the disk is full")
folder.mkdir(parents=True)
settings = pathlib.Path(words[words.index("--method") + 1] + ".yaml").read_text()
(folder / "config.yaml").write_text("# commit: abc\\n# machine: this one\\n" + settings)
(folder / "summary.json").write_text(json.dumps({"tokens": 5, "seconds": {"train": 36.0}}))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A repository with two items: one opens the folder of a vanilla run, one needs two records."""
    (tmp_path / "train_stand_in.py").write_text(TRAIN)
    (tmp_path / "results").mkdir()
    for method in ("full_rank", "salaad"):
        settings = read_command_line(["--config", "nano", "--method", method])[0].to_dict()
        (tmp_path / f"{method}.yaml").write_text(yaml.safe_dump(settings))
    monkeypatch.chdir(tmp_path)
    for module in (grid, reproduce, starts):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    items = (
        Item("opening", "Opens", "1", trainings.once(trainings.VANILLA), lambda scale: Measured([{"value": 1}])),
        Item("reading", "Reads", "2", BOTH, lambda scale: Measured(), folders=trainings.once()),
    )
    monkeypatch.setattr(reproduce, "ITEMS", items)
    return tmp_path


@pytest.fixture
def call(place, monkeypatch, capsys):
    """A function from command-line words to the names of the trained runs and the printed text (stdout, stderr)."""

    def run(*words: str) -> tuple[list[str], tuple[str, str]]:
        (place / "trained").write_text("")
        launcher = f"{sys.executable} {place / 'train_stand_in.py'}"
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "--scale", "nano", "--launcher", launcher, *words])
        reproduce.main()
        return (place / "trained").read_text().split(), capsys.readouterr()

    return run


def test_what_is_there_is_neither_trained_nor_measured_again(call, place):
    assert call("opening")[0] == ["full_rank"]
    trained, said = call("all")
    assert trained == ["salaad"]
    assert "opening is kept in results/nano/reproduce/opening.json; --again measures it anew" in said[1]
    assert said[0].startswith("\n## Opens\n")  # what is there is shown
    assert call("all")[0] == []


def test_a_record_does_for_an_item_that_opens_no_folder(call, place):
    call("reading")
    for name in ("full_rank", "salaad"):
        (place / "runs/reproduce/nano" / name / "summary.json").unlink()
        (place / "runs/reproduce/nano" / name / "config.yaml").unlink()
        (place / "runs/reproduce/nano" / name).rmdir()
    (place / "results/nano/reproduce/reading.json").unlink()
    assert call("reading")[0] == []
    assert (place / "results/nano/reproduce/reading.json").exists()
    assert call("opening")[0] == ["full_rank"]


def test_again_trusts_neither_results_nor_records_of_another_machine(call, place):
    call("all")
    result = place / "results/nano/reproduce/opening.json"
    result.write_text("{}")
    folder = place / "runs/reproduce/nano/full_rank"
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    assert call("all", "--again")[0] == ["full_rank"]
    kept = json.loads(result.read_text())
    assert kept["rows"] == [{"value": 1}]
    assert kept["trainings"][0]["commit"] == "abc" and kept["trainings"][0]["hours"] == 0.01


def test_a_second_text_is_measured_and_not_lost_without_a_word(call, place, monkeypatch):
    monkeypatch.setattr(reproduce, "ITEMS", [replace(item, reads=("other-text",)) for item in reproduce.ITEMS])
    (place / "second.jsonl").write_text("")
    result = place / "results/nano/reproduce/opening.json"
    call("opening")
    assert "other-text" not in json.loads(result.read_text())["command"]
    call("opening", "--other-text", "second.jsonl")
    assert "--other-text FILE" in (kept := result.read_text())
    call("opening")  # shows what is kept
    with pytest.raises(UserError, match=r"opening.json has perplexities on a second text, which would be lost; give -"):
        call("opening", "--again")
    assert result.read_text() == kept
    call("opening", "--again", "--other-text", "second.jsonl")


def test_a_result_of_other_trainings_than_todays_is_left_to_do(call, place):
    call("opening")
    result = place / "results/nano/reproduce/opening.json"
    kept = json.loads(result.read_text())
    kept["trainings"][0]["name"] = "full_rank,rho=1"
    result.write_text(json.dumps(kept))
    rows = {row["item"]: row for row in json.loads(call("--list", "--json")[1][0])}
    assert not rows["opening"]["done"] and rows["opening"]["runs_left"] == []
    call("opening")
    assert json.loads(result.read_text())["trainings"][0]["name"] == "full_rank"


def test_a_training_with_other_settings_than_todays_is_not_taken(call, place, monkeypatch):
    """As after a change of the scale's YAML file, which the names of runs do not tell."""
    call("opening")
    monkeypatch.setitem(grid.SCALES, "nano", replace(grid.SCALES["nano"], options=("--optimizer.lr=9e-3",)))
    rows = {row["item"]: row for row in json.loads(call("--list", "--json")[1][0])}
    assert rows["opening"]["runs_left"] == ["full_rank"]
    with pytest.raises(UserError, match=r"opening lacks full_rank"):
        call("opening")
    assert (place / "trained").read_text() == ""


def test_a_training_on_shards_of_c4_is_one_on_c4_from_the_hub(place):
    scale, shards = (
        grid.SCALES["60m"],
        ["--data.source=files", "--data.files=['c4/train*']", "--data.validation_files=['c4/v*']"],
    )
    run = trainings.VANILLA
    for options, known in ((shards, True), ([*shards, "--optimizer.lr=9e-3"], False)):
        config = read_command_line([*run.command(scale)[1:], *options])[0].to_dict()
        run.record(scale).parent.mkdir(parents=True, exist_ok=True)
        about = {"command": "", "commit": "abc", "machine": "m", "summary": {"tokens": 5, "seconds": {}}}
        run.record(scale).write_text(json.dumps({"config": config, **about}))
        assert run.recorded(scale) == known


def test_a_failed_training_is_named_and_the_others_are_kept(call, place):
    (place / "broken").write_text("full_rank")
    with pytest.raises(UserError, match=r"1 trainings failed \(full_rank\); opening lacks full_rank; .*; mend what"):
        call("all")
    assert (place / "runs/reproduce/nano/salaad/summary.json").exists()
    assert not (place / "results/nano/reproduce/opening.json").exists()
    (place / "broken").unlink()
    assert "the disk is full" in (place / "runs/reproduce/nano/full_rank.log").read_text()
    assert call("all")[0] == ["full_rank"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_no_training_begins_after_an_error_that_no_user_can_correct(call, place, monkeypatch, jobs):
    begun = []

    def train(run, scale, launcher, threads):
        begun.append(run.name(scale))
        if len(begun) == jobs:
            raise RuntimeError
        sleep(0.2)  # until after the error

    seeds = trainings.once(*(trainings.VANILLA.seeded(seed) for seed in range(9)))
    monkeypatch.setattr(reproduce, "ITEMS", (Item("many", "Many", "1", seeds, lambda scale: Measured()),))
    monkeypatch.setattr(reproduce, "train", train)
    with pytest.raises(RuntimeError):
        call("many", "--jobs", str(jobs))
    assert len(begun) == jobs


@pytest.mark.parametrize("own", [False, True])
def test_a_training_that_ends_early_is_told_from_a_launcher_that_does_not_wait(call, place, monkeypatch, capsys, own):
    (place / "train.py").write_text("#!/bin/sh\n")  # ends with code 0 and without a summary, as Python's too
    (place / "train.py").chmod(0o755)
    monkeypatch.setenv("PATH", str(place), prepend=":")
    launcher = ["--launcher", "env"] if own else ["--launcher", "python"]
    with pytest.raises(UserError, match="opening lacks full_rank"):
        call("opening", *launcher)
    said = capsys.readouterr().out
    assert "full_rank ended before its last step; the same command goes on with it" in said
    assert ("as sbatch --wait does" in said) == own


def test_the_list_and_the_printed_commands_name_what_is_left(call, place):
    call("opening")
    rows = {row["item"]: row for row in json.loads(call("--list", "--json")[1][0])}
    assert rows["opening"]["done"] and rows["opening"]["runs_left"] == []
    assert not rows["reading"]["done"] and rows["reading"]["runs_left"] == ["salaad"]
    assert rows["opening"]["hours"]["2 cores"] == 0.01  # measured
    assert rows["opening"]["hours_left"]["2 cores"] == 0 < rows["reading"]["hours_left"]["2 cores"]
    assert rows["reading"]["hours_left"]["2 cores"] < rows["reading"]["hours"]["2 cores"]
    trained, said = call("all", "--launcher", "print")
    assert trained == []
    [command] = said[0].splitlines()
    assert command.startswith("accelerate launch train.py --config nano.yaml")
    assert command.endswith("--method salaad --seed 0 --output runs/reproduce/nano/salaad")


def test_a_record_of_another_run_than_the_folder_is_written_anew_without_a_training(call, place):
    call("opening")
    record = place / "results/nano/reproduce/runs/full_rank.json"
    kept = json.loads(record.read_text())
    record.write_text(json.dumps(kept | {"summary": {"tokens": 6, "seconds": {"train": 1.0}}}))
    trained, said = call("all")
    assert "opening.json; some of its trainings were repeated since, on another machine or commit; --again" in said[1]
    assert trained == ["salaad"]
    assert call("opening", "--again")[0] == []
    assert json.loads(record.read_text()) == kept


@pytest.mark.parametrize(
    ("launcher", "said"),
    [
        ("nosuchlauncher --x", "'nosuchlauncher --x', which begins with no program that is here; give python, print"),
        ("", "'', which begins with no program"),
        ('a"b', "which are no words (No closing quotation); close its quotes"),
    ],
)
def test_a_launcher_that_cannot_be_started_is_one_sentence_before_anything_is_trained(call, place, launcher, said):
    with pytest.raises(UserError, match=re.escape(said)):
        call("opening", "--launcher", launcher)
    assert (place / "trained").read_text() == ""


@pytest.mark.parametrize("part", ["name", "hours"])
def test_a_result_whose_trainings_lack_a_part_is_one_sentence(call, place, part):
    call("opening")
    result = place / "results/nano/reproduce/opening.json"
    kept = json.loads(result.read_text())
    del kept["trainings"][0][part]
    result.write_text(json.dumps(kept))
    for words in (["opening"], ["--list"]):
        with pytest.raises(UserError, match=r"opening.json has a training without a name, .* measure opening --again"):
            call(*words)


@pytest.mark.parametrize("content", ["{}", "[]", "5", '{"trainings": []}'])
def test_a_result_that_is_none_is_one_sentence(call, place, content):
    call("opening")
    result = place / "results/nano/reproduce/opening.json"
    result.write_text(content)
    with pytest.raises(UserError, match=r"opening\.json (has no .* --again$|holds no JSON object; restore it)"):
        call("--list")


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"summary": {}}', '{"config": {}, "summary": {"tokens": 1, "seconds": {}}}']
)
def test_a_record_that_is_none_is_one_sentence(call, place, content):
    call("opening")
    (place / "results/nano/reproduce/runs/full_rank.json").write_text(content)
    with pytest.raises(UserError, match=r"full_rank\.json (is no record|holds no JSON object).*; restore it"):
        call("--list")


def test_an_item_that_cannot_be_measured_does_not_stop_those_behind_it(call, place, monkeypatch):
    def refuse(scale):
        raise UserError("no task data; give --task-data")

    refusing = Item("refusing", "Refuses", "0", trainings.once(), refuse)
    monkeypatch.setattr(reproduce, "ITEMS", (refusing, *reproduce.ITEMS))
    with pytest.raises(UserError, match=r"^refusing: no task data; give --task-data; mend"):
        call("all")
    assert (place / "results/nano/reproduce/reading.json").exists()


def test_commands_name_a_place_for_what_an_item_reads_and_no_path_of_this_machine(call, place):
    (place / "tasks").mkdir()
    reading = Item("asking", "Asks", "3", trainings.once(), lambda scale: Measured(), reads=("task-data",))
    scale = reproduce.asked_scale(reproduce.parser().parse_args(["--scale", "nano", "--task-data", "tasks"]))
    assert reading.command(scale) == "python scripts/reproduce.py --scale nano --task-data DIR asking"
    assert reproduce.ITEMS[0].command(scale) == "python scripts/reproduce.py --scale nano opening"


def test_a_damaged_file_of_another_scale_stops_the_report_and_no_item(call, place):
    damaged = place / "results" / "elastic" / "micro.json"
    damaged.parent.mkdir()
    damaged.write_text("{}")
    with pytest.raises(UserError, match=r"^the report is not written: .*elastic/micro.json has no rows; restore it"):
        call("all")
    for name in ("opening", "reading"):
        assert (place / "results/nano/reproduce" / f"{name}.json").exists()
    damaged.unlink()
    (place / "results/micro/reproduce").mkdir(parents=True)
    (place / "results/micro/reproduce/reading.json").write_text('{"item": "reading"}')
    with pytest.raises(UserError, match=r"^the report is not written: .*reading.json has no title and no section"):
        call("all", "--again")


def test_every_mark_of_a_listed_item_is_explained():
    hours = dict.fromkeys(reproduce.MACHINES, 1.0)
    row = {"item": "kappa", "title": "κ", "section": "5.3", "runs": ["a"], "runs_left": [], "flops": 1e9, "done": True}
    row |= {"hours": hours, "hours_left": hours, "mark": "†‡", "result": "kappa.json", "hub": None}
    table = reproduce.listing_table([row], hours)
    assert "kappa.json †‡" in table and all(f"{mark}: {LEGENDS[mark]}" in table for mark in "†‡")
    assert LEGENDS["§"] not in table
