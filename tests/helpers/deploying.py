"""Functions that call compress.py and evaluate.py as a user does, and read what they write."""

import contextlib
import importlib
import io
import json
import sys
from pathlib import Path

import pytest

from salaad.common.errors import UserError


def run(program: str, *arguments: object) -> tuple[int, str, str]:
    """Return exit code, standard output and error of a program; run in this process, as starting one takes 6 s."""
    out, err, code = io.StringIO(), "", 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [program, *map(str, arguments)])
        try:
            importlib.import_module(program.removesuffix(".py")).main()
        except UserError as error:
            code, err = 2, f"error: {error}"
    return code, out.getvalue(), err


def ok(program: str, *arguments: object) -> str:
    code, out, err = run(program, *arguments)
    assert code == 0, err
    return out


def compress(checkpoint: Path, output: Path | str, *words: object, **options: object) -> str:
    """Return what compress.py prints; `kappa=0.5` stands for `--kappa=0.5`, `elastic=True` for `--elastic`."""
    return ok("compress.py", f"--checkpoint={checkpoint}", f"--output={output}", *words, *_words(options))


def evaluate(command: str, checkpoint: Path, output: Path | str, *words: object, **options: object) -> str:
    """Return what `evaluate.py COMMAND` prints, with options written as for `compress`."""
    return ok("evaluate.py", command, f"--checkpoint={checkpoint}", f"--output={output}", *words, *_words(options))


def _words(options: dict[str, object]) -> list[str]:
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


def refused(program: str, *arguments: object) -> str:
    code, out, err = run(program, *arguments)
    assert (code, out) == (2, "")
    assert "\n" not in err
    return err


def text_options(text_files: dict[str, list[str]], tokenizer: str) -> dict[str, object]:
    """Return options that name a text and a tokenizer, for models that were saved without a run."""
    of = {"data.source": "files", "data.sequence_length": 32, "data.tokenizer": tokenizer}
    return of | {"data.files": text_files["train"][0], "data.validation_files": text_files["validation"][0]}


def rows_of(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / f"{name}.json").read_text())["rows"]
