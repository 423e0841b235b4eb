"""Checkpoints that appear whole or not at all, and surrogate files that any world size can open.

checkpoints/step-0001000/model/       a standard Hugging Face folder with its tokenizer
checkpoints/step-0001000/surrogate/   a safetensors shard per rank, and index.json: which block lies where
checkpoints/step-0001000/state/       optimizer, schedule, random generators, data position, records
checkpoints/step-0001000/checksums.json   SHA-256 of every file above
checkpoints/latest                    the name of the newest complete one
"""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from salaad import sharding
from salaad.errors import UserError
from salaad.files import read_json, write_checksums, write_json
from salaad.surrogate import Surrogate, target_of

FORMAT, OLD_FORMAT = 2, 1  # the old one had L in place of T


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the run's `checkpoints/`.
        keep_last: how many of the newest stay; 0 keeps all.
    """

    folder: Path
    keep_last: int = 0

    def latest(self) -> Path | None:
        """The newest complete checkpoint, if there is one."""
        pointer = self.folder / "latest"
        if not pointer.is_file():
            return None
        path = self.folder / pointer.read_text().strip()
        replaced = self.folder / f".replaced-{path.name}"
        if not path.exists() and replaced.exists():  # killed between the two renames of `save`
            replaced.replace(path)
        if not (path / "state" / "trainer.json").is_file():
            raise UserError(f"{pointer} names {path.name}, which is not there; write the name of a whole one into it")
        return path

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let every rank `write` into a hidden folder, then give it its name in one step; collective."""
        final = self.folder / f"step-{step:07d}"
        partial = self.folder / f".partial-{final.name}"
        if sharding.rank() == 0:
            for leftover in (*self.folder.glob(".partial-*"), *self.folder.glob(".replaced-*")):
                shutil.rmtree(leftover)
            for part in ("model", "surrogate", "state"):
                (partial / part).mkdir(parents=True)
        sharding.barrier()
        write(partial)
        sharding.barrier()
        if sharding.rank() == 0:
            write_checksums(partial)
            for path in (*partial.rglob("*"), partial):
                _flush(path)
            replaced = self.folder / f".replaced-{final.name}"
            if final.exists():  # written by an earlier life of this run that was resumed from before it
                final.replace(replaced)
            partial.replace(final)
            shutil.rmtree(replaced, ignore_errors=True)
            self.point_to(final)
            self._delete_old(final)
        sharding.barrier()
        return final

    def point_to(self, checkpoint: Path) -> None:
        """Make `latest` name this checkpoint: by its name in this folder, or by its path from elsewhere."""
        inside = checkpoint.resolve().parent == self.folder.resolve()
        pointer = self.folder / "latest.partial"
        pointer.write_text(f"{checkpoint.name if inside else checkpoint.resolve()}\n")
        _flush(pointer)
        pointer.replace(self.folder / "latest")
        _flush(self.folder)

    def _delete_old(self, newest: Path) -> None:
        older = sorted(path for path in self.folder.glob("step-*") if path != newest)
        if self.keep_last:
            for path in older[: max(0, len(older) - self.keep_last + 1)]:
                shutil.rmtree(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_surrogates(surrogates: Mapping[str, Surrogate], folder: Path) -> None:
    """Write this rank's surrogates as one shard, and on rank 0 the index of all shards; collective."""
    shard = f"shard-{sharding.rank():05d}-of-{sharding.world_size():05d}.safetensors"
    tensors = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, surrogate in surrogates.items()
        for key, value in surrogate.state_dict().items()
    }
    if tensors:
        save_file(tensors, folder / shard)
    entries = {
        name: {"file": shard, "shape": list(s.T.shape), "rho": s.rho, "rank": s.rank, "nnz": s.nnz}
        for name, s in surrogates.items()
    }
    index = {name: entry for part in sharding.gather(entries) for name, entry in part.items()}
    if sharding.rank() == 0 and index:
        write_json({"format": FORMAT, "blocks": index}, folder / "index.json")


def load_surrogates(surrogates: Mapping[str, Surrogate], folder: Path) -> None:
    """Fill this rank's surrogates from the shards of any world size."""
    for name, state in read_surrogates(folder, tuple(surrogates)).items():
        surrogates[name].load_state_dict(state)


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """Block → file, shape, ρ, rank and entries, of the surrogates in `folder`.

    Raises:
        UserError: there is no index, or it is of another format.
    """
    index = read_json(folder / "index.json")
    if index.get("format") not in (FORMAT, OLD_FORMAT):
        raise UserError(
            f"{folder} has format {index.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    return index["blocks"]


def read_surrogates(folder: Path, names: tuple[str, ...] | None = None) -> dict[str, dict[str, Tensor]]:
    """Block → the tensors of `Surrogate.state_dict`, for the named blocks or for all.

    Raises:
        UserError: the folder has no index, is of another format, or lacks a block.
    """
    blocks = read_index(folder)
    states: dict[str, dict[str, Tensor]] = {}
    for name in blocks if names is None else names:
        if name not in blocks:
            raise UserError(f"{folder} holds no block {name}; give the salaad.roles of the run that wrote it")
        with safe_open(folder / blocks[name]["file"], framework="pt") as shard:
            present = set(shard.keys())
            keys = ("target", "low_rank", "residual", "sigma", "thresholds", "basis")
            state = {key: shard.get_tensor(f"{name}/{key}") for key in keys if f"{name}/{key}" in present}
        if "low_rank" in state:
            state["target"] = target_of(state.pop("low_rank"), state["residual"], state["thresholds"][2])
        states[name] = state
    return states
