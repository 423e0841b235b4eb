"""Trainings that scripts start: run once, continued if interrupted, and read back from their folders."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from salaad.common.errors import UserError
from salaad.common.files import read_json
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from salaad.runs.summary import origin_of

ROOT = Path(__file__).resolve().parents[1]
# Settings of train.* that change logging, saving or compiling, and what is computed by no more than rounding.
WATCHING = ("compile", "log_every", "eval_every", "save_every", "keep_last", "keep_every")


class Trained(NamedTuple):
    """A training that ended.

    Args:
        about: its options, followed by --train.compile where the run was compiled otherwise; its steps; and the
            versions, commit and machine it began with.
        summary: summary.json; None where the numbers diverged.
    """

    about: dict[str, Any]
    summary: dict[str, Any] | None


def trained(words: Sequence[str], folder: Path, one_core: bool = False) -> Trained:
    """Train with these options of train.py into `folder`, unless it holds the finished run already.

    Args:
        words: options of train.py.
        folder: folder of the run; its parent must exist.
        one_core: compute on one core, whatever the environment says.

    Raises:
        UserError: the training failed or was stopped, or the folder holds one with other settings.
    """
    if not (folder / "summary.json").exists():
        command = [sys.executable, "train.py", *words, "--output", str(folder), "--resume", "auto"]
        environment = os.environ | {"TQDM_DISABLE": "1"} | ({"OMP_NUM_THREADS": "1"} if one_core else {})
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if (folder / "diagnosis.json").exists() and not (folder / "summary.json").exists():
            return Trained({"command": " ".join(words)}, None)
        if done.returncode:
            (folder.parent / f"{folder.name}.log").write_text(done.stderr)
            raise UserError(f"{folder.name} failed: {(done.stderr.strip().splitlines() or ['killed'])[-1]}")
        if not (folder / "summary.json").exists():
            raise UserError(f"{folder.name} was stopped before its last step; the same command goes on with it")
    config, asked = config_of(folder), read_command_line(words)[0].to_dict()
    if not is_of(config, asked):
        raise UserError(f"{folder} was trained with other settings; give another --runs, or delete it")
    compiled = config["train"].get("compile", False)
    otherwise = [f"--train.compile={str(compiled).lower()}"] if compiled != asked["train"]["compile"] else []
    summary = read_json(folder / "summary.json")
    return Trained({"command": " ".join([*words, *otherwise]), "steps": summary["step"], **origin_of(folder)}, summary)


@cache
def _defaults(method: str) -> dict[str, Any]:
    return read_command_line(["--method", method])[0].to_dict()


def config_of(folder: Path) -> dict[str, Any]:
    """All settings of a run."""
    return yaml.safe_load((folder / "config.yaml").read_text())


def is_same(old: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Return what `is_of` returns, for runs whose text and tokenizer may have other paths, as on another machine."""
    texts = dict.fromkeys(("files", "validation_files", "tokenizer"))
    return is_of(*({**config, "data": config["data"] | texts} for config in (old, asked)))


def is_of(old: dict[str, Any], asked: dict[str, Any]) -> bool:
    """Return whether a run with the settings `old` began with the settings `asked`.

    Settings that its version did not know have their defaults; those of other methods do not count, and neither do
    those in `WATCHING`, which change what is computed by no more than rounding.
    """
    defaults = _defaults(asked["method"])
    counted = [key for key in asked if key not in SETTINGS or key == asked["method"]]
    known = {key: {**defaults[key], **old.get(key, {})} for key in counted if isinstance(defaults[key], dict)}
    known["train"] |= {name: asked["train"][name] for name in WATCHING}
    return all(known.get(key, old.get(key)) == asked[key] for key in counted)
