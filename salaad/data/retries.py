"""Reading on after an interruption: a file that cannot be read for a moment is tried again, behind the last record.

Networks, mounts and hubs fail for minutes and come back; damage and refusals do not, so nobody waits for those. What
huggingface_hub does by itself comes first: it gives a request of the hub six tries of at most 10 s of silence each.
"""

import sys
import time
import zlib
from collections.abc import Callable, Iterator
from lzma import LZMAError

import pyarrow
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from salaad.common.errors import UserError

FIRST_PAUSE = 1.0  # seconds before the first new try; every further pause is twice as long
LONGEST_PAUSE = 30.0
DAMAGE = (EOFError, zlib.error, LZMAError, pyarrow.ArrowInvalid)


class UnreadableFile(UserError):
    """A file that vanished, is damaged, or could not be read however often it was tried."""


def read_patiently(
    file: str,
    records_from: Callable[[int], Iterator[tuple[int, str, object]]],
    *,
    start: int,
    stride: int,
    retries: int,
    remote: bool,
) -> Iterator[tuple[int, str, object]]:
    """The records of a file, each once, however often reading breaks off in between.

    Args:
        file: its path or address.
        records_from: opens it at the record of an index; yields (index, place for a person, record).
        start: index of the first record.
        stride: distance to the next one.
        retries: how often it is opened again without a new record, after 1, 2, 4, … seconds.
        remote: whether the file lies on the hub, where a broken connection looks like a damaged file.

    Raises:
        UnreadableFile: it stays unreadable, or is so in a way that waiting does not mend.
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
            pause = min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE)
            tries += 1
            # A worker has no other way to say it at once than the standard error that it shares with the trainer.
            print(
                f"{file}: cannot be read ({_one_line(error)}), trying again in {pause:g} s ({tries} of {retries})",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(pause)


def _may_pass(error: Exception, remote: bool) -> bool:
    """Whether the same file may be readable a little later."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    if remote:
        return not isinstance(error, FileNotFoundError | PermissionError | OfflineModeIsEnabled)
    # The system gives its errors a number; the decompressors' and Arrow's own OSErrors, which mean damage, have none.
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
