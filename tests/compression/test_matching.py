"""Matching layer by layer: what it reads, how much of the model it runs and holds, and the state it goes on from."""

import gc
import random
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from salaad.common.errors import UserError
from salaad.compression.tuning.distillation import Distillation
from salaad.compression.tuning.matching import PASSES, Matching
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.model.loss import IGNORED
from tests.helpers.tuned_models import WTE, NeverAsked, Q, ids, tuned_model


def texts(count: int) -> list[dict[str, Tensor]]:
    """Return batches of random tokens."""
    return [{"input_ids": ids(seed=seed), "labels": ids(seed=seed)} for seed in range(count)]


def matched(tuned: TunedModel, path: Path, request=NeverAsked, count: int = 2) -> TunedModel:
    Matching(tuned, texts(count), SavedTuning(path), request()).run()
    return tuned


class Batches:
    """A stream of the same batch, which goes on from the number of rows in its state."""

    repeats = False

    def __init__(self, state: dict | None) -> None:
        self.rows = 0 if state is None else state["rows"]

    def __next__(self) -> dict[str, Tensor]:
        self.rows += 1
        return texts(self.rows)[-1]

    def state_dict(self) -> dict:
        return {"rows": self.rows}

    def close(self) -> None:
        pass


def distilled(tuned: TunedModel, path: Path, request=NeverAsked, steps: int = 4) -> TunedModel:
    Distillation(tuned, Batches, steps, SavedTuning(path), request(), 0.0, lambda step: [None]).run()
    return tuned


def numbers(tuned: TunedModel) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tuned.state_dict().items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# ---- what it reads, runs and holds


def test_an_embedding_of_which_nothing_is_kept_is_left_out_of_matching(tmp_path):
    tuned = tuned_model()
    tuned = TunedModel(tuned.model, tuned.parts() | {WTE: tuned.parts()[WTE].cut(0, 0)}, {})
    matched(tuned, tmp_path / "state.pt")
    assert tuned.parts()[WTE].parameters == 0
    assert tuned.parts()[Q].dense().isfinite().all()


def test_matching_reads_no_padding(tmp_path):
    """Token ids after the end of a sequence do not change what is fitted."""
    tuned, found = tuned_model(), []
    for filler in (0, 7):
        copy = TunedModel(tuned.model, tuned.parts(), {})
        labels = ids().clone()
        labels[:, 6:] = IGNORED
        text = {"input_ids": ids().masked_fill(labels == IGNORED, filler), "labels": labels}
        Matching(copy, [text], SavedTuning(tmp_path / f"{filler}.pt"), NeverAsked()).run()
        found.append(copy.parts()[Q].dense())
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], tuned.parts()[Q].dense(), rtol=1e-3)


def test_a_layer_is_run_once_per_batch_and_model_to_pass_through_it_and_once_per_shape_for_its_arguments(tmp_path):
    tuned, calls, batches = tuned_model(num_hidden_layers=4), Counter(), 5
    for i, layer in enumerate(tuned.model.model.layers):
        layer.register_forward_hook(lambda *_, i=i: calls.update([i]))
    matched(tuned, tmp_path / "state.pt", count=batches)
    fitted = PASSES * batches  # the only layer with a block is 1
    assert calls == {0: 2 * batches + 1, 1: 2 * batches + 1 + fitted, 2: 2 * batches + 1, 3: batches + 1}


class CountsHidden:
    """A request that never comes; when it is looked for, tensors of the shape of hidden states are counted."""

    most = 0

    @property
    def asked(self) -> bool:
        alive = [part for part in gc.get_objects() if type(part) is Tensor and part.shape == (3, 9, 16)]
        CountsHidden.most = max(CountsHidden.most, len({part.data_ptr() for part in alive}))
        return False


def test_the_hidden_states_before_one_layer_are_held_however_many_layers_there_are(tmp_path):
    batches = 6
    matched(tuned_model(num_hidden_layers=6), tmp_path / "state.pt", CountsHidden, batches)
    # Those of the dense and of the cut model, and one batch in work.
    assert 2 * batches <= CountsHidden.most <= 2 * batches + 2


# ---- the state it goes on from


class AskedAfter:
    """A request to stop that comes when it has been looked for so many times."""

    def __init__(self, looks: int) -> None:
        self.left = looks

    @property
    def asked(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_the_state_of_the_whole_model_is_not_saved_after_every_layer_that_takes_a_moment(tmp_path, monkeypatch):
    saved, exact = [], SavedTuning.save
    monkeypatch.setattr(SavedTuning, "save", lambda self, state: (saved.append([*state["fitted"]]), exact(self, state)))
    matched(tuned_model(), tmp_path / "state.pt")
    assert len(saved) == 1 and len(saved[0]) > 1
    with pytest.raises(UserError, match="interrupted"):
        matched(tuned_model(), tmp_path / "another.pt", partial(AskedAfter, 9))
    assert saved[1:] == [saved[0][:1]]


def flipped(path: Path, seed: int) -> None:
    """Change one byte of the numbers in a file."""
    content = bytearray(path.read_bytes())
    content[random.Random(seed).randrange(len(content) // 4, len(content) // 2)] ^= 0x40
    path.write_bytes(content)


DAMAGE = {
    "flipped": partial(flipped, seed=1),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "another layout": lambda path: torch.save({"fitted": [Q], "fitting": {}}, path),
    "no state": lambda path: torch.save(torch.ones(3), path),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("fit", [matched, distilled])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_state_that_is_damaged_counts_as_none(tmp_path, fit, damage):
    expected, path = numbers(fit(tuned_model(), tmp_path / "whole.pt")), tmp_path / "damaged.pt"
    with pytest.raises(UserError, match="interrupted"):
        fit(tuned_model(), path, partial(AskedAfter, 9 if fit is matched else 2))
    damage(path)
    assert_equal(numbers(fit(tuned_model(), path)), expected)


@pytest.mark.parametrize("fit", [matched, distilled])
def test_a_state_of_another_cut_counts_as_none(tmp_path, fit):
    fit(tuned_model(rank=3), tmp_path / "another.pt")
    expected = numbers(fit(tuned_model(), tmp_path / "own.pt"))
    assert_equal(numbers(fit(tuned_model(), tmp_path / "another.pt")), expected)


def test_moments_of_another_shape_count_as_no_state(tmp_path):
    path = tmp_path / "state.pt"
    expected = numbers(distilled(tuned_model(), path))
    state = torch.load(path, weights_only=True)
    moments = state["fitting"]["optimizer"]["state"][0]
    moments["exp_avg"] = moments["exp_avg"][:1]
    state["fitting"]["done"] = 2
    torch.save(state, path)
    assert_equal(numbers(distilled(tuned_model(), path)), expected)


@pytest.mark.parametrize(("fit", "looks", "left"), [(matched, 9, PASSES * 2), (distilled, 2, 2)])
def test_a_whole_state_is_gone_on_from(tmp_path, fit, looks, left):
    expected, path = numbers(fit(tuned_model(), tmp_path / "whole.pt")), tmp_path / "state.pt"
    with pytest.raises(UserError, match="interrupted"):
        fit(tuned_model(), path, partial(AskedAfter, looks))
    rest = AskedAfter(100)
    assert_equal(numbers(fit(tuned_model(), path, lambda: rest)), expected)
    assert 100 - rest.left == left + 1  # once at the end; for steps that were done before, nobody looks
