"""What the report concludes: the numbers of its sentences against sums by hand, and silence where one is missing."""

import json

from scripts.reproduction.conclusions import conclusions


def row(label: str, seed: int, X: float, **ways: dict[float, float]) -> dict:
    sizes = {
        way.replace("_", ", "): [{"share": share, "perplexity": value} for share, value in found.items()]
        for way, found in ways.items()
    }
    return {"label": label, "seed": seed, "X": {"perplexity": X}, "ways": sizes}


def said(tmp_path, *rows: dict) -> list[str]:
    (tmp_path / "elastic").mkdir(exist_ok=True)
    (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
    return conclusions(tmp_path)


def test_nothing_is_concluded_from_nothing(tmp_path):
    assert conclusions(tmp_path) == []
    assert said(tmp_path, row("full-rank", 0, 50.0), row("SALAAD", 0, 51.0)) == []


def test_cuts_are_compared_seed_by_seed_and_only_where_there_is_a_full_rank_model_of_that_seed(tmp_path):
    [many, head] = said(
        tmp_path,
        row("full-rank", 0, 50.0, rpca_head={0.5: 55.0, 0.2: 60.0}),
        row("full-rank", 1, 40.0),
        row("SALAAD", 0, 51.0, cut={0.2: 90.0}, cut_head={0.5: 51.0, 0.2: 55.0}),
        row("SALAAD", 1, 41.0, cut={0.2: 80.0}, cut_head={0.5: 42.0, 0.2: 46.0}),
        row("SALAAD", 2, 9.0, cut={0.2: 9.0}, cut_head={0.5: 9.0, 0.2: 9.0}),
    )
    assert "SALAAD's model is cut to is +3.5% and +12.5% from" in many  # means of +2 % and +5 %, +10 % and +15 %
    assert "the same tools, +10.0% and +20.0%" in many
    assert "a fifth is +12.5% from the whole full-rank model with it and +90.0% with a dense head" in head


def test_of_two_ways_with_text_the_better_counts_at_each_size(tmp_path):
    ways = {"rpca_tuned_each": {0.5: 49.0, 0.2: 70.0}, "rpca_head_tuned_each": {0.5: 50.0, 0.2: 60.0}}
    small = [row("dense, 0.5", 0, 52.0), row("dense, 0.2", 0, 60.0)]
    mine = row("SALAAD", 0, 51.0, tuned_each={0.5: 50.5, 0.2: 58.0})
    [tuned, dense] = said(tmp_path, row("full-rank", 0, 50.0, **ways), mine, *small)
    assert "are then SALAAD +1.0% and +16.0% and full-rank -2.0% and +20.0%" in tuned
    assert "a dense model trained at it is +4.0% (half) and +20.0% (a fifth)" in dense
