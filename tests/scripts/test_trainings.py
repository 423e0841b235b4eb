"""A script's trainings: a finished run is taken only if it was trained with the requested settings."""

import os
import shlex
import subprocess

import pytest
import yaml

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from scripts.trainings import trained

WORDS = ["--config", "nano", "--method=salaad", "--train.steps=7"]


@pytest.fixture
def finished(tmp_path):
    """A function that writes a finished run, with the given changes to its configuration."""

    def write(**changes):
        config = read_command_line(WORDS)[0].to_dict()
        for key, value in changes.items():
            section, _, name = key.partition("__")
            if value is None:
                del config[section][name]
            else:
                config[section][name] = value
        (tmp_path / "config.yaml").write_text(f"# commit: abc\n# machine: m\n{yaml.safe_dump(config)}")
        (tmp_path / "summary.json").write_text('{"step": 7}')
        return tmp_path

    return write


def test_a_finished_run_is_not_trained_again_and_says_where_it_comes_from(finished):
    about, summary = trained(WORDS, finished())
    assert summary == {"step": 7}
    assert about == {"command": " ".join(WORDS), "steps": 7, "commit": "abc", "machine": "m"}


def test_a_run_of_a_version_without_a_setting_had_its_default(finished):
    assert trained(WORDS, finished(salaad__owners=None)).summary
    with pytest.raises(UserError, match="trained with other settings"):
        trained([*WORDS, "--salaad.owners=balanced"], finished(salaad__owners=None))


@pytest.mark.parametrize("change", [{"optimizer__lr": 0.5}, {"salaad__every": 99}])
def test_a_run_with_other_settings_is_refused(finished, change):
    with pytest.raises(UserError, match="trained with other settings"):
        trained(WORDS, finished(**change))


def test_a_run_that_was_compiled_is_the_same_run_and_says_so(finished):
    assert trained(WORDS, finished(train__compile=True)).about["command"].endswith(" --train.compile=true")
    other = trained([*WORDS, "--train.compile=true"], finished())
    assert other.about["command"].endswith("--train.compile=true --train.compile=false")


def test_a_recorded_command_can_be_read_though_a_path_has_a_space(finished):
    words = [*WORDS, "--data.tokenizer=a folder/one.model"]
    command = trained(words, finished(data__tokenizer="a folder/one.model")).about["command"]
    assert shlex.split(command) == words


def test_settings_of_other_methods_do_not_count(finished):
    folder = finished()
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump({**config, "galore": {"rank": 3}}))
    assert trained(WORDS, folder).summary


def test_a_training_that_was_stopped_goes_on_by_the_same_command(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda words, **how: subprocess.CompletedProcess(words, 0, "", ""))
    with pytest.raises(UserError, match="run ended before its last step; the same command goes on with it"):
        trained(WORDS, tmp_path / "run")


@pytest.fixture
def train(tmp_path, monkeypatch):
    """A function that gets what train.py writes to standard error, and whether it diverges; it trains and fails."""

    def run(said: str, diverges: bool):
        def start(command, **how):
            folder = tmp_path / "run"
            assert command[-2:] == ["--output", str(folder)]
            if diverges:
                folder.mkdir(exist_ok=True)
                (folder / "diagnosis.json").write_text("{}")
                (folder / "config.yaml").write_text("# commit: abc\n")
            return subprocess.CompletedProcess(command, 2, "", said)

        monkeypatch.setattr(subprocess, "run", start)
        return trained(WORDS, tmp_path / "run")

    return run


def test_a_training_whose_numbers_diverge_has_no_summary(train):
    about, summary = train("error: a number is not finite at step 3", diverges=True)
    assert (about, summary) == ({"command": " ".join(WORDS), "commit": "abc"}, None)


def test_a_refusal_to_go_on_with_a_run_that_had_diverged_is_told_and_its_diagnosis_is_kept(train, tmp_path):
    train("error: a number is not finite at step 3", diverges=True)
    before = 10**9  # seconds, as long ago as a later start is
    os.utime(tmp_path / "run" / "diagnosis.json", (before, before))
    with pytest.raises(UserError, match=r"run failed: error: begun with other settings; all that it said is in .*log"):
        train("a warning\nerror: begun with other settings\n", diverges=False)
    assert (tmp_path / "run" / "diagnosis.json").exists()
    assert (tmp_path / "run.log").read_text() == "a warning\nerror: begun with other settings\n"
    assert train("error: a number is not finite at step 5", diverges=True).summary is None
