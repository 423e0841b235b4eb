"""The one exception that is meant for a person: a sentence, exit code 2, no traceback."""

import os
import sys
import traceback
from collections.abc import Callable


class UserError(Exception):
    """Something the user can mend. Its text is one sentence: the value, the limit and the cure."""


def run_command(main: Callable[[], None]) -> None:
    """Run an entry point; a `UserError` becomes its sentence on standard error and exit code 2.

    The process leaves through `os._exit`: with several ranks the others may be waiting in a collective, and the
    launcher stops them as soon as one rank is gone, whereas an orderly shutdown would wait for them.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        _leave(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        _leave(130)
    except Exception:
        traceback.print_exc()
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
