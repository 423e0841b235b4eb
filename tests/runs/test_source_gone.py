"""A run from an existing model whose folder is gone: while the run saves, and when it goes on."""

import shutil
from pathlib import Path

import pytest

import train
from salaad.common.errors import UserError
from tests.helpers.training import assert_same_records, last_checkpoint, lines, run_training


@pytest.fixture
def source(runs, tmp_path) -> Path:
    """A model with its tokenizer, a licence and a card."""
    folder = tmp_path / "source"
    shutil.copytree(last_checkpoint(runs / "full_rank") / "model", folder)
    (folder / "LICENSE").write_text("Theirs.")
    (folder / "README.md").write_text("A card.")
    return folder


def words_of(toy, source: Path, **options: object) -> list[str]:
    """Options of a run from `source`; the tokenizer is the model's own."""
    words = toy(train__steps=4, model__path=source, **options)
    return [word for word in words if "data.tokenizer" not in word]


def test_licence_and_card_are_in_every_checkpoint_though_the_source_is_deleted_meanwhile(
    toy, source, tmp_path, monkeypatch
):
    save = train.Trainer.save

    def save_without_source(trainer: train.Trainer, last: bool = False) -> None:
        shutil.rmtree(source, ignore_errors=True)
        save(trainer, last)

    monkeypatch.setattr(train.Trainer, "save", save_without_source)
    run_training(words_of(toy, source, method="full_rank", train__save_every=2), tmp_path / "run")
    for step in (2, 4):
        model = tmp_path / "run" / "checkpoints" / f"step-000000{step}" / "model"
        assert (model / "LICENSE").read_text() == "Theirs."
        assert (model / "README.source.md").read_text() == "A card."


def interrupted(words: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until the run is asked to stop, half way."""
    save = train.Trainer.save

    def save_and_stop(trainer: train.Trainer, last: bool = False) -> None:
        save(trainer, last)
        trainer.request.asked = True

    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "save", save_and_stop)
        run_training(words, run)
    assert not (run / "summary.json").exists()


@pytest.mark.parametrize("method", ["salaad", "full_rank"])
def test_a_run_goes_on_without_its_source_as_it_would_have_with_it(toy, source, tmp_path, monkeypatch, capsys, method):
    words = words_of(toy, source, method=method, train__save_every=2)
    run_training(words, tmp_path / "whole")
    interrupted(words, tmp_path / "parts", monkeypatch)
    shutil.rmtree(source)
    run_training(words, tmp_path / "parts")
    assert f"model.path {source} is gone" in capsys.readouterr().out
    begun = (tmp_path / "parts" / "config.yaml").read_text()
    assert f"# begun from: {source}\n" in begun and "# begun from: random weights\n" not in begun
    assert_same_records(tmp_path / "whole", tmp_path / "parts")
    model = last_checkpoint(tmp_path / "parts") / "model"
    assert (model / "LICENSE").read_text() == "Theirs." and (model / "README.source.md").read_text() == "A card."
    beginning = f"--resume={tmp_path}/whole/checkpoints/step-0000002"
    run_training([*words, beginning], tmp_path / "new")
    assert lines(tmp_path / "new") == lines(tmp_path / "whole")[2:]


def test_a_method_whose_checkpoints_hold_another_form_says_that_the_source_is_needed(
    toy, source, tmp_path, monkeypatch
):
    words = words_of(toy, source, method="lora", lora__rank=4, train__save_every=2)
    interrupted(words, tmp_path / "run", monkeypatch)
    away = source.rename(tmp_path / "away")
    with pytest.raises(UserError, match=r"model\.path .*source is gone, and .* what lora made of it.*put the folder b"):
        run_training(words, tmp_path / "run")
    away.rename(source)
    run_training(words, tmp_path / "run")
    assert last_checkpoint(tmp_path / "run").name == "step-0000004"


def test_a_new_run_and_one_from_another_model_need_their_source(toy, source, tmp_path):
    words = words_of(toy, source, method="full_rank", train__save_every=2)
    run_training(words, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(UserError, match=r"begun with model\.path .*source, but .*nowhere is asked for"):
        run_training([*words, f"--model.path={tmp_path}/nowhere"], tmp_path / "run")
    shutil.rmtree(source)
    with pytest.raises(UserError, match=r"source holds no config\.json; give the folder"):
        run_training(words, tmp_path / "new")
    assert not (tmp_path / "new").exists()
