"""What the README and the pages under results/ promise is there and runs."""

import dataclasses
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from textwrap import dedent

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from salaad import SalaadCallback, suggest
from salaad.config import commands
from salaad.config.command_line import read_command_line
from salaad.factored.fixed_size import slr_modules
from salaad.methods import base, registry
from salaad.runs.model_on_disk import ModelOnDisk
from scripts import reproduce
from scripts.reproduction import freshness
from scripts.reproduction.grid import SCALES
from scripts.reproduction.report import first_pages, page_of
from scripts.results_tables import RESULTS
from scripts.update_results import PAGES, all_sections, filled

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
OPTIONS = {
    "evaluate.py perplexity": commands.PerplexityOptions,
    "evaluate.py sweep": commands.SweepOptions,
    "evaluate.py lm-eval": commands.LmEvalOptions,
    "evaluate.py rpca": commands.RpcaOptions,
    "compress.py": commands.CompressOptions,
}
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
COMMANDS = ("train.py", *OPTIONS, "scripts/reproduce.py", "scripts/torture.py", "scripts/demo.py")


def code_blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_the_ten_lines_run_on_gpt2(capsys):
    code = next(block for block in code_blocks("python") if "GPT2" in block)
    namespace: dict = {}
    exec(code, namespace)
    salaad, small = namespace["salaad"], namespace["small"]
    assert salaad.steps == 100 and salaad.closed
    told = re.search(r"mean rank ratio and density: ([\d.]+) and ([\d.]+)", code)
    found = salaad.summary()
    assert found["rank_ratio"] == pytest.approx(float(told[1]), abs=0.02)
    assert found["density"] == pytest.approx(float(told[2]), abs=0.03)
    # What was asked for is reached in the steps that the example runs.
    assert found["rank_ratio"] == pytest.approx(salaad.config.rank_ratio, abs=0.03)
    assert found["density"] == pytest.approx(salaad.config.density, abs=0.05)
    assert slr_modules(small)
    lines = capsys.readouterr().out.splitlines()
    assert "blocks: 8" in lines[1] and "tensor([[" in lines[-1]


def test_the_callback_of_the_readme_is_one_line_at_a_trainer(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=64))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (8, 16))]
    arguments = TrainingArguments(str(tmp_path), max_steps=2, report_to="none", use_cpu=True, save_steps=2)
    trainer = Trainer(model, arguments, train_dataset=rows)
    [code] = [block for block in code_blocks("python") if "SalaadCallback" in block]
    exec(code, {"trainer": trainer, "SalaadCallback": SalaadCallback, "suggest": suggest})
    trainer.train()
    assert (tmp_path / "checkpoint-2" / "surrogate" / "index.json").exists()
    assert ModelOnDisk.open(tmp_path).name == "checkpoint-2"  # as compress.py opens OUTPUT_DIR


def test_the_example_of_a_method_is_a_method(monkeypatch):
    registered = {}
    monkeypatch.setattr(registry, "register", registered.__setitem__)
    usage, code = base.__doc__.split("Then `--method ")[1].split("\n\n", 1)
    exec(dedent(code), {})
    [(name, method)] = registered.items()
    hooks = {name for name in vars(method) if not name.startswith("__")}
    assert hooks and hooks <= set(dir(method.__mro__[1]))
    assert usage.startswith(f"{name}`")


def test_the_readme_is_one_page_with_one_table_of_four_rows():
    assert len(README.splitlines()) <= 200
    table = re.findall(r"^\|.*\|$", README, flags=re.MULTILINE)
    assert len(table) == 2 + 4
    assert len(re.findall(r"^!\[", README, flags=re.MULTILINE)) <= 1
    assert len(code_blocks("mermaid")) == 1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_every_path_a_page_names_exists(page):
    text = re.sub(r"<!-- (\S+):begin -->.*?<!-- \1:end -->", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    paths = re.findall(
        r"(?<![\w/.-])((?:scripts|salaad|configs|results|tests)/[\w/.-]*\w|(?:train|evaluate|compress)\.py)", text
    )
    for link in links:
        assert "://" in link or (page.parent / link).exists(), link
    for path in paths:
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_a_page_names_is_there(page):
    for file, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / file).read_text(), f"{file}::{name}"


@cache
def generated() -> dict[str, str]:
    return all_sections()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_of_a_page_is_as_update_results_makes_it(page):
    assert filled(page, generated()) == page.read_text(), "run python scripts/update_results.py"


def test_the_first_page_of_the_results_and_the_claims_are_as_update_results_makes_them(monkeypatch):
    """But for what depends on git: the marks of code that has changed, and the widths of columns with them."""
    monkeypatch.setattr(freshness, "changed_since", lambda commit: [])
    measured = [scale for scale in SCALES.values() if (RESULTS / page_of(scale)).exists()]
    for name, text in first_pages(RESULTS, list(SCALES.values()), measured).items():
        assert unmarked(text) == unmarked((RESULTS / name).read_text()), "run python scripts/update_results.py"


def unmarked(text: str) -> list[str]:
    """The lines of a page of results without marks and the padding of cells."""
    plain = re.sub(" +", " ", re.sub("-{3,}", "---", text.replace(f" {freshness.CHANGED}", "")))
    of_git = (f"{freshness.CHANGED}:", freshness.ALL_CHANGED.partition("{")[0])
    lines = [line.removeprefix("- ") for line in plain.splitlines() if line]
    return [line for line in lines if not line.startswith(of_git)]


def test_every_generated_table_stands_on_one_page():
    marked = [name for page in PAGES for name in re.findall(r"<!-- (\S+):begin -->", page.read_text())]
    assert sorted(marked) == sorted(generated())


def test_the_map_has_every_room():
    [tree] = re.findall(r"## The map\n\n```\n(.*?)```", README, flags=re.DOTALL)
    named = set(re.findall(r"[\w/]+/|\w+\.py", tree))
    rooms = {f"{init.parent.relative_to(ROOT / 'salaad')}/" for init in (ROOT / "salaad").glob("*/**/__init__.py")}
    modules = {path.name for path in (ROOT / "salaad").glob("*.py")} - {"__init__.py"}
    scripts = {f"{init.parent.name}/" for init in (ROOT / "scripts").glob("*/__init__.py")}
    top = {f"{name}/" for name in ("configs", "salaad", "scripts", "results", "tests")}
    assert named >= rooms | modules | scripts | top


def command_lines() -> Iterator[tuple[str, list[str]]]:
    """Yield (program, its words) of every command that a page shows in a block or in backquotes."""
    for page in PAGES:
        text = page.read_text()
        shown = [line for block in code_blocks("bash", text) for line in block.splitlines()]
        for line in (*shown, *re.findall(r"`((?:python|bash|accelerate) [^`]+[.](?:py|sh)[^`]*)`", text)):
            words = shlex.split(line, comments=True)
            program = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")))
            script, options = words[program], words[program + 1 :]
            if script == "evaluate.py":
                script, options = f"{script} {options[0]}", options[1:]
            yield script.replace("demo.sh", "demo.py"), options


@pytest.fixture(scope="module")
def known():
    """A function that returns the options that the help of a program names."""

    @cache
    def options_of(program: str) -> set[str]:
        script, *command = program.split()
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
            patch.setattr(sys, "argv", [script, *command, "--help"])
            shown: list[str] = []
            patch.setattr(sys.stdout, "write", shown.append)
            if script == "train.py":
                read_command_line(["--help"])
            importlib.import_module(script.removesuffix(".py").replace("/", ".")).main()
        return set(re.findall(r"--[\w.-]*\w", "".join(shown).replace("_", "-")))

    return options_of


def test_every_command_line_shown_has_known_options(known):
    lines = list(command_lines())
    assert {program for program, _ in lines} >= {"train.py", "compress.py", "evaluate.py sweep", "scripts/reproduce.py"}
    for program, words in lines:
        options = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
        if program.endswith(".sh"):
            assert not options
        elif options:
            assert options <= known(program), (program, options)


def test_every_command_line_shown_has_values_that_can_be():
    for program, words in command_lines():
        if program == "train.py" and "--help" not in words:
            read_command_line(words)
        elif program in OPTIONS and words:
            values = dict(zip(words[::2], words[1::2], strict=True))
            names = {flag.removeprefix("--").replace("-", "_"): yaml.safe_load(text) for flag, text in values.items()}
            OPTIONS[program](**{name: value for name, value in names.items() if not name.startswith("data.")})
        elif program == "scripts/reproduce.py":
            options = reproduce.parser().parse_args(words)
            assert reproduce.chosen_items(options.items or ["all"])


def test_every_option_that_prose_names_is_known(known):
    everything = set().union(*(known(program) for program in COMMANDS))
    for page in PAGES:
        for span in re.findall(r"`(--[^`]+)`", page.read_text()):
            for option in re.findall(r"--[\w.-]*\w", span):
                assert option.replace("_", "-") in everything | {"--section.key"}, option
    fields = {field.name for field in dataclasses.fields(commands.CompressOptions)}
    assert {"allocation", "refine", "kappa"} <= fields
