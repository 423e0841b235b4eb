"""Checkpoints that appear whole or not at all, and surrogate files that any world size can open.

checkpoints/step-0001000/model/       a standard Hugging Face folder with its tokenizer
checkpoints/step-0001000/surrogate/   a safetensors shard per rank, and index.json: which block lies where
checkpoints/step-0001000/state/       optimizer, schedule, random generators, data position, records
checkpoints/step-0001000/checksums.json   SHA-256 of every file above
checkpoints/latest                    the name of the newest complete one
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.common.files import inside, read_object, verify, write_checksums, write_json
from salaad.common.locks import delete_unless_kept
from salaad.methods.salaad.surrogate import Surrogate, target_of
from salaad.model.weight_headers import FLOATS, is_count

FORMAT, OLD_FORMAT = 2, 1  # the old one had L in place of T
NAME = re.compile(r"step-\d{7,}")


class NotSavedError(Exception):
    """A checkpoint could not be written; the text says why. The one before is untouched."""


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the run's `checkpoints/`.
        keep_last: how many of the newest stay; 0 keeps all.
        keep_every: those at multiples of so many steps always stay; 0 names none.
    """

    folder: Path
    keep_last: int = 0
    keep_every: int = 0

    def latest(self) -> Path | None:
        """The newest complete checkpoint, if there is one; changes nothing, for whoever looks in beside a training."""
        pointer = self.folder / "latest"
        if not pointer.is_file():
            return None
        name = pointer.read_text(errors="replace").strip()
        if not NAME.fullmatch(name):
            raise UserError(f"{pointer} names {name[:80]!r}, which is no checkpoint; write a name such as step-0001000")
        for path in (self.folder / name, self.folder / f".replaced-{name}"):  # between the two renames of `save`
            if (path / "state" / "trainer.json").is_file():
                return path
        if pointer.read_text(errors="replace").strip() != name:  # there is a newer one since, and this one was deleted
            return self.latest()
        raise UserError(f"{pointer} names {name}, which is not there; write the name of a whole one into it")

    def begun(self) -> bool:
        """Whether a checkpoint was ever written, whole or not."""
        return any(True for _ in self._all())

    def newest_whole(self, read: Callable[[Path], Any] = lambda checkpoint: None) -> tuple[Path | None, list[str]]:
        """The checkpoint to go on from, every file of it compared with its checksum; for the run that writes here.

        Args:
            read: raises a UserError of a checkpoint that is of no use.

        Returns:
            The one that `latest` names if it is whole, or else the newest before it that is; and what is wrong with
            those passed over, a sentence each. None if there has never been any.

        Raises:
            UserError: there are some, and none is whole.
        """
        self._settle_replaced()
        candidates, wrong = sorted(self._all(), reverse=True), []
        try:
            named = self.latest()
            # Those behind it are of a life that was given up, whose records are gone.
            candidates = [path for path in candidates if named is None or path <= named]
        except UserError as error:
            wrong.append(str(error))
        for path in candidates:
            try:
                verify(path, alone=True)
                read(path)
            except UserError as error:
                wrong.append(str(error))
            else:
                return path, wrong
        if wrong:
            raise UserError(f"no checkpoint in {self.folder} is whole ({wrong[0]}), or give another --output")
        return None, []

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let every rank `write` into a hidden folder, then give it its name in one step; collective.

        Args:
            step: names it.
            write: writes files; once it has written one it exchanges nothing with other ranks.

        Raises:
            NotSavedError: on every rank, if any could not write. `latest` names what it did before.
        """
        final = self.folder / f"step-{step:07d}"
        partial = self.folder / f".partial-{final.name}"
        try:
            _together(lambda: self._prepare(partial), rank=0)
            _together(lambda: write(partial))
            _together(lambda: self._finish(partial, final), rank=0)
        except NotSavedError:
            if distributed.rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def adopt(self, checkpoint: Path) -> Path:
        """Make another run's checkpoint the newest of this one, without a second copy of the data where that works."""
        adopted = self.folder / checkpoint.resolve().name
        partial = self.folder / f".partial-{adopted.name}"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(checkpoint, partial, copy_function=_link)
        partial.replace(adopted)
        self.point_to(adopted)
        return adopted

    def point_to(self, checkpoint: Path) -> None:
        """Make `latest` name this checkpoint of the folder."""
        pointer = self.folder / "latest.partial"
        pointer.write_text(f"{checkpoint.name}\n")
        _flush(pointer)
        pointer.replace(self.folder / "latest")
        _flush(self.folder)

    def _all(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())

    def _prepare(self, partial: Path) -> None:
        for leftover in self.folder.glob(".partial-*"):
            shutil.rmtree(leftover)
        self._settle_replaced()
        for part in ("model", "surrogate", "state"):
            (partial / part).mkdir(parents=True)

    def _finish(self, partial: Path, final: Path) -> None:
        write_checksums(partial)
        for path in (*partial.rglob("*"), partial):
            _flush(path)
        replaced = self.folder / f".replaced-{final.name}"
        if final.exists():  # written by an earlier life of this run that was resumed from before it
            final.replace(replaced)
        partial.replace(final)
        self.point_to(final)
        self._settle_replaced()
        self._delete_old(final)

    def _settle_replaced(self) -> None:
        """Delete what another checkpoint has replaced, or bring it back where that never came."""
        for replaced in self.folder.glob(".replaced-*"):
            final = self.folder / replaced.name.removeprefix(".replaced-")
            if final.exists():
                delete_unless_kept(replaced)
            else:
                replaced.replace(final)

    def _delete_old(self, newest: Path) -> None:
        """`latest` names `newest`."""
        # Later ones are of a life that this run has gone back from.
        older = sorted((path for path in self._all() if path != newest), key=lambda path: (path < newest, path))
        for path in older[: max(0, len(older) - self.keep_last + 1)] if self.keep_last else ():
            if not self.keep_every or int(path.name.removeprefix("step-")) % self.keep_every:
                delete_unless_kept(path)


def _together(action: Callable[[], None], rank: int | None = None) -> None:
    """Run `action` on every rank, or on one; raise on all what went wrong on any."""
    problem = None
    try:
        if rank in (None, distributed.rank()):
            action()
    except (OSError, RuntimeError, SafetensorError, UserError) as error:  # libraries and `files` have own classes
        problem = " ".join(str(error).split())[:200]
    problems = [found for found in distributed.gather(problem) if found is not None]
    if problems:
        raise NotSavedError(problems[0])


def _link(source: str, target: str) -> None:
    """A file that is never written again may have two names."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_surrogates(surrogates: Mapping[str, Surrogate], folder: Path) -> None:
    """Write this rank's surrogates as one shard, and on rank 0 the index of all shards; collective."""
    shard = f"shard-{distributed.rank():05d}-of-{distributed.world_size():05d}.safetensors"
    tensors = {
        f"{name}/{key}": value.detach().cpu().contiguous()
        for name, surrogate in surrogates.items()
        for key, value in surrogate.state_dict().items()
    }
    entries = {
        name: {"file": shard, "shape": list(s.T.shape), "rho": s.rho, "rank": s.rank, "nnz": s.nnz}
        for name, s in surrogates.items()
    }
    index = {name: entry for part in distributed.gather(entries) for name, entry in part.items()}
    if tensors:
        save_file(tensors, folder / shard)
    if distributed.rank() == 0 and index:
        write_json({"format": FORMAT, "blocks": index}, folder / "index.json")


def load_surrogates(surrogates: Mapping[str, Surrogate], folder: Path) -> None:
    """Fill this rank's surrogates from the shards of any world size.

    Raises:
        UserError: as `read_surrogates`, or a block has another shape than in this model.
    """
    for name, state in read_surrogates(folder, tuple(surrogates)).items():
        found, wanted = tuple(state["target"].shape), tuple(surrogates[name].T.shape)
        if found != wanted:
            raise UserError(f"{folder} has {name} as {found}, the model as {wanted}; give a checkpoint of this model")
        surrogates[name].load_state_dict(state)


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """Block → file, shape, ρ, rank and entries, of the surrogates in `folder`.

    Raises:
        UserError: there is no index, it is of another format, or says what no matrix has.
    """
    index = read_object(folder / "index.json")
    if index.get("format") not in (FORMAT, OLD_FORMAT):
        raise UserError(
            f"{folder} has format {index.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    blocks = index.get("blocks")
    wrong = [name for name, entry in blocks.items() if not _is_entry(entry)] if isinstance(blocks, dict) else ["blocks"]
    if wrong:
        raise UserError(f"{folder / 'index.json'} has no sound entry for {wrong[0]}; give a whole checkpoint")
    return blocks


def _is_entry(entry: Any) -> bool:
    """Whether this is a matrix with its rank and entries."""
    shape, rank, nnz = (entry.get(key) for key in ("shape", "rank", "nnz")) if isinstance(entry, dict) else (None,) * 3
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(is_count, (*shape, rank, nnz))):
        return False
    return rank <= min(shape) and nnz <= shape[0] * shape[1] and type(entry.get("rho")) in (int, float)


def read_surrogates(folder: Path, names: tuple[str, ...] | None = None) -> dict[str, dict[str, Tensor]]:
    """Block → the tensors of `Surrogate.state_dict`, for the named blocks or for all.

    Raises:
        UserError: the folder has no index, is of another format, lacks a block, or a shard is not what the index says.
    """
    blocks = read_index(folder)
    states: dict[str, dict[str, Tensor]] = {}
    for name in blocks if names is None else names:
        if name not in blocks:
            raise UserError(f"{folder} holds no block {name}; give the salaad.roles of the run that wrote it")
        state = _read_block(inside(folder, blocks[name].get("file")), name, *blocks[name]["shape"])
        if "low_rank" in state:
            state["target"] = target_of(state.pop("low_rank"), state["residual"], state["thresholds"][2])
        states[name] = state
    return states


def _read_block(path: Path, name: str, n: int, m: int) -> dict[str, Tensor]:
    """The tensors of a block of n×m, whose shapes are compared before any of them is read."""
    matrix, short = (n, m), min(n, m)
    most = {"target": matrix, "low_rank": matrix, "residual": matrix, "thresholds": (3,)}
    most |= {"sigma": (short,), "basis": (short, short)}
    try:
        with safe_open(path, framework="pt") as shard:
            stored = set(shard.keys())
            present = [key for key in most if f"{name}/{key}" in stored]
            if len({"residual", "thresholds", "sigma"} & {*present}) < 3 or not {"target", "low_rank"} & {*present}:
                raise ValueError(f"a part of {name} is missing")
            for key in present:
                tensor = shard.get_slice(f"{name}/{key}")
                shape = tuple(tensor.get_shape())
                # Of singular values and vectors there are as many as the rank needs.
                fits = shape[:-1] == most[key][:-1] and len(shape) == len(most[key]) and shape[-1] <= most[key][-1]
                exact = key in ("sigma", "basis") or shape == most[key]
                if not fits or not exact or tensor.get_dtype() not in FLOATS:
                    raise ValueError(f"{name}/{key} is {shape} of {tensor.get_dtype()}, where {most[key]} is wanted")
            return {key: shard.get_tensor(f"{name}/{key}") for key in present}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a whole checkpoint") from None
