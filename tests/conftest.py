"""Small text and a small tokenizer, made on the spot: nothing is downloaded."""

import json
import os
import random
from pathlib import Path

# Read when transformers is imported: looking for a hub takes most of a minute to fail.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

WORDS = (  # noqa: SIM905
    "a the of and to in it is was on matrix rank sparse low model train step loss weight value singular "
    "threshold gradient token text stream file row batch seed window cursor epoch resume exact number "
    "every other small large"
).split()


def make_documents(count: int, seed: int) -> list[str]:
    """Distinct sentences of 3 to 60 words; some share most of their words, none are equal."""
    pick = random.Random(seed)
    return [f"{seed} {k} " + " ".join(pick.choices(WORDS, k=pick.randint(3, 60))) for k in range(count)]


@pytest.fixture(scope="session")
def tiny_tokenizer_dir(tmp_path_factory) -> str:
    """A Hugging Face folder with a byte-fallback-free BPE tokenizer of at most 512 ids: pad 0, eos 1, unk 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(make_documents(300, seed=7), trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def text_files(tmp_path_factory) -> dict[str, list[str]]:
    """`train`: three JSON lines files of 150, 100 and 75 documents; `validation`: one of 60."""
    folder = tmp_path_factory.mktemp("text")
    files: dict[str, list[str]] = {"train": [], "validation": []}
    for name, split, count in (("a", "train", 150), ("b", "train", 100), ("c", "train", 75), ("v", "validation", 60)):
        path = folder / f"{name}.jsonl"
        documents = make_documents(count, seed=ord(name))
        path.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
        files[split].append(str(path))
    return files


@pytest.fixture
def own_caches(tmp_path_factory, monkeypatch) -> None:
    """What is derived from folders outside a run stays with the test."""
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path_factory.mktemp("caches")))


@pytest.fixture(scope="session")
def runs(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    """A folder with a toy run of each method; the embedding is among the blocks."""
    from training import run_training, toy_arguments  # the trainer, seconds that other tests need not wait for

    folder = tmp_path_factory.mktemp("runs")
    for method in ("salaad", "full_rank"):
        arguments = toy_arguments(text_files, tiny_tokenizer_dir, method=method, salaad__embedding="true")
        run_training(arguments, folder / method)
    return folder
