"""When a line of metrics.jsonl is written, and what it may not wait for."""

from salaad.methods.salaad import round as admm_round
from salaad.runs.records import Recorder
from tests.helpers.training import assert_same_records, run_training
from train import SummedLoss


def test_a_line_at_every_round_does_not_end_a_round_that_runs_beside_the_next_forward_pass(toy, tmp_path, monkeypatch):
    events: list[str] = []

    def noted(cls: type, name: str, event: str) -> None:
        original = getattr(cls, name)
        monkeypatch.setattr(cls, name, lambda *args, **options: events.append(event) or original(*args, **options))

    noted(admm_round.Round, "__init__", "begin")
    noted(admm_round.Round, "end", "end")
    noted(SummedLoss, "forward", "forward")
    noted(Recorder, "log", "line")
    options = {"train__steps": 5, "train__log_every": 2, "salaad__every": 2, "salaad__overlap": "true"}
    run_training(toy(**options), tmp_path / "run")
    cycle = ["forward", "line", "begin", "forward", "end"]
    assert events[:10] == ["forward", *cycle, *cycle[:-1]]
    assert "end" in events[10:]


def test_the_records_of_overlapped_rounds_are_those_of_rounds_at_once(toy, tmp_path):
    for overlap in ("false", "true"):
        run_training(toy(salaad__overlap=overlap, train__eval_every=6), tmp_path / overlap)
    assert_same_records(tmp_path / "false", tmp_path / "true")
