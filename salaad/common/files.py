"""JSON files, folders that appear complete or not at all, and checksums of their files."""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from math import isfinite
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any

from salaad.common.errors import UserError
from salaad.common.locks import held

CHECKOUT = Path(__file__).resolve().parents[2]  # the project's root, unless it was installed from a wheel
CHECKSUMS = "checksums.json"
PARTIAL = ".partial"  # suffix of a file that is not complete yet
_PROVENANCE = {"versions", "commit", "machine"}  # what `salaad.common.provenance` writes beside every table's rows
_LARGEST_JSON = 2**26  # bytes, a thousand times our files' size; parsed, a file takes about ten times as much memory
REMAKE = "restore it, or delete it and make it anew"  # the cure of a broken file that a command can make once more


def at_home(path: str) -> Path:
    """Return a path in which `~` at the begin is the home folder: in a file, and after `=`, no shell replaces it."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 – for an unknown user, Path.expanduser raises an error


@contextmanager
def replacing(path: Path, to_disk: bool = False) -> Iterator[Path]:
    """Yield a temporary file to write, which replaces `path` at the end and is deleted after an error.

    Args:
        path: the file; a reader sees the old content or the new, never a part.
        to_disk: flush the new content before it replaces the old, and then the folder.

    Raises:
        OSError: the file cannot be written; the error names `path`.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield temporary
        if to_disk:
            flush(temporary)
        temporary.replace(path)
        if to_disk:
            flush(path.parent)
    except OSError as error:
        if error.errno is None or str(error.filename) not in ("None", str(temporary)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def save_if_possible(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` make a file that only saves time later, such as a cache; print a warning if the disk refuses it.

    Args:
        path: the file; what it held before stays if the new content cannot be written.
        write: function that writes the file to the path it gets; raises an OSError if it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as temporary:
            write(temporary)
    except OSError as error:
        print(
            f"warning: {path} cannot be written ({error.strerror}); this command goes on, but one that needs "
            "the file later has to do the work once more",
            file=sys.stderr,
        )


def flush(path: Path) -> None:
    """Flush the content of a file, or the list of names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def only_finite(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row, and rows in it, with None in place of numbers that are not finite, for which JSON has no word."""

    def only(value: Any) -> Any:
        if isinstance(value, Mapping):
            return only_finite(value)
        return None if isinstance(value, float) and not isfinite(value) else value

    return {key: only(value) for key, value in row.items()}


def write_json(value: Any, path: Path, to_disk: bool = False) -> None:
    """Write `value` as indented JSON; `to_disk` as for `replacing`."""
    with replacing(path, to_disk) as temporary:
        temporary.write_text(json.dumps(value, indent=1) + "\n")


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file of JSON lines; none if it is missing. Lines cut off by a kill are left out."""
    if path.is_file():
        with path.open(errors="replace") as lines:
            for line in lines:
                with suppress(ValueError):
                    yield json.loads(line)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return all rows of `json_lines`."""
    return list(json_lines(path))


def read_json(path: Path, most: int = _LARGEST_JSON, cure: str = REMAKE) -> Any:
    """Return the content of a JSON file.

    Args:
        path: the file.
        most: bytes that it may have.
        cure: what the error message tells to do; the default suits results.

    Raises:
        UserError: the file is missing, broken or too large.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe would block, and a device has no end
            raise OSError("it is no file")
        if path.stat().st_size > most:
            raise OSError(f"it has {path.stat().st_size:,} bytes, and {most:,} are the most")
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); {cure}") from None


def read_object(path: Path, most: int = _LARGEST_JSON, cure: str = "give a whole checkpoint") -> dict[str, Any]:
    """The object in a JSON file; a UserError as in `read_json`, or if it holds something else."""
    value = read_json(path, most, cure)
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; {cure}")
    return value


def is_file(path: Path) -> bool:
    """Whether the file exists; False, too, for a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def inside(folder: Path, name: Any) -> Path:
    """Return the path of a file in `folder` whose name was read from another file of `folder`.

    The hub's cache keeps REPOSITORY/snapshots/REVISION/NAME as links into REPOSITORY/blobs, which are allowed.

    Raises:
        UserError: the name is not a plain relative one, or a link leads out of the folder.
    """
    plain = isinstance(name, str) and name.isprintable() and name == str(PurePosixPath(name))
    if not plain or name == "." or name[0] == "/" or "\\" in name or name[1:2] == ":" or ".." in name.split("/"):
        raise UserError(f"{folder} names {name!r}, which is no plain name in it; give a whole copy")
    path = folder / name
    try:
        home, target = folder.resolve(), path.resolve()
    except (OSError, RuntimeError) as error:  # a name too long, links in a circle
        raise UserError(f"{path} leads nowhere ({error}); give a whole copy of the folder") from None
    homes = [home, home.parent.parent / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(target.is_relative_to(place) for place in homes):
        raise UserError(f"{path} is a link that leads out of its folder, to {target}; put the file itself there")
    return path


def require_new(folder: Path, option: str = "--output ") -> None:
    """Raise a UserError if `folder`, which `option` names, exists."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"{option}{folder} exists, and nothing is overwritten; give a folder that is new")


def writable_folder(folder: Path) -> None:
    """Make a folder, before the work whose files it is to get.

    Raises:
        UserError: it cannot be made or written to.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".partial-", dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--output {folder} cannot be made or written to ({error}); give a folder you can write to"
        ) from None


def require_place(folder: Path) -> None:
    """Make what is above `folder`, before the work for it begins.

    Raises:
        UserError: `folder` exists, or nothing can be made in what is above it.
    """
    writable_folder(folder.parent)
    require_new(folder)


def json_file(name: str) -> Path:
    """Return the path of the JSON file that `--output` names; create its folder, before the work for it begins.

    Raises:
        UserError: the folder cannot be created or written to, or the name does not end in .json.
    """
    path = Path(name)
    if path.suffix != ".json":
        raise UserError(f"--output is {name}, but JSON is written; give a name that ends in .json")
    writable_folder(path.parent)
    return path


def require_writable(path: Path, pictures: Sequence[Path] = ()) -> None:
    """Create the folder of the JSON file `path`, before the work whose rows it is to get.

    Args:
        path: a file that is new, or a table of ours, to which rows are added.
        pictures: files beside it that are drawn anew.

    Raises:
        UserError: the folder cannot be written to, or a file is somebody else's.
    """
    json_file(str(path))
    if path.exists() and not _is_table(path):
        raise UserError(f"{path} is there and no table of ours, which rows could be added to; give another --output")
    for picture in pictures:
        if picture.exists() and not (path.exists() and picture.is_file()):
            raise UserError(f"{picture} is there and no picture of ours, to be drawn anew; give another --output")


def _is_table(path: Path) -> bool:
    """Whether a file is a table of ours: rows, with their provenance."""
    try:
        table = read_object(path)
    except UserError:  # damaged, or no JSON
        return False
    rows = table.get("rows")
    return table.keys() >= _PROVENANCE and isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


@contextmanager
def tokenizer_errors(folder: Path) -> Iterator[None]:
    """Raise an OSError where a tokenizer cannot be written to `folder`; its library raises no class of its own."""
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error)) if type(error) is Exception else None
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(folder)) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder to write into, which is renamed to `folder` at the end and deleted after an error.

    Raises:
        UserError: `folder` exists, is being written by another process, or cannot be created.
    """
    require_new(folder)
    partial = folder.with_name(f".partial-{folder.name}")
    try:
        partial.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be made ({error}); give a folder in a place you can write") from None
    with held(partial) as alone:
        if not alone:
            raise UserError(f"--output {folder} is being written by another process; wait for its end, or give another")
        try:
            _empty(partial)  # what a killed process left
            yield partial
            partial.replace(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_checksums(folder: Path, known: Mapping[str, str] | None = None, written: Iterable[str] | None = None) -> None:
    """List the SHA-256 of every file below `folder` in its checksums.json.

    Args:
        folder: the folder of the files.
        known: name in the folder → SHA-256 of files that were hashed before and are not read again.
        written: names of the files; by default those that the folder lists, which on a network file system may lack
            some that other machines wrote.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    names, known = sorted(names_below(folder) if written is None else written), known or {}
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        digests = list(pool.map(lambda name: known.get(name) or _digest(folder / name), names))
    if None in digests:
        raise UserError(f"{folder / names[digests.index(None)]} is not there to be hashed; save again")
    write_json(dict(zip(names, digests, strict=True)), folder / CHECKSUMS)


def verify(folder: Path, *patterns: str, alone: bool = False, patience: float = 0, or_else: str = "") -> str:
    """Compare the files of `folder` that match one of the patterns (or all files) with its checksums.json.

    With `alone` the folder may hold no other file, since a reader of all files would use it unchecked. As a network
    file system may not show them yet, checksums.json and then the files are waited for up to `patience` seconds each.
    `or_else` adds another cure than a whole copy to the error about a file that differs.

    Returns:
        One digest of all compared files, a key for results derived from them.

    Raises:
        UserError: checksums.json or a file is missing, or a file is not listed or differs from what was written.
    """
    if unseen(folder, [CHECKSUMS], patience):
        raise UserError(f"{folder} has no {CHECKSUMS}, so an older version wrote it; use that one, or train anew")
    listed = read_json(folder / CHECKSUMS, cure="give a whole copy of the folder")
    patterns = patterns or ("*",)
    names = [name for name in listed if any(fnmatch(name, p) for p in patterns)] if isinstance(listed, dict) else []
    if not names:
        raise UserError(f"{folder / CHECKSUMS} lists no file of this folder; give a whole copy of the folder")
    foreign = names_below(folder) - set(names) if alone else set()
    if foreign:
        raise UserError(f"{folder / min(foreign)} is none of the files that were written here; take it out")
    unseen(folder, names, patience)
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(_digest, [inside(folder, name) for name in names]))
    for name, digest in zip(names, found, strict=True):
        if digest is None:
            raise UserError(f"{folder / name} is missing; give a whole copy of the folder")
        if digest != listed[name]:
            raise UserError(
                f"{folder / name} is not as it was written (its SHA-256 begins with {digest[:8]}, not "
                f"{str(listed[name])[:8]}); give a whole copy of the folder{or_else}"
            )
    return combined_digest(names, found)


def unseen(folder: Path, names: Iterable[str], patience: float) -> list[str]:
    """Wait up to `patience` seconds until all files are visible, printing a message; return those that are not.

    A network file system caches for a while that a file was missing; listing its folder makes it look again.
    """
    absent, begun, told = list(names), time.monotonic(), False
    while absent := [name for name in absent if not (folder / name).is_file()]:
        if time.monotonic() >= begun + patience:
            break
        if not told:
            print(f"waiting up to {patience:g} s for {folder / absent[0]}, not seen on this machine", file=sys.stderr)
            told = True
        for place in {(folder / name).parent for name in absent}:
            with suppress(OSError):
                list(place.iterdir())
        time.sleep(min(1.0, patience / 10))
    return absent


def names_below(folder: Path) -> set[str]:
    """Return the names of all files below `folder`, relative to it, without its checksums.json."""
    files = (path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    return {str(path.relative_to(folder)) for path in files}


def digest_of(files: list[Path]) -> str:
    """One digest of the names and contents of `files`."""
    with ThreadPoolExecutor() as pool:
        return combined_digest([path.name for path in files], list(pool.map(_digest, files)))


def combined_digest(names: list[str], digests: list[str]) -> str:
    """One digest for a list of names and digests."""
    lines = "".join(f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True))
    return hashlib.sha256(lines.encode(errors="surrogateescape")).hexdigest()


def _digest(path: Path) -> str | None:
    if not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); give a folder you may read") from None
