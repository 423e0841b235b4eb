"""Files that a network file system shows late: waited for, and refused with a sentence where they never come."""

import hashlib
import threading
import time
from pathlib import Path

import pytest

from salaad.common import distributed, locks
from salaad.common.errors import NotSavedError, UserError
from salaad.common.files import read_object, unseen, verify, write_checksums
from salaad.config.command_line import TrainOptions, read_command_line
from salaad.runs import checkpoints, run
from salaad.runs.checkpoints import Checkpoints, RunState
from tests.helpers.ranks import run_ranks


def later(seconds: float, action) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(seconds), action()))
    thread.start()
    return thread


def test_a_file_that_is_shown_late_is_waited_for(tmp_path):
    (tmp_path / "there").touch()
    thread = later(0.5, (tmp_path / "late").touch)
    assert unseen(tmp_path, ["there", "late"], patience=20) == []
    thread.join()
    begun = time.monotonic()
    assert unseen(tmp_path, ["there", "never"], patience=0.3) == ["never"]
    assert time.monotonic() - begun >= 0.3
    assert unseen(tmp_path, ["never"], patience=0) == ["never"]


def test_a_checkpoint_is_not_rejected_for_a_shard_that_is_shown_late(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    write_checksums(tmp_path)
    (tmp_path / "b").rename(tmp_path.parent / "hidden")
    with pytest.raises(UserError, match="b is missing"):
        verify(tmp_path)
    thread = later(0.5, lambda: (tmp_path.parent / "hidden").rename(tmp_path / "b"))
    assert verify(tmp_path, patience=20)
    thread.join()


@pytest.fixture
def saved(toy, tmp_path) -> tuple:
    """A configuration and the checkpoints of two ranks' run with it, after steps 1 and 2."""
    config, _ = read_command_line(toy())
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2):
        state = RunState(step, world_size=2, config=config.to_dict())
        Checkpoints(folder).save(step, lambda partial, state=state: state.write(partial))
    return config, folder


def shown_late(path: Path, aside: Path) -> threading.Thread:
    path.rename(aside / "hidden")
    return later(0.5, lambda: (aside / "hidden").rename(path))


@pytest.mark.parametrize("late", ["step-0000002", "step-0000002/checksums.json", "step-0000002/state/trainer.json"])
@pytest.mark.parametrize("machines", ["1", "2"])
def test_the_newest_checkpoint_is_not_passed_over_for_what_is_shown_late(saved, monkeypatch, capsys, late, machines):
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)  # one machine resumes what others may have written
    _, folder = saved
    thread = shown_late(folder / late, folder.parent)
    assert Checkpoints(folder).newest_whole(RunState.read) == (folder / "step-0000002", [])
    thread.join()
    assert "waiting up to 60 s for" in capsys.readouterr().err


@pytest.mark.parametrize("machines", ["1", "2"])
def test_a_checkpoint_of_which_a_file_never_comes_is_passed_over_and_named(saved, monkeypatch, machines):
    monkeypatch.setenv("GROUP_WORLD_SIZE", machines)
    monkeypatch.setattr(checkpoints, "UNSEEN", 0.3)
    _, folder = saved
    (folder / "step-0000002" / "state" / "trainer.json").unlink()
    found, wrong = Checkpoints(folder).newest_whole(RunState.read)
    assert found == folder / "step-0000001"
    assert any("step-0000002" in sentence for sentence in wrong)


@pytest.mark.parametrize("late", ["checksums.json", "state/trainer.json"])
def test_a_checkpoint_that_was_named_is_waited_for(saved, tmp_path, monkeypatch, late):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    config, folder = saved
    named = folder / "step-0000001"
    thread = shown_late(named / late, tmp_path)
    options = TrainOptions(output=str(tmp_path / "other"), resume=str(named))
    assert run.open_run(config, options) == (tmp_path / "other", named)
    thread.join()


def hidden_from_the_first(folder: Path, forever: bool) -> str:
    """Save on both ranks, where rank 0 cannot see rank 1's file for a second, or ever; return checksums or error."""
    checkpoints.UNSEEN = 2
    kept, is_file = time.monotonic() + 1, Path.is_file

    def late(self: Path) -> bool:
        hidden = distributed.rank() == 0 and self.name == "of-1" and (forever or time.monotonic() < kept)
        return False if hidden else is_file(self)

    Path.is_file = late

    def write(partial: Path) -> None:
        (partial / f"of-{distributed.rank()}").write_text("x")

    try:
        Checkpoints(folder).save(7, write)
    except NotSavedError as error:
        return str(error)
    finally:
        Path.is_file = is_file
    return (folder / "step-0000007" / "checksums.json").read_text()


@pytest.mark.parametrize("forever", [False, True])
def test_what_another_machine_wrote_is_in_the_checksums_or_the_checkpoint_is_not_saved(tmp_path, forever):
    first, _ = run_ranks(hidden_from_the_first, 2, tmp_path, tmp_path / "checkpoints", forever)
    if forever:
        assert "of-1 was written on another machine and is not seen on the first one" in first
        assert not (tmp_path / "checkpoints" / "step-0000007").exists()
    else:
        assert "of-0" in first and "of-1" in first


def saved_where_listings_lack_a_file(folder: Path) -> dict[str, str]:
    """Save on both ranks, where rank 0 can open rank 1's file, but its listings lack the file; return the checksums."""
    rglob = Path.rglob

    def lacking(self: Path, pattern: str):
        return (path for path in rglob(self, pattern) if distributed.rank() == 1 or path.name != "of-1")

    Path.rglob = lacking
    try:
        Checkpoints(folder).save(7, lambda partial: (partial / f"of-{distributed.rank()}").write_text("x") and {})
    finally:
        Path.rglob = rglob
    return read_object(folder / "step-0000007" / "checksums.json")


def test_a_file_that_a_listing_lacks_has_its_checksum(tmp_path):
    first, second = run_ranks(saved_where_listings_lack_a_file, 2, tmp_path, tmp_path / "checkpoints")
    assert first == second == dict.fromkeys(["of-0", "of-1"], hashlib.sha256(b"x").hexdigest())
    verify(tmp_path / "checkpoints" / "step-0000007", alone=True)


def looks_of_two_machines(folder: Path, until: int) -> str:
    """Return how often this rank looked at the folder, or its error; rank 1 sees the run from look `until` on."""
    run.UNSEEN, looks, view = 2, [], run._view

    def late(of: Path) -> tuple[bool, str]:
        looks.append(1)
        return view(of) if distributed.rank() == 0 or len(looks) >= until else (False, "")

    run._view = late
    try:
        run.require_shared_storage(folder)
    except UserError as error:
        return str(error)
    finally:
        run._view = view
    return f"{len(looks)} looks"


@pytest.mark.parametrize(("until", "said"), [(1, "1 looks"), (4, "4 looks"), (99, "is not the same folder")])
def test_a_folder_that_another_machine_sees_late_is_looked_at_again(tmp_path, until, said):
    (tmp_path / "config.yaml").touch()
    assert all(said in found for found in run_ranks(looks_of_two_machines, 2, tmp_path, tmp_path, until))


def test_a_lock_says_how_to_take_it_over(tmp_path, monkeypatch):
    def taken(*_):
        raise BlockingIOError

    monkeypatch.setattr(locks.fcntl, "lockf", taken)
    (tmp_path / ".lock").write_text("process 9 on node7\n")
    with pytest.raises(UserError, match=r"written by process 9 on node7; .* gone for good, delete .*\.lock and start"):
        locks.claim(tmp_path)
