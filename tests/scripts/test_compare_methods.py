"""The search of learning rates: which rates it tries, and that finished trainings are not repeated."""

import json
import re
import sys
from math import log2
from threading import Barrier, Event
from time import sleep

import pytest

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.methods.registry import method_of
from salaad.model.build import describe_model, outline
from scripts import compare_methods, elastic_trainings
from scripts.compare_methods import Contest, Rates, best_rates
from scripts.own_settings import alternatives
from scripts.results_tables.methods import comparison_table, search_table, widths_table
from scripts.side_by_side import side_by_side
from scripts.trainings import ROOT, Trained


def stored(config) -> int:
    """Return the number of parameters that the trained model stores."""
    model = outline(describe_model(config.model, config.data.sequence_length))
    method_of(config).rebuild(model, config)
    return method_of(config).stored(model)["parameters"]


@pytest.fixture
def search(tmp_path, monkeypatch):
    """A function that runs the script with stand-ins for trainings, and returns which it trained.

    The loss is least where the projections' rate is `best`, and grows with their share of the learning rate. Trainings
    in full diverge while `run.diverges`.
    """
    output = tmp_path / "found.json"

    def run(best: float, *words: str) -> list[tuple[float, int | None]]:
        found = []

        def trained(words, folder):
            config, _ = read_command_line(words)
            lr, share = config.optimizer.lr, config.optimizer.projection_lr
            steps = config.train.steps if "-steps" in folder.name else None
            slower = "" if share == 1 else f"x{share:g}"
            own = {"--cola.keep_swiglu=false": "-keep_swiglu=false", "--optimizer.weight_decay=0": "-weight_decay=0"}
            slower += "".join(name for word, name in own.items() if word in words)
            assert folder.name == f"{config.method}-lr{lr:g}{slower}" + (f"-{steps}-steps" if steps else "")
            found.append((lr, steps) if share == 1 else (lr, share, steps))
            found[-1] += tuple(word for word in words if "cola." in word or "weight_decay" in word)
            better = 0.5 if any("keep_swiglu=false" in word for word in words) else 0.0
            if steps is None and run.diverges:
                return Trained({"command": " ".join(words), "commit": "d", "machine": "m"}, None)
            loss = 100 + share + abs(log2(lr * share / best)) - better
            variants = {"X": {"perplexity": loss, "tokens": 1}}
            return Trained(
                {"command": " ".join(words), "steps": config.train.steps, "commit": "c", "machine": "m"},
                {"variants": variants},
            )

        monkeypatch.setattr(compare_methods, "trained", trained)
        asked = ["--config=nano", "--methods=cola", f"--runs={tmp_path / 'runs'}", f"--output={output}", *words]
        monkeypatch.setattr(sys, "argv", ["compare_methods.py", *asked])
        compare_methods.main()
        return found

    run.output, run.diverges = output, False
    return run


def test_a_search_goes_on_beyond_the_edge_that_is_best_and_then_trains_in_full(search):
    assert search(0.012) == [(0.0015, 250), (0.003, 250), (0.006, 250), (0.012, 250), (0.024, 250), (0.012, None)]
    entry = json.loads(search.output.read_text())["methods"]["cola"]
    assert [row["lr"] for row in entry["search"]] == [0.0015, 0.003, 0.006, 0.012, 0.024]
    assert (entry["own_lr"], best_rates(entry["search"]).lr, entry["full"]["lr"]) == (0.003, 0.012, 0.012)
    assert search(0.012) == []


def test_a_search_alone_is_taken_up_by_the_run_in_full(search):
    assert search(0.003, "--search-only") == [(0.0015, 250), (0.003, 250), (0.006, 250)]
    assert "full" not in json.loads(search.output.read_text())["methods"]["cola"]
    assert search(0.003) == [(0.003, None)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--config=micro"], "has results of --config nano; give another --output"),
        (["--train.steps=4000"], "has searches of 250 steps, but here they take 500; give another --output"),
    ],
)
def test_results_of_another_configuration_or_length_are_not_taken(search, words, said):
    search(0.003, "--search-only")
    kept = search.output.read_text()
    with pytest.raises(UserError, match=said):
        search(0.003, *words)
    assert search.output.read_text() == kept


TEXT = ("--data.source=files", "--data.files=one/train-*", "--data.validation_files=one/valid*")
TEXT += ("--data.tokenizer=one/small.model",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seed=7"], "a run of cola with seed 0, but here it is 7"),
        (["--optimizer.clip=0.25"], "with optimizer.clip 0.5, but here it is 0.25"),
        (["--data.files=one/other-*"], "with data.files train-*, but here it is other-*"),
        (["--data.tokenizer=one/large.model"], "with data.tokenizer small.model, but here it is large.model"),
    ],
)
def test_results_of_other_settings_or_another_text_are_not_taken(search, words, said):
    """Whether they are those of the search or of the run in full."""
    search(0.003, *TEXT)
    kept = json.loads(search.output.read_text())
    without = [
        {key: value for key, value in row.items() if key != "command"} for row in kept["methods"]["cola"]["search"]
    ]
    for part in ({"full": None}, {"search": without}):
        content = json.dumps({**kept, "methods": {"cola": kept["methods"]["cola"] | part}})
        search.output.write_text(content)
        with pytest.raises(UserError, match=rf"{re.escape(said)}; give another --output$"):
            search(0.003, *TEXT, *words, "--projections=1,0.25")
        assert search.output.read_text() == content


def test_the_same_text_may_lie_elsewhere_or_be_listed_file_by_file(search, tmp_path):
    search(0.003, *TEXT)
    files = [tmp_path / f"train-{number}" for number in (1, 2)]
    for file in files:
        file.touch()
    every = ["--data.files", *map(str, files)]
    for words in (["--data.files=two/train-*", f"--data.tokenizer={tmp_path}/small.model"], every):
        assert search(0.003, *TEXT, *words) == []
    with pytest.raises(UserError, match=r"data\.files train-1,train-2, but here it is train-1; give"):
        search(0.003, *TEXT, *every[:-1])


WIKIPEDIA = ("--data.source=files", "--data.files=runs/wikipedia/train-*", "--data.validation_files")
WIKIPEDIA += ("runs/wikipedia/valid*", "--data.tokenizer=runs/wikipedia-4096.model", "--train.compile=true")


@pytest.mark.parametrize(
    ("name", "extra"),
    [
        ("nano", ()),
        ("nano-20-dense-0.5", ("--model.like", "nano-20", "--model.parameters", "1182848", *WIKIPEDIA)),
    ],
)
def test_the_recorded_results_are_taken_by_the_commands_beside_them(name, extra, tmp_path):
    path = ROOT / "results" / "methods" / f"{name}.json"
    contest = Contest(json.loads(path.read_text())["config"], tmp_path, (), extra)
    assert compare_methods.kept_results(path, contest)


@pytest.mark.parametrize("words", [["--config=nosuch"], ["--methods=cola,nosuch"]])
def test_what_is_unknown_is_refused_before_a_folder_is_made(search, tmp_path, words):
    with pytest.raises(UserError, match="nosuch"):
        search(0.003, *words)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [["methods"], {"config": "nano", "methods": {"lora": {"over_full_rank": 1}}}])
def test_a_file_of_another_script_is_not_taken(search, content):
    search.output.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"has no results of compare_methods\.py; give another --output"):
        search(0.003)
    assert json.loads(search.output.read_text()) == content


def test_a_search_ends_though_the_edge_is_always_best_and_says_so(search):
    assert len(search(1e9, "--search-only")) == len(compare_methods.FACTORS) + compare_methods.MOST_MORE
    assert search(1e9, "--search-only") == []
    assert "(the best at the edge)" in search_table(json.loads(search.output.read_text()))


def test_the_share_of_the_projections_is_tried_around_the_best_rate_before(search):
    words = ("--projections=1,0.25", "--search-only")
    first = [(0.0015, 250), (0.003, 250), (0.006, 250)]
    second = [(0.0015, 0.25, 250), (0.003, 0.25, 250), (0.006, 0.25, 250), (0.012, 0.25, 250), (0.024, 0.25, 250)]
    assert search(0.003, *words) == first + second
    entry = json.loads(search.output.read_text())["methods"]["cola"]
    assert [Rates.of(row) for row in entry["search"]][2:4] == [Rates(0.006, 1), Rates(0.0015, 0.25)]
    assert best_rates(entry["search"]) == Rates(0.012, 0.25)
    shown = search_table(json.loads(search.output.read_text()))
    assert "0.003: 101.0, 0.006: 102.0" in shown and "0.012 × 0.25: **100.2**" in shown and "edge" not in shown
    assert search(0.003, *words) == []
    assert search(0.003, "--projections=1,0.25") == [(0.012, 0.25, None)]


def test_a_run_in_full_follows_the_best_rates(search):
    assert search(0.003)[-1] == (0.003, None)
    assert search(0.003, "--projections=1,0.25")[-1] == (0.012, 0.25, None)
    assert search(0.003, "--projections=1,0.25") == []


def test_a_run_in_full_that_diverged_is_shown_and_started_again(search, tmp_path):
    search(0.003, "--methods=full_rank")
    search.diverges = True
    assert search(0.003)[-1] == (0.003, None)
    result = json.loads(search.output.read_text())
    assert result["methods"]["cola"]["full"]["variants"] == {}
    result["methods"]["full_rank"]["full"]["variants"]["X"]["parameters"] = 1_000_000
    shown = comparison_table(result, tmp_path / "nowhere.json")
    assert "| cola | 0.003 | diverged |" in re.sub(" +", " ", shown) and " Commits: c; m." in shown
    alone = {"methods": {"cola": result["methods"]["cola"]}}
    assert "diverged" in comparison_table(alone, tmp_path / "nowhere.json")
    assert widths_table({"methods": {"matformer": result["methods"]["cola"]}}) == "Not measured."
    search.diverges = False
    assert search(0.003) == [(0.003, None)]
    assert search(0.003) == []


def test_the_comparison_at_every_size_takes_the_best_rates_over(search):
    search(0.003, "--projections=1,0.25", "--search-only")
    [entry] = json.loads(search.output.read_text())["methods"].values()
    settings = elastic_trainings.Settings((), {}, (), {"cola": best_rates(entry["search"])})
    [cola] = [one for one in elastic_trainings.trainings("nano", (), settings) if one.label == "cola"]
    assert cola.words == ("--method=cola", "--optimizer.lr=0.012", "--optimizer.projection_lr=0.25")


def test_settings_of_the_methods_are_searched_at_the_best_rates_and_taken_over(search):
    own = [(0.003, 250, "--cola.keep_swiglu=false"), (0.003, 250, "--optimizer.weight_decay=0")]
    assert search(0.003, "--own") == [
        *((lr, 250) for lr in (0.0015, 0.003, 0.006)),
        *own,
        (0.003, None, "--cola.keep_swiglu=false"),
    ]
    entry = json.loads(search.output.read_text())["methods"]["cola"]
    assert best_rates(entry["search"]) == Rates(0.003, 1, ("--cola.keep_swiglu=false",))
    assert "0.003, keep_swiglu=false: **100.5**" in search_table(json.loads(search.output.read_text()))
    settings = elastic_trainings.Settings((), {}, (), {"cola": best_rates(entry["search"])})
    [cola] = [one for one in elastic_trainings.trainings("nano", (), settings) if one.label == "cola"]
    assert cola.words[-1] == "--cola.keep_swiglu=false"
    assert search(0.003, "--own") == []


# Named here, since other tests register methods of their own.
@pytest.mark.parametrize(
    "method", ["full_rank", "salaad", "lora", "relora", "galore", "loro", "cola", "sltrain", "lost", "matformer"]
)
def test_every_method_has_two_other_settings_that_it_can_train_with_at_the_same_size(method):
    config, _ = read_command_line(["--config", "nano", "--method", method])
    others = alternatives(config)
    assert len(others) == 2
    for words in others:
        other, _ = read_command_line(["--config", "nano", "--method", method, *words])
        assert other != config
        assert stored(other) == stored(config)


def test_a_weaker_pull_of_salaad_has_thresholds_that_move_faster():
    config, _ = read_command_line(["--config", "nano"])  # c 0.3, Δα 0.04, Δβ 0.0008
    weaker, stronger = alternatives(config)
    assert weaker == ("--salaad.rho_constant=0.15", "--salaad.delta_alpha=0.08", "--salaad.delta_beta=0.0016")
    assert Rates(0.003, 1, weaker).name == "lr0.003-rho_constant=0.15"
    assert Rates(0.003, 1, weaker).own == ("rho_constant=0.15", "delta_alpha=0.08", "delta_beta=0.0016")
    assert stronger == ("--salaad.rho_constant=0.6", "--salaad.delta_alpha=0.02", "--salaad.delta_beta=0.0004")


def test_a_method_with_a_rate_of_its_own_for_projections_keeps_it(search):
    assert search(0.01, "--projections=1,0.25", "--search-only", "--methods=galore") == [
        (0.005, 250),
        (0.01, 250),
        (0.02, 250),
    ]


@pytest.mark.parametrize(
    ("share", "said"),
    [
        ("half", "--projections 'half' is no number; give a share such as"),
        ("1,-0.25", "--projections is 1,-0.25, but the shares are above 0"),
    ],
)
def test_a_share_that_is_none_is_one_sentence(search, share, said):
    with pytest.raises(UserError, match=said):
        search(0.003, f"--projections={share}")


def test_settings_that_cost_more_are_shown_but_not_taken_in_full():
    def row(perplexity, *settings):
        found = {"lr": 0.006, "projection_lr": 0.25, "settings": settings, "steps": 9, "commit": "c", "machine": "m"}
        return found | {"variants": {"X": {"perplexity": perplexity, "tokens": 1}}}

    entry = {"own_lr": 0.006, "search": [row(87.0), row(83.0, "--matformer.train=summed")]}
    assert best_rates(entry["search"]) == Rates(0.006, 0.25)
    shown = search_table({"methods": {"matformer": entry}})
    assert "0.006 × 0.25: **87.0**" in shown and "train=summed: 83.0" in shown


@pytest.mark.parametrize("jobs", [1, 3])
def test_as_many_runs_of_one_method_go_side_by_side_as_there_are_jobs(tmp_path, monkeypatch, jobs):
    together, going, most = Barrier(jobs), [], []

    def trained(words, folder):
        going.append(folder)
        together.wait(timeout=60)  # for as many runs as there are jobs
        most.append(len(going))
        together.wait(timeout=60)
        going.remove(folder)
        lr = read_command_line(words)[0].optimizer.lr
        return Trained({}, {"variants": {"X": {"perplexity": 100 + abs(log2(lr / 0.003))}}})

    monkeypatch.setattr(compare_methods, "trained", trained)
    entry = {}
    with side_by_side(jobs) as submit:
        Contest("nano", tmp_path, (), ()).complete("cola", entry, True, lambda: None, submit)
    assert [row["lr"] for row in entry["search"]] == [0.0015, 0.003, 0.006]
    assert most == [jobs] * 3


def test_runs_of_several_methods_share_the_jobs(tmp_path, monkeypatch):
    going, most, two_begun = [], [], Event()

    def trained(words, folder):
        going.append(folder)
        most.append(len(going))
        if len(most) == 2:
            two_begun.set()
        two_begun.wait(60)  # however long the machine takes to begin the second
        sleep(0.05)  # in which a third run would begin if nothing held it back
        going.remove(folder)
        return Trained({}, {"variants": {"X": {"perplexity": read_command_line(words)[0].optimizer.lr}}})

    monkeypatch.setattr(compare_methods, "trained", trained)
    words = ["--methods=cola,full_rank", "--search-only", "--jobs=2", f"--runs={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", *words, f"--output={tmp_path / 'found.json'}"])
    compare_methods.main()
    assert max(most) == 2


@pytest.mark.parametrize("error", [UserError("the disk is full"), KeyboardInterrupt()])
@pytest.mark.parametrize("jobs", [1, 2])
def test_no_training_begins_after_one_has_failed(tmp_path, monkeypatch, error, jobs):
    begun = []

    def trained(words, folder):
        begun.append(folder.name)
        if len(begun) == jobs:
            raise error
        sleep(0.2)  # until after the error
        return Trained({}, {"variants": {"X": {"perplexity": 9.0}}})

    monkeypatch.setattr(compare_methods, "trained", trained)
    words = ["--methods=cola,full_rank,lora", f"--jobs={jobs}", f"--runs={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["compare_methods.py", *words, f"--output={tmp_path / 'found.json'}"])
    with pytest.raises(type(error)) as told:
        compare_methods.main()
    assert told.value is error and len(begun) == jobs
