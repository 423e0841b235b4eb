"""Fixtures of all tests: small text, a small tokenizer and toy runs, made here without downloads."""

import gc
import os
from pathlib import Path

# Read when transformers is imported; otherwise a failing attempt to reach the hub takes most of a minute.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

from scripts.reliability.toy_run import toy_arguments, write_text, write_tokenizer


def pytest_collection_finish() -> None:
    """Take the millions of objects of the imports out of every later search for garbage or for live objects."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the folders with minute-long tests first, so that the tests that are distributed last are short."""
    rooms = {item: item.path.parent.name for item in items}
    items.sort(key=lambda item: ("scripts", "end_to_end", rooms[item]).index(rooms[item]))


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory) -> str:
    """A Hugging Face folder with a byte-fallback-free BPE tokenizer of at most 512 ids: pad 0, eos 1, unk 2."""
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> dict[str, list[str]]:
    """Split → JSON lines files: `train` with 150, 100 and 75 documents, `validation` with 60."""
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture
def toy(text_files, tiny_tokenizer_dir):
    """A function that returns the command-line options of a toy run, with keywords like train__steps=3 as overrides."""
    return lambda **overrides: toy_arguments(text_files, tiny_tokenizer_dir, **overrides)


@pytest.fixture
def own_caches(tmp_path_factory, monkeypatch) -> None:
    """Use a cache folder of the test's own, for what is derived from models that belong to no run."""
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path_factory.mktemp("caches")))


@pytest.fixture(scope="session")
def runs(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    """A folder with two finished toy runs, `salaad` and `full_rank`; the embedding is among the blocks."""
    from tests.helpers.training import run_training  # here, since importing the trainer takes seconds

    folder = tmp_path_factory.mktemp("runs")
    for method in ("salaad", "full_rank"):
        arguments = toy_arguments(text_files, tiny_tokenizer_dir, method=method, salaad__embedding="true")
        run_training(arguments, folder / method)
    return folder
