"""Trainings that scripts start: run once, continued if interrupted, and read back from their folders."""

import os
import shlex
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
        about: its options, followed by --train.compile where the run was compiled otherwise; its steps, unless the
            numbers diverged; and the versions, commit and machine it began with.
        summary: summary.json; None where the numbers diverged.
    """

    about: dict[str, Any]
    summary: dict[str, Any] | None


class Difference(NamedTuple):
    """A setting that differs: its name, its value in a run, and the one that is asked for."""

    name: str
    old: Any
    asked: Any


class DivergedError(UserError):
    """The error of a training that ended because a number was not finite."""


def train_to_the_end(
    command: Sequence[str], folder: Path, threads: int | None = None, launcher: Sequence[str] = (sys.executable,)
) -> None:
    """Start a training, or go on with it, and wait until it has taken its last step.

    What a failed training wrote to standard error is kept beside its folder, in NAME.log.

    Args:
        command: train.py and its options, with `folder` as --output.
        folder: folder of the run.
        threads: threads of every process; as the environment says unless given.
        launcher: what is typed before train.py.

    Raises:
        UserError: the training diverged (`DivergedError`), failed, or ended before its last step.
    """
    diagnosis = folder / "diagnosis.json"
    earlier = _version(diagnosis)  # train.py leaves an earlier start's where it refuses to start
    environment = os.environ | {"TQDM_DISABLE": "1"} | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
    done = subprocess.run([*launcher, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        log = folder.with_name(f"{folder.name}.log")
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stderr)
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        kind = DivergedError if _version(diagnosis) not in (None, earlier) else UserError
        raise kind(f"{folder.name} failed: {said}; all that it said is in {log}")
    if not (folder / "summary.json").exists():
        own = launcher != (sys.executable,)
        waiting = "; a launcher has to wait for the end of a training, as sbatch --wait does" if own else ""
        raise UserError(f"{folder.name} ended before its last step; the same command goes on with it{waiting}")


def _version(path: Path) -> tuple[int, int] | None:
    """Return what tells a file from one that replaced it; None where there is no file."""
    try:
        return path.stat().st_ino, path.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def trained(words: Sequence[str], folder: Path, one_core: bool = False) -> Trained:
    """Train with these options of train.py into `folder`, unless it holds the finished run already.

    Args:
        words: options of train.py.
        folder: folder of the run.
        one_core: compute on one core, whatever the environment says.

    Raises:
        UserError: the training failed or was stopped, or the folder holds one with other settings.
    """
    if not (folder / "summary.json").exists():
        try:
            train_to_the_end(["train.py", *words, "--output", str(folder)], folder, threads=1 if one_core else None)
        except DivergedError:
            return Trained({"command": shlex.join(words), **origin_of(folder)}, None)
    config, asked = config_of(folder), read_command_line(words)[0].to_dict()
    if not is_of(config, asked):
        raise UserError(f"{folder} was trained with other settings; give another --runs, or delete it")
    compiled = config["train"].get("compile", False)
    otherwise = [f"--train.compile={str(compiled).lower()}"] if compiled != asked["train"]["compile"] else []
    summary = read_json(folder / "summary.json")
    command = shlex.join([*words, *otherwise])
    return Trained({"command": command, "steps": summary["step"], **origin_of(folder)}, summary)


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
    """Return whether a run with the settings `old` began with the settings `asked`, but for what does not count."""
    return difference(old, asked) is None


def difference(old: dict[str, Any], asked: dict[str, Any]) -> Difference | None:
    """Return the first setting in which a run with the settings `old` differs from `asked`; None if there is none.

    Settings that its version did not know have their defaults; those of other methods do not count, and neither do
    those in `WATCHING`, which change what is computed by no more than rounding.
    """
    defaults = _defaults(asked["method"])
    counted = [key for key in asked if key not in SETTINGS or key == asked["method"]]
    known = {key: {**defaults[key], **old.get(key, {})} for key in counted if isinstance(defaults[key], dict)}
    known["train"] |= {name: asked["train"][name] for name in WATCHING}
    was, now = (_by_full_name({key: config.get(key) for key in counted}) for config in (old | known, asked))
    for name in was | now:
        if (name in was, was.get(name)) != (name in now, now.get(name)):
            return Difference(name, was.get(name), now.get(name))
    return None


def _by_full_name(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return name → value of all settings, such as train.steps."""
    sections = {key: value if isinstance(value, dict) else {"": value} for key, value in config.items()}
    return {f"{key}.{name}".rstrip("."): value for key, of in sections.items() for name, value in of.items()}
