"""What is kept of work that is interrupted or meets a full disk: the blocks split so far, the state of a fit."""

import os
import resource
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file

from salaad.common.errors import UserError
from salaad.compression import split
from salaad.compression.calibration import kept_moments
from salaad.compression.split import cached_parts
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.unfinished import Unfinished
from salaad.factored.slr import Slr

SHAPES = dict.fromkeys("abc", (6, 4))


def parts_of(name: str) -> Slr:
    generator = torch.Generator().manual_seed(ord(name))
    L = torch.randn(6, 2, generator=generator) @ torch.randn(2, 4, generator=generator)
    S = torch.randn(6, 4, generator=generator) * (torch.rand(6, 4, generator=generator) < 0.3)
    return Slr.from_parts(L, S, 2)


def ctrl_c() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Splitting:
    """A callable that splits blocks, is interrupted before block `stop`, and records in `asked` the blocks it got."""

    def __init__(self, stop: str | None = None, interrupt: Callable[[], None] = ctrl_c):
        self.stop, self.interrupt, self.asked = stop, interrupt, []

    def __call__(self, names):
        self.asked = list(names)
        for name in names:
            if name == self.stop:
                self.interrupt()
            yield name, parts_of(name)


@contextmanager
def no_room():
    """Context manager under which no file can grow beyond 100 bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def same(found: dict[str, Slr]) -> bool:
    return list(found) == list(SHAPES) and all(torch.equal(found[n].dense(), parts_of(n).dense()) for n in SHAPES)


@pytest.mark.parametrize(("interrupt", "raised"), [(ctrl_c, KeyboardInterrupt), (terminate, UserError)])
def test_a_split_that_is_interrupted_goes_on_with_the_blocks_that_are_left(tmp_path, interrupt, raised):
    path, handler = tmp_path / "cache" / "parts.safetensors", signal.getsignal(signal.SIGTERM)
    first, second, third = Splitting("c", interrupt), Splitting(), Splitting("a")
    with pytest.raises(raised) as error:
        cached_parts(path, SHAPES, first)
    if raised is UserError:
        assert str(error.value) == ("interrupted after 2 of 3 blocks were split; the same command goes on from there")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert same(cached_parts(path, SHAPES, second)) and (first.asked, second.asked) == (["a", "b", "c"], ["c"])
    assert same(cached_parts(path, SHAPES, third)) and third.asked == []


def test_blocks_are_saved_while_others_are_still_to_be_done_so_that_a_kill_costs_little(tmp_path, monkeypatch):
    monkeypatch.setattr(split, "_SECONDS", -1)  # of patience between two saves
    path, there = tmp_path / "parts.safetensors", []

    def make(names):
        for name in names:
            there.append(path.is_file() and {key.partition("/")[0] for key in load_file(path)})
            yield name, parts_of(name)

    assert same(cached_parts(path, SHAPES, make))
    assert there[0] is False and there[1] == {"a"}  # later ones may wait, as saving may take a twentieth of the time


def test_a_signal_while_the_blocks_are_saved_ends_the_command_once_they_are(tmp_path, monkeypatch):
    path, again, exact = tmp_path / "parts.safetensors", Splitting(), split.write_tensors

    def write(*arguments):
        terminate()
        exact(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(split, "write_tensors", write)
        with pytest.raises(UserError, match="interrupted after 3 of 3 blocks were split"):
            cached_parts(path, SHAPES, Splitting())
    assert same(cached_parts(path, SHAPES, again)) and again.asked == []


def test_what_is_split_lies_in_memory_as_what_is_read_so_that_products_with_it_are_the_same(tmp_path):
    def make(names):
        yield from ((name, parts_of(name).transposed()) for name in names)  # with U and V as views

    turned = dict.fromkeys(SHAPES, (4, 6))
    first, second = (cached_parts(tmp_path / "parts.safetensors", turned, make) for _ in range(2))
    for name in SHAPES:
        for one, other in zip(first[name].tensors().values(), second[name].tensors().values(), strict=True):
            assert torch.equal(one, other)
        assert first[name].U.stride() == second[name].U.stride() and first[name].V.stride() == second[name].V.stride()


DAMAGE = {
    "not finite": lambda tensors: tensors["b/U"].fill_(torch.nan),
    "no vector": lambda tensors: tensors.update({"b/values": torch.tensor(1.0)}),
    "complex positions": lambda tensors: tensors.update({"b/positions": torch.zeros(3, dtype=torch.complex64)}),
    "another shape": lambda tensors: tensors.update({"b/V": torch.zeros(2, 5)}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_block_that_is_damaged_on_disk_is_split_once_more(tmp_path, damage):
    path, again = tmp_path / "parts.safetensors", Splitting()
    cached_parts(path, SHAPES, Splitting())
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    assert same(cached_parts(path, SHAPES, again)) and again.asked == ["b"]


@pytest.mark.parametrize("damage", [b"", b"no moments", None])
def test_moments_of_text_are_computed_once_and_once_more_if_the_file_is_damaged(tmp_path, damage):
    path, made = tmp_path / "calibration.safetensors", []

    def make():
        made.append({name: (torch.rand(6), torch.rand(4)) for name in SHAPES})
        return made[-1]

    for _ in range(2):
        found = kept_moments(path, SHAPES, make)
        assert all(torch.equal(a, b) for name in SHAPES for a, b in zip(found[name], made[0][name], strict=True))
    if damage is None:
        save_file({name: -tensor for name, tensor in load_file(path).items()}, path)
    else:
        path.write_bytes(damage)
    kept_moments(path, SHAPES, make)
    assert len(made) == 2


def test_a_split_that_cannot_be_kept_is_made_again_and_nothing_more(tmp_path, capsys):
    path, again = tmp_path / "parts.safetensors", Splitting()
    with no_room():
        assert same(cached_parts(path, SHAPES, Splitting()))
    assert not any(tmp_path.iterdir())
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {path} cannot be written (File too large)")
    assert same(cached_parts(path, SHAPES, again)) and again.asked == list(SHAPES)


def test_a_fit_that_finds_no_room_for_its_state_goes_on_with_a_warning_and_the_state_before_stays(tmp_path, capsys):
    saved, module = SavedTuning(tmp_path / "state.pt"), torch.nn.Linear(1, 1)
    saved.save({"done": 1})
    with no_room():
        saved.save({"done": 2, "weights": torch.ones(1000)})
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: {saved.path} cannot be written (no room, or no right to write")
    assert saved.resumed(module, lambda state: state) == {"done": 1}


NO_MEMORY = {
    "host": MemoryError(),
    "GPU": torch.OutOfMemoryError("CUDA out of memory."),
    "torch on a CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes."),
}


@pytest.mark.parametrize("raised", [*NO_MEMORY.values(), NameError("a fault of the program")], ids=[*NO_MEMORY, "name"])
def test_a_state_that_could_not_be_taken_over_for_lack_of_memory_stays_and_the_error_is_raised(tmp_path, raised):
    saved, module = SavedTuning(tmp_path / "state.pt"), torch.nn.Linear(1, 1)
    saved.save({"done": 1})

    def begin(state):
        raise raised

    with pytest.raises(type(raised)) as error:
        saved.resumed(module, begin)
    assert error.value is raised
    assert saved.resumed(module, lambda state: state) == {"done": 1}


def test_a_line_says_that_a_state_is_passed_over_and_none_that_there_is_none(tmp_path, capsys):
    saved, module = SavedTuning(tmp_path / "state.pt"), torch.nn.Linear(1, 1)
    weight = module.weight.detach().clone()

    def begin(state):
        if state is not None:
            torch.nn.init.zeros_(module.weight)
            return state["layers"]
        return "anew"

    assert saved.resumed(module, begin) == "anew" and not capsys.readouterr().err
    saved.save({"done": 1})
    assert saved.resumed(module, begin) == "anew" and torch.equal(module.weight, weight)
    [warning] = capsys.readouterr().err.splitlines()
    assert warning == (
        f"warning: the state in {saved.path} is broken or does not fit (KeyError: 'layers'); the fit begins anew"
    )
    saved.path.write_bytes(b"no state")
    assert saved.resumed(module, begin) == "anew"
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: the state in {saved.path} is broken or does not fit (BadZipFile: ")


def test_the_end_of_a_command_deletes_its_own_files_and_those_that_were_left_for_a_month(tmp_path):
    ended = Unfinished(tmp_path / "unfinished", "one command")
    own, other = ended.path("a fit"), Unfinished(tmp_path / "unfinished", "another").path("a fit")
    before = tmp_path / "tuning" / "of an older version.pt"
    ages = {own: 0, other: 29, other.with_name("left"): 31, before: 31, before.with_name("new.pt"): 0}
    for path, days in ages.items():
        path.parent.mkdir(exist_ok=True)
        path.touch()
        os.utime(path, (time.time() - days * 24 * 3600,) * 2)
    ended.remove()
    assert {path for path in ages if path.exists()} == {other, before.with_name("new.pt")}


def test_a_file_that_cannot_be_deleted_does_not_keep_the_others_of_a_command(tmp_path):
    ended = Unfinished(tmp_path / "unfinished", "one command")
    stuck, other = ended.path("a fit"), ended.path("another fit")
    stuck.mkdir(parents=True)  # which nobody can unlink, whatever their rights
    other.touch()
    ended.remove()
    assert stuck.exists() and not other.exists()
