"""A checkpoint that a new run takes over: its name, the settings it is compared with, a disk without room for it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from salaad.common.errors import UserError
from salaad.common.files import verify
from salaad.common.locks import delete_unless_kept
from salaad.config.command_line import read_command_line
from salaad.runs import checkpoints, run
from tests.helpers.training import last_checkpoint, lines, run_training
from tests.runs.test_checkpoints import largest_file

SAVED = {"train__steps": 6, "train__save_every": 2, "train__log_every": 2, "train__keep_last": 0}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    from scripts.reliability.toy_run import toy_arguments

    folder = tmp_path_factory.mktemp("older") / "run"
    run_training(toy_arguments(text_files, tiny_tokenizer_dir, **SAVED), folder)
    return folder


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_a_checkpoint_under_any_name_is_adopted_by_the_name_of_its_step(trained, toy, tmp_path):
    best, new = tmp_path / "best", tmp_path / "new"
    shutil.copytree(trained / "checkpoints" / "step-0000004", best)
    run_training([*toy(**SAVED), f"--resume={best}"], new)
    assert names_in(new) == ["latest", "step-0000004", "step-0000006"]
    (new / "summary.json").unlink()
    (new / "checkpoints" / "latest").write_text("step-0000004\n")
    run_training(toy(**SAVED), new)
    assert lines(new) == lines(trained)[2:]


def test_a_folder_of_something_else_is_left_alone_whatever_is_resumed(trained, toy, tmp_path):
    other, checkpoint = tmp_path / "thesis", f"--resume={trained}/checkpoints/step-0000004"
    other.mkdir()
    for name in ("summary.json", "config.yaml"):  # the second also by itself, as the user's own settings
        for path in other.iterdir():
            path.unlink()
        (other / name).write_text("mine")
        for resume in ([], ["--resume=none"], [checkpoint]):
            with pytest.raises(UserError, match=r"thesis exists and is no run of this program; give a folder that is"):
                run_training([*toy(**SAVED), *resume], other)
        assert [path.name for path in other.iterdir()] == [name] and (other / name).read_text() == "mine"


def test_a_checkpoint_that_a_new_run_begins_from_is_not_deleted_until_it_is_its_own(trained, toy, tmp_path):
    source, new = tmp_path / "source", tmp_path / "new"
    shutil.copytree(trained, source)
    checkpoint, found = source / "checkpoints" / "step-0000004", []
    config, options = read_command_line([*toy(**SAVED), f"--resume={checkpoint}", f"--output={new}"])
    assert run.open_run(config, options) == (new, checkpoint)
    for begun in (False, True):
        if begun:
            adopted = run.begin(new, config, None, checkpoint)
            assert adopted == new / "checkpoints" / "step-0000004"
        delete_unless_kept(checkpoint)  # as the run that still trains does
        found.append(checkpoint.exists())
    assert found == [True, False]
    verify(adopted, alone=True)


def test_an_adopted_checkpoint_is_gone_on_from_with_the_settings_of_the_run_that_adopted_it(trained, toy, tmp_path):
    new, slower = tmp_path / "new", toy(**SAVED, optimizer__lr=0.001)
    run_training([*slower, f"--resume={trained}/checkpoints/step-0000004"], new)
    whole, adopted = lines(new), f"--resume={new}/checkpoints/step-0000004"
    proposed = (
        rf"new was begun with optimizer\.lr 0\.001, but 0\.003 is asked for; .* {adopted.replace('=', ' ')} --out"
    )
    with pytest.raises(UserError, match=proposed):
        run_training([*toy(**SAVED), adopted], new)
    run_training([*slower, adopted], new)
    assert lines(new) == whole


def test_a_disk_without_room_for_an_adopted_checkpoint_is_a_sentence_and_the_same_command_works_later(
    trained, toy, tmp_path, monkeypatch
):
    def elsewhere(*_: object, **__: object) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(checkpoints.os, "link", elsewhere)
    command, new = [*toy(**SAVED), f"--resume={trained}/checkpoints/step-0000004"], tmp_path / "new"
    with (
        largest_file(50_000),
        pytest.raises(UserError, match=r"step-0000004 cannot be copied to .* \(.*too large.*\); make room") as told,
    ):
        run_training(command, new)
    assert "\n" not in str(told.value)
    assert names_in(new) == []
    run_training(command, new)
    assert last_checkpoint(new).name == "step-0000006"
    assert lines(new) == lines(trained)[2:]


def test_an_adopted_checkpoint_that_latest_cannot_name_is_gone_on_from_by_the_same_command(
    trained, toy, tmp_path, monkeypatch
):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    command, new = [*toy(**SAVED), f"--resume={trained}/checkpoints/step-0000004"], tmp_path / "new"
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.Checkpoints, "point_to", full)
        with pytest.raises(UserError, match=r"step-0000004 cannot be copied to .* \(No space left.*\); make room"):
            run_training(command, new)
    assert names_in(new) == ["step-0000004"]
    run_training(command, new)
    assert lines(new) == lines(trained)[2:]
