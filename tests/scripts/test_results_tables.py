"""The sentences and tables of the results pages, and the curves of their pictures, against sums by hand."""

import json
import re
from functools import partial
from math import exp, log

import pytest

from scripts.elastic_ways import WAYS
from scripts.results_tables import all_methods, demo, elastic, elastic_picture, methods
from scripts.results_tables.compared import Trainings, goals_table

SHARES = (0.75, 0.5, 0.2)


def row(label: str, seed: int, X: float, parameters: float = 2e6, **ways: list[float]) -> dict:
    sizes = {
        way.replace("_", ", "): [
            {"share": share, "perplexity": value, "parameters": 1e6 * (1 + share)}
            for share, value in zip(SHARES, found, strict=True)
        ]
        for way, found in ways.items()
    }
    whole = {"perplexity": X, "parameters": parameters, "tokens": 1000}
    rate = 0.01 if label.startswith("dense, ") else 0.005
    config = {"optimizer": {"lr": rate}}
    return {"label": label, "seed": seed, "X": whole, "ways": sizes, "config": config, "commit": "c"}


@pytest.mark.parametrize(
    ("salaad", "cuts", "said"),
    [
        (50.5, [51.0, 57.0, 63.0], ("5.0 % better", "level with", "10.0 % better", "30.0 % better", "1.0 % worse")),
        (49.0, [51.0, 63.0, 77.0], ("5.0 % worse", "10.5 % worse", "10.0 % worse", "14.4 % better", "2.0 % better")),
    ],
)
def test_the_first_page_says_in_a_sentence_what_its_table_shows(tmp_path, monkeypatch, salaad, cuts, said):
    rows = [
        *(
            row("full-rank", seed, 50.0 * level, rpca_head=[50.0 * level, 57.01 * level, 90.0 * level])
            for seed, level in ((1, 1), (2, 1.25))
        ),
        *(
            row("SALAAD", seed, salaad * level, cut_head=[cut * level for cut in cuts], head_tuned=[50.0] * 3)
            for seed, level in ((1, 1), (2, 1.25), (3, 1.125))  # full-rank training has no seed 3
        ),
        row("dense, 0.5", 9, 60.0 * 1.125),  # of another seed: compared with the mean of the others, 1.125 as well
        row("dense, 0.2", 9, 70.0 * 1.125),
    ]
    rows[2]["costs"] = {"train": {"operations": 1e9}, "head, tuned": {"operations": 2.1e8, "bytes": 9}}
    rows[0]["text_tokens"] = 40.1e6
    for one, loss in ((rows[2]["ways"]["cut, head"][1], 4.0), (rows[5]["X"], 4.2)):
        one["in_context"] = {"other": (loss, 10)}
    (tmp_path / "elastic").mkdir()
    (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(demo, "RESULTS", tmp_path)
    page = demo.summary_table()
    half, alike, fifth, alike_too, whole = (words.removesuffix(" with") for words in said)
    dense = "a dense model trained at that size"
    assert f"Cut to 75 % of its parameters, SALAAD's model is {half} than {dense}" in page
    other = "a full-rank model cut the same way; "
    assert re.search(f"and {alike} (than|with) {other}cut to 60 %, it is {fifth} than", page)
    assert f"and {alike_too} than {other}uncut, it is {whole} than full-rank training" in page
    assert "for 21% of the training's operations" in page
    assert "All trainings saw 40.1 M tokens of Wikipedia, 20 per parameter" in page
    assert page.endswith("Some of the code behind these numbers has changed since.")  # as git has no such commit
    with monkeypatch.context() as patched:
        patched.setattr(demo, "mark_of", lambda commits: "†" if "of godec" in commits else "")
        assert "has changed since" not in demo.summary_table()
        rows[0]["commits"] = {"godec": "of godec"}
        (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
        assert "has changed since" in demo.summary_table()
    assert "tuned on text" not in page  # of the full-rank model there is no tuned size
    for one, tuned in zip(rows[:2], ([50.2] * 3, [50.0, 50.0, 55.0]), strict=True):
        one["ways"] |= row("", 0, 1.0, rpca_head_tuned=tuned)["ways"]
    (tmp_path / "elastic" / "nano-20.json").write_text(json.dumps({"rows": rows}))
    told = (
        "tuned on text, it is level with a full-rank model tuned the same way at 75 %, and 4.7 % better than it at 60 %"
    )
    assert told in demo.summary_table()
    lines = {line[0]: line[2:] for line in cells(page)}
    names = ["SALAAD", "SALAAD, tuned", "full-rank, cut", "full-rank, cut, tuned", "dense, trained small"]
    assert lines["size"] == names
    assert "(means over 2 seeds, of dense models over 1; ± 0.0% for uncut SALAAD)" in page
    assert lines["uncut"] == [f"{salaad / 50 - 1:+.1%}", "–", "+0.0%", "–", "–"]
    # The tuned model has 50 with seeds 1 and 2, where full-rank training has 50 and 62.5.
    assert lines["60 % (0.2)"][1] == "-10.0%" and lines["75 % (0.5)"][4] == "+20.0%"
    # Over the tokens not copied both have exp(4) and exp(4.2) with the seed that was measured.
    assert f"SALAAD's cuts are {100 * (1 - exp(-0.2)):.1f} % better at 75 %." in page


def cells(page: str) -> list[list[str]]:
    """The cells of the lines of a page's tables."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("|")]


def test_a_picture_shows_ways_and_whole_models_relative_to_full_rank_training(tmp_path, monkeypatch):
    rows = [
        row("full-rank", 0, 50.0, rpca=[51.0, 55.0, 80.0]),
        row("full-rank", 1, 100.0, rpca=[102.0, 114.0, 180.0]),
        row("SALAAD", 0, 53.0, cut=[51.0, 55.0, 84.0]),
        row("SALAAD", 1, 110.0, cut=[102.0, 114.0, 176.0]),
        row("SALAAD", 2, 99.0),  # a seed without full-rank training
        # Relative to the mean of full-rank training, 75.
        row("galore", 0, 84.0),
        row("lost", 2, 87.0, parameters=1.5e6),
        row("dense, 0.5", 0, 90.0, parameters=1.4e6),
    ]
    drawn = {}

    def keep(figure, path):
        [panel] = figure.axes
        drawn.update({line.get_label(): [*zip(*line.get_data(), strict=True)] for line in panel.get_lines()})

    monkeypatch.setattr(elastic_picture, "save", keep)
    elastic_picture.picture(rows, tmp_path / "picture.png")
    close = partial(pytest.approx, rel=1e-9)
    assert drawn["full-rank: rpca (0, 1)"] == [close(point) for point in ((1.2, 0.7), (1.5, 0.12), (1.75, 0.02))]
    assert drawn["SALAAD (0, 1)"] == [close((2.0, 0.08))]
    assert drawn["SALAAD: cut (0, 1)"] == [close(point) for point in ((1.2, 0.72), (1.5, 0.12), (1.75, 0.02))]
    assert drawn["galore (0)"] == [close((2.0, 0.12))] and drawn["lost (2)"] == [close((1.5, 0.16))]
    assert drawn["trained dense at its size"] == [close((1.4, 0.2))]
    assert {y for _, y in drawn["full-rank"]} == {0}


def test_every_way_to_a_smaller_model_has_a_marker_shared_by_those_that_match():
    markers = {way: elastic_picture.MARKERS[elastic_picture._MATCHING.get(way, way)] for way in WAYS}
    for ours, theirs in (("cut", "rpca"), ("cut, head", "godec, head"), ("head, tuned", "rpca, head, tuned")):
        assert markers[ours] == markers[theirs]
    assert len(set(elastic_picture.MARKERS.values())) == len(elastic_picture.MARKERS)


def test_the_table_of_all_methods_has_both_counts_the_other_text_bytes_and_kappa_of_halves(tmp_path):
    bench = tmp_path / "methods.json"
    cost = {"optimizer_bytes": 3e6, "method_bytes": 1e6, "over_full_rank": 1.25}
    own = {"optimizer_bytes": 3e6, "method_bytes": 0, "over_full_rank": 1.5}
    costs = {"salaad": cost, "SALAAD": own, "full_rank": own}
    bench.write_text(json.dumps({"methods": costs, "config": {"train": {"compile": True}}, "commit": "abc"}))
    rows = [row(label, 0, 50.0, hpa=[51.0, 55.0, 80.0]) for label in ("SALAAD", "SALAAD, as in the paper")]
    for one in rows:
        one |= {"commit": "c", "text_tokens": 1e6, "method": "salaad"}
        one["X"] |= {"legacy_perplexity": 47.0, "in_context": {"other": (log(57), 900), "copied": (2, 100)}}
        one["ways"]["hpa"][1] |= {"legacy_perplexity": 52.5, "other_perplexity": 90.0, "bytes": 5e6, "kappa": 0.65}
        one["costs"] = {"train": {"tokens": 1e6}, "hpa": {"tokens": 5e5}}
    whole = [row("full-rank", seed, 40.0 + 60 * seed) for seed in (0, 1)]
    again = [row("SALAAD, again", seed, perplexity) for seed, perplexity in ((0, 44.0), (1, 112.0), (2, 9.0))]
    galore = [row("galore", seed, perplexity) for seed, perplexity in ((0, 63.0), (2, 91.0))]
    others = [one | {"commit": "c", "text_tokens": 1e6, "method": "full_rank"} for one in (*whole, *again, *galore)]
    again[1]["X"]["bytes"] = 6e6  # recorded with one seed only
    whole[0]["X"]["in_context"], again[2]["X"]["in_context"] = ({"other": (log(value), 1)} for value in (50, 60))
    lines = cells(all_methods.fair_table([*rows, *others], bench))
    # With seeds 0 and 1, +10 % and +12 %; with seed 2 there is no full-rank training.
    assert next(line for line in lines if line[0] == "SALAAD, again")[:5] == [
        *("SALAAD, again", "", "0, 1, 2", "+11.0% ± 1.0% (seeds 0, 1)", "≈ +20.0% (seed 2)"),
    ]
    assert "6.00 MB" in next(line for line in lines if line[0] == "SALAAD, again")
    # Other methods are relative to the mean of full-rank training's seeds, which is 70.
    assert next(line for line in lines if line[0] == "galore")[2:4] == ["0, 2", "≈ +10.0% ± 20.0%"]
    # SALAAD has the step time of its label; no row tells what is trained, and that column is left out.
    whole = ["", "0", "+25.0%", "+14.0%", "50.00", "47.00", "", "1.0 M", "2.00 M", ""]
    assert ["SALAAD", *whole, "3.00 MB", "1.50"] in lines
    assert ["SALAAD, as in the paper", *whole, "3.00 MB + 1.00 MB", "1.25"] in lines
    half = ["0.5", "0", "+37.5%", "", "55.00", "52.50", "90.00", "1.5 M", "1.50 M", "5.00 MB", "", ""]
    assert ["SALAAD: hpa, κ* 0.65", *half] in lines  # of whose tokens a third were read after the training
    assert ["SALAAD: hpa", "0.2", "0", "+100.0%", "", "80.00", "", "", "1.5 M", "1.20 M", "", "", ""] in lines


def test_runs_of_a_table_have_commits_and_machines_and_say_that_code_has_changed_since(monkeypatch):
    monkeypatch.setattr(methods, "mark_of", lambda commits: "†" if "old" in commits else "")
    runs = [{"commit": "old", "machine": "A, 1 threads"}, {"commit": "new", "machine": "B"}]
    told = "Commits: new, old; A, 1 threads; B."
    assert methods._measured_at(runs) == f"{told} Some of the code behind these runs has changed since."
    assert methods._measured_at(runs[1:]) == "Commits: new; B."


def test_a_way_has_the_bytes_of_its_folders_beside_its_costs():
    one = row("SALAAD", 0, 50.0) | {"machine": "A", "minutes": {"train": 60.0, "head, tuned": 30.0}}
    one["costs"] = {
        "train": {"tokens": 2e6, "operations": 1e12},
        "head, tuned": {"tokens": 1e5, "operations": 4e11, "bytes": 22e6},
    }
    trained, tuned = cells(elastic.cost_table([one]))[2:]
    assert trained == ["SALAAD", "train", "2.00 M", "1.0e+12", "", "60.0", "A"]
    assert tuned == ["SALAAD", "head, tuned", "0.10 M", "4.0e+11", "22.00 MB", "30.0", "A"]


def test_full_rank_training_at_searched_rates_is_told_with_and_without_copying():
    rows = [row("full-rank", 0, 50.0), row("full-rank", 1, 70.0), row("full-rank, as searched", 0, 54.0)]
    assert demo._at_searched_rates(Trainings(rows)) == ""
    for one, other in zip(rows, (60.0, 60.0, 63.0), strict=True):
        one["X"]["in_context"] = {"other": (log(other), 10)}
    assert "is -10.0% (seed 0, relative to the mean of the seeds), and +5.0% over" in demo._at_searched_rates(
        Trainings(rows)
    )


@pytest.mark.parametrize("timed", [None, {"lora": {"optimizer_bytes": 1, "method_bytes": 1, "over_full_rank": 1.0}}])
def test_the_table_of_all_methods_leaves_out_the_costs_of_what_was_not_timed(tmp_path, timed):
    """As of results in a file of their own, of which no benchmark has the name."""
    bench = tmp_path / "methods-again.json"
    if timed:
        bench.write_text(json.dumps({"methods": timed, "config": {"train": {"compile": False}}, "commit": "abc"}))
    rows = [row("full-rank", 0, 40.0) | {"commit": "c", "text_tokens": 1e6, "method": "full_rank"}]
    page = all_methods.fair_table(rows, bench)
    assert cells(page)[2:] == [["full-rank", "0", "+0.0%", "40.00", "1.0 M", "2.00 M"]]
    told = (
        "*step time* is relative to full-rank training, of SALAAD while its weights are pulled, of steps that were not "
    )
    assert (f"{told}compiled (results/bench/methods-again.json, commit abc)" in page) == bool(timed)


def test_small_dense_models_have_their_rates_and_a_state_by_their_parameters(tmp_path):
    timed = {"optimizer_bytes": 16e6, "method_bytes": 0, "over_full_rank": 1.0, "trained": 2e6}  # 8 bytes a parameter
    bench = tmp_path / "methods.json"
    bench.write_text(
        json.dumps({"methods": {"full_rank": timed}, "config": {"train": {"compile": True}}, "commit": "c"})
    )
    small = [row("dense, 0.5", 0, 60.0, parameters=1.5e6), row("dense, 0.2", 0, 70.0, parameters=1.2e6)]
    small[1]["config"] = {"optimizer": {"lr": 0.02}}
    rows = [
        one | {"commit": "c", "text_tokens": 1e6, "method": "full_rank"} for one in (row("full-rank", 0, 40.0), *small)
    ]
    page = all_methods.fair_table(rows, bench)
    found = {line[0]: line[-2:] for line in cells(page)}
    assert found["full-rank"] == ["16.00 MB", "1.00"]
    assert found["dense, 0.5"] == ["12.00 MB", ""] and found["dense, 0.2"] == ["9.60 MB", ""]
    assert "(of small dense models by their parameters)" in page
    assert "at a learning rate of 0.01 (0.5) or 0.02 (0.2); the large model's is 0.005." in page
    costs = {"full_rank": timed}
    for label, steps, told in (("dense, 0.5", 0.7, True), ("dense, 0.2", 0.4, False)):
        costs[label] = {"optimizer_bytes": 1e6 * steps, "method_bytes": 0, "over_full_rank": steps}
        bench.write_text(json.dumps({"methods": costs, "config": {"train": {"compile": True}}, "commit": "c"}))
        page = all_methods.fair_table(rows, bench)
        found = {line[0]: line[-2:] for line in cells(page)}
        assert found[label] == [f"{steps:.2f} MB", f"{steps:.2f}"]
        assert ("(of small dense models by their parameters)" in page) == told
    assert found["dense, 0.5"] == ["0.70 MB", "0.70"]


def test_what_was_aimed_at_stands_beside_what_was_reached(tmp_path):
    rows = [
        row("full-rank", 0, 60.0, rpca_head=[50.0, 50.0, 50.0]),
        row("full-rank", 1, 50.0, rpca_head=[50.0, 52.0, 53.0]),
        row("SALAAD", 1, 49.0, cut=[49.0, 50.4, 60.0], cut_head=[49.0, 50.4, 52.4]),
        row("SALAAD", 2, 90.0, cut_head=[49.0, 50.4, 62.4]),
        row("SALAAD, as in the paper", 1, 52.0, energy=[50.0, 50.0, 60.0], cut_head=[48.0, 50.4, 52.4]),
        # Its size up to half a percent; SALAAD's cut of this size has 50.4 with both seeds.
        row("dense, 0.5", 1, 56.0, parameters=1.499e6),
        row("dense, as loro", 1, 1.0, parameters=1.52e6),  # of no size of a cut
        row("dense, 0.2", 0, 70.0, parameters=1.2e6),  # SALAAD's mean is 57.4
    ]
    for figures, loss in ((rows[1]["X"], 4.0), (rows[2]["X"], 4.02), (rows[2]["ways"]["cut, head"][1], 4.001)):
        figures["in_context"] = {"other": (loss, 10), "copied": (1, 1)}
    lines = [line.strip("|").split("|") for line in goals_table(rows).splitlines() if line.startswith("|")]
    found = {name.strip(): [cell.strip() for cell in cells] for name, *cells in lines}
    # Full-rank and SALAAD have only seed 1 in common.
    assert found["uncut, over full-rank training"][:2] == ["0.0%", "-2.0%, met"]
    assert found["uncut, over full-rank training, not copied"][0:2] == ["0.0%", "+2.0%, missed"]
    assert found["half, over full-rank training, not copied"] == ["0.5%", "+0.1%, met"]
    assert "a fifth, over full-rank training, not copied" not in found
    assert found["half, over full-rank training"] == ["0.5%", "+0.8%, missed"]
    assert found["a fifth, over full-rank training"][1] == "+4.8%, met"
    assert found["the elastic score"][1] == "–"  # not all of its sizes are there
    assert found["over the dense model trained at the size"][1] == "-10.0%, met"
    assert found["over the full-rank model, split and cut the same way"][1] == "-1.1%, met"  # the worst size, a fifth
    assert found["over the cut that leaves the head dense"][1] == "+0.00%, met"  # equal at three quarters
    by_energy = "over the model trained as in the paper, cut by energy with equal weights"
    assert found[by_energy][1] == "+0.8%, missed"  # at half
    assert found["over the model trained as in the paper, cut the same way"][1] == "+2.1%, missed"  # at 0.75
    assert "with seed 1 alone it is -2.0% uncut, +0.8% at half and +4.8% at a fifth" in goals_table(rows)


def test_figures_name_the_seeds_that_they_have():
    """The second seed has no fifth without text, and the third has figures over tokens not copied alone of X."""
    rows = [
        *(row("full-rank", seed, 50.0) for seed in (0, 1, 2)),
        row("SALAAD", 0, 49.0, cut_head=[49.0, 50.0, 55.0]),
        row("SALAAD", 1, 60.0, cut_head=[49.0, 50.0, 55.0]),
        row("SALAAD", 2, 51.0, cut_head=[49.0, 52.0, 54.0]),
    ]
    del rows[4]["ways"]["cut, head"][2]
    for one in (rows[1], rows[2], rows[4], rows[5]):
        one["X"]["in_context"] = {"other": (4.0, 10)}
    rows[5]["ways"]["cut, head"][1]["in_context"] = {"other": (4.01, 10)}
    text = goals_table(rows)
    assert "with seed 2 alone it is +2.0% uncut, +4.0% at half and +8.0% at a fifth" in text
    found = {line[0]: line[2] for line in cells(text)}
    assert found["uncut, over full-rank training"] == "+6.7%, missed"
    assert found["uncut, over full-rank training, not copied"] == "+0.00%, met, seeds 1, 2"
    assert found["half, over full-rank training, not copied"] == "+1.0%, missed, seed 2"


def test_models_that_are_level_over_the_tokens_not_copied_are_said_to_be_so():
    rows = [row("SALAAD", 0, 50.0, cut_head=[50.0, 50.4, 54.0]), row("dense, 0.5", 0, 56.0), row("dense, 0.2", 0, 60.0)]
    for size in (*rows[0]["ways"]["cut, head"], rows[1]["X"]):
        size["in_context"] = {"other": (4.0, 10)}
    said = demo._not_copied(Trainings(rows), ["60 %", "40 %"])
    assert said.endswith("over the tokens that are not copied, SALAAD's cuts are level at 60 %.")
