"""Checkpoints on disks that fill up, files that change, folders that two processes want."""

import json
import os
import resource
import shutil
import signal
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import train
from salaad.common import locks
from salaad.common.errors import NotSavedError, UserError
from salaad.common.files import verify, write_checksums
from salaad.config.command_line import read_command_line
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.salaad.storage import read_surrogates
from salaad.runs.checkpoints import Checkpoints
from salaad.runs.model_on_disk import ModelOnDisk
from salaad.runs.run import open_run
from scripts.reliability.toy_run import toy_arguments
from tests.helpers.forked import Forked
from tests.helpers.training import (
    assert_same_records,
    last_checkpoint,
    lines,
    run_training,
    start_alone,
    wait_for_steps,
    weights,
)

STEP_LINE = "the checkpoint cannot be written"


@pytest.fixture
def at_step(monkeypatch):
    """A function that takes step → action; each action is done once, in the middle of its step of the run."""

    def register(actions: dict) -> None:
        original = SalaadMethod.after_step

        def after_step(self, *given):
            original(self, *given)
            actions.pop(self.salaad.steps, lambda: None)()

        monkeypatch.setattr(SalaadMethod, "after_step", after_step)

    return register


@contextmanager
def largest_file(size: int | None):
    """Context manager in which the kernel limits the files of this process to `size` bytes, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[1] if size is None else size, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def limit(size: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard if size is None else size, hard))


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("size", [100_000, 0])  # too little for the weights, or for anything at all
def test_a_full_disk_costs_a_checkpoint_and_nothing_else(toy, tmp_path, at_step, capsys, size):
    options = {"train__save_every": 3, "train__keep_last": 0}
    run_training(toy(**options), tmp_path / "whole")
    capsys.readouterr()
    kept = {}

    def fill():
        kept.update(everything(last_checkpoint(tmp_path / "run")))
        limit(size)

    def free():
        kept["same"] = everything(tmp_path / "run" / "checkpoints" / "step-0000003") == kept
        limit(None)

    at_step({5: fill, 8: free})
    with largest_file(None):
        run_training(toy(**options), tmp_path / "run")
    said = capsys.readouterr().out
    assert f"step 6: {STEP_LINE} (" in said and "File too large" in said
    assert "training goes on, step-0000003 stays untouched, the next attempt is after step 9" in said
    assert kept["same"]
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-0000003", "step-0000009", "step-0000012"]
    assert_same_records(tmp_path / "run", tmp_path / "whole")
    whole, run = weights(tmp_path / "whole"), weights(tmp_path / "run")
    assert all(torch.equal(whole[name], run[name]) for name in whole)


def test_a_last_checkpoint_that_cannot_be_written_is_an_error_and_the_run_goes_on_later(toy, tmp_path, at_step):
    options = {"train__save_every": 5, "train__steps": 7}
    at_step({6: lambda: limit(100_000)})
    with largest_file(None), pytest.raises(UserError, match=r"step 7 cannot be written.*goes on from step-0000005"):
        run_training(toy(**options), tmp_path / "run")
    assert last_checkpoint(tmp_path / "run").name == "step-0000005"
    run_training(toy(**options), tmp_path / "run")
    assert [row["step"] for row in lines(tmp_path / "run")] == list(range(1, 8))


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("spoil", [truncated, flipped, Path.unlink])
@pytest.mark.parametrize(
    "file",
    [
        "model/model.safetensors",
        "surrogate/shard-00000-of-00001.safetensors",
        "state/optimizer.pt",
        "state/trainer.json",
        "checksums.json",
    ],
)
def test_a_spoiled_file_is_named_and_the_newest_whole_takes_over(trained, toy, tmp_path, capsys, spoil, file, run):
    spoil(run / "checkpoints" / "step-0000006" / file)
    with pytest.raises(UserError) as told:
        run_training([*toy(**SAVED), f"--resume={run}/checkpoints/step-0000006"], tmp_path / "other")
    assert "step-0000006" in str(told.value) and "\n" not in str(told.value)
    if file != "checksums.json":
        assert file in str(told.value)
    capsys.readouterr()
    run_training(toy(**SAVED), run)
    said = capsys.readouterr().err
    assert "passed over: " in said and "going on from" in said and "step-0000004, the newest that is whole" in said
    assert lines(run) == lines(trained)
    whole, again = weights(trained), weights(run)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


SAVED = {"train__steps": 6, "train__save_every": 2, "train__keep_last": 0, "train__log_every": 2}


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    """A finished run with checkpoints at steps 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_training(toy_arguments(text_files, tiny_tokenizer_dir, **SAVED), folder)
    return folder


@pytest.fixture
def run(trained, tmp_path) -> Path:
    """A copy of the run `trained` without its summary.json, as if it had not ended."""
    shutil.copytree(trained, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    return tmp_path / "run"


def test_without_any_whole_checkpoint_the_run_is_not_begun_anew(toy, run):
    for step in (2, 4, 6):
        flipped(run / "checkpoints" / f"step-000000{step}" / "state" / "optimizer.pt")
    before = everything(run)
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole \(.*step-0000006/state/optimizer.pt is not as"):
        run_training(toy(**SAVED), run)
    after = everything(run)
    after.pop(".lock")
    before.pop(".lock")
    assert after == before


@pytest.mark.parametrize("pointer", ["", "step-9999999", "../../elsewhere", "/etc", "step-0000004/../step-0000002"])
def test_a_pointer_to_nothing_or_elsewhere_is_passed_over(trained, toy, capsys, pointer, run):
    (run / "checkpoints" / "latest").write_text(pointer)
    with pytest.raises(UserError, match="latest names"):
        Checkpoints(run / "checkpoints").latest()
    run_training(toy(**SAVED), run)
    assert "going on from" in capsys.readouterr().err
    assert lines(run) == lines(trained)


def test_the_checkpoint_that_latest_names_goes_first_even_if_it_is_older(capsys, run):
    (run / "checkpoints" / "latest").write_text("step-0000002\n")
    found, wrong = Checkpoints(run / "checkpoints").newest_whole()
    assert (found.name, wrong) == ("step-0000002", [])


def write_nothing(folder: Path) -> None:
    (folder / "state" / "trainer.json").write_text("{}")


def test_keep_last_and_keep_every_never_delete_what_latest_names(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints = Checkpoints(folder, keep_last=2, keep_every=40)
    for step in range(10, 131, 10):
        checkpoints.save(step, write_nothing)
        assert Checkpoints(folder).latest().name == f"step-{step:07d}"
        verify(Checkpoints(folder).latest())
    steps = sorted(int(path.name[5:]) for path in folder.glob("step-*"))
    assert steps == [40, 80, 120, 130]
    # A run that resumed from an earlier checkpoint saves a step below those that are there.
    checkpoints.save(50, write_nothing)
    assert Checkpoints(folder).latest().name == "step-0000050"


def test_checkpoints_are_in_the_order_of_their_steps_beyond_ten_million(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints = Checkpoints(folder, keep_last=2)
    for step in (9_999_980, 9_999_990, 10_000_000):
        checkpoints.save(step, lambda partial: (partial / "state" / "trainer.json").write_text("{}") and None)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-10000000", "step-9999990"]
    (folder / "step-10000000" / "state" / "trainer.json").write_text("spoiled")
    assert Checkpoints(folder).newest_whole()[0].name == "step-9999990"


def test_a_save_that_fails_leaves_nothing_and_the_next_one_works(tmp_path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    checkpoints = Checkpoints(folder, keep_last=1)
    checkpoints.save(10, write_nothing)
    before = everything(folder)

    def fails(partial: Path) -> None:
        (partial / "model" / "half").write_text("written")
        raise OSError(28, "No space left on device")

    with pytest.raises(NotSavedError, match="No space left"):
        checkpoints.save(20, fails)
    assert everything(folder) == before
    # A checkpoint that was to be replaced is not lost, nor is its name.
    with pytest.MonkeyPatch.context() as patch:
        replace = Path.replace

        def refuses(self, target):
            if self.name.startswith(".partial-"):
                raise OSError(5, "Input/output error")
            return replace(self, target)

        patch.setattr(Path, "replace", refuses)
        with pytest.raises(NotSavedError, match="Input/output"):
            checkpoints.save(10, write_nothing)
        assert Checkpoints(folder).latest() is not None
    assert Checkpoints(folder).newest_whole()[0].name == "step-0000010"
    assert everything(folder) == before


def test_a_second_run_into_the_folder_is_refused(toy, tmp_path):
    arguments = toy(train__steps=100000)
    first = start_alone(arguments, tmp_path / "run")
    try:
        wait_for_steps(first, tmp_path / "run")
        said = rf"^--output {tmp_path / 'run'} is being written by process {first.pid} .*; wait for its end, or give an"
        with pytest.raises(UserError, match=said):
            run_training(arguments, tmp_path / "run")
    finally:
        first.terminate()
        first.communicate(timeout=60)
    # When the first run has ended, its folder is free.
    run_training([*arguments, "--train.steps=1"], tmp_path / "other")
    locks.claim(tmp_path / "run")


def test_a_run_that_goes_back_gives_up_what_came_after(trained, toy, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    more = {**SAVED, "train__save_every": 1, "train__keep_last": 2}

    def stop_at_4(monkeypatch):
        original = SalaadMethod.after_step

        def after_step(self, *given):
            original(self, *given)
            if self.salaad.steps == 3:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(SalaadMethod, "after_step", after_step)

    with pytest.MonkeyPatch.context() as patch:
        stop_at_4(patch)
        run_training([*toy(**more), f"--resume={run}/checkpoints/step-0000002"], run)
    reached = int(last_checkpoint(run).name[5:])
    assert 3 <= reached < 6
    assert not (run / "summary.json").exists()  # written by the steps that were given up
    # keep_last counts the checkpoints of this continuation alone, not the later ones that were given up.
    steps = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    assert steps == [reached - 1, reached]
    flipped(last_checkpoint(run) / "state" / "trainer.json")
    shutil.copytree(trained / "checkpoints" / "step-0000006", run / "checkpoints" / "step-0000006")
    capsys.readouterr()
    run_training(toy(**more), run)
    assert f"step-000000{reached - 1}, the newest that is whole" in capsys.readouterr().err
    assert lines(run) == lines(trained)


def test_a_requeued_command_goes_on_with_the_run_it_began_elsewhere(trained, toy, tmp_path, capsys):
    arguments = [*toy(**SAVED), f"--resume={trained}/checkpoints/step-0000002"]
    run_training(arguments, tmp_path / "new")
    (tmp_path / "new" / "summary.json").unlink()
    (tmp_path / "new" / "checkpoints" / "latest").write_text("step-0000004\n")
    run_training(arguments, tmp_path / "new")
    assert [row["step"] for row in lines(tmp_path / "new")] == [4, 6]
    whole = (tmp_path / "new" / "summary.json").read_bytes()  # with the time of all starts
    capsys.readouterr()
    run_training(arguments, tmp_path / "new")
    assert "is finished" in capsys.readouterr().out
    assert (tmp_path / "new" / "summary.json").read_bytes() == whole
    shutil.rmtree(tmp_path / "new" / "checkpoints" / "step-0000006")  # its last, to spare room
    (tmp_path / "new" / "checkpoints" / "latest").write_text("step-0000004\n")
    run_training(toy(**SAVED), tmp_path / "new")
    assert "is finished" in capsys.readouterr().out
    with pytest.raises(UserError, match="already holds a run"):
        run_training([*toy(**SAVED), f"--resume={trained}/checkpoints/step-0000004"], tmp_path / "new")


def test_a_requeued_command_may_name_its_checkpoint_in_another_way(trained, toy, tmp_path, monkeypatch):
    """From another folder, and for a config.yaml with a relative path, as earlier versions wrote it."""
    begun, new = trained / "checkpoints" / "step-0000002", tmp_path / "new"
    monkeypatch.chdir(trained)
    run_training([*toy(**SAVED), "--resume=checkpoints/step-0000002"], new)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(trained)
    for resume in (begun, f"{begun}/", tmp_path / "link" / "checkpoints" / begun.name):
        (new / "summary.json").unlink()
        run_training([*toy(**SAVED), f"--resume={resume}"], new)
    told = new / "config.yaml"
    told.write_text(
        told.read_text().replace(f"# begun from: {begun}\n", f"# begun from: link/checkpoints/{begun.name}\n")
    )
    assert f"# begun from: {begun}\n" not in told.read_text()
    (new / "summary.json").unlink()
    run_training([*toy(**SAVED), f"--resume={begun}"], new)
    assert lines(new) == lines(trained)[1:]


def test_a_requeued_command_goes_on_though_what_it_began_from_is_deleted(trained, toy, tmp_path):
    other, new = tmp_path / "other", tmp_path / "new"
    shutil.copytree(trained, other)
    arguments = [*toy(**SAVED), f"--resume={other}/checkpoints/step-0000002"]
    run_training(arguments, new)
    (new / "summary.json").unlink()
    (new / "checkpoints" / "latest").write_text("step-0000004\n")
    shutil.rmtree(other)
    run_training(arguments, new)
    assert lines(new) == lines(trained)[1:]


def test_a_requeued_command_goes_back_once_and_then_on(trained, toy, tmp_path, monkeypatch, capsys):
    """As a job does that is queued again: each start takes two steps, until there is none left to take."""
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    more = {**SAVED, "train__save_every": 1, "train__log_every": 2, "train__keep_last": 2}
    arguments = [*toy(**more), f"--resume={run}/checkpoints/step-0000002"]
    save, begun, reached = train.Trainer.save, [], []

    def save_and_stop(trainer, last=False):
        save(trainer, last)
        if trainer.step == trainer.saved_step == trainer.recorder._start + 1:  # obeyed after the next step
            trainer.request.asked = True

    monkeypatch.setattr(train.Trainer, "save", save_and_stop)
    for _ in range(2):
        run_training(arguments, run)
        reached.append(last_checkpoint(run).name)
        begun.append("went back to step-0000002 already" in capsys.readouterr().out)
    assert reached == ["step-0000004", "step-0000006"]
    assert begun == [False, True]
    assert not (run / "checkpoints" / "step-0000002").exists()  # keep_last; a third start need not find it
    run_training(arguments, run)
    assert "step-0000006; to go back once more, write step-0000002 into" in capsys.readouterr().out
    assert lines(run) == lines(trained)


def test_the_same_command_goes_back_again_after_another_start_or_where_latest_says_so(trained, toy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    again = [*toy(**SAVED), f"--resume={run}/checkpoints/step-0000002"]
    config, options = read_command_line([*again, f"--output={run}"])
    back, on = run / "checkpoints" / "step-0000002", run / "checkpoints" / "step-0000006"

    def found() -> Path:
        try:
            return open_run(config, options)[1]
        finally:
            locks.release()

    assert found() == back
    run_training(again, run)
    assert found() == on
    (run / "checkpoints" / "latest").write_text("step-0000002\n")
    assert found() == back
    (run / "checkpoints" / "latest").write_text("step-0000004\n")
    (run / "summary.json").unlink()
    run_training(toy(**SAVED), run)
    assert found() == back


def test_a_link_to_a_checkpoint_of_the_run_is_the_checkpoint_itself(trained, toy, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    for link in (run / "checkpoints" / "best", tmp_path / "best"):
        link.symlink_to(run / "checkpoints" / "step-0000004")
        (run / "checkpoints" / "latest").write_text("step-0000004\n")
        run_training([*toy(**SAVED), f"--resume={link}"], run)
        assert last_checkpoint(run).name == "step-0000006"
        begun = [line for line in (run / "config.yaml").read_text().splitlines() if line.startswith("# begun from")]
        assert begun[-1].endswith("run/checkpoints/step-0000004")
        run_training(toy(**SAVED), run)
    assert lines(run) == lines(trained)


def test_a_run_that_another_process_began_and_ended_meanwhile_is_not_begun_anew(trained, toy, tmp_path, monkeypatch):
    original = train.open_text

    def slowly(*args, **kwargs):
        shutil.copytree(trained, tmp_path / "run", dirs_exist_ok=True)
        return original(*args, **kwargs)

    monkeypatch.setattr(train, "open_text", slowly)
    with pytest.raises(UserError, match="was begun by another process meanwhile; start again"):
        run_training(toy(**SAVED), tmp_path / "run")
    assert lines(tmp_path / "run") == lines(trained)


def test_a_checkpoint_of_another_version_or_with_a_foreign_file_is_one_sentence(trained, toy, tmp_path):
    run = tmp_path / "run"
    for change, said in (
        (lambda state: (state / "trainer.json").write_text("{}"), "does not say step, so another version wrote it"),
        (lambda state: (state / "random-00001.pt").write_bytes(b"x"), "is none of the files that were written here"),
    ):
        shutil.copytree(trained, run)
        (run / "summary.json").unlink()
        for step in (2, 4, 6):
            checkpoint = run / "checkpoints" / f"step-000000{step}"
            change(checkpoint / "state")
            if "version" in said:
                write_checksums(checkpoint)
        with pytest.raises(UserError, match=said):
            run_training(toy(**SAVED), run)
        assert lines(run) == lines(trained)
        shutil.rmtree(run)


def test_a_line_that_a_power_cut_spoiled_is_dropped(trained, toy, run):
    (run / "checkpoints" / "latest").write_text("step-0000004\n")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"\0\0\0\xff\n")
    run_training(toy(**SAVED), run)
    assert lines(run) == lines(trained)


def test_a_run_with_a_long_list_of_files_goes_on(trained, toy, run):
    """Its configuration may have more bytes than a file that a user gives."""
    told = run / "config.yaml"
    (run / "checkpoints" / "latest").write_text("step-0000004\n")
    told.write_text(told.read_text() + f"# {'a file' * 2**16}\n")
    run_training(toy(**SAVED), run)
    assert lines(run) == lines(trained)


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/run"])
def test_an_output_that_cannot_be_made_is_a_sentence(toy, place):
    with pytest.raises(UserError, match=r"cannot be made \(.*\); give one you can write to"):
        run_training(toy(), Path(place))


def test_a_disk_that_is_full_from_the_start_leaves_a_folder_that_can_be_used_later(toy, tmp_path):
    with largest_file(100), pytest.raises(OSError, match="File too large") as told:
        run_training(toy(train__steps=1), tmp_path / "run")
    assert told.value.filename == str(tmp_path / "run" / "config.yaml")
    run_training(toy(train__steps=1), tmp_path / "run")


def test_a_new_run_from_anothers_checkpoint_stands_on_its_own(trained, toy, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(trained, source)
    arguments = [*toy(**SAVED), f"--resume={source}/checkpoints/step-0000004"]
    run_training(arguments, tmp_path / "new")
    shutil.rmtree(source)
    names = sorted(path.name for path in (tmp_path / "new" / "checkpoints").iterdir())
    assert names == ["latest", "step-0000004", "step-0000006"]
    verify(tmp_path / "new" / "checkpoints" / "step-0000004")
    first, second = (read_surrogates(last_checkpoint(run) / "surrogate") for run in (trained, tmp_path / "new"))
    assert all(torch.equal(first[name][key], second[name][key]) for name in first for key in first[name])


def read(run: Path) -> None:
    print(ModelOnDisk.open(run).folder.path, flush=True)
    time.sleep(60)


def test_what_an_evaluation_reads_is_not_deleted_beneath_it(tmp_path, trained):
    folder = tmp_path / "run" / "checkpoints"
    shutil.copytree(trained / "checkpoints" / "step-0000002", folder / "step-0000002")
    checkpoints = Checkpoints(folder, keep_last=1)
    checkpoints.point_to(folder / "step-0000002")
    reader = Forked(read, tmp_path / "run")
    try:
        assert reader.stdout.readline().strip() == str(folder / "step-0000002" / "model")
        for step in (4, 6):
            checkpoints.save(step, write_nothing)
        assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000002", "step-0000006"]
        verify(folder / "step-0000002")
    finally:
        reader.kill()
        reader.wait()
    checkpoints.save(8, write_nothing)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-0000008"]


def test_an_evaluation_beside_a_training_sees_complete_checkpoints_only(toy, tmp_path):
    """The run is opened again and again while checkpoints come and go; every checkpoint that is found is whole."""
    first = start_alone(toy(train__steps=100000, train__save_every=2, train__keep_last=1), tmp_path / "run")
    seen = set()
    try:
        wait_for_steps(first, tmp_path / "run")
        while not (tmp_path / "run" / "checkpoints" / "latest").exists():
            time.sleep(0.05)
        for _ in range(1000):
            try:
                source = ModelOnDisk.open(tmp_path / "run")
            except UserError as error:
                # Deleted after `latest` named it and before it was locked: an error, and no partial read.
                assert "missing" in str(error) or "not there" in str(error)
                continue
            seen.add(source.folder.path.parent.name)
            assert json.loads((source.folder.path / "config.json").read_text())["model_type"] == "llama"
            while locks._kept:
                os.close(locks._kept.pop())
            if len(seen) >= 5:
                break
    finally:
        first.terminate()
        first.communicate(timeout=60)
    assert len(seen) >= 5
