"""A compress command that is interrupted and given again, beside others on the same model."""

import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from salaad.common.cache_folder import cache_folder
from salaad.common.signals import StopRequest
from salaad.compression import cut, from_checkpoint
from salaad.compression.split import PostHoc
from salaad.compression.tuning.saved import SavedTuning
from tests.helpers.deploying import compress, refused, text_options
from tests.helpers.models import save_gpt2

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def gpt2(tmp_path) -> Path:
    return save_gpt2(tmp_path / "gpt2")


@pytest.fixture
def words(text_files, tiny_tokenizer_dir) -> dict[str, object]:
    return {"rpca": True, "budget": "0.8", "dtype": "float32"} | text_options(text_files, tiny_tokenizer_dir)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_a_command_that_is_given_again_cuts_the_same_model_though_gradients_differ_in_their_last_bits(
    gpt2, words, tmp_path, monkeypatch
):
    compress(gpt2, tmp_path / "first", calibrate=8, **words)
    exact = from_checkpoint.second_moments_of_text

    def otherwise(*arguments):
        """Return other moments, as another run on a GPU does, though much further off."""
        return {name: tuple(side.flip(0) for side in pair) for name, pair in exact(*arguments).items()}

    monkeypatch.setattr(from_checkpoint, "second_moments_of_text", otherwise)
    compress(gpt2, tmp_path / "again", calibrate=8, **words)
    first, again = tensors(tmp_path / "first"), tensors(tmp_path / "again")
    assert first.keys() == again.keys() and all(torch.equal(first[name], again[name]) for name in first)
    compress(gpt2, tmp_path / "other text", calibrate=9, **words)  # is calibrated anew
    other = tensors(tmp_path / "other text")
    assert any(name not in other or not torch.equal(first[name], other[name]) for name in first)


def test_a_command_leaves_the_saved_states_of_others_with_the_same_cut(gpt2, words, tmp_path, monkeypatch):
    asked = iter([False] * 8)  # twice in the split, twice in the refinement, at the four steps of the first layer
    with monkeypatch.context() as patch:
        patch.setattr(
            StopRequest, "asked", property(lambda self: next(asked, True), lambda self, value: None), raising=False
        )
        refused("compress.py", f"--checkpoint={gpt2}", *as_options(words), "--match=8", f"--output={tmp_path / 'a'}")
    kept = list(cache_folder().rglob("unfinished/*"))
    assert len(kept) == 2  # the blocks as they were refined, and the state of matching
    compress(gpt2, tmp_path / "b", match=8, **words | {"format": "dense"})
    compress(gpt2, tmp_path / "c", match=8, **words | {"data.packing": "true"})
    assert all(path.exists() for path in kept)
    compress(gpt2, tmp_path / "another place", match=8, **words)
    assert not any(path.exists() for path in kept)


@pytest.mark.parametrize(("elastic", "blocks"), [((), 8), (("--elastic",), 16)])
def test_a_refinement_that_is_ended_by_a_signal_goes_on_with_the_blocks_that_are_left(
    gpt2, words, tmp_path, monkeypatch, elastic, blocks
):
    """An elastic folder has every block twice: as refined for its size, and what that lacks of L + S."""
    compress(gpt2, tmp_path / "at once", *elastic, **words)
    done, exact = [], cut.refine

    def refine(*arguments, **options):
        done.append(1)
        if len(done) == blocks - 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return exact(*arguments, **options)

    monkeypatch.setattr(cut, "refine", refine)
    error = refused("compress.py", f"--checkpoint={gpt2}", *as_options(words), *elastic, f"--output={tmp_path / 'a'}")
    assert error == "error: interrupted after 5 of 8 blocks were refined; the same command goes on from there"
    assert any(cache_folder().rglob("unfinished/*"))
    compress(gpt2, tmp_path / "a", *elastic, **words)
    assert len(done) == blocks + 1  # the one in which the signal came is refined once more
    assert not any(cache_folder().rglob("unfinished/*"))
    at_once, in_two = tensors(tmp_path / "at once"), tensors(tmp_path / "a")
    assert at_once.keys() == in_two.keys() and all(torch.equal(at_once[name], in_two[name]) for name in at_once)


def test_what_godec_finds_for_a_budget_stays_until_the_command_has_ended(gpt2, words, tmp_path, monkeypatch):
    words = {name: value for name, value in words.items() if name != "rpca"} | {"godec": True}
    done, exact = [], PostHoc.split

    def split(*arguments):
        done.append(1)
        if len(done) == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return exact(*arguments)

    monkeypatch.setattr(PostHoc, "split", split)
    error = refused("compress.py", f"--checkpoint={gpt2}", *as_options(words), f"--output={tmp_path / 'a'}")
    assert error == "error: interrupted after 4 of 8 blocks were split; the same command goes on from there"
    for budget in ("0.8", "0.7"):
        compress(gpt2, tmp_path / budget, **words | {"budget": budget})
        assert not list(cache_folder().rglob("*/godec-*")) and not any(cache_folder().rglob("unfinished/*"))
    assert len(done) == 5 + 4 + 8


@pytest.mark.parametrize(("words_of_a_fit", "fit"), [({"match": 8}, "matched"), ({"distill": "1K"}, "distilled")])
def test_a_signal_during_the_last_save_of_a_fit_ends_the_command_which_then_goes_on(
    gpt2, words, tmp_path, monkeypatch, words_of_a_fit, fit
):
    """Outside of the fit the signals do what they did before."""
    handlers, seen, exact = [signal.getsignal(number) for number in SIGNALS], [], SavedTuning.save

    def save(saved, state):
        last = len(state["fitted"]) == 2 if fit == "matched" else state["fitting"]["done"] == 4
        if last and not seen:
            seen.append([signal.getsignal(number) for number in SIGNALS])
            os.kill(os.getpid(), signal.SIGTERM)
        exact(saved, state)

    monkeypatch.setattr(SavedTuning, "save", save)
    options = as_options(words | words_of_a_fit)
    error = refused("compress.py", f"--checkpoint={gpt2}", *options, f"--output={tmp_path / 'a'}")
    said = "all layers were matched" if fit == "matched" else "4 of 4 steps"
    assert error == f"error: interrupted after {said}; the same command goes on from there"
    assert not set(seen[0]) & set(handlers)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    compress(gpt2, tmp_path / "a", **words, **words_of_a_fit)
    compress(gpt2, tmp_path / "at once", **words, **words_of_a_fit)
    assert [signal.getsignal(number) for number in SIGNALS] == handlers
    in_two, at_once = tensors(tmp_path / "a"), tensors(tmp_path / "at once")
    assert at_once.keys() == in_two.keys() and all(torch.equal(at_once[name], in_two[name]) for name in at_once)


def as_options(words: dict[str, object]) -> list[str]:
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in words.items()]
