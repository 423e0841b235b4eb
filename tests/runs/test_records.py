"""The records of a run that is killed at an unlucky moment: none is written twice, and none keeps it from going on."""

import json
import math
import os
import signal
from types import SimpleNamespace

import pytest

import train
from salaad.methods.salaad.method import SalaadMethod
from salaad.model.perplexity import Perplexity
from salaad.runs import records
from tests.helpers.training import assert_same_records, lines, run_training


def test_an_evaluation_that_was_due_is_recorded_once_though_the_run_is_killed_after_it(toy, tmp_path, monkeypatch):
    options = toy(train__eval_every=4)
    run_training(options, tmp_path / "whole")
    original = train.evaluate

    def interrupted(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*given)

    monkeypatch.setattr(train, "evaluate", interrupted)
    run_training(options, tmp_path / "parts")  # saves after step 4 with the evaluation still due
    monkeypatch.setattr(train, "evaluate", original)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SalaadMethod, "after_step", killed)
        run_training(options, tmp_path / "parts")
    assert {row["step"] for row in lines(tmp_path / "parts", "evaluations.jsonl")} == {4}
    run_training(options, tmp_path / "parts")
    assert_same_records(tmp_path / "whole", tmp_path / "parts")


def test_an_empty_file_in_place_of_the_identity_at_weights_and_biases_is_filled(toy, tmp_path):
    """A power cut can leave it so, and Weights & Biases takes no empty identity."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "wandb_id").touch()
    run_training(toy(train__steps=1, wandb__mode="offline"), run)
    [folder] = (run / "wandb").glob("offline-run-*")
    assert folder.name.endswith(f"-{(run / 'wandb_id').read_text()}")


def test_the_time_that_is_left_is_told_from_the_steps_alone(toy, tmp_path, monkeypatch, capsys):
    """An hour before the first step, such as for a text on the hub, is not spent again."""
    clock = [0.0]

    def taking(seconds, original):
        def run(*given):
            clock[0] += seconds
            return original(*given)

        return run

    monkeypatch.setattr(records, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(train.Trainer, "begin", taking(3600, train.Trainer.begin))
    monkeypatch.setattr(train.Trainer, "backward", taking(10, train.Trainer.backward))
    run_training(toy(train__steps=4), tmp_path / "run")
    said = [line for line in capsys.readouterr().out.splitlines() if line.endswith(" left")]
    assert [line.rpartition(", ")[2] for line in said] == ["00:30 left", "00:20 left", "00:10 left", "00:00 left"]


def test_a_perplexity_that_is_no_number_is_null(toy, tmp_path, monkeypatch, capsys):
    """JSON has no NaN, and a strict reader refuses a file with one."""
    monkeypatch.setattr(train, "evaluate", lambda *_: Perplexity(math.nan, 7, math.inf))
    run_training(toy(train__steps=1), tmp_path / "run")
    assert "| X " in capsys.readouterr().out
    for name in ("evaluations.jsonl", "summary.json"):
        text = (tmp_path / "run" / name).read_text()
        for line in [text] if name == "summary.json" else text.splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(word))
    assert {
        (row["loss"], row["perplexity"], row["tokens"]) for row in lines(tmp_path / "run", "evaluations.jsonl")
    } == {(None, None, 7)}
