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
DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE}
DISK |= {errno.ENAMETOOLONG}
# Classes by name, since torch may not be imported yet; what else torch's compiler raises is a fault of the program.
_COMPILER = {"BackendCompilerFailed", "TritonMissing", "GPUTooOldForTriton"}


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
            "rate or a weaker pull"
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
    except Exception as error:
        if isinstance(error, UserError) or is_lack_of_memory(error, of_a_file=True):
            raise
        # torch's own message for a pickle with other contents explains how to load it nevertheless.
        unsafe = isinstance(error, UnpicklingError)
        why = "it holds more than tensors" if unsafe else " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path} does not fit this run or is broken ({why}); give a whole checkpoint of it") from None


def is_lack_of_memory(error: Exception, of_a_file: bool = False) -> bool:
    """Return whether an error says that a GPU's or the machine's memory does not suffice.

    With `of_a_file` it was raised while a file was read, which may be broken and claim a size that no machine has.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    # torch raises a RuntimeError for a CPU's memory, and for a GPU's outside of its allocator.
    words = ("out of memory",) if of_a_file else ("out of memory", "allocate memory")
    said = isinstance(error, RuntimeError) and any(one in str(error) for one in words)
    return said or isinstance(error, MemoryError)


def of_the_machine(error: Exception) -> UserError | None:
    """Return the sentence of an error that lies in the machine: memory, disk or compiler; None for others."""
    why = " ".join(str(error).split()) or type(error).__name__
    if is_lack_of_memory(error):
        return UserError(
            f"memory does not suffice ({why}); use a machine with more, or take fewer sequences at once (train.py: "
            "--train.micro_batch, or --train.gradient_checkpointing true; evaluate.py: --batch, of lm-eval "
            "--batch-size; compress.py: --match)"
        )
    names = {one.__name__ for one in type(error).__mro__}
    if "SafetensorError" in names and "I/O error" in why:  # what safetensors makes of an OSError in writing
        return UserError(f"a file cannot be written ({why}); mend that and start again")
    if _COMPILER & names:
        return UserError(f"torch cannot compile the model here ({why}); train with --train.compile false")
    return None


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point; a `UserError` becomes its sentence on standard error and exit code 2.

    So do errors that lie in the machine (`of_the_machine`).

    After an error the process ends by `os._exit`: other ranks may wait in a collective operation, and the launcher
    stops them as soon as one rank has ended, whereas an orderly shutdown would wait for them.
    """
    try:
        main()
    except UserError as error:
        _leave_with(error)
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
        if error.errno not in DISK:
            _leave_after(error)
        place = error.filename or "a file"
        print(
            f"error: {place} cannot be written or read ({error.strerror}); mend that and start again", file=sys.stderr
        )
        leave(2)
    except Exception as error:
        _leave_after(error)


def _leave_after(error: Exception) -> None:
    """End the process: with a sentence if the error lies in the machine, else with its traceback and exit code 1."""
    if told := of_the_machine(error):
        _leave_with(told)
    traceback.print_exc()
    leave(1)


def _leave_with(error: UserError) -> None:
    """Print an error's sentence, here and where the launcher shows it last, and end the process with exit code 2."""
    print(f"error: {error}", file=sys.stderr)
    say_last(f"error: {error}")
    leave(2)


def leave(code: int) -> None:
    """End the process at once with this exit code, after flushing the output."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
