"""A run from an existing model whose folder is gone: while the run saves, and when it goes on."""

import shutil
from pathlib import Path

import pytest

import train
from tests.helpers.training import last_checkpoint, run_training


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
