"""Where a model lies on disk: a run, a training checkpoint or any Hugging Face folder, and what is known about it."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salaad.checkpoint import Checkpoints
from salaad.errors import UserError
from salaad.files import CHECKSUMS, digest_of, read_json, verify

RECORD = "compression.json"


@dataclass(frozen=True)
class Source:
    """A model on disk.

    Args:
        name: what tables call it.
        model: the Hugging Face folder.
        surrogate: the folder of its L and S, if it was trained with any.
        run: the configuration of the run that trained it, as far as known.
        parameters: of a folder that compress.py made, the paper's count; None of others.
        digest: changes when any of these files does.
        cache: folder for what is derived from it.
        output: folder for the tables made of it, unless the user names another.
    """

    name: str
    model: Path
    surrogate: Path | None
    run: dict[str, Any]
    parameters: int | None
    digest: str
    cache: Path
    output: Path


@functools.cache
def open_source(folder: Path) -> Source:
    """Find out what `folder` is and compare its files with their checksums, where it has any.

    Raises:
        UserError: it is nothing we know, or some file is not what was written.
    """
    if (folder / "checkpoints" / "latest").is_file():
        folder = Checkpoints(folder / "checkpoints").latest()
    if (folder / "model" / "config.json").is_file():
        return _checkpoint(folder)
    if (folder / "config.json").is_file():
        return _model_folder(folder)
    raise UserError(
        f"--checkpoint {folder} is no run, no checkpoint and no Hugging Face folder; give one such as "
        "runs/NAME, runs/NAME/checkpoints/step-0001000 or a folder with a config.json"
    )


def _checkpoint(folder: Path) -> Source:
    digest = verify(folder, "model/*", "surrogate/*")
    surrogate = folder / "surrogate"
    own = folder.resolve()
    inside = own.parent.name == "checkpoints"  # and not copied out of its run
    run = own.parent.parent
    return Source(
        name=f"{run.name}/{own.name}" if inside else own.name,
        model=folder / "model",
        surrogate=surrogate if (surrogate / "index.json").is_file() else None,
        run=read_json(folder / "state" / "trainer.json").get("config", {}),
        parameters=None,
        digest=digest,
        cache=run / "cache" / digest[:16] if inside else _caches() / digest[:16],
        output=run / "evaluation" if inside else Path("evaluation") / own.name,
    )


def _model_folder(folder: Path) -> Source:
    entry = read_json(folder / "config.json").get("quantization_config") or {}
    if (folder / CHECKSUMS).is_file() and entry.get("quant_method") == "salaad-elastic":
        digest = verify(folder, "config.json") + digest_of([folder / CHECKSUMS])  # a size reads a part of the rest
    elif (folder / CHECKSUMS).is_file():
        digest = verify(folder, "*.safetensors", "config.json")
    else:
        digest = digest_of(sorted(filter(Path.is_file, folder.iterdir())))
    record = read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    name = folder.resolve().name
    return Source(
        name=name,
        model=folder,
        surrogate=None,
        run=record.get("run", {}),
        parameters=record["parameters"][1] if record else None,
        digest=digest,
        cache=_caches() / digest[:16],
        output=Path("evaluation") / name,
    )


def _caches() -> Path:
    return Path(os.environ.get("SALAAD_CACHE") or Path.home() / ".cache" / "salaad")
