"""Errors that a user can correct, as one sentence, and the end of a command: its exit code and what it prints."""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError

from salaad.common.launcher import say_last

_LONGEST = 1000  # characters of a sentence

# Errors of a disk or of its permissions, which are no faults of this program.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE}


class UserError(Exception):
    """An error that the user can correct. Its text is one sentence with the value, the limit and the cure.

    Values may come from files of unknown origin: line breaks and control characters become spaces, and the middle of a
    very long sentence is left out.
    """

    def __init__(self, sentence: str) -> None:
        shown = "".join(c if c.isprintable() else " " for c in sentence)
        half = _LONGEST // 2
        super().__init__(shown if len(shown) <= _LONGEST else f"{shown[:half]} … {shown[-half:]}")


class NotFiniteError(UserError):
    """The error of a weight or surrogate that holds NaN or infinity; `block` is its name."""

    def __init__(self, block: str, step: int) -> None:
        super().__init__(
            f"block {block} is not finite at step {step}; go on from the last good checkpoint with a lower learning "
            "rate or rho_constant"
        )
        self.block = block


class NotSavedError(Exception):
    """The error of a checkpoint that could not be written; its text says why. The previous checkpoint is untouched."""


class Stopped(BaseException):
    """The exception raised after a request to stop; a BaseException, so that no `except Exception` catches it."""


@contextmanager
def in_a_sentence(path: Path) -> Iterator[Path]:
    """Context manager that turns an error in reading a file of tensors into a UserError.

    A pickle is read with `weights_only`, which builds only tensors and plain values. Other contents, missing entries
    and entries that do not fit the run raise too many kinds of exceptions to list.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sentence says what is wrong with the file
            yield path
    except (UserError, MemoryError):
        raise
    except Exception as error:
        # torch's own message for a pickle with other contents explains how to load it nevertheless.
        unsafe = isinstance(error, UnpicklingError)
        why = "it holds more than tensors" if unsafe else " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path} does not fit this run or is broken ({why}); give a whole checkpoint of it") from None


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point; a `UserError` becomes its sentence on standard error and exit code 2.

    After an error the process ends by `os._exit`: other ranks may wait in a collective operation, and the launcher
    stops them as soon as one rank has ended, whereas an orderly shutdown would wait for them.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        say_last(f"error: {error}")
        leave(2)
    except Stopped:
        print("stopped before the first step of this start; the same command goes on", file=sys.stderr)
        leave(0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        leave(130)
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else flushing raises it again
        leave(0)
    except OSError as error:
        if error.errno not in _DISK:
            traceback.print_exc()
            leave(1)
        place = error.filename or "a file"
        print(
            f"error: {place} cannot be written or read ({error.strerror}); mend that and start again", file=sys.stderr
        )
        leave(2)
    except Exception:
        traceback.print_exc()
        leave(1)


def leave(code: int) -> None:
    """End the process at once with this exit code, after flushing the output."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
