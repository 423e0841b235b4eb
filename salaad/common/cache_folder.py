"""The cache folder, and folders in it that are created once, by one of several processes."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock

from salaad.common.errors import UserError


def cache_folder() -> Path:
    """Return the cache folder: `$SALAAD_CACHE`, or ~/.cache/salaad.

    Raises:
        UserError: there is neither.
    """
    named = os.environ.get("SALAAD_CACHE")
    try:
        return Path(named) if named else Path.home() / ".cache" / "salaad"
    except RuntimeError:
        raise UserError("this user has no home folder for a cache; name a folder in SALAAD_CACHE") from None


@contextlib.contextmanager
def made_once(folder: Path) -> Iterator[Path | None]:
    """Yield an empty folder to fill, which becomes `folder` at the end, or None if `folder` exists.

    Processes that start together wait for the first one; a process that dies leaves no incomplete `folder`.
    """
    if folder.exists():
        yield None
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f"{folder.name}.lock"):
        if folder.exists():
            yield None
            return
        filling = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            yield filling
            filling.chmod(0o755)
            filling.replace(folder)
        finally:
            shutil.rmtree(filling, ignore_errors=True)
