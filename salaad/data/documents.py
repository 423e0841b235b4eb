"""One file of text as a sequence of documents: JSON lines, plain text, parquet, compressed or not, local or on the hub.

The index of a document counts all records of its file, good or bad. So a reader can begin anywhere and take every n-th
record (a stripe) without parsing the others, and an index does not depend on which records before it were bad.
"""

import codecs
import contextlib
import errno
import glob
import io
import json
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import fsspec
import pyarrow
import pyarrow.parquet
from huggingface_hub import HfFileSystem

from salaad.common.errors import UserError
from salaad.common.files import at_home
from salaad.data.retries import read_with_retries

KINDS = {".jsonl": "json", ".json": "json", ".txt": "text", ".md": "text", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bz2"}
C4 = "hf://datasets/allenai/c4/en/c4-{split}.{index:05d}-of-{count:05d}.json.gz"
C4_SHARDS = {"train": 1024, "validation": 8}
LARGEST_DOCUMENT = 64 << 20  # bytes of a record; a larger one is bad and never held in memory as a whole
CHUNK = 1 << 20


class Skipped(Enum):
    """The reason why a record gives no document; callers of the readers count both kinds."""

    BAD = "bad"
    EMPTY = "empty"


class _BadRecord(Exception):
    """The error of a single bad record; its message says why the record is bad."""


def expand(patterns: Iterable[str]) -> tuple[str, ...]:
    """The files that paths and globs match, sorted, each once, however often and by whatever path it is named.

    Raises:
        UserError: a pattern matches nothing or a folder, or a file is of an unknown kind.
    """
    found = set()
    for pattern in patterns:
        path = at_home(pattern)
        if path.is_dir():
            raise UserError(f"{pattern} is a folder, but files are read one by one; give a glob such as {path}/*.jsonl")
        folder = next(parent for parent in path.parents if parent.is_dir())  # whose own name may hold brackets
        inside = Path(glob.escape(str(folder)), path.relative_to(folder))
        # Path.glob also gives hidden files.
        matches = [str(path)] if path.exists() else glob.glob(str(inside), recursive=True)  # noqa: PTH207
        files = [match for match in matches if not Path(match).is_dir()]
        if not files:
            raise UserError(f"{pattern} matches no file here ({Path.cwd()}); give an existing path or a glob")
        found.update(files)
    once: dict[Path, str] = {}
    for file in sorted(found):
        kind_of(file)
        once.setdefault(Path(file).resolve(), file)
    return tuple(once.values())


def c4_files(split: str) -> tuple[str, ...]:
    """Addresses of all shards of C4 `en` on the hub; `split` is train or validation."""
    shards = C4_SHARDS[split]
    return tuple(C4.format(split=split, index=index, count=shards) for index in range(shards))


def is_remote(file: str) -> bool:
    """Whether a file is on the hub."""
    return "://" in file


def size_of(file: str) -> int | None:
    """Return the size of a local file in bytes; None for a file on the hub.

    Raises:
        UserError: the file does not exist or cannot be read.
    """
    try:
        return None if is_remote(file) else Path(file).stat().st_size
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}); check the path and its permissions") from None


def kind_of(file: str) -> tuple[str, str | None]:
    """(`json`, `text` or `parquet`; compression or None) from the name of a file.

    Raises:
        UserError: the extension is unknown.
    """
    suffixes = [suffix.lower() for suffix in Path(file).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    if kind is None or (compression and kind == "parquet"):
        raise UserError(
            f"{file} is of an unknown kind; give {' '.join(KINDS)}, all but .parquet also with {' '.join(COMPRESSIONS)}"
        )
    return kind, compression


def read_documents(
    file: str,
    field: str = "text",
    *,
    max_bad: int = 100,
    bad: int = 0,
    retries: int = 0,
    size: int | None = None,
    start: int = 0,
    stride: int = 1,
) -> Iterator[tuple[int, str | Skipped]]:
    """Yield (index, text or `Skipped`) of the records start, start + stride, start + 2·stride, … of a file.

    Args:
        file: a local path or an `hf://` address.
        field: the column that holds the text in JSON lines and parquet.
        max_bad: largest number of bad records that are tolerated.
        bad: how many of them an earlier reader of the same records met before `start`.
        retries: how often reading is tried again when it fails.
        size: bytes that a local file must have; another number means that it was changed or cut off.
        start: index of the first record.
        stride: distance to the next record; those between are not parsed.

    Raises:
        UnreadableFile: the file is damaged, changed or gone, or there is no network.
        UserError: there are more than `max_bad` bad records, or no such column.
    """
    records = read_with_retries(
        file,
        lambda index: _records(file, field, size, index, stride),
        start=start,
        stride=stride,
        retries=retries,
        remote=is_remote(file),
    )
    for index, place, record in records:
        try:
            text = _text_of(record, field)
        except _BadRecord as problem:
            bad += 1
            if bad > max_bad:
                raise UserError(
                    f"{file}, {place}: {problem}, and that is bad document {bad} of this file where "
                    f"data.max_bad_documents allows {max_bad}; raise data.max_bad_documents, or for a new run mend "
                    f"the file or name its column with data.text_field"
                ) from None
            yield index, Skipped.BAD
            continue
        yield index, text if text and not text.isspace() else Skipped.EMPTY


def require_document(file: str, field: str, max_bad: int, retries: int = 0) -> None:
    """Check before training that a file can be read and holds at least one document.

    `retries` apply to the hub only: a missing local file is a mistake that the user wants to hear of at once.

    Raises:
        UserError: the file cannot be read, or holds no document.
    """
    if size_of(file) == 0:
        raise UserError(f"{file} is empty (0 bytes); take it out of the list or write it again")
    seen = {Skipped.BAD: 0, Skipped.EMPTY: 0}
    for _, document in read_documents(file, field, max_bad=max_bad, retries=retries if is_remote(file) else 0):
        if isinstance(document, str):
            return
        seen[document] += 1
    raise UserError(
        f"{file} holds no document ({seen[Skipped.BAD]} bad, {seen[Skipped.EMPTY]} empty ones"
        f"{_first_problem(file, field)}); check the file and data.text_field, which is {field}"
    )


def _first_problem(file: str, field: str) -> str:
    """Return where the first bad record of a file is and why it is bad, as the end of a list; empty if none is."""
    for _, place, record in _records(file, field, None, 0, 1):
        try:
            _text_of(record, field)
        except _BadRecord as problem:
            return f"; {place}: {problem}"
    return ""


def _text_of(record: object, field: str) -> str:
    """Return the text of a record: the bytes of a JSON line or paragraph, a parquet value, or None if it was too large.

    Raises:
        _BadRecord: the record has no text, or was too large.
    """
    if record is None:
        raise _BadRecord(f"larger than {LARGEST_DOCUMENT / 2**20:g} MiB")
    try:
        if isinstance(record, _JsonLine):
            value = json.loads(record.decode("utf-8-sig"))  # of bytes, it would guess other encodings
            if not isinstance(value, dict):
                raise _BadRecord("no JSON object, as every line has to be")
            if field not in value:
                raise _BadRecord(f"no field {field!r}")
            record = value[field]
        elif isinstance(record, bytes):
            record = record.decode("utf-8").strip()
        elif isinstance(record, pyarrow.Scalar):
            record = record.as_py()
        if not isinstance(record, str):
            raise _BadRecord(f"the text is of type {type(record).__name__}")
        record.encode("utf-8")  # JSON can hold half a surrogate pair, which no tokenizer accepts
    except UnicodeError:
        raise _BadRecord("not UTF-8") from None
    except (ValueError, RecursionError):
        raise _BadRecord("broken JSON, of which every line has to be an object") from None
    return record


def _records(file: str, field: str, size: int | None, start: int, stride: int) -> Iterator[tuple[int, str, object]]:
    _require_size(file, size)
    yield from _READERS[kind_of(file)[0]](file, field, start, stride)
    # A file that is cut off while it is read seems to end, so its size is compared again. A file that was deleted
    # meanwhile was still open, and has been read completely.
    with contextlib.suppress(FileNotFoundError):
        _require_size(file, size)


def _require_size(file: str, size: int | None) -> None:
    if size is not None and (now := Path(file).stat().st_size) != size:
        raise OSError(errno.ESTALE, f"it has {now:,} bytes, but had {size:,} when the run began")


class _Hub(HfFileSystem):
    """The hub's file system without folder listings, which have no time limit: one request opens and reads a file.

    The reader of `datasets` is not used, as it does not retry: it expects the exceptions of the HTTP library that the
    hub's client used before.
    """

    def isdir(self, path: str) -> bool:
        """False: only files are opened, so no listing is needed."""
        return False


@contextlib.contextmanager
def _open(file: str) -> Iterator[BinaryIO]:
    """Context manager that opens a local file or one on the hub as a stream of decompressed bytes."""
    _, compression = kind_of(file)
    if is_remote(file):
        storage = _Hub(block_size=0) if file.startswith("hf://") else fsspec.url_to_fs(file)[0]
    else:  # such as "data:x.jsonl", which would be read as an address
        storage, file = fsspec.filesystem("file"), str(Path(file).absolute())
    own = None if compression == "zstd" else compression
    with fsspec.core.OpenFile(storage, file, "rb", compression=own) as stream:
        # Arrow's reader, as fsspec's zstd reader ends without an error after the first frame, and at a cut-off frame.
        if compression == "zstd":
            stream = pyarrow.CompressedInputStream(stream, "zstd")
        yield io.BufferedReader(stream, CHUNK)


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes | None]]:
    """Yield (number from 1, line) for every line; None in place of a line that is too large."""
    lines = iter(partial(stream.readline, LARGEST_DOCUMENT + 1), b"")
    for number, line in enumerate(lines, 1):
        if len(line) > LARGEST_DOCUMENT:
            while line and not line.endswith(b"\n"):
                line = stream.readline(CHUNK)
            yield number, None
        else:
            yield number, line if number > 1 else line.removeprefix(codecs.BOM_UTF8)


class _JsonLine(bytes):
    """One undecoded line of JSON."""


def _json_records(file: str, field: str, start: int, stride: int) -> Iterator[tuple[int, str, _JsonLine | None]]:
    with _open(file) as stream:
        lines = ((number, line) for number, line in _lines(stream) if line is None or not line.isspace())
        for index, (number, line) in islice(enumerate(lines), start, None, stride):
            yield index, f"line {number}", line if line is None else _JsonLine(line)


def _text_records(file: str, field: str, start: int, stride: int) -> Iterator[tuple[int, str, bytes | None]]:
    with _open(file) as stream:
        for index, (number, lines) in islice(enumerate(_paragraphs(stream)), start, None, stride):
            yield index, f"line {number}", lines if lines is None else b"".join(lines)


def _paragraphs(stream: BinaryIO) -> Iterator[tuple[int, list[bytes] | None]]:
    """Yield (number of the first line, lines) of each block between blank lines; None for a block that is too large."""
    block: list[bytes] = []
    first, size = 1, 0
    for number, line in _lines(stream):
        if line is None or not line.isspace():
            first = first if size else number
            size += LARGEST_DOCUMENT + 1 if line is None else len(line)
            if size <= LARGEST_DOCUMENT:
                block.append(line)
            else:
                block = []
        elif size:
            yield first, block or None
            block, size = [], 0
    if size:
        yield first, block or None


def _parquet_records(
    file: str, field: str, start: int, stride: int
) -> Iterator[tuple[int, str, pyarrow.Scalar | None]]:
    with _open(file) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if field not in names:
            raise UserError(f"{file} has no column {field!r}; give data.text_field one of {', '.join(names)}")
        end = 0
        for group in range(table.num_row_groups):
            metadata = table.metadata.row_group(group)
            begin, end = end, end + metadata.num_rows
            if end <= start:
                continue
            position = begin
            # Arrow decodes a batch of rows at once, so batches have fewer rows where these are large.
            rows = max(1, min(1024, LARGEST_DOCUMENT * metadata.num_rows // max(1, metadata.total_byte_size)))
            for batch in table.iter_batches(rows, row_groups=[group], columns=[field], use_threads=False):
                values = batch.column(0)
                first = max(start, position + (start - position) % stride)
                for index in range(first, position + batch.num_rows, stride):
                    value = values[index - position]
                    # Arrow's text types are binary scalars, too.
                    binary = isinstance(value, pyarrow.BinaryScalar) and value.is_valid
                    too_large = binary and value.as_buffer().size > LARGEST_DOCUMENT
                    yield index, f"row {index + 1}", None if too_large else value
                position += batch.num_rows


_READERS = {"json": _json_records, "text": _text_records, "parquet": _parquet_records}
