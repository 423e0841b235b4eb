"""Text that is late, broken, enormous or missing: what is read is as in an undisturbed run, the rest is reported."""

import gzip
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from torch.utils.data import IterableDataset

from salaad.common.errors import UserError
from salaad.config.run import DataConfig, RunConfig
from salaad.data import documents, retries, rows
from salaad.data.batches import TrainingStream, counts_in, merge_states
from salaad.data.documents import Skipped, read_documents, require_document
from salaad.data.rows import Cursor, Plan, RowStream
from salaad.data.text import open_text, sample_rows, validation_batches
from salaad.data.tokenizer import Encoder, load_tokenizer
from salaad.data.workers import Workers
from salaad.runs.records import Recorder
from scripts.reliability import faulty_hub
from tests.helpers.training import lines, run_training

ROOT = Path(__file__).resolve().parents[2]
ROWS = [f"row {k}" for k in range(200)]


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(retries, "FIRST_PAUSE", 0.01)


def write(path, texts):
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return str(path)


def text_list(file, **options):
    return [text for _, text in read_documents(file, **options)]


# The hub


@pytest.fixture(scope="module")
def hub(tiny_tokenizer_dir):
    """What a process read from a failing hub, and what it printed on standard error."""
    command = [sys.executable, str(ROOT / "scripts" / "reliability" / "faulty_hub.py"), tiny_tokenizer_dir]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"said": done.stderr}


@pytest.mark.parametrize("fault", faulty_hub.FAULTS)
def test_a_hub_that_fails_for_a_while_costs_no_record_and_repeats_none(hub, fault):
    expected = [[index, text] for index, text in enumerate(faulty_hub.texts_of(fault))]
    assert hub["found"][fault] == expected
    assert (hub["asked"][fault] > faulty_hub.TIMES) == (fault != "none")


def test_a_new_try_is_said_and_counted(hub):
    assert "cut.json.gz: cannot be read (EOFError: " in hub["said"]
    assert "trying again in 2 s (2 of 4)" in hub["said"]
    assert hub["asked"]["c4"] > faulty_hub.TIMES  # the hub's own client retries shards, but not this request


def test_a_hub_that_stays_down_is_a_sentence_after_the_last_try(hub):
    assert "down.json.gz cannot be read from the hub in 2 tries (" in hub["found"]["down"]
    assert "scripts/fetch_c4.py" in hub["found"]["down"]


def test_a_shard_that_is_gone_from_the_hub_stops_the_run_or_is_passed_over(hub, tiny_tokenizer_dir):
    strict, lenient = hub["runs"]
    assert f"{faulty_hub.GONE} cannot be read from the hub (" in strict["error"]
    assert strict["error"].endswith("which lets stream 0 pass over 0 such part(s) of files in a pass")
    assert 0 < len(strict["rows"]) < len(lenient["rows"])
    assert lenient["rows"][: len(strict["rows"])] == strict["rows"]
    assert lenient["counts"]["lost"] == 1
    encode = Encoder(load_tokenizer(tiny_tokenizer_dir))
    texts = [text for k in (0, 2) for text in faulty_hub.texts_of(faulty_hub.NAME.format(k))]
    assert sorted(lenient["rows"]) == sorted([*ids[:31].tolist(), 1] for ids in encode(texts))


# Local files


def test_a_file_that_flickers_costs_no_record_and_repeats_none(tmp_path, monkeypatch):
    file = tmp_path / "some.jsonl"
    write(file, ROWS)
    away = file.rename(tmp_path / "away")
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: away.exists() and away.rename(file))
    assert text_list(str(file), retries=1) == ROWS


def test_reading_goes_on_behind_the_last_record_after_an_error_of_the_disk(tmp_path, monkeypatch, capfd):
    file = write(tmp_path / "some.jsonl", ROWS)
    original, opened = documents._lines, []

    def flickering(stream):
        opened.append(stream)
        for number, line in original(stream):
            if number == 20 * len(opened) and len(opened) < 4:
                raise OSError(5, "Input/output error")
            yield number, line

    monkeypatch.setattr(documents, "_lines", flickering)
    assert list(read_documents(file, retries=1, start=3, stride=7)) == list(enumerate(ROWS))[3::7]
    assert len(opened) == 4  # a try that yielded a record does not count
    assert capfd.readouterr().err.count("trying again in 0.01 s (1 of 1)") == 3


def test_pauses_double_up_to_the_longest(tmp_path, monkeypatch):
    pauses = []
    monkeypatch.setattr(retries, "FIRST_PAUSE", 1)
    monkeypatch.setattr(retries.time, "sleep", pauses.append)
    with pytest.raises(UserError, match=r"gone\.jsonl cannot be read in 8 tries \(No such file"):
        text_list(str(tmp_path / "gone.jsonl"), retries=7)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


@pytest.mark.parametrize("kind", ["folder", "damage", "missing before training"])
def test_what_waiting_does_not_mend_is_told_at_once(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(retries.time, "sleep", lambda seconds: pytest.fail("waited"))
    file = tmp_path / "some.jsonl.gz"
    if kind == "folder":
        file.mkdir()
    if kind == "damage":
        file.write_bytes(gzip.compress(b"{}\n", mtime=0)[:-3])
    with pytest.raises(UserError):
        if kind == "missing before training":
            require_document(str(file), "text", 0, retries=9)
        text_list(str(file), retries=9)


def test_a_plain_file_that_was_cut_off_does_not_just_end(tmp_path):
    file = tmp_path / "some.jsonl"
    write(file, ROWS)
    reader = read_documents(str(file), size=file.stat().st_size)
    next(reader)
    with file.open("r+") as stream:
        stream.truncate(100)
    with pytest.raises(UserError, match=r"it has 100 bytes, but had [\d,]+ when the run began"):
        list(reader)


# Parts of files that are lost


@pytest.fixture
def config(tmp_path, tiny_tokenizer_dir):
    """Four files of 100 documents, of which c.jsonl.gz, in the first of two streams, will break."""
    pick = random.Random(0)
    files = [
        write(tmp_path / f"{name}.jsonl.gz", [f"{name} {k} " + pick.randbytes(200).hex() for k in range(100)])
        for name in "abcd"
    ]
    return DataConfig(
        source="files",
        files=tuple(files),
        validation_files=write(tmp_path / "v.jsonl", ROWS),
        tokenizer=tiny_tokenizer_dir,
        sequence_length=16,
        shuffle_window=10,
        streams=2,
        workers=0,
        retries=1,
    )


def remove(file):
    file.unlink()


def cut(file):
    file.write_bytes(file.read_bytes()[:-40])


def flip(file):
    data = bytearray(file.read_bytes())
    data[-60] ^= 255
    file.write_bytes(data)


def rows_until_error(stream, steps):
    rows = []
    while len(rows) < steps and stream.error is None:
        rows.append(next(stream)["input_ids"].tolist())
    return rows


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("harm", [remove, cut, flip])
def test_a_file_that_breaks_in_mid_run_is_known_one_step_before_it_is_needed(config, harm, workers):
    config = replace(config, workers=workers)
    text = open_text(config, vocab_size=512)
    whole = TrainingStream(text, config, batch=4)
    expected = [next(whole)["input_ids"].tolist() for _ in range(100)]
    whole.close()
    harm(Path(config.files[2]))
    stream = TrainingStream(text, config, batch=4)
    given = rows_until_error(stream, 100)
    assert 0 < len(given) < 100
    assert given == expected[: len(given)]
    state = stream.state_dict()
    with pytest.raises(UserError) as error:
        next(stream)
    for part in (config.files[2], "raise data.max_lost_files", "stream 0 pass over 0 such part(s)"):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert stream.state_dict() == state
    assert state["rows"] == 4 * len(given)
    stream.close()


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("harm", [remove, cut, flip])
def test_a_lost_part_is_counted_and_resuming_around_it_gives_the_same_batches(config, harm, packing):
    config = replace(config, max_lost_files=1, packing=packing, sequence_length=512 if packing else 16)
    text = open_text(config, vocab_size=512)
    harm(Path(config.files[2]))
    whole = TrainingStream(text, config, batch=4)
    expected, states = [], []
    for _ in range(90):
        states.append(json.loads(json.dumps(whole.state_dict())))
        expected.append(next(whole)["input_ids"].tolist())
    lost = [sum(cursor["lost"] for cursor in state["cursors"].values()) for state in states]
    assert lost[0] == 0 < lost[-1] == counts_in(whole.state_dict())["lost"]
    for done in range(0, 90, 9):
        again = TrainingStream(text, config, batch=4, state=states[done])
        assert [next(again)["input_ids"].tolist() for _ in range(90 - done)] == expected[done:]
        assert again.state_dict() == whole.state_dict()
    ranks = [TrainingStream(text, config, batch=4, rank=r, world_size=2) for r in range(2)]
    for batch in expected:
        parts = [next(rank)["input_ids"].tolist() for rank in ranks]
        assert [parts[i % 2][i // 2] for i in range(4)] == batch
    assert merge_states([rank.state_dict() for rank in ranks]) == whole.state_dict()


def test_what_is_readable_of_a_broken_file_is_read_up_to_the_window_that_is_not(config):
    texts = [f"text {k} {k * k} {k**3}" for k in range(30000)]
    file = Path(write(Path(config.files[0]).with_name("long.jsonl.gz"), texts))
    cut(file)
    plan = Plan((str(file),), 1, None, 1000, 1, "text", 0, 64, False, 0, max_lost=1)
    stream = RowStream(plan, 0, Cursor(), lambda texts: [np.array([int(text.split()[1])]) for text in texts])
    numbers = []
    while (row := stream.next_row()) is not None:
        numbers.append(int(row[0]))
    assert numbers == list(range(len(numbers)))
    assert 0 < len(numbers) < 30000
    assert len(numbers) % 1000 == 0
    assert stream.cursor.lost == 1


def test_where_every_part_is_lost_the_run_ends_in_a_sentence(config):
    config = replace(config, max_lost_files=10**9, retries=0)
    text = open_text(config, vocab_size=512)
    for file in config.files:
        Path(file).unlink()
    stream = TrainingStream(text, config, batch=4)
    with pytest.raises(UserError, match=r"finds no document in 4 file\(s\).*4 parts could not be read"):
        next(stream)


def test_a_part_that_is_lost_in_every_pass_is_allowed_in_every_pass(config):
    config = replace(config, max_lost_files=1, retries=0)
    text = open_text(config, vocab_size=512)
    flip(Path(config.files[2]))
    stream = TrainingStream(text, config, batch=4)
    assert len(rows_until_error(stream, 300)) == 300
    epoch = stream.state_dict()["cursors"]["0"]["epoch"]
    assert counts_in(stream.state_dict())["lost"] in (epoch, epoch + 1)
    assert epoch > 2


def test_passes_without_a_lost_part_allow_no_more_in_a_later_one(config):
    config = replace(config, max_lost_files=1, retries=0, streams=1, packing=False)
    stream = TrainingStream(open_text(config, vocab_size=512), config, batch=1)
    while stream.state_dict()["cursors"]["0"]["epoch"] < 2:
        next(stream)
    for file in config.files[1:]:
        Path(file).unlink()
    with pytest.raises(UserError, match="lets stream 0 pass over 1 such"):
        while True:
            next(stream)
    assert counts_in(stream.state_dict())["lost"] <= 1


def test_lost_parts_are_told_with_the_skipped_documents(tmp_path, capsys):
    counts = {"bad": 0, "empty": 0, "long": 9, "lost": 0, "passes": 0}
    before, after = counts | {"lost": 2}, counts | {"lost": 2, "empty": 1}
    for start in ([counts, before, before], [before, before, after]):
        recorder = Recorder(tmp_path, RunConfig(), 0, 0, True, read=start[0])
        for told in start[1:]:
            recorder.text_read(3, told)
        recorder.close()
    assert capsys.readouterr().out.splitlines() == [
        "documents skipped so far: 0 broken, 0 without text, 2 parts of files lost",
        "documents skipped so far: 0 broken, 1 without text, 2 parts of files lost",
    ]


def test_text_that_repeats_tells_of_documents_that_did_not_fit(tmp_path, capsys):
    before = {"bad": 0, "empty": 0, "long": 0, "lost": 0, "passes": 0}
    recorder = Recorder(tmp_path, RunConfig(), 0, 0, True, read=before)
    recorder.text_read(3, before | {"passes": 1})
    recorder.text_read(6, before | {"passes": 2, "long": 1200})
    recorder.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "step 3: the training text repeats; pass 2 over it has begun"
    assert "begun; 1,200 documents did not fit into a row; a new run with --data.packing true" in second


def test_lost_validation_text_is_always_an_error(config):
    config = replace(config, max_lost_files=9, retries=0)
    text = open_text(config, vocab_size=512)
    remove(Path(config.validation_files[0]))
    with pytest.raises(UserError, match=r"v\.jsonl cannot be read") as error:
        next(validation_batches(text, config, rows=4, max_tokens=100))
    assert "max_lost_files" not in str(error.value)


def test_a_sample_passes_over_what_training_would(config):
    text = open_text(config, vocab_size=512)
    remove(Path(config.files[2]))
    assert len(sample_rows(text, replace(config, max_lost_files=1, retries=0), 250)) == 250
    with pytest.raises(UserError, match="max_lost_files"):
        sample_rows(text, replace(config, retries=0), 300)


# Workers


def children():
    return [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]


@pytest.mark.parametrize("moment", ["between", "in the middle"])
def test_a_killed_worker_is_a_sentence(config, moment):
    # The rows exceed the capacity of a pipe, so a worker is always in the middle of handing over a batch.
    config = replace(config, workers=1, sequence_length=512, packing=True)
    before = set(children())
    stream = TrainingStream(open_text(config, vocab_size=512), config, batch=64)
    next(stream)
    state = stream.state_dict()
    (worker,) = set(children()) - before
    if moment == "between":
        os.kill(worker, signal.SIGKILL)
    else:
        os.kill(worker, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (worker, signal.SIGKILL)).start()
    with pytest.raises(UserError, match=rf"pid {worker}\) was killed by SIGKILL.*--resume auto") as error:
        while True:
            state = stream.state_dict()
            next(stream)
    assert "\n" not in str(error.value)
    assert stream.state_dict() == state
    assert str(stream.error) == str(error.value)
    stream.close()
    assert not set(children()) - before


def test_a_worker_that_dies_does_not_disturb_the_trainer_elsewhere(config):
    config = replace(config, workers=1)
    before = set(children())
    stream = TrainingStream(open_text(config, vocab_size=512), config, batch=4)
    next(stream)
    (worker,) = set(children()) - before
    os.kill(worker, signal.SIGKILL)
    os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)  # its end has been signalled
    assert stream.error is None
    stream.close()


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux alone")
def test_a_worker_is_forked_where_a_program_starts_its_processes_otherwise():
    """An object of a function's own class cannot be sent to a process that is started anew."""

    class Unsendable(IterableDataset):
        def __iter__(self):
            yield os.getppid()

    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        workers = Workers(Unsendable(), 1)
        assert next(workers) == os.getpid()
        workers.close()
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_workers_that_cannot_be_started_are_a_sentence(config, monkeypatch):
    def refuse():
        raise OSError(12, "Cannot allocate memory")

    stream = TrainingStream(open_text(config, vocab_size=512), replace(config, workers=2), batch=4)
    monkeypatch.setattr(os, "fork", refuse)
    with pytest.raises(UserError, match=r"data\.workers 2 .*Cannot allocate memory.*give fewer"):
        next(stream)
    assert stream.state_dict()["rows"] == 0


def test_a_stream_that_is_only_asked_for_its_state_reads_nothing(config):
    before = set(children())
    text = open_text(config, vocab_size=512)
    for file in config.files:
        Path(file).unlink()
    stream = TrainingStream(text, replace(config, workers=1), batch=4)
    assert stream.state_dict()["rows"] == stream.rows == 0
    assert stream.error is None
    assert set(children()) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_of_the_program_is_a_sentence_with_its_traceback_above(config, monkeypatch, capfd, workers):
    text = open_text(config, vocab_size=512)
    config = replace(config, workers=workers)
    stream = TrainingStream(text, config, batch=4)
    monkeypatch.setattr(RowStream, "next_row", lambda self: {}["nothing"])
    with pytest.raises(UserError, match=r"cannot be read \(KeyError: 'nothing'\)"):
        next(stream)
    stream.close()
    assert "Traceback" in capfd.readouterr().err


def test_closing_ends_a_worker_that_waits_for_a_file(config, monkeypatch, capfd):
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    text = open_text(config, vocab_size=512)
    remove(Path(config.files[2]))
    steps = len(rows_until_error(TrainingStream(text, replace(config, retries=0), batch=4), 100))
    assert steps > 2
    before = set(children())
    monkeypatch.setattr(retries, "FIRST_PAUSE", 1000)
    monkeypatch.setattr(retries, "LONGEST_PAUSE", 1000)
    stream = TrainingStream(text, replace(config, workers=1), batch=4)
    for _ in range(steps - 1):
        next(stream)
    while "trying again in 1000 s" not in capfd.readouterr().err:
        time.sleep(0.01)
    stream.close()
    assert not set(children()) - before


# Enormous documents


def test_a_document_larger_than_the_limit_is_never_held(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "LARGEST_DOCUMENT", 1 << 20)
    monkeypatch.setattr(documents, "CHUNK", 1 << 16)
    enormous = b"x " * (8 << 20)
    lines, text = tmp_path / "some.jsonl", tmp_path / "some.txt"
    lines.write_bytes(b'{"text": "a"}\n{"text": "' + enormous + b'"}\n{"text": "b"}\n' + enormous)
    text.write_bytes(b"a\n\n" + enormous + b"\nmore\n\nb\n\n" + b"line of words\n" * (1 << 17) + b"\nc")
    del enormous
    tracemalloc.start()
    assert text_list(str(lines)) == ["a", Skipped.BAD, "b", Skipped.BAD]
    assert text_list(str(text)) == ["a", Skipped.BAD, "b", Skipped.BAD, "c"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 << 20
    with pytest.raises(UserError, match=r"line 2: larger than 1 MiB, and that is bad document 1"):
        text_list(str(lines), max_bad=0)


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string(), pyarrow.string_view()])
def test_a_parquet_value_larger_than_the_limit_is_bad(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(documents, "LARGEST_DOCUMENT", 1000)
    texts = ["a", "b" * 1000, "é" * 501, "", "c"] * 3
    file = tmp_path / "some.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, kind)}), file)
    expected = ["a", "b" * 1000, Skipped.BAD, Skipped.EMPTY, "c"] * 3
    assert text_list(str(file)) == expected
    assert text_list(str(file), start=2, stride=3) == expected[2::3]


def test_a_long_document_is_cut_into_rows_as_if_tokenised_at_once(config, monkeypatch):
    document = " ".join(f"matrix {k}" for k in range(20_000))
    file = write(Path(config.files[0]).with_name("long.jsonl"), ["short", document, "end"])
    config = replace(config, files=(file,), streams=1, shuffle_window=1, packing=True)
    text = open_text(config, vocab_size=512)
    encoder = Encoder(text.tokenizer)
    pieces = []

    class Watched:
        def __call__(self, texts):
            pieces.append(sum(map(len, texts)))
            return encoder(texts)

    monkeypatch.setattr(rows, "PART", 10_000)
    plan = Plan((file,), 1, None, 1000, 1, "text", 0, 16, True, 1)
    stream = RowStream(plan, 0, Cursor(), Watched())
    ids = []
    while (row := stream.next_row()) is not None:
        ids += row.tolist()
    assert ids == [i for document in ("short", document, "end") for i in (*encoder([document])[0], 1)]
    assert max(pieces) <= 10_000


# What is no text


def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path):
    (tmp_path / "some.txt").write_bytes(b"\xef\xbb\xbfone\n\ntwo")
    (tmp_path / "some.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}\n')
    (tmp_path / "some.md").write_bytes(b"\xef\xbb\xbf")
    assert text_list(str(tmp_path / "some.txt")) == text_list(str(tmp_path / "some.jsonl")) == ["one", "two"]
    assert text_list(str(tmp_path / "some.md")) == []


def test_the_first_cure_of_too_many_bad_documents_is_one_for_a_run_that_goes_on(toy, tmp_path):
    """A mended file has another size, and a run goes on with the text that it was begun with."""
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "good"}\n' * 8 + "{\n" * 5 + '{"text": "good"}\n' * 8)
    one = {"method": "full_rank", "data__files": str(file), "data__streams": 1, "data__shuffle_window": 4}
    words = toy(**one, train__steps=5, data__max_bad_documents=2)
    with pytest.raises(UserError, match=r"allows 2; raise data\.max_bad_documents, or for a new run mend the file or"):
        run_training(words, tmp_path / "run")
    with pytest.raises(UserError, match=r"data\.text_field"):
        run_training([*words, "--data.text_field=body"], tmp_path / "run")
    run_training([*words, "--data.max_bad_documents=5"], tmp_path / "run")
    assert lines(tmp_path / "run")[-1]["step"] == 5


def test_no_record_of_json_raises(tmp_path):
    lines = [
        b"null", b"7", b'"text"', b"[]", b"{}", b'{"text": {"text": "x"}}', b'{"text": ["x"]}', b'{"text": true}',
        b'{"text": 1e999}', b'{"text": ' + b"9" * 5000 + b"}", b'{"text": ' + b"[" * 99999 + b"]" * 99999 + b"}",
        b"\0" * 99, b'{"text": "a\0b"}', '{"text": "x"}'.encode("utf-16"), b'{"text": "\xc3"}', b'\xef\xbb\xbf{"x": 1}',
    ]  # fmt: skip
    file = tmp_path / "some.jsonl"
    file.write_bytes(b"\n".join([b'{"text": "a\\u0000b"}', *lines, b'{"text": "end"}']))
    assert text_list(str(file)) == ["a\0b", *[Skipped.BAD] * len(lines), "end"]


def test_text_that_is_not_utf_8_is_passed_over_in_the_middle_of_a_file(tmp_path):
    file = tmp_path / "some.txt"
    file.write_bytes(b"one\n\n\xff\xfe\n\n" + "zwölf".encode("latin-1") + b"\n\nwith a \0 in it\n\nend")
    assert text_list(str(file)) == ["one", Skipped.BAD, Skipped.BAD, "with a \0 in it", "end"]


def test_parquet_of_wrong_types_is_bad(tmp_path):
    file = tmp_path / "some.parquet"
    for values in ([["x"], []], [{"text": "x"}, None], [b"x", b"\xff"], [1.5, None], [True, False]):
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), file)
        assert text_list(str(file)) == [Skipped.BAD] * 2
