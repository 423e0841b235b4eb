"""Where a model lies on disk: a run, a training checkpoint or any Hugging Face folder, and what is known about it.

`Salaad.save` and `SalaadCallback` write a Hugging Face folder with L and S in its subfolder `surrogate`.
"""

import filecmp
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from salaad.common.cache_folder import cache_folder
from salaad.common.errors import UserError
from salaad.common.files import CHECKSUMS, at_home, digest_of, is_file, read_object, verify
from salaad.common.locks import keep_from_deletion
from salaad.common.validation import section
from salaad.config.methods import SETTINGS, SalaadConfig
from salaad.config.run import DataConfig
from salaad.model.build import ModelFolder
from salaad.model.folder_formats import is_any_size, is_fixed_size
from salaad.model.folders import is_cached, is_hub_name, local_folder
from salaad.model.parameters import count_parameters
from salaad.model.second_moments import SECOND_MOMENTS
from salaad.model.weight_headers import check_block, check_entry, is_count
from salaad.runs.checkpoints import TRAINED, Checkpoints

RECORD = "compression.json"
_CHANGED = f", or delete {CHECKSUMS} and {RECORD} in it if you changed it yourself"  # what they say holds no more


@dataclass(frozen=True)
class ModelOnDisk:
    """A model on disk, opened and checked.

    Args:
        name: the name of the model in tables.
        folder: the Hugging Face folder, whose files were compared with its config.json.
        surrogate: the folder of the model's L and S, if it was trained with any.
        weights: file of the weights as they were trained, where the method trains other weights than the folder's.
        second_moments: file of the mean squared gradients of the training, if it left any.
        is_checkpoint: whether this is a checkpoint of train.py, so that `run` says how all of the model was trained.
        run: the configuration of the run that trained the model, as far as known.
        parameters: the paper's count for a compressed folder or one with blocks as U·V + S; None for others.
        base: name on the hub of the model that this is or was made from, as far as known.
        digest: digest of the model's files, which changes when any of them does.
        cache: folder for results that are derived from the model.
        output: folder for the tables made from the model, unless the user names another.
    """

    name: str
    folder: ModelFolder
    surrogate: Path | None
    weights: Path | None
    second_moments: Path | None
    is_checkpoint: bool
    run: dict[str, Any]
    parameters: int | None
    base: str | None
    digest: str
    cache: Path
    output: Path

    @property
    def blocks(self) -> SalaadConfig:
        """Settings of the run that trained the model, which say what its blocks are; by default all projections."""
        return SalaadConfig(**self.run.get("salaad", {}))

    @classmethod
    def open(cls, path: Path, option: str = "--checkpoint") -> "ModelOnDisk":
        """Return the model at `path`, after finding out what that is and comparing its files with any checksums.

        Args:
            path: a run, a checkpoint, a Hugging Face folder, the output folder of a Trainer, whose newest checkpoint is
                taken if that has L and S or the folder itself no model, and in its place the best one if that is the
                folder's own model, or the name of a model on the hub.
            option: the option by which the user gave `path`, for error messages.

        Raises:
            UserError: `path` is none of these, or some file is not as it was written.
        """
        path = at_home(str(path))
        if is_hub_name(str(path)):
            return _model_folder(local_folder(str(path), option), str(path))
        if is_file(path / "checkpoints" / "latest"):
            path = _newest_of(Checkpoints(path / "checkpoints"))
        if is_file(path / "model" / "config.json"):
            return _checkpoint(path)
        if (newest := _newest_of_trainer(path)) and not _is_whole(path, newest):
            return _model_folder(_best_of_trainer(path, newest))
        if is_file(path / "config.json"):
            return _model_folder(path)
        if (path / "checkpoints").is_dir() and is_file(path / "config.yaml"):
            raise UserError(f"{option} {path} is a run without a checkpoint yet; wait for its first, or give another")
        raise UserError(
            f"{option} {path} is no run, no checkpoint and no Hugging Face folder; give one such as "
            "runs/NAME, runs/NAME/checkpoints/step-0001000 or a folder with a config.json"
        )


def _newest_of(checkpoints: Checkpoints) -> Path:
    """Return the newest checkpoint of a run that may be training, protected from deletion while it is read."""
    while not keep_from_deletion(newest := checkpoints.latest()):
        pass
    return newest


def _newest_of_trainer(path: Path) -> Path | None:
    """The newest checkpoint in the output folder of a Trainer of transformers, of those with L and S if there are any.

    A checkpoint without them beside others with them is one whose saving was cut off.
    """
    found = [place for place in path.glob("checkpoint-*") if is_file(place / "config.json")]
    numbered = [place for place in found if place.name.removeprefix("checkpoint-").isdigit()]
    return max(
        numbered, key=lambda place: (_has_surrogate(place), int(place.name.removeprefix("checkpoint-"))), default=None
    )


def _best_of_trainer(path: Path, newest: Path) -> Path:
    """Return the checkpoint that a Trainer found best if its output folder has the same weights, else the `newest`.

    They are the same after a training with `load_best_model_at_end` and `Trainer.save_model`.
    """
    weights, state = [file.name for file in path.glob("*.safetensors")], {}
    with suppress(UserError):  # a long log or a damaged one, of which nothing else is read
        state = read_object(newest / "trainer_state.json") if weights else {}
    best = path / Path(str(state.get("best_model_checkpoint"))).name
    if best == newest or not _has_surrogate(best):
        return newest
    same, _, _ = filecmp.cmpfiles(path, best, weights, shallow=False)
    return best if len(same) == len(weights) else newest


def _is_whole(path: Path, newest: Path) -> bool:
    """Whether the output folder of a Trainer holds a model itself, and L and S if its `newest` checkpoint has them.

    `Trainer.save_model` writes the weights alone there.
    """
    alone = _has_surrogate(newest) and not (_has_surrogate(path) or is_file(path / RECORD))
    return is_file(path / "config.json") and not alone


def _has_surrogate(folder: Path) -> bool:
    return is_file(folder / "surrogate" / "index.json")


def _checkpoint(folder: Path) -> ModelOnDisk:
    keep_from_deletion(folder)
    moments = folder / "state" / SECOND_MOMENTS
    digest = verify(folder, "model/*", "surrogate/*", TRAINED, f"state/{SECOND_MOMENTS}")
    surrogate, model = folder / "surrogate", ModelFolder(folder / "model")
    config = _run_of(read_object(folder / "state" / "trainer.json").get("config", {}), folder / "state")
    own = folder.resolve()
    inside = own.parent.name == "checkpoints"  # and not copied out of its run
    run = own.parent.parent
    return ModelOnDisk(
        name=f"{run.name}/{own.name}" if inside else own.name,
        folder=model,
        surrogate=surrogate if is_file(surrogate / "index.json") else None,
        weights=folder / TRAINED if is_file(folder / TRAINED) else None,
        second_moments=moments if is_file(moments) else None,
        is_checkpoint=True,
        run=config,
        parameters=_parameters_in_parts(model),
        base=_base_of(config),
        digest=digest,
        cache=run / "cache" / digest[:16] if inside else cache_folder() / digest[:16],
        output=run / "evaluation" if inside else Path("evaluation") / own.name,
    )


def _model_folder(folder: Path, hub_name: str | None = None) -> ModelOnDisk:
    """Open a Hugging Face folder; `hub_name` is the name of the model on the hub, if it came from there."""
    entry = read_object(folder / "config.json").get("quantization_config")
    elastic = is_any_size(entry)
    surrogate = folder / "surrogate" if is_file(folder / "surrogate" / "index.json") else None
    moments = folder / "surrogate" / SECOND_MOMENTS
    if not is_file(folder / CHECKSUMS):
        # All that is opened as a model, and not what a Trainer keeps to resume, such as optimizer.pt.
        kinds = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "surrogate/*")
        found = {path for kind in kinds for path in folder.glob(kind) if is_file(path)}
        digest = digest_of(sorted(found - {folder / "trainer_state.json"}))
    elif elastic:
        verify(folder, "config.json", or_else=_CHANGED)  # this file alone, as opening a size reads a part of the others
        digest = digest_of([folder / CHECKSUMS])
    else:
        parts = ("*.safetensors", "config.json", *(["surrogate/*"] if surrogate else []))
        digest = verify(folder, *parts, or_else=_CHANGED)
    record = read_object(folder / RECORD) if is_file(folder / RECORD) else {}
    parameters = record.get("parameters")
    if record and not (isinstance(parameters, list) and len(parameters) == 2 and all(map(is_count, parameters))):
        raise UserError(f"{folder / RECORD} does not count the parameters; give a whole copy of the folder")
    run = record.get("run", {})
    if surrogate is not None:  # saved from a training loop that is not ours, of which the settings alone are known
        run = {"salaad": read_object(surrogate / "index.json").get("settings", {})}
    base, name = record.get("base"), hub_name or folder.resolve().name
    run, model = _run_of(run, folder / RECORD), ModelFolder(folder)
    return ModelOnDisk(
        name=name,
        folder=model,
        surrogate=surrogate,
        weights=None,
        second_moments=None if surrogate is None or not is_file(moments) else moments,
        is_checkpoint=False,
        run=run,
        parameters=parameters[1] if record else _parameters_in_parts(model),
        base=hub_name or (base if isinstance(base, str) else _base_of(run)),
        digest=digest,
        cache=cache_folder() / digest[:16],
        output=Path("evaluation") / name,
    )


def _parameters_in_parts(folder: ModelFolder) -> int | None:
    """Return the paper's count of parameters of a folder with blocks as U·V + S; None for other folders.

    `save_pretrained` may have written the folder, so that it has no compression.json.
    """
    entry = getattr(folder.config, "quantization_config", None) or {}
    if not is_fixed_size(entry):
        return None
    if is_count(entry.get("parameters")):
        return entry["parameters"]
    count = count_parameters(folder.outline)  # an earlier version did not write it
    for name, (rank, nnz) in check_entry(entry.get("blocks"), 2).items():
        n, m = check_block(folder.outline, name, rank, nnz)
        count += rank * (n + m) + nnz - n * m
    return count


def _base_of(run: dict[str, Any]) -> str | None:
    """Return the name of the hub's model that a run began with; None if there was none or it is not in the cache."""
    model = run.get("model")
    path = model.get("path") if isinstance(model, dict) else None
    return path if isinstance(path, str) and is_cached(path) else None


def _run_of(config: Any, place: Path) -> dict[str, Any]:
    """Return the configuration of a run, after checking the sections that later commands take over from it."""
    if not isinstance(config, dict):
        raise UserError(f"{place} has no configuration of a run in it; give a whole checkpoint")
    for name, kind in {"data": DataConfig, **SETTINGS}.items():
        if name in config:
            section(kind, config[name], place)
    return config
