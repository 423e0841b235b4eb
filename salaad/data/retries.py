"""Retries: a file that cannot be read for a while is tried again, from the record after the last one read.

Networks, mounts and the hub may fail for minutes and recover, so waiting helps; damaged files and refused requests do
not recover. Before these retries, huggingface_hub itself tries a request up to six times with a timeout of 10 s each
and pauses of 1, 2, 4, 8 and 8 s.
"""

import sys
import time
import zlib
from collections.abc import Callable, Iterator
from lzma import LZMAError

import pyarrow
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from salaad.common.errors import UserError

FIRST_PAUSE = 1.0  # seconds before the first retry; every further pause is twice as long
LONGEST_PAUSE = 30.0
HUB_REQUEST = 6 * 10 + 1 + 2 + 4 + 8 + 8  # seconds until huggingface_hub gives up a request
DAMAGE = (EOFError, zlib.error, LZMAError, pyarrow.ArrowInvalid)


class UnreadableFile(UserError):
    """A file that is gone or damaged, or that could not be read in all tries."""


def read_with_retries(
    file: str,
    records_from: Callable[[int], Iterator[tuple[int, str, object]]],
    *,
    start: int,
    stride: int,
    retries: int,
    remote: bool,
) -> Iterator[tuple[int, str, object]]:
    """Yield the records of a file, each once, even if reading is interrupted.

    Args:
        file: its path or address.
        records_from: opens the file at the record of the given index; yields (index, place in words, record).
        start: index of the first record.
        stride: distance to the next record.
        retries: how often the file is opened again without a new record, after 1, 2, 4, … seconds.
        remote: whether the file is on the hub, where a broken connection looks like a damaged file.

    Raises:
        UnreadableFile: all tries failed, or the error is one that waiting does not correct.
    """
    tries = 0
    while True:
        try:
            for record in records_from(start):
                start, tries = record[0] + stride, 0
                yield record
            return
        except UserError:
            raise
        except Exception as error:
            if not remote and not isinstance(error, (OSError, *DAMAGE)):
                raise
            if tries == retries or not _may_pass(error, remote):
                raise UnreadableFile(_sentence(file, error, remote, tries)) from error
            pause = _pause(tries)
            tries += 1
            # The standard error is the only way in which a worker can report this at once.
            print(
                f"{file}: cannot be read ({_one_line(error)}), trying again in {pause:g} s ({tries} of {retries})",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)


def longest_wait(retries: int) -> float:
    """Return the seconds after which a file on the hub that never answers is given up, with `retries` retries."""
    growing = range(min(retries, 10))  # every later pause is the longest
    pauses = sum(map(_pause, growing)) + (retries - len(growing)) * LONGEST_PAUSE
    return (retries + 1) * HUB_REQUEST + pauses


def _pause(tries: int) -> float:
    """Return the seconds to wait before the next retry, when `tries` retries have been made."""
    return min(FIRST_PAUSE * 2.0 ** min(tries, 10), LONGEST_PAUSE)


def _may_pass(error: Exception, remote: bool) -> bool:
    """Whether the file may become readable a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if remote:
        return not isinstance(error, FileNotFoundError | PermissionError | OfflineModeIsEnabled)
    # Errors of the system have a number; OSErrors of the decompressors and of Arrow, which mean damage, have none.
    refused = isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError)
    return isinstance(error, OSError) and error.errno is not None and not refused


def _sentence(file: str, error: Exception, remote: bool, retries: int) -> str:
    tries = f" in {retries + 1} tries" if retries else ""
    if remote:
        return (
            f"{file} cannot be read from the hub{tries} ({_one_line(error)}); connect to it, or fetch shards once with "
            f"scripts/fetch_c4.py and give them as data.files with data.source files"
        )
    if isinstance(error, OSError) and error.errno is not None:
        return f"{file} cannot be read{tries} ({error.strerror}); check the path, its permissions and the disk"
    return f"{file} is damaged or cut off ({_one_line(error)}); download or write it again"


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
