"""The commands that fetch a text and train a tokenizer on it, on local files in place of the hub's."""

import errno
import json
import lzma
import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from salaad.data.tokenizer import load_tokenizer
from scripts import fetch_c4, reproduce, train_tokenizer

ROOT = Path(__file__).resolve().parents[2]
WORDS = ["river", "Zürich", "window", "station", "garden", "letter", "carpet", "mountain", "kettle", "λόγος"]


def article(part: int, number: int, words: int) -> str:
    return f"Article {number} of part {part}. " + " ".join(WORDS[(number * i + part) % 10] for i in range(words))


def script(name: str, *options: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "scripts" / name, *map(str, options)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


@pytest.fixture(scope="module")
def encyclopedia(tmp_path_factory):
    """Three parts of 200 articles; every second one is short."""
    folder = tmp_path_factory.mktemp("encyclopedia")
    for part in range(3):
        texts = [article(part, number, 5 if number % 2 else 100) for number in range(200)]
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), folder / f"part-{part}.parquet")
    return folder


@pytest.fixture(scope="module")
def fetched(encyclopedia, tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts") / "wikipedia"
    options = ("--documents", 150, "--least", 300, "--output", folder)
    done = script("fetch_text.py", "--files", f"{encyclopedia}/*", *options)
    assert done.returncode == 0, done.stderr
    return folder


def texts(*files) -> list[str]:
    return [json.loads(line)["text"] for file in files for line in lzma.open(file, "rt", encoding="utf-8")]


def test_every_part_gives_the_same_number_of_long_articles_and_none_is_in_both(fetched):
    train, validation = texts(*fetched.glob("train-*.jsonl.xz")), texts(fetched / "validation.jsonl.xz")
    assert sorted(train + validation) == sorted(article(part, 2 * k, 100) for part in range(3) for k in range(50))
    assert 1 <= len(validation) <= 15
    assert sum(bool(texts(file)) for file in fetched.glob("train-*.jsonl.xz")) == 10


def test_fewer_articles_than_parts_are_taken_from_the_first(encyclopedia, tmp_path):
    options = ("--documents", 2, "--least", 300, "--output", tmp_path / "few")
    done = script("fetch_text.py", "--files", f"{encyclopedia}/*", *options)
    assert done.returncode == 0, done.stderr
    assert sorted(texts(*(tmp_path / "few").glob("*.xz"))) == [article(part, 0, 100) for part in range(2)]


def test_what_is_there_is_not_overwritten_and_what_is_not_there_is_said(fetched, encyclopedia, tmp_path):
    again = script("fetch_text.py", "--files", f"{encyclopedia}/*", "--output", fetched)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1) and "nothing is overwritten" in again.stderr
    more = script("fetch_text.py", "--files", f"{encyclopedia}/*", "--least", 300, "--output", tmp_path / "more")
    assert more.returncode == 2 and "only 300 texts of 300 characters, not 25000" in more.stderr
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_is_trained_on_it_and_loses_nothing(fetched, tmp_path, command):
    path = tmp_path / "wikipedia.model"
    done = script("train_tokenizer.py", f"{fetched}/train-*", "--vocab-size", 380, "--output", path)
    assert done.returncode == 0, done.stderr
    tokenizer = load_tokenizer(str(path))
    assert len(tokenizer) == 380
    text = "The λόγος of a station in Zürich, 猫."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer("mountain kettle")["input_ids"]) <= 4
    for options, said in (
        ((path, 380), "is there already"),
        ((tmp_path / "other.json", 380), "end it in .model"),
        ((tmp_path / "other.model", 31000), "or more text"),
        ((tmp_path / "other.model", 0), "--vocab-size is 0, but the least is 1"),
        ((path / "inside.model", 380), "cannot be written"),
    ):
        code, _, err = command(
            train_tokenizer, f"{fetched}/train-*", "--output", options[0], "--vocab-size", options[1]
        )
        assert (code, len(err)) == (2, 1) and said in err[0]


def trained(monkeypatch, path: Path, *options: object) -> bytes:
    """Train a tokenizer on a file in this process and return its model."""
    output = path.with_suffix(".model")
    words = [path, "--vocab-size", 380, "--output", output, *options]
    monkeypatch.setattr(sys, "argv", ["train_tokenizer.py", *map(str, words)])
    train_tokenizer.main()
    return output.read_bytes()


@pytest.mark.parametrize("name", ["lines.jsonl", "table.parquet"])
def test_the_column_of_the_text_is_named_as_the_error_says(name, tmp_path, command, monkeypatch):
    """The tokenizer is that of the same text in the usual column."""
    path, usual = tmp_path / name, tmp_path / "usual.jsonl"
    rows = [{"content": article(0, number, 100)} for number in range(200)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "table.parquet")
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual.write_text("".join(json.dumps({"text": row["content"]}) + "\n" for row in rows))
    code, _, err = command(train_tokenizer, path, "--vocab-size", 380, "--output", tmp_path / "none.model")
    assert (code, len(err)) == (2, 1)
    named = re.findall(r"data\.\w+", err[0])
    assert "data.text_field" in named
    given = {"data.text_field": "content", "data.max_bad_documents": 200}
    options = [word for name in named for word in (f"--{name}", given[name])]
    assert trained(monkeypatch, path, *options) == trained(monkeypatch, usual)


def test_what_the_disk_refuses_is_not_laid_on_the_hub(tmp_path, command, monkeypatch):
    def download(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch_c4, "hf_hub_download", download)
    code, _, err = command(fetch_c4, "--output", tmp_path / "c4")
    assert (code, len(err)) == (2, 1) and "No space left" in err[0] and "hub" not in err[0]
    (tmp_path / "file").touch()
    code, _, err = command(fetch_c4, "--output", tmp_path / "file" / "c4")
    assert (code, len(err)) == (2, 1) and f"--output {tmp_path / 'file' / 'c4'} cannot be made or written to" in err[0]


@pytest.mark.parametrize("word", ["zygomatic", "頬骨"])
def test_a_word_of_long_lines_alone_is_learnt(word, tmp_path, monkeypatch):
    """Sentencepiece reads no line of more than 4,192 bytes."""
    space = " " if word.isascii() else ""
    rows = [{"text": article(0, number, 100)} for number in range(200)] + [{"text": space.join([word] * 900)}] * 20
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained(monkeypatch, tmp_path / "text.jsonl")
    assert len(load_tokenizer(str(tmp_path / "text.model"))(f"{word}{space}{word}")["input_ids"]) <= 5


def test_lines_that_are_short_enough_are_not_cut(tmp_path):
    lines = ["λ" * 2096, "", "two  spaces ", " ".join(["word"] * 838)]
    long = "  a tab\tand-hyphens " + "x" * 1500 + " ".join(map(str, range(2000)))
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "\n".join([*lines, long])}))
    found = list(train_tokenizer.sentences([str(tmp_path / "text.jsonl")], 10**6))
    short, parts = found[: len(lines)], found[len(lines) :]
    assert short == lines and max(map(len, parts)) <= 1000
    assert "".join("".join(parts).split()) == "".join(long.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--other-text", "nowhere.jsonl"), "--other-text nowhere.jsonl is no file"),
        (("--task-data", "nowhere"), "--task-data nowhere is no folder"),
        (("--c4", "nowhere"), "--c4 nowhere is no folder"),
        (("--c4", "configs"), "nano has a text of its own"),
        (("--tokenizer", "nowhere"), "--tokenizer nowhere is not there"),
        (("--tokenizer", "README.md"), "nano has one of its own"),
    ],
)
def test_a_place_that_is_not_there_is_said_before_anything_is_trained(options, said, command):
    code, _, err = command(reproduce, "--scale", "nano", "table1", *options)
    assert (code, len(err)) == (2, 1) and said in err[0]
