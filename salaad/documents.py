"""One file of text as a sequence of documents: JSON lines, plain text, parquet, compressed or not, local or on the hub.

A document has an index, its place among the records of its file, good or bad. So a reader can begin anywhere and take
every n-th record (a stripe) without parsing the others, and a place in a file means the same whatever was wrong before.
"""

import contextlib
import glob
import io
import json
import zlib
from collections.abc import Iterable, Iterator
from enum import Enum
from itertools import islice
from lzma import LZMAError
from pathlib import Path
from typing import BinaryIO

import fsspec
import pyarrow
import pyarrow.parquet
import zstandard

from salaad.errors import UserError

KINDS = {".jsonl": "json", ".json": "json", ".txt": "text", ".md": "text", ".parquet": "parquet"}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".xz": "xz", ".bz2": "bz2"}
C4 = "hf://datasets/allenai/c4/en/c4-{split}.{index:05d}-of-{count:05d}.json.gz"
C4_SHARDS = {"train": 1024, "validation": 8}


class Skipped(Enum):
    """Why a record gives no document; never silent, the readers' callers count them."""

    BAD = "bad"
    EMPTY = "empty"


class _BadRecord(Exception):
    """What is wrong with one record."""


def expand(patterns: Iterable[str]) -> tuple[str, ...]:
    """The files behind paths and globs, sorted, each once.

    Raises:
        UserError: a pattern that matches nothing, a folder, or a file of an unknown kind.
    """
    found = set()
    for pattern in patterns:
        path = Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"{pattern} is a folder, but files are read one by one; give a glob such as {path}/*.jsonl")
        # Path.glob takes no absolute pattern.
        matches = [str(path)] if path.exists() else glob.glob(str(path), recursive=True)  # noqa: PTH207
        files = [match for match in matches if not Path(match).is_dir()]
        if not files:
            raise UserError(f"{pattern} matches no file here ({Path.cwd()}); give an existing path or a glob")
        found.update(files)
    for file in found:
        kind_of(file)
    return tuple(sorted(found))


def c4_files(split: str) -> tuple[str, ...]:
    """Addresses of all shards of C4 `en` on the hub; `split` is train or validation."""
    count = C4_SHARDS[split]
    return tuple(C4.format(split=split, index=index, count=count) for index in range(count))


def is_remote(file: str) -> bool:
    """Whether a file lies on the hub."""
    return "://" in file


def kind_of(file: str) -> tuple[str, str | None]:
    """(`json`, `text` or `parquet`; compression or None) by the name of a file.

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
    file: str, field: str = "text", *, max_bad: int = 100, start: int = 0, stride: int = 1
) -> Iterator[tuple[int, str | Skipped]]:
    """(index, text) of the records start, start + stride, start + 2·stride, … of a file; `Skipped` stands for no text.

    Args:
        file: a local path or an `hf://` address.
        field: the column that holds the text in JSON lines and parquet.
        max_bad: bad records this reader may meet.
        start: index of the first record.
        stride: distance to the next one; what lies between is passed over unparsed.

    Raises:
        UserError: more than `max_bad` bad records, a damaged or vanished file, no such column, no network.
    """
    bad = 0
    records = _hub_records if is_remote(file) else _RECORDS[kind_of(file)[0]]
    for index, place, record in _guarded(file, records(file, field, start, stride)):
        try:
            text = _text_of(record, field)
        except _BadRecord as problem:
            bad += 1
            if bad > max_bad:
                raise UserError(
                    f"{file}, {place}: {problem}, and that is bad document {bad} of this file where "
                    f"data.max_bad_documents allows {max_bad}; mend the file, name its column with data.text_field "
                    f"or raise data.max_bad_documents"
                ) from None
            yield index, Skipped.BAD
            continue
        yield index, text if text and not text.isspace() else Skipped.EMPTY


def require_document(file: str, field: str, max_bad: int) -> None:
    """Find out before training whether a file can be read and holds at least one document.

    Raises:
        UserError: it cannot, or does not.
    """
    if not is_remote(file) and Path(file).stat().st_size == 0:
        raise UserError(f"{file} is empty (0 bytes); take it out of the list or write it again")
    seen = {Skipped.BAD: 0, Skipped.EMPTY: 0}
    for _, document in read_documents(file, field, max_bad=max_bad):
        if isinstance(document, str):
            return
        seen[document] += 1
    raise UserError(
        f"{file} holds no document ({seen[Skipped.BAD]} bad, {seen[Skipped.EMPTY]} empty ones); "
        f"check the file and data.text_field, which is {field}"
    )


def _text_of(record: object, field: str) -> str:
    """The text of one raw record: bytes of a JSON line (`_JsonLine`) or of a paragraph, or a value out of parquet."""
    try:
        if isinstance(record, _JsonLine):
            value = json.loads(record)
            if not isinstance(value, dict) or field not in value:
                raise _BadRecord(f"no field {field!r}")
            record = value[field]
        elif isinstance(record, bytes):
            record = record.decode("utf-8").strip()
        elif isinstance(record, pyarrow.Scalar):
            record = record.as_py()
        if not isinstance(record, str):
            raise _BadRecord(f"the text is of type {type(record).__name__}")
        record.encode("utf-8")  # JSON can spell half a surrogate pair, which no tokenizer takes
    except UnicodeError:
        raise _BadRecord("not UTF-8") from None
    except (ValueError, RecursionError):
        raise _BadRecord("broken JSON") from None
    return record


@contextlib.contextmanager
def _open(file: str) -> Iterator[BinaryIO]:
    """A file as decompressed bytes."""
    _, compression = kind_of(file)
    # fsspec's own zstd reader stops silently at the end of the first of several frames.
    with fsspec.open(file, "rb", compression=None if compression == "zstd" else compression) as stream:
        if compression == "zstd":
            stream = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        yield stream if compression is None else io.BufferedReader(stream, 1 << 20)


class _JsonLine(bytes):
    """One undecoded line of JSON."""


def _json_records(file: str, field: str, start: int, stride: int) -> Iterator[tuple[int, str, _JsonLine]]:
    with _open(file) as stream:
        lines = ((number, line) for number, line in enumerate(stream, 1) if not line.isspace())
        for index, (number, line) in islice(enumerate(lines), start, None, stride):
            yield index, f"line {number}", _JsonLine(line)


def _hub_records(file: str, field: str, start: int, stride: int) -> Iterator[tuple[int, str, object]]:
    """A shard on the hub, streamed by `datasets`, which waits and retries where the hub asks for patience."""
    import datasets  # two seconds of start-up that local files need not pay

    rows = datasets.load_dataset("json", data_files=file, split="train", streaming=True).skip(start)
    for index, row in islice(enumerate(rows, start), 0, None, stride):
        yield index, f"row {index + 1}", row.get(field)


def _text_records(file: str, field: str, start: int, stride: int) -> Iterator[tuple[int, str, bytes]]:
    with _open(file) as stream:
        for index, (number, lines) in islice(enumerate(_paragraphs(stream)), start, None, stride):
            yield index, f"line {number}", b"".join(lines)


def _paragraphs(stream: Iterable[bytes]) -> Iterator[tuple[int, list[bytes]]]:
    """(number of the first line, lines) of each block between blank lines."""
    block: list[bytes] = []
    first = 1
    for number, line in enumerate(stream, 1):
        if not line.isspace():
            if not block:
                first = number
            block.append(line)
        elif block:
            yield first, block
            block = []
    if block:
        yield first, block


def _parquet_records(file: str, field: str, start: int, stride: int) -> Iterator[tuple[int, str, pyarrow.Scalar]]:
    with _open(file) as stream:
        table = pyarrow.parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if field not in names:
            raise UserError(f"{file} has no column {field!r}; give data.text_field one of {', '.join(names)}")
        end = 0
        for group in range(table.num_row_groups):
            begin, end = end, end + table.metadata.row_group(group).num_rows
            if end <= start:
                continue
            position = begin
            for batch in table.iter_batches(1024, row_groups=[group], columns=[field], use_threads=False):
                first = max(start, position + (start - position) % stride)
                for index in range(first, position + batch.num_rows, stride):
                    yield index, f"row {index + 1}", batch.column(0)[index - position]
                position += batch.num_rows


_RECORDS = {"json": _json_records, "text": _text_records, "parquet": _parquet_records}


def _guarded(file: str, records: Iterator) -> Iterator:
    """Turn what goes wrong below the records (network, disk, compression, parquet) into a sentence."""
    try:
        yield from records
    except (UserError, GeneratorExit):
        raise
    except (EOFError, zlib.error, LZMAError, zstandard.ZstdError, pyarrow.ArrowInvalid) as error:
        raise UserError(f"{file} is damaged or cut off ({_one_line(error)}); download or write it again") from error
    except OSError as error:
        raise UserError(_unreadable(file, error)) from error
    except Exception as error:
        if not is_remote(file):
            raise
        # Which class a broken connection raises depends on the HTTP library below the hub's file system.
        raise UserError(_unreadable(file, error)) from error


def _unreadable(file: str, error: Exception) -> str:
    if is_remote(file):
        return (
            f"{file} cannot be read from the hub ({_one_line(error)}); connect to it, or fetch shards once with "
            f"scripts/fetch_c4.py and give them as data.files with data.source files"
        )
    if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
        return f"{file} cannot be read ({error.strerror}); check the path and its permissions"
    return f"{file} cannot be read ({_one_line(error)}), it may be damaged; download or write it again"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
