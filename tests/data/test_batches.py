"""Batches against hand-written loops over the same files; ranks, workers and resumes against one plain run."""

import copy
import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from salaad.common.errors import UserError
from salaad.config.run import DataConfig
from salaad.data.batches import TrainingStream, counts_in, merge_states
from salaad.data.rows import Cursor, Plan, RowStream
from salaad.data.text import fingerprint, open_text, rows_before_repeating, to_batch, validation_batches

LENGTH = 24


@pytest.fixture(scope="module")
def config(text_files, tiny_tokenizer_dir):
    return DataConfig(
        source="files",
        files=tuple(text_files["train"]),
        validation_files=tuple(text_files["validation"]),
        tokenizer=tiny_tokenizer_dir,
        sequence_length=LENGTH,
        shuffle_window=10,
        streams=8,
        workers=0,
    )


@pytest.fixture(scope="module")
def text(config):
    return open_text(config, vocab_size=512)


def texts_of(files):
    return [json.loads(line)["text"] for file in files for line in Path(file).open()]


def ids_of(text, document):
    return text.tokenizer(document, add_special_tokens=False).input_ids


def rows_of(batch):
    """The rows without padding, after checking that padding and labels are what they must be."""
    rows = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        length = sum(label != -100 for label in labels)
        assert labels[:length] == ids[:length]
        assert labels[length:] == [-100] * (len(ids) - length)
        assert ids[length:] == [0] * (len(ids) - length)
        rows.append(tuple(ids[:length]))
    return rows


def take(stream, steps):
    return [rows_of(next(stream)) for _ in range(steps)]


def global_batches(text, config, batch, world_size, steps, states=(None,), **kwargs):
    """Return the batches of all ranks, interleaved to global batches, and the merged state after them."""
    state = merge_states(states) if states != (None,) else None
    ranks = [
        TrainingStream(text, config, batch=batch, rank=r, world_size=world_size, state=state, **kwargs)
        for r in range(world_size)
    ]
    batches = []
    for _ in range(steps):
        parts = [rows_of(next(rank)) for rank in ranks]
        batches.append([parts[i % world_size][i // world_size] for i in range(batch)])
    return batches, json.loads(json.dumps(merge_states([rank.state_dict() for rank in ranks])))


def truncated(text, document):
    return (*ids_of(text, document)[: LENGTH - 1], text.tokenizer.eos_token_id)


def test_an_epoch_holds_every_document_once_truncated_with_eos_last(text, config):
    documents = texts_of(text.train_files)
    stream = TrainingStream(text, replace(config, streams=1), batch=5)
    rows = [row for batch in take(stream, len(documents) // 5) for row in batch]
    assert Counter(rows) == Counter(truncated(text, document) for document in documents)
    assert counts_in(stream.state_dict())["long"] == sum(
        len(ids_of(text, document)) > LENGTH - 1 for document in documents
    )


class CharacterEncoder:
    """An encoder whose ids are code points, so that documents can be read back from rows."""

    def __call__(self, texts):
        return [np.array([ord(c) for c in text], np.int32) for text in texts]


def plan(files, streams, window=4, packing=False, length=64, epochs=1):
    files = tuple(map(str, files))
    return Plan(files, streams, 0, window, epochs, "text", 0, length, packing, eos=0)


def all_rows(stream):
    rows = []
    while (row := stream.next_row()) is not None:
        rows.append(row)
    return rows


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    streams=st.integers(1, 9),
    window=st.integers(1, 7),
    packing=st.booleans(),
)
def test_all_streams_together_hold_every_document_once_an_epoch(tmp_path, sizes, streams, window, packing):
    names = iter(f"{k:04}" for k in itertools.count())
    files, documents = [], []
    for k, size in enumerate(sizes):
        files.append(tmp_path / f"{k}.jsonl")
        mine = [next(names) * (1 + k % 3) for _ in range(size)]
        files[-1].write_text("".join(json.dumps({"text": document}) + "\n" for document in mine))
        documents += mine
    shared = plan(files, streams, window=window, packing=packing, length=7 if packing else 64, epochs=2)
    found = Counter()
    for number in range(streams):
        try:
            rows = all_rows(RowStream(shared, number, Cursor(), CharacterEncoder()))
        except UserError as error:  # raised by a stream that gets no document
            assert "too few" in str(error)
            continue
        assert all(len(row) == 7 for row in rows[:-1]) or not packing
        joined = "".join(chr(i) for row in rows for i in row)
        found.update(joined.split("\0")[:-1])
    assert found == Counter(documents * 2)


def test_order_depends_on_seed_stream_epoch_and_window_only(text, config):
    first = take(TrainingStream(text, config, batch=4), 6)
    assert take(TrainingStream(text, config, batch=4), 6) == first
    assert take(TrainingStream(text, config, batch=4, seed=1), 6) != first
    shared = plan(text.train_files, 1)
    assert list(shared.order(50, 0, 0, 0)) != list(shared.order(50, 0, 1, 0))
    assert sorted(shared.order(50, 0, 0, 0)) == list(range(50))


def test_a_window_of_one_keeps_the_order_of_a_file(text, config):
    config = replace(config, files=config.files[:1], shuffle_window=1, streams=1)
    rows = take(TrainingStream(open_text(config, vocab_size=512), config, batch=3), 50)
    expected = [truncated(text, document) for document in texts_of(config.files)]
    assert [row for batch in rows for row in batch] == expected


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_same_at_every_world_size_and_number_of_workers(text, config, packing, workers):
    config = replace(config, packing=packing)
    expected, state = global_batches(text, config, 8, 1, 6)
    for world_size in (2, 4) if workers == 0 else (2,):
        other = replace(config, workers=workers)
        assert global_batches(text, other, 8, world_size, 6) == (expected, state)


def test_packed_rows_are_full_and_lose_nothing(text, config):
    config = replace(config, packing=True, streams=1, shuffle_window=1, files=config.files[:1])
    stream = TrainingStream(open_text(config, vocab_size=512), config, batch=2)
    tokens = [i for document in texts_of(config.files) for i in (*ids_of(text, document), 1)]
    steps = len(tokens) // (2 * LENGTH) + 5  # past the end of the epoch
    rows = [row for batch in take(stream, steps) for row in batch]
    assert all(len(row) == LENGTH for row in rows)
    assert [i for row in rows for i in row] == (tokens * 2)[: len(rows) * LENGTH]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 1])
def test_resume_at_every_step_goes_on_as_if_nothing_happened(text, config, packing, workers):
    # One small file, so that the steps cross windows, units and an epoch.
    config = replace(config, files=config.files[2:], packing=packing, workers=workers, sequence_length=64)
    text = open_text(config, vocab_size=512)
    steps = 14
    whole = TrainingStream(text, config, batch=8)
    expected, states = [], [json.loads(json.dumps(whole.state_dict()))]
    for _ in range(steps):
        expected.append(rows_of(next(whole)))
        states.append(json.loads(json.dumps(whole.state_dict())))
    assert {cursor["epoch"] for cursor in states[-1]["cursors"].values()} != {0} or packing
    for done, state in list(enumerate(states))[:: 1 if workers == 0 else 6]:
        again = TrainingStream(text, config, batch=8, state=state)
        assert take(again, steps - done) == expected[done:]
        assert again.state_dict() == states[-1]
        assert counts_in(again.state_dict()) == counts_in(whole.state_dict())


@pytest.mark.parametrize("packing", [False, True])
def test_resume_at_another_world_size_and_batch_loses_and_repeats_nothing(text, config, packing):
    config = replace(config, packing=packing)
    expected, _ = global_batches(text, config, 8, 1, 12)
    expected = [row for batch in expected for row in batch]
    begun, state = global_batches(text, config, 8, 2, 3)
    alone, state = global_batches(text, config, 8, 1, 2, [state])
    by_three, state = global_batches(text, config, 6, 3, 4, [state])
    in_two, _ = global_batches(text, config, 8, 4, 4, [state])
    assert [row for part in (begun, alone, by_three, in_two) for batch in part for row in batch] == expected


@pytest.mark.parametrize(("batch", "world_size", "workers"), [(2, 1, 4), (4, 4, 2)])
def test_workers_without_a_row_in_a_step_of_a_smaller_batch_do_no_harm(text, config, batch, world_size, workers):
    whole, _ = global_batches(text, config, 8, 1, 5)
    expected = [row for step in whole for row in step]
    begun, state = global_batches(text, config, 8, 1, 2)
    rest, _ = global_batches(text, replace(config, workers=workers), batch, world_size, 24 // batch, [state])
    assert [row for part in (begun, rest) for step in part for row in step] == expected


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("batch", [4, 6])
def test_rows_are_counted_up_to_the_first_that_training_would_read_again(text, config, batch, packing):
    config = replace(config, packing=packing)
    stream, seen = TrainingStream(text, config, batch=batch), []
    while not stream.repeats:
        seen += rows_of(next(stream))
    found = rows_before_repeating(text, config, batch, most=10_000)
    assert len(seen) - batch <= found < len(seen)
    assert len(set(seen[:found])) == found > 100
    streams = np.gcd(config.streams, batch)  # they give a row each in turn
    assert rows_before_repeating(text, config, batch, most=streams) == streams


def test_a_rank_reads_only_the_streams_it_trains_on(text, config):
    stream = TrainingStream(text, config, batch=8, rank=1, world_size=4)
    assert set(stream.state_dict()["cursors"]) == {"1", "5"}
    assert next(stream)["input_ids"].shape == (2, LENGTH)


def test_a_state_of_some_ranks_is_refused(text, config):
    state = TrainingStream(text, config, batch=8, rank=0, world_size=2).state_dict()
    with pytest.raises(UserError, match="4 of 8 streams"):
        TrainingStream(text, config, batch=8, state=state)


@pytest.mark.parametrize(
    ("changes", "seed", "sentence"),
    [
        ({"files": 1}, 0, "other training files"),
        ({}, 3, "give seed 0"),
        ({"shuffle_window": 9}, 0, "shuffle_window 10"),
    ],
)
def test_a_state_of_another_order_is_refused(text, config, changes, seed, sentence):
    state = TrainingStream(text, config, batch=8).state_dict()
    if "files" in changes:
        changes = {"files": config.files[: changes["files"]]}
    other = replace(config, **changes)
    with pytest.raises(UserError, match=sentence):
        TrainingStream(open_text(other, vocab_size=512), other, batch=8, seed=seed, state=state)


@pytest.fixture
def marked(text, config, tmp_path):
    """The text under a tokenizer that puts a mark before every text, as those of LLaMA and Gemma do."""
    tokenizer = copy.deepcopy(text.tokenizer)
    mark = ("<unk>", tokenizer.unk_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[mark])
    tokenizer.bos_token = "<unk>"
    tokenizer.save_pretrained(tmp_path / "marked")
    return open_text(replace(config, tokenizer=str(tmp_path / "marked")), vocab_size=512)


def test_documents_begin_with_the_mark_that_the_tokenizer_puts_before_a_text(marked, config):
    texts, eos = texts_of(marked.validation_files), marked.tokenizer.eos_token_id
    documents = [[*marked.tokenizer(text).input_ids, eos] for text in texts]
    assert all(ids[0] == marked.tokenizer.bos_token_id for ids in documents)
    batches = validation_batches(marked, config, rows=8, max_tokens=10**6)
    for row, whole in zip([row for batch in batches for row in rows_of(batch)], documents, strict=True):
        assert list(row) == (whole if len(whole) <= LENGTH else [*whole[: LENGTH - 1], eos])
    batches = validation_batches(marked, replace(config, packing=True), rows=8, max_tokens=10**6)
    assert [i for batch in batches for row in rows_of(batch) for i in row] == [i for ids in documents for i in ids]


def test_a_run_that_began_without_the_mark_goes_on_without(marked, text, config):
    old, new = (TrainingStream(one, config, batch=8) for one in (text, marked))
    rows = [next(stream)["input_ids"] for stream in (old, new)]
    assert not torch.equal(*rows)
    state = {key: value for key, value in old.state_dict().items() if key not in ("bos", "tokenizer", "validation")}
    again = TrainingStream(marked, config, batch=8, state=state)
    assert torch.equal(next(again)["input_ids"], next(old)["input_ids"])
    assert again.state_dict()["bos"] is None
    after = TrainingStream(marked, config, batch=8, state=new.state_dict())
    assert torch.equal(next(after)["input_ids"], next(new)["input_ids"])


def test_a_state_of_documentation_that_an_upgrade_has_changed_names_no_option(text, config):
    docs = replace(config, source="python-docs", files=(), validation_files=())
    state = TrainingStream(text, docs, batch=8).state_dict()
    for files in (text.train_files, text.validation_files):
        upgraded = replace(text, sizes=text.sizes | {files[0]: text.sizes[files[0]] + 1})
        with pytest.raises(UserError, match=r"packages on this machine .* install the versions of that time") as told:
            TrainingStream(upgraded, docs, batch=8, state=state)
        assert "files" not in str(told.value)


def test_files_may_move_to_another_folder(tmp_path, text):
    copy = tmp_path / Path(text.train_files[0]).name
    copy.write_bytes(Path(text.train_files[0]).read_bytes())
    assert fingerprint([str(copy)]) == fingerprint(text.train_files[:1])


def test_files_of_one_name_and_size_are_told_apart_wherever_they_lie(tmp_path):
    """Their order decides in which order they are read, and it can change when their folders get other names."""
    for folder, content in (
        ("a/1", "one"),
        ("a/2", "two"),
        ("b/1", "two"),
        ("b/2", "one"),
        ("c/x", "one"),
        ("c/y", "two"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "part.jsonl").write_text(content)
    digests = [fingerprint([f"{tmp_path}/{one}/part.jsonl" for one in two]) for two in (("a/1", "a/2"), ("b/1", "b/2"))]
    assert digests[0] != digests[1]
    assert digests[0] == fingerprint([f"{tmp_path}/c/{one}/part.jsonl" for one in "xy"])


def test_states_of_different_steps_are_not_merged(text, config):
    one, two = (TrainingStream(text, config, batch=8, rank=r, world_size=2) for r in range(2))
    next(one)
    with pytest.raises(ValueError, match="different"):
        merge_states([one.state_dict(), two.state_dict()])


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_documents_are_counted_over_workers_and_resumes(tmp_path, config, workers):
    lines = [json.dumps({"text": f"document {k} of a small file"}) for k in range(40)]
    lines[4:8] = ['{"text": "cut', '{"text": ""}', '{"other": 1}', '{"text": 5}']  # the second document of each stream
    file = tmp_path / "some.jsonl"
    file.write_text("\n".join(lines))
    config = replace(
        config,
        files=(str(file),),
        streams=4,
        shuffle_window=1,
        workers=workers,
        sequence_length=64,
        max_bad_documents=3,
    )
    text = open_text(config, vocab_size=512)
    stream = TrainingStream(text, config, batch=4)
    take(stream, 3)
    resumed = TrainingStream(text, config, batch=4, state=stream.state_dict())
    take(resumed, 3)
    assert (
        counts_in(stream.state_dict())
        == counts_in(resumed.state_dict())
        == {"bad": 3, "empty": 1, "long": 0, "lost": 0, "passes": 0}
    )


def test_skipped_documents_of_a_stream_that_all_ranks_read_are_counted_once(tmp_path, config):
    file = tmp_path / "some.jsonl"
    file.write_text('{"text": "a document"}\n{"text": ""}\n{"text": "cut\n' * 8)
    config = replace(config, files=(str(file),), streams=1, shuffle_window=1, sequence_length=64)
    text = open_text(config, vocab_size=512)
    ranks = [TrainingStream(text, config, batch=3, rank=r, world_size=3) for r in range(3)]
    for _ in range(2):
        for rank in ranks:
            next(rank)
    found = counts_in(merge_states([rank.state_dict() for rank in ranks]))
    # Between the first document and the sixth.
    assert found == {"bad": 5, "empty": 5, "long": 0, "lost": 0, "passes": 0}
    assert counts_in(None) == dict.fromkeys(found, 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_too_many_bad_documents_stop_the_run_with_a_sentence(tmp_path, config, workers):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "good"}\n' * 5 + "{\n" * 20)
    config = replace(config, files=(str(file),), streams=1, workers=workers, max_bad_documents=3)
    stream = TrainingStream(open_text(config, vocab_size=512), config, batch=1)
    with pytest.raises(
        UserError, match=r"bad\.jsonl, line 9: broken JSON.* allows 3; .*raise data.max_bad_documents"
    ) as e:
        take(stream, 30)
    assert "\n" not in str(e.value)


def test_bad_documents_before_a_resume_count_towards_the_limit(tmp_path, config):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"text": "good"}\n{\n' * 20 + '{"text": "good"}\n' * 20)
    config = replace(config, files=(str(file),), streams=1, shuffle_window=4, max_bad_documents=5)
    text = open_text(config, vocab_size=512)

    def rows_until_the_error(every: int | None) -> tuple[int, str]:
        """Take rows until an error, with a resume after every so many, and return their number and the error."""
        stream, state = TrainingStream(text, config, batch=1), None
        for k in range(40):
            if every and k and k % every == 0:
                state = stream.state_dict()
                stream = TrainingStream(text, config, batch=1, state=state)
            try:
                next(stream)
            except UserError as error:
                return k, str(error)
        return 40, ""

    whole = rows_until_the_error(None)
    assert "bad document 6 of this file" in whole[1]  # in the third window of two good and two bad records
    assert rows_until_the_error(1) == rows_until_the_error(3) == whole


def test_validation_is_in_order_ends_at_its_tokens_and_is_shared_disjointly(text, config):
    documents = [truncated(text, document) for document in texts_of(text.validation_files)]
    limit = 300
    expected = []
    for row in documents:
        if sum(map(len, expected)) >= limit:
            break
        expected.append(row)
    for world_size in (1, 2, 3):
        parts = []
        for rank in range(world_size):
            batches = list(validation_batches(text, config, rank=rank, world_size=world_size, rows=4, max_tokens=limit))
            assert all(len(batch["input_ids"]) == 4 for batch in batches[:-1])
            parts.append([row for batch in batches for row in rows_of(batch)])
        assert [parts[i % world_size][i // world_size] for i in range(len(expected))] == expected
        assert sum(map(len, parts)) == len(expected)


def test_validation_may_hold_less_than_asked_for_and_packs_its_remainder(text, config):
    tokens = [i for document in texts_of(text.validation_files) for i in (*ids_of(text, document), 1)]
    config = replace(config, packing=True)
    for _ in range(2):  # the second time from memory
        batches = list(validation_batches(text, config, rows=7, max_tokens=10**9))
        assert [i for batch in batches for row in rows_of(batch) for i in row] == tokens


def test_the_halves_of_the_validation_rows_are_all_of_them_and_share_none(text, config):
    def read(**which):
        batches = validation_batches(text, config, rows=3, max_tokens=300, **which)
        return [row for batch in batches for row in rows_of(batch)]

    whole, first, second = read(), read(half="first"), read(half="second")
    assert first + second == whole and abs(len(first) - len(second)) <= 1 and first
    with pytest.raises(UserError, match="has 1 rows, which make no two halves"):
        next(validation_batches(text, config, rows=3, max_tokens=1, half="first"))


def test_a_tokenizer_larger_than_the_model_is_refused(config):
    with pytest.raises(UserError, match=r"model.vocab_size 100; give model.vocab_size \d+ or more"):
        open_text(config, vocab_size=100)


@pytest.mark.parametrize("packing", [False, True])
def test_validation_text_without_a_token_is_refused_before_training(tmp_path, config, packing):
    """A vocabulary of Latin words knows no sign of the text, and has no unknown token to say so."""
    words = tmp_path / "words"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(special_tokens=["</s>"], vocab_size=300, show_progress=False)
    tokenizer.train_from_iterator(texts_of(config.files), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(words)
    file = tmp_path / "other.jsonl"
    file.write_text('{"text": "汉字漢字"}\n')
    config = replace(config, tokenizer=str(words), packing=packing)
    other = replace(config, validation_files=(str(file),))
    with pytest.raises(UserError, match=r"no token of the validation text \(.*other\.jsonl\).*data\.tokenizer"):
        open_text(other, vocab_size=300)
    file.write_text('{"text": "汉字漢字"}\n{"text": "rank"}\n')
    text = open_text(other, vocab_size=300)
    (batch,) = validation_batches(text, other, rows=3, max_tokens=100)
    assert [text.tokenizer.decode(row, skip_special_tokens=True).replace(" ", "") for row in rows_of(batch)] == ["rank"]


def test_an_id_the_model_lacks_is_refused():
    with pytest.raises(UserError, match="id 9"):
        to_batch([np.array([9])], 2, 0, 9)


def test_a_file_in_both_lists_is_refused(config):
    shared = replace(config, validation_files=config.files[:1])
    with pytest.raises(UserError, match=r"in data\.files and in data\.validation_files"):
        open_text(shared, vocab_size=512)


def test_too_few_documents_for_the_streams_are_refused(tmp_path, config):
    file = tmp_path / "three.jsonl"
    file.write_text('{"text": "one"}\n' * 3)
    config = replace(config, files=(str(file),))
    stream = TrainingStream(open_text(config, vocab_size=512), config, batch=8)
    with pytest.raises(UserError, match=r"lower data\.streams"):
        next(stream)


def test_workers_print_nothing(capfd, text, config):
    text.tokenizer(["so that the tokenizer has run in threads"] * 64)
    take(TrainingStream(text, replace(config, workers=2), batch=8), 2)
    assert capfd.readouterr() == ("", "")
