"""The search of learning rates: where it goes, and that what was found is not trained again."""

import json
import sys
from math import log2

import pytest

from scripts import compare_methods
from scripts.compare_methods import best_rate


@pytest.fixture
def search(tmp_path, monkeypatch):
    """Run the script with trainings whose best learning rate is given; which ones it trained."""
    output = tmp_path / "found.json"

    def run(best: float, *words: str) -> list[tuple[float, int | None]]:
        trained = []

        def result(self, method, lr, steps):
            trained.append((lr, steps))
            variants = {"X": {"perplexity": 100 + abs(log2(lr / best)), "tokens": 1}}
            return {"lr": lr, "steps": steps or 1, "commit": "c", "command": "", "variants": variants}

        monkeypatch.setattr(compare_methods.Contest, "result", result)
        asked = ["--config=nano", "--methods=cola", f"--runs={tmp_path / 'runs'}", f"--output={output}", *words]
        monkeypatch.setattr(sys, "argv", ["compare_methods.py", *asked])
        compare_methods.main()
        return trained

    run.output = output
    return run


def test_a_search_goes_on_beyond_the_edge_that_is_best_and_then_trains_in_full(search):
    assert search(0.012) == [(0.0015, 250), (0.003, 250), (0.006, 250), (0.012, 250), (0.024, 250), (0.012, None)]
    entry = json.loads(search.output.read_text())["methods"]["cola"]
    assert [row["lr"] for row in entry["search"]] == [0.0015, 0.003, 0.006, 0.012, 0.024]
    assert (entry["own_lr"], best_rate(entry), entry["full"]["lr"]) == (0.003, 0.012, 0.012)
    assert search(0.012) == []


def test_a_search_alone_is_taken_up_by_the_run_in_full(search):
    assert search(0.003, "--search-only") == [(0.0015, 250), (0.003, 250), (0.006, 250)]
    assert "full" not in json.loads(search.output.read_text())["methods"]["cola"]
    assert search(0.003) == [(0.003, None)]


def test_a_search_ends_though_the_edge_is_always_best(search):
    assert len(search(1e9, "--search-only")) == len(compare_methods.FACTORS) + compare_methods.MOST_MORE
