"""JSON files, folders that appear whole or not at all, and the checksums by which they stay so."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from salaad.errors import UserError

CHECKSUMS = "checksums.json"


def write_json(value: Any, path: Path) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one is a UserError."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a whole checkpoint") from None


def require_new(folder: Path) -> None:
    """Raise a UserError if `folder` is there already."""
    if folder.exists() or folder.is_symlink():
        raise UserError(f"--output {folder} exists, and nothing is overwritten; give a folder that is new")


def require_writable(path: Path) -> None:
    """Make the folder of the JSON file `path`, and raise a UserError if it or what is in the file cannot be used."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path.parent} cannot be made ({error}); give a folder you can write to") from None
    if path.exists() and "rows" not in (read_json(path) or ()):
        raise UserError(f"{path} is there and no table of ours, which rows could be added to; give another --output")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to write into, which gets the name `folder` at the end; after an error nothing of it is left.

    Raises:
        UserError: `folder` exists or cannot be made.
    """
    require_new(folder)
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output {folder} cannot be made ({error}); give a folder in a place you can write") from None
    try:
        yield partial
        partial.replace(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_checksums(folder: Path) -> None:
    """List the SHA-256 of every file below `folder` in its checksums.json."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / CHECKSUMS)
    with ThreadPoolExecutor() as pool:  # hashing lets other threads run
        digests = pool.map(_digest, files)
        write_json(
            {str(path.relative_to(folder)): digest for path, digest in zip(files, digests, strict=True)},
            folder / CHECKSUMS,
        )


def verify(folder: Path, *patterns: str) -> str:
    """Compare the files of `folder` that match one of the patterns (or all files) with its checksums.json.

    Returns:
        One digest for all of them, the key of whatever is derived from them.

    Raises:
        UserError: the list is missing, or a file is missing or not what was written.
    """
    if not (folder / CHECKSUMS).is_file():
        raise UserError(f"{folder} has no {CHECKSUMS}, so an older version wrote it; use that one, or train anew")
    listed = read_json(folder / CHECKSUMS)
    patterns = patterns or ("*",)
    names = [name for name in listed if any(fnmatch(name, p) for p in patterns)] if isinstance(listed, dict) else []
    if not names:
        raise UserError(f"{folder / CHECKSUMS} lists no file of this folder; give a whole copy of the folder")
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda name: _digest(folder / name), names))
    for name, digest in zip(names, found, strict=True):
        if digest is None:
            raise UserError(f"{folder / name} is missing; give a whole copy of the folder")
        if digest != listed[name]:
            raise UserError(
                f"{folder / name} is not as it was written (its SHA-256 begins with {digest[:8]}, not "
                f"{str(listed[name])[:8]}); give a whole copy of the folder"
            )
    return combined_digest(names, found)


def digest_of(files: list[Path]) -> str:
    """One digest of the names and contents of `files`."""
    with ThreadPoolExecutor() as pool:
        return combined_digest([path.name for path in files], list(pool.map(_digest, files)))


def combined_digest(names: list[str], digests: list[str]) -> str:
    """One digest for a list of names and digests."""
    lines = "".join(f"{name} {digest}\n" for name, digest in zip(names, digests, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def _digest(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
