"""Where a model lies on disk: a run, a training checkpoint or any Hugging Face folder, and what is known about it.

`Salaad.save` and `SalaadCallback` write a Hugging Face folder with L and S in a folder `surrogate` of its own.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salaad.common.cache_folder import cache_folder
from salaad.common.errors import UserError
from salaad.common.files import CHECKSUMS, digest_of, is_file, read_object, verify
from salaad.common.locks import keep_from_deletion
from salaad.common.validation import section
from salaad.config.methods import SETTINGS, SalaadConfig
from salaad.config.run import DataConfig
from salaad.model.build import ModelFolder
from salaad.model.weight_headers import is_count
from salaad.runs.checkpoints import Checkpoints

RECORD = "compression.json"


@dataclass(frozen=True)
class ModelOnDisk:
    """A model on disk, opened and checked.

    Args:
        name: what tables call it.
        folder: the Hugging Face folder, compared with its own config.json.
        surrogate: the folder of its L and S, if it was trained with any.
        run: the configuration of the run that trained it, as far as known.
        parameters: of a folder that compress.py made, the paper's count; None of others.
        digest: changes when any of these files does.
        cache: folder for what is derived from it.
        output: folder for the tables made of it, unless the user names another.
    """

    name: str
    folder: ModelFolder
    surrogate: Path | None
    run: dict[str, Any]
    parameters: int | None
    digest: str
    cache: Path
    output: Path

    @property
    def blocks(self) -> SalaadConfig:
        """Which weights the run that trained it takes for blocks; all projections where that is not known."""
        return SalaadConfig(**self.run.get("salaad", {}))

    @classmethod
    def open(cls, path: Path) -> "ModelOnDisk":
        """Find out what `path` is and compare its files with their checksums, where it has any.

        Raises:
            UserError: it is nothing we know, or some file is not what was written.
        """
        if is_file(path / "checkpoints" / "latest"):
            path = _newest_of(Checkpoints(path / "checkpoints"))
        if is_file(path / "model" / "config.json"):
            return _checkpoint(path)
        if is_file(path / "config.json"):
            return _model_folder(path)
        raise UserError(
            f"--checkpoint {path} is no run, no checkpoint and no Hugging Face folder; give one such as "
            "runs/NAME, runs/NAME/checkpoints/step-0001000 or a folder with a config.json"
        )


def _newest_of(checkpoints: Checkpoints) -> Path:
    """The newest checkpoint of a run that may be training: not one that is deleted before it is read."""
    while not keep_from_deletion(newest := checkpoints.latest()):
        pass
    return newest


def _checkpoint(folder: Path) -> ModelOnDisk:
    keep_from_deletion(folder)
    digest = verify(folder, "model/*", "surrogate/*")
    surrogate = folder / "surrogate"
    own = folder.resolve()
    inside = own.parent.name == "checkpoints"  # and not copied out of its run
    run = own.parent.parent
    return ModelOnDisk(
        name=f"{run.name}/{own.name}" if inside else own.name,
        folder=ModelFolder(folder / "model"),
        surrogate=surrogate if is_file(surrogate / "index.json") else None,
        run=_run_of(read_object(folder / "state" / "trainer.json").get("config", {}), folder / "state"),
        parameters=None,
        digest=digest,
        cache=run / "cache" / digest[:16] if inside else cache_folder() / digest[:16],
        output=run / "evaluation" if inside else Path("evaluation") / own.name,
    )


def _model_folder(folder: Path) -> ModelOnDisk:
    entry = read_object(folder / "config.json").get("quantization_config")
    elastic = isinstance(entry, dict) and entry.get("quant_method") == "salaad-elastic"
    surrogate = folder / "surrogate" if is_file(folder / "surrogate" / "index.json") else None
    if not is_file(folder / CHECKSUMS):
        places = [folder] if surrogate is None else [folder, surrogate]
        digest = digest_of(sorted(path for place in places for path in place.iterdir() if is_file(path)))
    elif elastic:
        digest = verify(folder, "config.json") + digest_of([folder / CHECKSUMS])  # a size reads a part of the rest
    else:
        digest = verify(folder, "*.safetensors", "config.json", *(["surrogate/*"] if surrogate else []))
    record = read_object(folder / RECORD) if is_file(folder / RECORD) else {}
    parameters = record.get("parameters")
    if record and not (isinstance(parameters, list) and len(parameters) == 2 and all(map(is_count, parameters))):
        raise UserError(f"{folder / RECORD} does not count the parameters; give a whole copy of the folder")
    run = record.get("run", {})
    if surrogate is not None:  # saved from a training loop that is not ours, of which the settings alone are known
        run = {"salaad": read_object(surrogate / "index.json").get("settings", {})}
    name = folder.resolve().name
    return ModelOnDisk(
        name=name,
        folder=ModelFolder(folder),
        surrogate=surrogate,
        run=_run_of(run, folder / RECORD),
        parameters=parameters[1] if record else None,
        digest=digest,
        cache=cache_folder() / digest[:16],
        output=Path("evaluation") / name,
    )


def _run_of(config: Any, place: Path) -> dict[str, Any]:
    """The configuration of a run, of which later commands take these sections over."""
    if not isinstance(config, dict):
        raise UserError(f"{place} has no configuration of a run in it; give a whole checkpoint")
    for name, kind in {"data": DataConfig, **SETTINGS}.items():
        if name in config:
            section(kind, config[name], place)
    return config
