"""The one exception that is meant for a person: a sentence, exit code 2, no traceback."""

import errno
import os
import sys
import traceback
from collections.abc import Callable

_LONGEST = 1000  # characters of a sentence

# What a disk can have, of which no line of ours is the cause.
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.ESTALE}


class UserError(Exception):
    """Something the user can mend. Its text is one sentence: the value, the limit and the cure.

    Values come from files that anybody may have written: line breaks and the commands of a terminal become spaces, and
    of a value without end the middle is left out.
    """

    def __init__(self, sentence: str) -> None:
        shown = "".join(c if c.isprintable() else " " for c in sentence)
        half = _LONGEST // 2
        super().__init__(shown if len(shown) <= _LONGEST else f"{shown[:half]} … {shown[-half:]}")


class NotFiniteError(UserError):
    """A weight or a surrogate holds NaN or infinity; `block` names it."""

    def __init__(self, block: str, step: int) -> None:
        super().__init__(
            f"block {block} is not finite at step {step}; go on from the last good checkpoint with a lower learning "
            "rate or rho_constant"
        )
        self.block = block


class Stopped(BaseException):
    """A stop was asked for; no error, so that nothing on the way takes it for one."""


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point; a `UserError` becomes its sentence on standard error and exit code 2.

    The process leaves through `os._exit`: with several ranks the others may be waiting in a collective, and the
    launcher stops them as soon as one rank is gone, whereas an orderly shutdown would wait for them.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        leave(2)
    except Stopped:
        print("stopped before the first step of this start; the same command goes on", file=sys.stderr)
        leave(0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        leave(130)
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
    """End the process here and now, with everything printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
