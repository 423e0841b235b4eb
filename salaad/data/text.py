"""The text of a run: its files and tokenizer, its validation rows, and rows sampled from the training text."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from salaad.common.errors import UserError
from salaad.common.files import digest_of
from salaad.config.run import DataConfig
from salaad.data import python_docs
from salaad.data.documents import c4_files, expand, is_remote, require_document, size_of
from salaad.data.rows import Cursor, Plan, RowStream
from salaad.data.tokenizer import Encoder, beginning_id, load_tokenizer, text_pieces, tokenizer_digest
from salaad.model.loss import IGNORED

DEFAULT_TOKENIZER = "t5-base"


@dataclass
class Text:
    """The files of a run's text, and its tokenizer.

    Args:
        tokenizer: the tokenizer, which is saved with the model.
        train_files: paths or hub addresses.
        validation_files: paths or hub addresses; no file is in both.
        corpus_hash: hex digest of all python-docs texts; None for other sources.
        vocab_size: upper limit of the ids.
        sizes: bytes of the local files when they were found; a changed file is an error.
        validation_rows: cache of tokenised rows, by the settings they were made with.
    """

    tokenizer: PreTrainedTokenizerFast
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    corpus_hash: str | None
    vocab_size: int
    sizes: dict[str, int] = field(default_factory=dict, repr=False)
    validation_rows: dict[tuple, list[np.ndarray]] = field(default_factory=dict, repr=False)

    @property
    def pad_id(self) -> int:
        """The id that pads rows; its labels are ignored."""
        pad = self.tokenizer.pad_token_id
        return 0 if pad is None else pad


def open_text(config: DataConfig, *, vocab_size: int, training: bool = True, validation: bool = True) -> Text:
    """Find the files, open the tokenizer, and check both before anything is trained.

    Args:
        config: where the text is.
        vocab_size: vocabulary size of the model.
        training: whether to open the training files.
        validation: whether to open the validation files.

    Raises:
        UserError: no file is named, or one is missing, empty, unreadable or in both lists, there is no network, the
            tokenizer has more ids than the model, or it makes no token of the validation text.
    """
    config.require(training=training, validation=validation)
    corpus_hash, tokenizer = None, config.tokenizer or DEFAULT_TOKENIZER
    if config.source == "python-docs":
        corpus = python_docs.corpus()
        train, held_out, corpus_hash = corpus.train_files, corpus.validation_files, corpus.hash
        tokenizer = config.tokenizer or str(python_docs.tokenizer(corpus, vocab_size))
    elif config.source == "c4":
        train, held_out = c4_files("train") if training else (), c4_files("validation") if validation else ()
    else:
        train = expand(config.files) if training else ()
        held_out = expand(config.validation_files) if validation else ()
        resolved = {Path(file).resolve() for file in train}
        for file in held_out:
            if Path(file).resolve() in resolved:
                raise UserError(f"{file} is in data.files and in data.validation_files; leave it in one of them")
    # Of C4 only one shard is checked, since each check is a request to the hub.
    for file in (held_out or train)[:1] if config.source == "c4" else (*train, *held_out):
        require_document(file, _field(config), config.max_bad_documents, config.retries)
    sizes = {file: size for file in (*train, *held_out) if (size := size_of(file)) is not None}
    text = Text(load_tokenizer(tokenizer), train, held_out, corpus_hash, vocab_size, sizes)
    pieces = text_pieces(text.tokenizer)
    if pieces > vocab_size:
        larger = f"give model.vocab_size {pieces} or more, or" if training and validation else "give"
        raise UserError(
            f"tokenizer {tokenizer} has {pieces} pieces, more than model.vocab_size {vocab_size}; {larger} another "
            "data.tokenizer"
        )
    if held_out and config.source != "c4":
        _validation_rows(text, config, max_tokens=1)
    return text


def _field(config: DataConfig) -> str:
    return config.text_field if config.source == "files" else "text"


def validation_batches(
    text: Text,
    config: DataConfig,
    *,
    rank: int = 0,
    world_size: int = 1,
    rows: int,
    max_tokens: int,
    half: Literal["first", "second"] | None = None,
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the validation rows of a rank, in micro-batches of up to `rows`.

    The rows are those of `read_validation`. With `half` only that half of a rank's rows is given, so that a setting
    chosen on one half can be reported on the other.

    Raises:
        UserError: the text cannot be read, or has too few rows for halves.
    """
    mine = read_validation(text, config, rank=rank, world_size=world_size, max_tokens=max_tokens)
    if half is not None:
        if len(mine) < 2:
            raise UserError(f"the validation text has {len(mine)} rows, which make no two halves; give a longer one")
        middle = len(mine) // 2
        mine = mine[:middle] if half == "first" else mine[middle:]
    for start in range(0, len(mine), rows):
        yield to_batch(mine[start : start + rows], config.sequence_length, text.pad_id, text.vocab_size)


def read_validation(text: Text, config: DataConfig, *, rank: int, world_size: int, max_tokens: int) -> list[np.ndarray]:
    """Return the validation rows of a rank as ids; they are read at the first call and cached in `text`.

    The rows are read in order until they hold `max_tokens` non-padding tokens or more; row i belongs to rank i mod W.
    Every rank reads all rows, so no communication is needed.

    Raises:
        UserError: the text cannot be read, or gives no token.
    """
    key = (config.sequence_length, config.packing, max_tokens, rank, world_size)
    if key not in text.validation_rows:
        text.validation_rows[key] = _validation_rows(text, config, max_tokens)[rank::world_size]
    return text.validation_rows[key]


def _validation_rows(text: Text, config: DataConfig, max_tokens: int) -> list[np.ndarray]:
    plan = reading_plan(text, config, text.validation_files, streams=1, seed=None)
    stream = RowStream(plan, 0, Cursor(), Encoder(text.tokenizer))
    rows, tokens = [], 0
    while tokens < max_tokens and (row := stream.next_row()) is not None:
        rows.append(row)
        tokens += len(row)
    if not rows:  # the mean loss over no token is no number
        raise UserError(
            f"the tokenizer makes no token of the validation text ({text.validation_files[0]}), and perplexity needs "
            "one or more; give other data.validation_files, or a data.tokenizer that knows their signs"
        )
    return rows


def sample_rows(
    text: Text, config: DataConfig, count: int, seed: int = 0, option: str | None = None
) -> list[np.ndarray]:
    """Return `count` rows of ids (at most `sequence_length` each) from all streams of the training text, none twice.

    `option` is the option that asked for the rows, for the error message.

    Raises:
        UserError: the text cannot be read or has fewer rows.
    """
    plan = replace(reading_plan(text, config, text.train_files, config.streams, seed), epochs=1)
    encoder = Encoder(text.tokenizer)
    streams = [RowStream(plan, number, Cursor(), encoder) for number in range(plan.streams)]
    rows: list[np.ndarray] = []
    while streams and len(rows) < count:
        given = [(stream, stream.next_row()) for stream in streams[: count - len(rows)]]
        rows += [row for _, row in given if row is not None]
        ended = {id(stream) for stream, row in given if row is None}
        streams = [stream for stream in streams if id(stream) not in ended]
    if len(rows) < count:
        raise UserError(
            f"the training text holds {len(rows)} sequences of {config.sequence_length} tokens, {count} are asked for; "
            f"give {f'{option} ' if option else ''}{len(rows)} or fewer, or more text"
        )
    return rows


def rows_before_repeating(text: Text, config: DataConfig, batch: int, most: int) -> int:
    """Return how many training rows, up to `most`, a `TrainingStream` of this `batch` gives before it repeats text.

    Raises:
        UserError: the text cannot be read.
    """
    plan = reading_plan(text, config, text.train_files, gcd(config.streams, batch), seed=0)
    encoder = Encoder(text.tokenizer)
    streams = [RowStream(plan, number, Cursor(), encoder) for number in range(plan.streams)]
    for rows in range(0, most, len(streams)):
        for stream in streams:
            stream.next_row()
            if stream.cursor.epoch:
                return rows
    return most


def to_batch(rows: list[np.ndarray], length: int, pad_id: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Rows of ids as `input_ids` and `labels`, int64 [rows, length], padded on the right.

    Raises:
        UserError: the model has no embedding for an id.
    """
    mask = np.arange(length) < np.array([[len(row)] for row in rows], int).reshape(-1, 1)
    ids = np.full(mask.shape, pad_id, np.int64)
    ids[mask] = np.concatenate(rows) if rows else []
    if ids.size and ids.max() >= vocab_size:
        raise UserError(
            f"the tokenizer made the id {ids.max()}, but model.vocab_size is {vocab_size}; give {ids.max() + 1}"
        )
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(np.where(mask, ids, IGNORED))}
    return {name: value.pin_memory() for name, value in batch.items()} if torch.cuda.is_available() else batch


def fingerprint(files: Iterable[str], sizes: Mapping[str, int] | None = None) -> str:
    """Return a hex digest of the names and sizes of files, which stays the same if they are moved to another folder.

    Files of the same name and size, as in folders of parts, are told apart by their content. Sizes in `sizes` are used
    even if the files have changed since.
    """
    known = [(file, (sizes or {}).get(file) or size_of(file)) for file in files]
    names = [file if size is None else f"{Path(file).name} {size}" for file, size in known]
    often = Counter(names)
    names = [
        name if often[name] == 1 else f"{name} {digest_of([Path(file)])}"
        for name, (file, _) in zip(names, known, strict=True)
    ]
    return hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()  # a name is bytes


def content_digest(files: Sequence[str]) -> str:
    """Return a hex digest of the names and contents of local files, or of the names of files on the hub."""
    return fingerprint(files) if any(map(is_remote, files)) else digest_of([Path(file) for file in files])


def digests_of(text: Text) -> dict[str, str]:
    """Return what training reads → a key of it: of files by `fingerprint`, of a tokenizer by `tokenizer_digest`."""
    return {
        "training files": f"{fingerprint(text.train_files, text.sizes)} {text.corpus_hash}",
        "validation files": fingerprint(text.validation_files, text.sizes),
        "tokenizer": tokenizer_digest(text.tokenizer),
        "id of padding": str(text.pad_id),
    }


def reading_plan(text: Text, config: DataConfig, files: tuple[str, ...], streams: int, seed: int | None) -> Plan:
    """Return the plan by which `streams` streams read `files` in an order given by `seed`; None: once, in order."""
    return Plan(
        files=files,
        streams=streams,
        seed=seed,
        window=config.shuffle_window,
        epochs=None if seed is not None else 1,
        field=_field(config),
        max_bad=config.max_bad_documents,
        length=config.sequence_length,
        packing=config.packing,
        eos=text.tokenizer.eos_token_id,
        bos=beginning_id(text.tokenizer),
        retries=config.retries,
        max_lost=config.max_lost_files if seed is not None else None,
        sizes=text.sizes,
    )
