"""Every kind of file against the list it was written from."""

import bz2
import gzip
import hashlib
import json
import lzma
import os
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from salaad.common.errors import UserError
from salaad.data import documents, retries
from salaad.data.documents import Skipped, c4_files, expand, kind_of, read_documents, require_document
from salaad.data.text import fingerprint

TEXTS = [f"Document {k}, with an é and 日本 in it." for k in range(23)]
COMPRESS = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
COMPRESS[".zst"] = lambda data: b"".join(zstandard.compress(part) for part in (data[:99], data[99:]))  # two frames


def json_lines(texts, field="text"):
    return "".join(json.dumps({field: text, "other": 1}) + "\n" for text in texts).encode()


def write(folder, name, data):
    path = folder / name
    path.write_bytes(data)
    return str(path)


def text_list(file, **options):
    return [text for _, text in read_documents(file, **options)]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("extension", [".jsonl", ".json", ".txt", ".md"])
def test_every_kind_and_compression_gives_the_documents(tmp_path, extension, compression):
    data = json_lines(TEXTS) if "json" in extension else "\n\n".join(TEXTS).encode()
    file = write(tmp_path, f"some{extension}{compression}", COMPRESS[compression](data))
    assert list(read_documents(file)) == list(enumerate(TEXTS))
    assert list(read_documents(file, start=5, stride=4)) == list(enumerate(TEXTS))[5::4]


def parquet(folder, texts, column="text", group=5):
    path = folder / "some.parquet"
    pyarrow.parquet.write_table(pyarrow.table({column: texts}), path, row_group_size=group)
    return str(path)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(group=st.integers(1, 30), start=st.integers(0, 30), stride=st.integers(1, 9))
def test_parquet_is_entered_anywhere(tmp_path, group, start, stride):
    file = parquet(tmp_path, TEXTS, group=group)
    assert list(read_documents(file, start=start, stride=stride)) == list(enumerate(TEXTS))[start::stride]


def test_parquet_does_not_read_the_groups_before(tmp_path, monkeypatch):
    read = []
    original = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile,
        "iter_batches",
        lambda self, *a, row_groups, **k: read.extend(row_groups) or original(self, *a, row_groups=row_groups, **k),
    )
    assert text_list(parquet(tmp_path, TEXTS), start=16) == TEXTS[16:]
    assert read == [3, 4]


def test_a_stripe_parses_its_own_lines_only(tmp_path, monkeypatch):
    file = write(tmp_path, "some.jsonl", json_lines(TEXTS))
    parsed = []
    original = json.loads
    monkeypatch.setattr(documents.json, "loads", lambda line: parsed.append(line) or original(line))
    list(read_documents(file, start=2, stride=10))
    assert len(parsed) == 3


def test_paragraphs_keep_their_lines(tmp_path):
    file = write(tmp_path, "some.txt", b"\n\none\nstill one\n \n\t\n\ntwo\r\n\r\nthree")
    assert text_list(file) == ["one\nstill one", "two", "three"]


def test_bad_and_empty_records_keep_their_index_and_are_told(tmp_path):
    lines = [
        b'{"text": "good"}', b"{broken", b'{"text": ""}', b'{"text": " \\n"}', b"", b'{"title": "no text"}',
        b'{"text": 7}', b'{"text": null}', b'["text"]', b'{"text": "\xff"}', b'{"text": "\\ud800"}', b"[" * 5000,
        b'{"text": "last"}',
    ]  # fmt: skip
    found = dict(read_documents(write(tmp_path, "some.jsonl", b"\n".join(lines))))
    bad, empty = Skipped.BAD, Skipped.EMPTY
    assert list(found.values()) == ["good", bad, empty, empty, *[bad] * 7, "last"]
    assert list(found) == list(range(12))  # the blank line is no record


def test_parquet_nulls_and_numbers_are_bad(tmp_path):
    assert text_list(parquet(tmp_path, ["one", None, ""])) == ["one", Skipped.BAD, Skipped.EMPTY]
    assert text_list(parquet(tmp_path, [1, 2])) == [Skipped.BAD] * 2


def test_one_bad_document_too_many_names_file_line_limit_and_cure(tmp_path):
    file = write(tmp_path, "some.jsonl", b'{"text": "good"}\n\n{\n{"text": 1}\n')
    assert len(text_list(file, max_bad=2)) == 3
    with pytest.raises(UserError) as error:
        text_list(file, max_bad=1)
    for part in (file, "line 4", "type int", "bad document 2", "allows 1", "raise data.max_bad_documents"):
        assert part in str(error.value)


def test_another_field(tmp_path):
    file = write(tmp_path, "some.jsonl", json_lines(TEXTS, field="body"))
    assert text_list(file, field="body") == TEXTS
    assert text_list(parquet(tmp_path, TEXTS, column="body"), field="body") == TEXTS
    with pytest.raises(UserError, match=r"has no column 'text'; give data\.text_field one of body"):
        text_list(parquet(tmp_path, TEXTS, column="body"))


def test_globs_are_sorted_and_each_file_is_taken_once(tmp_path):
    names = [write(tmp_path, name, b"x") for name in ("b.txt", "a.jsonl.gz", "c.md")]
    (tmp_path / "folder.txt").mkdir()
    assert expand([f"{tmp_path}/[bc].*", f"{tmp_path}/*.*", names[0]]) == tuple(sorted(names))


@pytest.mark.parametrize("home", ["c4 [full]", "[a]/[b]", "a*b?"])
def test_a_folder_above_a_glob_may_have_any_name(tmp_path, monkeypatch, home):
    folder = tmp_path / home / "en"
    folder.mkdir(parents=True)
    names = [write(folder, name, b"x") for name in ("c4-0.jsonl", "c4-1.jsonl")]
    assert expand([f"{folder}/c4-?.jsonl"]) == expand([f"{tmp_path / home}/*/c4-[0-9].jsonl"]) == tuple(names)
    monkeypatch.chdir(tmp_path)
    assert [str(tmp_path / file) for file in expand([f"{home}/**/*.jsonl"])] == names


def test_a_file_that_is_named_by_two_paths_is_read_once(tmp_path, monkeypatch):
    (tmp_path / "text").mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path / "text", name, b"x")
    (tmp_path / "link").symlink_to(tmp_path / "text")
    (tmp_path / "text" / "link.jsonl").symlink_to("a.jsonl")
    monkeypatch.chdir(tmp_path)
    found = expand(["text/a.jsonl", f"{tmp_path}/text/*.jsonl", "link/a.jsonl", "text/../text/b.jsonl"])
    assert sorted(tmp_path.joinpath(file).name for file in found) == ["a.jsonl", "b.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        ("nothing/*.jsonl", "matches no file"),
        ("gone.jsonl", "matches no file"),
        (".", r"is a folder.*\*\.jsonl"),
        ("some.csv", r"unknown kind; give \.jsonl .*\.parquet.*\.zst"),
        ("some.parquet.gz", "unknown kind"),
        ("some", "unknown kind"),
    ],
)
def test_what_cannot_be_a_text_file_is_refused(tmp_path, monkeypatch, pattern, sentence):
    monkeypatch.chdir(tmp_path)
    for name in ("some.csv", "some.parquet.gz", "some"):
        write(tmp_path, name, b"x")
    with pytest.raises(UserError, match=sentence):
        expand([pattern])


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("empty.jsonl", b"", r"is empty \(0 bytes\)"),
        ("blank.jsonl", b"\n\n", r"holds no document \(0 bad, 0 empty"),
        (
            "bad.jsonl",
            b'{"title": "x"}\n' * 3,
            r"no document \(3 bad, 0 empty ones; line 1: no field 'text'\).*data.text_field",
        ),
        ("type.jsonl", b'\n{"text": ""}\n{"text": 7}', r"\(1 bad, 1 empty ones; line 3: the text is of type int\)"),
        ("array.json", b'[{"text": "x"}]', r"\(1 bad, .* line 1: no JSON object, as every line has to be\)"),
        (
            "indented.json",
            json.dumps({"text": "x"}, indent=1).encode(),
            "line 1: broken JSON, of which every line has to",
        ),
        ("two-bytes.jsonl", '{"text": "日本語の文 (a)."}\n'.encode("utf-16-le") * 3, r"\(. bad, .* line 1: not UTF-8"),
        ("latin.txt", "zwölf".encode("latin-1"), r"\(1 bad, .* line 1: not UTF-8\)"),
        ("cut.jsonl.gz", gzip.compress(json_lines(TEXTS) * 999, mtime=0)[:9], "damaged or cut off"),
        ("cut.jsonl.xz", lzma.compress(json_lines(TEXTS))[:20], "damaged or cut off"),
        ("not.jsonl.gz", b"plain", "is damaged or cut off"),
        ("not.jsonl.zst", b"plain", "damaged or cut off"),
        ("not.jsonl.bz2", b"plain", "is damaged or cut off"),
        ("not.parquet", b"plain", "damaged or cut off"),
    ],
)
def test_a_file_without_documents_is_found_before_training(tmp_path, name, data, sentence):
    with pytest.raises(UserError, match=sentence):
        require_document(write(tmp_path, name, data), "text", 100)


def test_a_file_with_a_document_behind_bad_ones_will_do(tmp_path):
    assert require_document(write(tmp_path, "some.jsonl", b'{\n{}\n{"text": ""}\n{"text": "x"}'), "text", 2) is None


@pytest.mark.parametrize("compression", [name for name in COMPRESS if name])
def test_a_file_cut_off_later_is_told_when_it_is_reached(tmp_path, compression):
    whole = COMPRESS[compression](json_lines(f"{k} {k * k} {k**3}" for k in range(20000)))
    reader = read_documents(write(tmp_path, f"some.jsonl{compression}", whole[: len(whole) // 2]))
    with pytest.raises(UserError, match="damaged or cut off"):
        list(reader)


def test_a_file_that_vanished_is_told(tmp_path):
    with pytest.raises(UserError, match=r"No such file.*check the path"):
        text_list(str(tmp_path / "gone.jsonl"))


def test_c4_is_1024_and_8_shards_of_gzipped_json_lines():
    train, validation = c4_files("train"), c4_files("validation")
    assert (len(train), len(validation)) == (1024, 8)
    assert train[37].endswith("allenai/c4/en/c4-train.00037-of-01024.json.gz")
    assert validation[7].endswith("allenai/c4/en/c4-validation.00007-of-00008.json.gz")
    assert kind_of(train[0]) == ("json", "gzip")


@pytest.mark.parametrize("name", ["data:x", "file:x", "local:x", "a::b", "~x", "h#%20", os.fsdecode(b"\xff")])
def test_a_file_in_this_folder_may_have_any_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    Path(f"{name}.jsonl").write_bytes(json_lines(TEXTS))
    (file,) = expand([f"{name}.jsonl"])
    require_document(file, "text", 0)
    assert text_list(file) == TEXTS
    bytes_of_name = os.fsencode(f"{name}.jsonl")
    assert fingerprint([file]) == hashlib.sha256(b"%s %d" % (bytes_of_name, Path(file).stat().st_size)).hexdigest()


def test_other_storage_is_streamed_like_the_hub():
    address = c4_files("validation")[0].replace("hf://", "memory://")
    fsspec.filesystem("memory").pipe(address, gzip.compress(json_lines(TEXTS), mtime=0))
    assert text_list(address) == TEXTS
    assert text_list(address, start=20) == TEXTS[20:]


def test_no_network_is_a_sentence_with_the_cure_at_once(monkeypatch):
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: pytest.fail("waited"))
    with pytest.raises(UserError, match=r"cannot be read from the hub \(Offline.*scripts/fetch_c4\.py") as error:
        require_document(c4_files("validation")[0], "text", 0, retries=9)
    assert "\n" not in str(error.value)
