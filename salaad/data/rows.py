"""Virtual streams: the files they read, their positions (cursors), and the rows of tokens they give.

With F files and V streams every file is divided into V / gcd(F, V) stripes, by the document's index modulo this number.
A stripe of a file is a unit; units are dealt to the streams round-robin, so every stream has equally many. A window
holds successive records of a unit, which are shuffled together. The order of a stream's units, and of the records in
each window, depends only on (seed, stream, epoch, unit, window). So the numbers of a cursor are a stream's whole state,
and a resume reads one window again.

If a unit becomes unreadable, the stream goes on with the next unit; the window being read and the rest of the unit are
lost.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from itertools import islice

import numpy as np

from salaad.common.errors import UserError
from salaad.data.documents import Skipped, read_documents
from salaad.data.retries import UnreadableFile
from salaad.data.tokenizer import Encoder

AHEAD = 32  # documents tokenised at once
PART = 1 << 20  # characters tokenised at once; a tokenizer takes about a hundred bytes for each


@dataclass(frozen=True)
class Plan:
    """The settings that all streams of a run share.

    Args:
        files: the files, in the same order in every process.
        streams: V, the number of virtual streams.
        seed: seeds every order; None keeps the order of the files.
        window: number of documents that are shuffled together.
        epochs: passes over the text; None never ends.
        field: the column that holds the text.
        max_bad: bad documents that a stream tolerates in one pass over its part of a file.
        length: tokens in a row.
        packing: cut rows from concatenated documents instead of one document per row.
        eos: id that ends every document.
        bos: id that begins every document, if any.
        retries: how often reading a file is tried again when it fails.
        max_lost: units that a stream may lose in a pass; None raises at the first.
        sizes: bytes of the local files, which must not change.
    """

    files: tuple[str, ...]
    streams: int
    seed: int | None
    window: int
    epochs: int | None
    field: str
    max_bad: int
    length: int
    packing: bool
    eos: int
    retries: int = 0
    max_lost: int | None = 0
    bos: int | None = None
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def stripes(self) -> int:
        """The number of stripes of every file."""
        return self.streams // math.gcd(len(self.files), self.streams)

    def units(self, stream: int, epoch: int) -> list[tuple[str, int]]:
        """Return the units (file, stripe) of a stream, in the order of this epoch."""
        units = range(stream, len(self.files) * self.stripes, self.streams)
        order = self.order(len(units), stream, epoch)
        return [(self.files[units[k] // self.stripes], units[k] % self.stripes) for k in order]

    def order(self, count: int, *place: int) -> np.ndarray:
        """Return a permutation [count] that depends only on `count`, the seed and the `place`.

        Sorting raw Philox words gives the same permutation in all numpy versions, which `Generator.permutation` does
        not promise.
        """
        if self.seed is None:
            return np.arange(count)
        words = np.random.Philox(np.random.SeedSequence([self.seed, *place])).random_raw(count)
        return np.argsort(words, kind="stable")


@dataclass
class Cursor:
    """The position of a stream, and counts of what it read up to there.

    Args:
        epoch: passes completed.
        unit: units completed in this pass.
        window: windows completed in this unit.
        position: records completed in this window, in its shuffled order.
        token: tokens of the record at this position that are already in rows (with packing only).
        bad: broken records.
        empty: records without text.
        long: documents that were cut to a row.
        lost: units that could not be read to their end.
        lost_in_pass: of them, those of this pass.
        bad_in_unit: broken records in the windows completed in this unit.
    """

    epoch: int = 0
    unit: int = 0
    window: int = 0
    position: int = 0
    token: int = 0
    bad: int = 0
    empty: int = 0
    long: int = 0
    lost: int = 0
    lost_in_pass: int = 0
    bad_in_unit: int = 0


class RowStream:
    """The rows of one virtual stream, from a cursor on.

    Args:
        plan: the settings of all streams.
        number: the number of this stream, from 0.
        cursor: the position where the stream begins; it is copied.
        encoder: the tokenizer.
    """

    def __init__(self, plan: Plan, number: int, cursor: Cursor, encoder: Encoder) -> None:
        self.plan = plan
        self.number = number
        self.cursor = Cursor(*astuple(cursor))
        if not plan.packing:
            self.cursor.token = 0
        self._encoder = encoder
        self._ends = [np.array([] if mark is None else [mark], np.int32) for mark in (plan.bos, plan.eos)]
        self._units = plan.units(number, cursor.epoch)
        self._reader: Iterator[tuple[int, str | Skipped]] | None = None
        self._records: list[str | Skipped] | None = None
        self._unit_ends = False
        self._ids: dict[int, np.ndarray] = {}
        self._epochs_without_document = 0

    def next_row(self) -> np.ndarray | None:
        """Return a row of int32 ids [at most length], end-of-document tokens included; None after the last epoch.

        Raises:
            UserError: the text cannot be read, or this stream has none.
        """
        if self.plan.packing:
            return self._packed()
        document = self._document()
        if document is None:
            return None
        if len(document) > self.plan.length:
            self.cursor.long += 1
            document = np.append(document[: self.plan.length - 1], np.int32(self.plan.eos))
        self.cursor.position += 1
        return document

    def _packed(self) -> np.ndarray | None:
        parts, room = [], self.plan.length
        while room and (document := self._document()) is not None:
            part = document[self.cursor.token : self.cursor.token + room]
            parts.append(part)
            room -= len(part)
            self.cursor.token += len(part)
            if self.cursor.token >= len(document):
                self.cursor.position += 1
                self.cursor.token = 0
        return np.concatenate(parts) if parts else None

    def _document(self) -> np.ndarray | None:
        """The document at the cursor as ids from bos to eos; records without text are skipped and counted."""
        cursor = self.cursor
        while True:
            if cursor.epoch == self.plan.epochs:
                return None
            if self._records is None and not self._read_window():
                continue
            if cursor.position == len(self._records):
                self._next_window()
                continue
            record = self._records[cursor.position]
            if isinstance(record, str):
                ids = self._tokenised(cursor.position)
                if len(ids) > len(self._ends[0]) + 1:
                    self._epochs_without_document = 0
                    return ids
            if record is Skipped.BAD:
                cursor.bad += 1
            else:
                cursor.empty += 1
            cursor.position += 1

    def _read_window(self) -> bool:
        """Read the window at the cursor; if it cannot be read completely, go to the next unit and return False."""
        cursor, plan = self.cursor, self.plan
        if self._reader is None:
            file, stripe = self._units[cursor.unit]
            self._reader = read_documents(
                file,
                plan.field,
                max_bad=plan.max_bad,
                bad=cursor.bad_in_unit,
                retries=plan.retries,
                size=plan.sizes.get(file),
                start=stripe + plan.stripes * plan.window * cursor.window,
                stride=plan.stripes,
            )
        try:
            records = [record for _, record in islice(self._reader, plan.window)]
        except UnreadableFile as error:
            self._reader = None  # a reader that failed would look like a unit that ended
            self._lose_unit(error)
            return False
        self._unit_ends = len(records) < plan.window
        order = plan.order(len(records), self.number, cursor.epoch, cursor.unit, cursor.window)
        self._records = [records[k] for k in order]
        self._ids.clear()
        return True

    def _lose_unit(self, error: UnreadableFile) -> None:
        """Skip the rest of a unit, including the window read in part, whose records no cursor could describe."""
        cursor, allowed = self.cursor, self.plan.max_lost
        if allowed is None:
            raise error
        if cursor.lost_in_pass >= allowed:
            raise UserError(
                f"{error}, or raise data.max_lost_files, which lets stream {self.number} pass over {allowed} such "
                f"part(s) of files in a pass"
            ) from error
        cursor.lost += 1
        cursor.lost_in_pass += 1
        self._unit_ends = True
        self._next_window()

    def _next_window(self) -> None:
        cursor, records = self.cursor, self._records
        self._records, cursor.position, cursor.token = None, 0, 0
        if not self._unit_ends:
            cursor.window += 1
            cursor.bad_in_unit += records.count(Skipped.BAD)
            return
        self._reader, cursor.window, cursor.bad_in_unit = None, 0, 0
        cursor.unit += 1
        if cursor.unit < len(self._units):
            return
        cursor.unit = cursor.lost_in_pass = 0
        cursor.epoch += 1
        self._units = self.plan.units(self.number, cursor.epoch)
        self._epochs_without_document += 1
        if self._epochs_without_document > 1:
            raise UserError(
                f"stream {self.number} of {self.plan.streams} finds no document in {len(self.plan.files)} file(s), "
                f"which hold too few for so many streams ({cursor.lost} parts could not be read); lower data.streams, "
                "give more text, or in .txt and .md end every document with a blank line"
            )

    def _tokenised(self, position: int) -> np.ndarray:
        if position not in self._ids:
            places, characters = [], 0
            for place in range(position, min(position + AHEAD, len(self._records))):
                if isinstance(self._records[place], str) and characters < PART:
                    places.append(place)
                    characters += len(self._records[place])
            encoded = self._encode([self._records[place] for place in places])
            bos, eos = self._ends
            self._ids = {place: np.concatenate([bos, ids, eos]) for place, ids in zip(places, encoded, strict=True)}
        return self._ids[position]

    def _encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the ids of whole texts or, without packing, of beginnings that are longer than a row."""
        if self.plan.packing:
            return [self._whole(text) for text in texts] if len(texts[-1]) > PART else self._encoder(texts)
        encoded = self._encoder([_beginning(text, 8 * self.plan.length) for text in texts])
        for k, text in enumerate(texts):
            # Ids just before a cut may differ from those of the whole text, so the row has to end well before it.
            if len(encoded[k]) < self.plan.length + 8 and len(text) > 8 * self.plan.length:
                encoded[k] = self._whole(text)
        return encoded

    def _whole(self, text: str) -> np.ndarray:
        """Return the ids of a text tokenised in parts of `PART` characters; the cuts may change ids next to them."""
        parts = []
        while text:
            part = _beginning(text, PART)
            parts.append(part)
            text = text[len(part) :]
        return np.concatenate([self._encoder([part])[0] for part in parts])


def _beginning(text: str, length: int) -> str:
    """The first `length` characters of a text, cut at a space if there is one."""
    if len(text) <= length:
        return text
    cut = text.rfind(" ", 0, length)
    return text[: cut if cut > 0 else length]
