"""The names of the harness's tasks, read out of its files without importing it: a wrong name is told in a second."""

import difflib
import functools
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from salaad.common.errors import UserError

# A file of the harness defines a task or a group of tasks; the keys of some are in quotation marks.
_NAME = re.compile(rb"""^[ \t]*["']?(?:task|group)["']?:[ \t]*["']?([\w./+:%-]+)""", re.MULTILINE)


@functools.cache
def folders() -> dict[str, Path]:
    """Return task or group → the folder that defines it; a UserError if the harness is not installed."""
    spec = find_spec("lm_eval")
    if spec is None:
        raise UserError("lm-eval is not installed, and nothing else scores tasks; run pip install lm-eval")
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(Path(spec.submodule_search_locations[0]) / "tasks"):
        for name in files:
            if name.endswith(".yaml"):
                path = Path(folder, name)
                found |= dict.fromkeys((match.decode() for match in _NAME.findall(path.read_bytes())), path.parent)
    return found


def require_known(tasks: Sequence[str]) -> None:
    """Raise a UserError for a name that the harness does not have, and suggest the nearest one."""
    known = folders()
    for name in tasks:
        if name not in known:
            [nearest] = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise UserError(
                f"task {name} is none of the harness's {len(known):,} tasks and groups; did you mean {nearest}?"
            )
