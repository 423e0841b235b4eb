"""The folder of a run: what it may be continued from, what it records about itself, how it ends."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from salaad.checkpoint import Checkpoints, read_json, write_json
from salaad.cli import TrainOptions, write_config
from salaad.config import RunConfig
from salaad.errors import UserError

# What may change when a run goes on: nothing of this changes what is computed.
_FREE = (
    "train.micro_batch",
    "train.compile",
    "train.gradient_checkpointing",
    "train.log_every",
    "train.eval_every",
    "train.eval_tokens",
    "train.save_every",
    "train.keep_last",
    "train.batch",  # the data goes on at any batch, losing and repeating nothing
    "data.workers",
    "data.max_bad_documents",
    "wandb.mode",
    "wandb.project",
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
        _compare(read_json(checkpoint / "state" / "trainer.json")["config"], config, checkpoint)
        if (folder / "config.yaml").exists() and checkpoint.resolve().parent.parent != folder.resolve():
            raise UserError(f"--output {folder} already holds a run; give a folder that is new")
        return folder, checkpoint
    if not (folder / "config.yaml").exists():
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserError(f"--output {folder} exists and is no run of this program; give a folder that is new")
        return folder, None
    if options.resume == "none":
        raise UserError(f"--output {folder} already holds a run; give another folder, or --resume auto to go on")
    _compare(yaml.safe_load((folder / "config.yaml").read_text()), config, folder)
    return folder, Checkpoints(folder / "checkpoints").latest()


def _compare(old: dict[str, Any], config: RunConfig, place: Path) -> None:
    new = config.to_dict()
    for key in sorted(_flat(old).keys() | _flat(new).keys()):
        before, now = _flat(old).get(key), _flat(new).get(key)
        if before != now and key not in _FREE:
            raise UserError(
                f"{place} was begun with {key} {before}, but {now} is asked for; keep it, or give another --output"
            )


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return flat


def begin(folder: Path, config: RunConfig, corpus_hash: str | None) -> None:
    """Create the folder and its config.yaml."""
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    write_config(config, provenance() | {"corpus": corpus_hash or "not hashed"}, folder / "config.yaml")


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


def diverged(folder: Path, step: int, model: nn.Module, block: str | None = None) -> UserError:
    """Write diagnosis.json for numbers that are not finite, and return the sentence to stop with.

    A block that is not known yet is the first weight that holds NaN or infinity.
    """
    if block is None:
        block = next((name for name, p in model.named_parameters() if not p.isfinite().all()), "none of the weights")
    good = Checkpoints(folder / "checkpoints").latest()
    last = str(good) if good else "none"
    write_json({"step": step, "block": block, "last_good_checkpoint": last}, folder / "diagnosis.json")
    return UserError(
        f"loss or gradient is not finite at step {step} (first in {block}; last good checkpoint: {last}); lower "
        f"optimizer.lr or salaad.rho_constant; see {folder / 'diagnosis.json'}"
    )
