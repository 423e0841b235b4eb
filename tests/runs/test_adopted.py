"""A checkpoint that a new run takes over: its name, the settings it is compared with, a disk without room for it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from salaad.common.errors import UserError
from salaad.runs import checkpoints
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
