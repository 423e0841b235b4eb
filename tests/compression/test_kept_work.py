"""What is kept of work that is interrupted or meets a full disk: the blocks split so far, the state of a fit."""

import resource
from contextlib import contextmanager

import pytest
import torch

from salaad.compression.split import cached_parts
from salaad.compression.tuning.saved import SavedTuning
from salaad.factored.slr import Slr

SHAPES = dict.fromkeys("abc", (6, 4))


def parts_of(name: str) -> Slr:
    generator = torch.Generator().manual_seed(ord(name))
    L = torch.randn(6, 2, generator=generator) @ torch.randn(2, 4, generator=generator)
    S = torch.randn(6, 4, generator=generator) * (torch.rand(6, 4, generator=generator) < 0.3)
    return Slr.from_parts(L, S, 2)


class Splitting:
    """A callable that splits blocks, is interrupted before block `stop`, and records in `asked` the blocks it got."""

    def __init__(self, stop: str | None = None):
        self.stop, self.asked = stop, []

    def __call__(self, names):
        self.asked = list(names)
        for name in names:
            if name == self.stop:
                raise KeyboardInterrupt
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


def test_a_split_that_is_interrupted_goes_on_with_the_blocks_that_are_left(tmp_path):
    path, first, second, third = tmp_path / "cache" / "parts.safetensors", Splitting("c"), Splitting(), Splitting("a")
    with pytest.raises(KeyboardInterrupt):
        cached_parts(path, SHAPES, first)
    assert same(cached_parts(path, SHAPES, second)) and (first.asked, second.asked) == (["a", "b", "c"], ["c"])
    assert same(cached_parts(path, SHAPES, third)) and third.asked == []


def test_a_split_that_cannot_be_kept_is_made_again_and_nothing_more(tmp_path):
    path, again = tmp_path / "parts.safetensors", Splitting()
    with no_room():
        assert same(cached_parts(path, SHAPES, Splitting()))
    assert not any(tmp_path.iterdir())
    assert same(cached_parts(path, SHAPES, again)) and again.asked == list(SHAPES)


def test_what_was_fitted_and_finds_no_room_is_an_error_of_the_disk_and_what_was_kept_before_stays(tmp_path):
    saved = SavedTuning(tmp_path / "state.pt")
    saved.save({"done": 1})
    with no_room(), pytest.raises(OSError, match="no room, or no right to write") as raised:
        saved.save({"done": 2, "weights": torch.ones(1000)})
    assert raised.value.filename == str(saved.path) and saved.load() == {"done": 1}
