"""Small text and a small tokenizer, made on the spot: nothing is downloaded."""

import os
from pathlib import Path

# Read when transformers is imported: looking for a hub takes most of a minute to fail.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from scripts.reliability.toy_run import toy_arguments, write_text, write_tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders with tests of a minute come first, so that the last tests to be shared out are short."""
    rooms = {item: item.path.parent.name for item in items}
    items.sort(key=lambda item: ("scripts", "end_to_end", rooms[item]).index(rooms[item]))


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory) -> str:
    """A Hugging Face folder with a byte-fallback-free BPE tokenizer of at most 512 ids: pad 0, eos 1, unk 2."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> dict[str, list[str]]:
    """`train`: three JSON lines files of 150, 100 and 75 documents; `validation`: one of 60."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def toy(text_files, tiny_tokenizer_dir):
    """Options of a toy run; keywords override."""
    return lambda **overrides: toy_arguments(text_files, tiny_tokenizer_dir, **overrides)


@pytest.fixture
def own_caches(tmp_path_factory, monkeypatch) -> None:
    """What is derived from folders outside a run stays with the test."""
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path_factory.mktemp("caches")))


@pytest.fixture(scope="session")
def runs(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    """A folder with a toy run of each method; the embedding is among the blocks."""
    from tests.helpers.training import run_training  # the trainer, seconds that other tests need not wait for

    folder = tmp_path_factory.mktemp("runs")
    for method in ("salaad", "full_rank"):
        arguments = toy_arguments(text_files, tiny_tokenizer_dir, method=method, salaad__embedding="true")
        run_training(arguments, folder / method)
    return folder
