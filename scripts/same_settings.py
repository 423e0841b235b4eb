"""Whether a kept result was trained with the settings that are asked for now, read from the command that it records."""

import shlex
from collections.abc import Iterable, Sequence
from fnmatch import filter as matching
from pathlib import Path
from typing import Any

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from scripts.trainings import ROOT, difference

TEXTS = ("files", "validation_files")  # settings of data.* that list files and patterns of files


def require_same(path: Path, method: str, command: str, asked: Sequence[str]) -> None:
    """Compare a result's command with what would be typed for it now.

    Text files and tokenizers are compared by name, since the same ones may lie in another folder, or be listed one by
    one where a pattern was given.

    Args:
        path: the JSON file of the result, for the message.
        method: the method of the result, for the message.
        command: the options of train.py that the result records.
        asked: the options of train.py now.

    Raises:
        UserError: a setting differs, or this version does not know the recorded options.
    """
    now = read_command_line(asked)[0].to_dict()
    try:
        old = read_command_line(shlex.split(command))[0].to_dict()
    except (UserError, ValueError) as error:
        said = f"{path} has a run of {method} whose options are no longer known ({error}); give another --output"
        raise UserError(said) from None
    there = names_beside(file for name in TEXTS for file in now["data"][name] or ())
    other = difference(*({**config, "data": by_name(config["data"], there)} for config in (old, now)))
    if other is not None:
        raise UserError(
            f"{path} has a run of {method} with {other.name} {_shown(other.old)}, but here it is "
            f"{_shown(other.asked)}; give another --output"
        )


def names_beside(files: Iterable[str]) -> set[str]:
    """Return the names of everything in the folders of these files."""
    folders = {(ROOT / file).parent for file in files}
    return {path.name for folder in folders if folder.is_dir() for path in folder.iterdir()}


def by_name(data: dict[str, Any], there: Iterable[str]) -> dict[str, Any]:
    """Return the settings of data.* with names in place of paths, those in `there` in place of a pattern for them."""
    names = {key: [Path(file).name for file in data[key] or ()] for key in TEXTS}
    lists = {key: sorted({one for name in names[key] for one in matching(there, name) or [name]}) for key in TEXTS}
    tokenizer = data["tokenizer"] and Path(data["tokenizer"]).name
    return {**data, **lists, "tokenizer": tokenizer}


def _shown(value: Any) -> str:
    return ",".join(value) if isinstance(value, list) else str(value)
