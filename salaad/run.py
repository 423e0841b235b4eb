"""The folder of a run: what it may be continued from, what it records about itself, how it ends."""

import platform
import subprocess
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml

from salaad import sharding
from salaad.checkpoint import Checkpoints
from salaad.cli import TrainOptions, write_config
from salaad.config import DataConfig, RunConfig
from salaad.errors import UserError
from salaad.files import read_json, write_json
from salaad.metrics import RECORDS

# What may change when a run goes on without changing what is computed; and the batch, since the data goes on at any
# size of it, losing and repeating nothing.
_FREE = (
    "train.batch",
    "train.micro_batch",
    "train.compile",
    "train.gradient_checkpointing",
    "train.log_every",
    "train.eval_every",
    "train.eval_tokens",
    "train.save_every",
    "train.keep_last",
    "data.workers",
    "data.max_bad_documents",
    "wandb.mode",
    "wandb.project",
)


# What a new folder may try differently from a checkpoint on, such as after a run that diverged.
_TUNABLE = (
    tuple(f"optimizer.{name}" for name in ("lr", "warmup", "final_lr", "clip"))
    + tuple(f"salaad.{name}" for name in ("rank_ratio", "density", "every", "inner", "delta_alpha", "delta_beta"))
    + ("salaad.rho_constant", "salaad.rho", "train.steps")
)


def open_run(config: RunConfig, options: TrainOptions) -> tuple[Path, Path | None]:
    """The run's folder and the checkpoint to go on from, if any. Writes nothing.

    Raises:
        UserError: the folder belongs to a run of another configuration, or --resume does not fit what is there.
    """
    folder = Path(options.output)
    if options.resume not in ("auto", "none"):
        checkpoint = Path(options.resume)
        if not (checkpoint / "state" / "trainer.json").is_file():
            raise UserError(
                f"--resume {checkpoint} is no checkpoint; give a folder such as RUN/checkpoints/step-0001000"
            )
        own = checkpoint.resolve().parent.parent == folder.resolve()
        _compare(
            read_json(checkpoint / "state" / "trainer.json")["config"], config, checkpoint, () if own else _TUNABLE
        )
        if _begun(folder) and not own:
            raise UserError(f"--output {folder} already holds a run; give a folder that is new")
        return folder, checkpoint
    if not _begun(folder):
        ours = {"config.yaml", "checkpoints", "diagnosis.json", "wandb", "wandb_id", *RECORDS}
        if folder.exists() and (not folder.is_dir() or any(path.name not in ours for path in folder.iterdir())):
            raise UserError(f"--output {folder} exists and is no run of this program; give a folder that is new")
        return folder, None
    if options.resume == "none":
        raise UserError(f"--output {folder} already holds a run; give another folder, or --resume auto to go on")
    try:
        begun_with = yaml.safe_load((folder / "config.yaml").read_text())
    except (OSError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"--output {folder} holds a run without a readable config.yaml ({why}); give another") from None
    _compare(begun_with, config, folder)
    return folder, Checkpoints(folder / "checkpoints").latest()


def _begun(folder: Path) -> bool:
    """Whether a run took a step here; one that ended before leaves nothing to go on from or to lose."""
    checkpoints = Checkpoints(folder / "checkpoints")
    metrics = folder / "metrics.jsonl"
    return checkpoints.latest() is not None or (metrics.exists() and metrics.stat().st_size > 0)


def _compare(old: dict[str, Any], config: RunConfig, place: Path, tunable: tuple[str, ...] = ()) -> None:
    new = config.to_dict()
    for key in sorted(_flat(old).keys() | _flat(new).keys()):
        before, now = _flat(old).get(key), _flat(new).get(key)
        if before != now and key not in (*_FREE, *tunable):
            raise UserError(
                f"{place} was begun with {key} {before}, but {now} is asked for; keep it, or give another --output"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def begin(folder: Path, config: RunConfig, corpus_hash: str | None, checkpoint: Path | None) -> None:
    """Create the folder and its config.yaml, in which every life of the run leaves its versions and commit.

    A checkpoint to go on from becomes the newest of the folder, so that a later --resume auto finds the same way.
    """
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    life = provenance() | {"corpus": corpus_hash or "not hashed", "begun from": str(checkpoint or "random weights")}
    path = folder / "config.yaml"
    earlier = (
        [line for line in path.read_text().splitlines() if line.startswith("#")] if checkpoint and path.exists() else []
    )
    write_config(config, [*earlier, *(f"# {key}: {value}" for key, value in life.items())], path)
    if checkpoint:
        Checkpoints(folder / "checkpoints").point_to(checkpoint)


def with_own_tokenizer(config: RunConfig) -> DataConfig:
    """The data settings, in which a run from `model.path` without a tokenizer of its own takes the model's.

    Raises:
        UserError: the model's folder has none.
    """
    if config.model.path is None or config.data.tokenizer is not None:
        return config.data
    if not any((Path(config.model.path) / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise UserError(f"model.path {config.model.path} holds no tokenizer; name the model's own with data.tokenizer")
    return replace(config.data, tokenizer=config.model.path)


def require_shared_storage(folder: Path) -> None:
    """Compare what every rank sees in the run's folder; collective.

    Raises:
        UserError: some machine does not see what the first one wrote.
    """
    latest = folder / "checkpoints" / "latest"
    seen = sharding.gather(((folder / "config.yaml").exists(), latest.exists() and latest.read_text()))
    if any(view != seen[0] for view in seen):
        raise UserError(f"--output {folder} is not the same folder on every machine; give one on storage they share")


def provenance() -> dict[str, str]:
    """Versions, commit and machine that produced a result."""
    packages = ("salaad", "torch", "transformers", "datasets", "accelerate")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages)
        + f", python {platform.python_version()}",
        "commit": _commit(),
        "machine": f"{device}, {torch.get_num_threads()} threads, {platform.system()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "from source"


def _commit() -> str:
    root = Path(__file__).resolve().parent.parent
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def diverged(folder: Path, step: int, block: str) -> UserError:
    """Write diagnosis.json for numbers that are not finite, and return the sentence to stop with."""
    good = Checkpoints(folder / "checkpoints").latest()
    last = str(good) if good else "none"
    write_json({"step": step, "block": block, "last_good_checkpoint": last}, folder / "diagnosis.json")
    return UserError(
        f"a number is not finite at step {step}, first in {block}; go on with --resume {last} --output NEW and a lower "
        f"--optimizer.lr or --salaad.rho_constant; see {folder / 'diagnosis.json'}"
    )
