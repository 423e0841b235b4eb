"""Command lines as users type them: lists, names, hints after mistakes, help, and what help and errors import."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from types import SimpleNamespace

import pytest

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line, read_options
from salaad.config.commands import LmEvalOptions, PerplexityOptions, SweepOptions
from salaad.config.option_parser import nearest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "transformers", "datasets", "pyarrow", "accelerate", "matplotlib", "lm_eval", "wandb")


def options_of(*words: str, kind: type = LmEvalOptions) -> object:
    return read_options(
        "evaluate.py", "Tables.", {"it": kind}, None, arguments=["it", "--checkpoint=x", *words]
    ).options


def test_a_second_configuration_is_laid_over_the_first_and_both_name_the_run():
    config, options = read_command_line(["--config", "350m.yaml", "--config=fast.yaml"])
    plain, _ = read_command_line(["--config", "350m.yaml"])
    assert (plain.train.precision, plain.train.compile, plain.salaad.overlap) == ("fp32", False, False)
    assert (config.train.precision, config.train.compile, config.salaad.overlap) == ("bf16-mixed", True, True)
    assert config.model == plain.model and config.train.steps == plain.train.steps
    assert options.output == "runs/350m-fast-salaad"


def test_workers_which_only_training_has_are_no_option_of_the_other_commands():
    def data_of(*words: str) -> object:
        trained = SimpleNamespace(run={"data": {"workers": 3, "sequence_length": 48}})
        words = ("perplexity", "--checkpoint=x", *words)
        kinds = {"perplexity": PerplexityOptions}
        return read_options("evaluate.py", "Tables.", kinds, lambda _: trained, ("perplexity",), words).data

    assert data_of().sequence_length == 48
    with pytest.raises(UserError, match=r"there is no option --data\.workers; did you mean"):
        data_of("--data.workers=2")


# ---- lists


@pytest.mark.parametrize(
    "words",
    [
        ["--salaad.roles", "q,k,up"],
        ["--salaad.roles", "q", "k", "up"],
        ["--salaad.roles=q,k", "up"],
        ["--salaad.roles", "q,", "k,", "up"],
        ["--salaad.roles", '["q", "k", "up"]'],
        ["--salaad.roles=[q,k,up]"],
    ],
)
def test_a_list_of_a_configuration_is_taken_in_every_form(words):
    config, _ = read_command_line(["--train.steps", "7", *words, "--seed", "3"])
    assert config.salaad.roles == ("q", "k", "up")
    assert (config.train.steps, config.seed) == (7, 3)


@pytest.mark.parametrize("words", [["0.8,0.9"], ["0.8", "0.9"], ["[0.8, 0.9]"]])
def test_a_list_of_numbers_is_taken_in_every_form(words):
    assert read_command_line(["--optimizer.betas", *words])[0].optimizer.betas == (0.8, 0.9)


@pytest.mark.parametrize("globs", [["[st]0.jsonl"], ["[s]/x.jsonl", "[t]/y.jsonl"], ["[st]*", "u*", "[v]*"]])
def test_globs_that_begin_with_a_bracket_are_a_list(globs):
    given = ["--data.source=files", "--data.validation_files", "v.jsonl", "--data.files"]
    for words in (globs, [",".join(globs)]):
        assert read_command_line([*given, *words])[0].data.files == tuple(globs)


def test_a_name_may_have_any_character():
    names = ("🙂.jsonl", "数.txt", "a\x7fb.txt", "a\x85b.txt", "a \u2028 b.txt", "'a\"b.txt", "a: b.txt", "#.txt")
    words = ["--data.source", "files", "--data.files", *names, "--data.validation_files", names[0]]
    data = read_command_line(words)[0].data
    assert (data.files, data.validation_files) == (names, names[:1])


def test_a_configuration_may_lie_at_home_and_is_refused_if_it_is_empty(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.yaml").write_text("seed: 7\n")
    (tmp_path / "empty.yaml").write_text("# nothing yet\n")
    assert read_command_line(["--config=~/own.yaml"])[0].seed == 7
    with pytest.raises(UserError, match=r"empty.yaml holds no settings; give a plain YAML file"):
        read_command_line(["--config", "nano", "--config=~/empty.yaml"])


def test_a_pattern_keeps_its_commas():
    config, _ = read_command_line(["--salaad.roles", "q", "re:^h[.][0-3]{1,2}[.]mlp$"])
    assert config.salaad.roles == ("q", "re:^h[.][0-3]{1,2}[.]mlp$")
    assert read_command_line(["--salaad.roles=q, re:a{1,2}"])[0].salaad.roles == ("q", "re:a{1,2}")


@pytest.mark.parametrize("words", [["/store:1/a.jsonl", "/core:2/b.jsonl"], ["/store:1/a.jsonl,/core:2/b.jsonl"]])
def test_only_the_beginning_of_an_item_makes_it_a_pattern(words):
    given = ["--data.source=files", "--data.validation_files", "v.jsonl", "--data.files", *words]
    assert read_command_line(given)[0].data.files == ("/store:1/a.jsonl", "/core:2/b.jsonl")


@pytest.mark.parametrize("words", [["piqa,boolq"], ["piqa", "boolq"], ["piqa,", "boolq"], ['["piqa", "boolq"]']])
def test_a_list_of_a_command_is_taken_in_every_form(words):
    assert options_of("--tasks", *words, "--limit", "3").tasks == "piqa,boolq"


def test_every_list_of_the_commands_is_one():
    assert options_of("--variants", "X", "L+S", "0.5@0.6", kind=PerplexityOptions).variants == "X,L+S,0.5@0.6"
    sweep = options_of(
        "--budgets",
        "144M",
        "194M",
        "--kappas",
        "0:1:0.1",
        "--vanilla=v",
        "--rivals",
        "rpca",
        "godec",
        kind=SweepOptions,
    )
    assert (sweep.budgets, sweep.kappas, sweep.ways_to_split) == ("144M,194M", "0:1:0.1", ["rpca", "godec"])


# ---- what is refused, by the name that was typed


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--lr", "3"], "there is no option --lr; did you mean --optimizer.lr?"),
        (["--batch", "3"], "there is no option --batch; did you mean --train.batch?"),
        (["--train.precison", "fp32"], "there is no option --train.precison; did you mean --train.precision?"),
        (["--dry_run"], "there is no option --dry_run; did you mean --dry-run?"),
        (["--zzzz", "3"], "there is no option --zzzz; see train.py --help for those there are"),
        (["--train.batch", "ten"], "--train.batch is ten, but has to be a whole number"),
        (["--salaad.rho", "x"], "--salaad.rho is x, but has to be a number"),
        (["--train.compile", "maybe"], "--train.compile is maybe, but has to be true or false"),
        (["--train.precision", "fp8"], "--train.precision is fp8, but has to be one of fp32, tf32, bf16-mixed, bf16"),
        (["--optimizer.betas", "0.9", "x"], "--optimizer.betas is x, but has to be a number"),
        (["stray"], "'stray' belongs to no option"),
    ],
)
def test_an_error_names_the_option_that_was_typed_and_no_type(words, sentence):
    with pytest.raises(UserError) as error:
        read_command_line(words)
    assert str(error.value).startswith(sentence)
    assert not any(word in str(error.value) for word in ("class", "Literal", "Union", "Optional", "None"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--batch-size", "no"], "--batch-size is no; give auto, or 1 or more"),
        (["--max-length", "0"], "--max-length is 0, but the least is 1"),
        (["--task_dta", "x"], "there is no option --task-dta; did you mean --task-data?"),
        (["--limit", "many"], "--limit is many, but has to be a whole number"),
    ],
)
def test_an_error_of_a_command_writes_its_option_with_dashes(words, sentence):
    with pytest.raises(UserError) as error:
        options_of(*words)
    assert str(error.value).startswith(sentence)


def test_the_nearest_key_is_one_of_the_same_name_before_one_that_looks_like_it():
    known = ["optimizer.lr", "salaad.rho", "model.path", "data.retries"]
    assert nearest("lr", known) == "optimizer.lr"
    assert nearest("train.lr", known) == "optimizer.lr"
    assert nearest("pth", known) == "model.path"
    assert nearest("quite-another", known) is None


# ---- help, and the end without arguments


def command(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60
    )


@pytest.mark.parametrize(
    "words", [["train.py"], ["compress.py"], ["evaluate.py", "perplexity"], ["evaluate.py", "lm-eval"]]
)
def test_help_has_no_types_of_python_and_writes_options_as_they_are_typed(words):
    done = command(*words, "--help")
    assert done.returncode == 0
    assert done.stderr == ""
    for clutter in ("type:", "Literal", "Optional", "Union", "tuple[", "| None", "null", "NoneType"):
        assert clutter not in done.stdout
    if words == ["evaluate.py", "lm-eval"]:
        assert "--task-data" in done.stdout
        assert "--task_data" not in done.stdout


@pytest.mark.parametrize(
    ("program", "shown"),
    [("compress.py", "usage: compress.py --checkpoint ... --output ..."), ("evaluate.py", "usage: evaluate.py {perp")],
)
def test_without_arguments_a_command_shows_its_usage_and_ends_with_2(program, shown):
    done = command(program)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(shown)
    assert "Traceback" not in done.stderr


def test_train_alone_only_shows_the_plan():
    assert read_command_line([])[1].dry_run
    assert not read_command_line(["--config", "nano.yaml"])[1].dry_run


# ---- what is imported before help or an error is printed


@pytest.mark.parametrize(
    "code",
    [
        "import salaad",
        "from salaad.config import command_line, commands",
        "import salaad.factored",
    ],
)
def test_nothing_heavy_is_imported(code):
    done = command("-c", f"{code}\nimport sys\nprint([name for name in {HEAVY} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["train.py", "--help"], 0),
        (["compress.py", "--help"], 0),
        (["evaluate.py", "sweep", "--help"], 0),
        (["train.py", "--lr", "3"], 2),
        (["compress.py", "--checkpoint", "a", "--output", "b", "--kappa", "2"], 2),
        (["evaluate.py", "lm-eval", "--checkpoint", "a", "--batch-size", "no"], 2),
    ],
)
def test_help_and_a_wrong_option_import_nothing_heavy(words, code):
    watch = (
        "import runpy, sys, os\n"
        "from salaad.common import errors\n"
        f"tell = lambda: print([name for name in {HEAVY} if name in sys.modules], file=sys.stderr)\n"
        "errors.leave = lambda code: (tell(), os._exit(code))\n"
        f"sys.argv = {words!r}\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end:\n    tell()\n    sys.exit(end.code)\n"
    )
    done = command("-c", watch)
    assert done.returncode == code, done.stderr
    assert done.stderr.rstrip().endswith("[]"), done.stderr


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("--optimizer.learning_rate", "--optimizer.lr"),
        ("--learning-rate", "--optimizer.lr"),
        ("--max_steps", "--train.steps"),
    ],
)
def test_the_name_of_an_option_elsewhere_is_answered_with_ours(theirs, ours):
    with pytest.raises(UserError, match=f"did you mean {ours}"):
        read_command_line([theirs, "1"])


def test_threads_that_read_configurations_leave_the_process_in_its_folder(monkeypatch):
    here, chdir = Path.cwd(), os.chdir
    monkeypatch.setattr(os, "chdir", lambda folder: (chdir(folder), sleep(0.02)))  # long enough for the others
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: read_command_line(["--config", "nano"]), range(8)))
    found = Path.cwd()
    chdir(here)
    assert found == here
