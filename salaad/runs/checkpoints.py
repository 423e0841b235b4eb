"""Checkpoints that appear whole or not at all.

checkpoints/step-0001000/model/       a standard Hugging Face folder with its tokenizer
checkpoints/step-0001000/surrogate/   a safetensors shard per rank, and index.json: which block lies where
checkpoints/step-0001000/state/       the optimizer's state, a part per rank, random generators, data position,
                                      counters; for methods whose model/ is merged or factored, the weights as trained
checkpoints/step-0001000/checksums.json   SHA-256 of every file above
checkpoints/latest                    the name of the newest complete one

A save may be killed at any moment, for example by a launcher that waits no longer. Until the new folder has its name,
`latest` and the checkpoint that it names are unchanged, and the next save or start removes what was left over.
"""

import os
import re
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from salaad.common import distributed
from salaad.common.errors import NotSavedError, UserError
from salaad.common.files import (
    CHECKSUMS,
    flush,
    is_file,
    names_below,
    read_object,
    replacing,
    unseen,
    verify,
    write_checksums,
    write_json,
)
from salaad.common.locks import delete_unless_kept

TRAINED = "state/weights.safetensors"  # the weights as they are trained, where model/ holds another form of them
UNSEEN = 60  # seconds for which one machine may not see what another wrote
NAME = re.compile(r"step-\d{7,}")


def name_of(step: int) -> str:
    """Return the name of the checkpoint after a step."""
    return f"step-{step:07d}"


@dataclass(frozen=True)
class RunState:
    """The state of a run apart from tensors: `state/trainer.json` of a checkpoint; by default before the first step.

    Args:
        step: optimizer steps taken or discarded.
        tokens: non-padding tokens up to the last logged line.
        sums: for each rank loss, steps and tokens since that line (`training.step_totals`).
        discarded: steps that were not taken because a number was not finite.
        due: whether an evaluation was interrupted, so that it has to be done first.
        seconds: wall time by phase since the last logged line.
        data: position in the text (`data.batches.merge_states`).
        method: `Method.state_dict`.
        world_size: processes that wrote it.
        config: the run's configuration as plain values.
    """

    step: int = 0
    tokens: int = 0
    sums: Sequence[Sequence[float]] = ()
    discarded: int = 0
    due: bool = False
    seconds: Mapping[str, float] | None = None
    data: dict[str, Any] | None = None
    method: dict[str, Any] | None = None
    world_size: int = 1
    config: dict[str, Any] | None = None

    @classmethod
    def read(cls, checkpoint: Path) -> "RunState":
        """Read the state in a checkpoint.

        Raises:
            UserError: the file is missing or broken, or another version wrote it.
        """
        path = checkpoint / "state" / "trainer.json"
        if not is_file(path) and is_file(checkpoint / "surrogate" / "index.json"):
            raise UserError(
                f"{checkpoint} was saved from another training loop and holds no optimizer or data position; go on in "
                f"that loop by Salaad.load, or begin a new run from its model with --model.path {checkpoint}"
            )
        stored = read_object(path)
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in stored]
        if missing:
            raise UserError(
                f"{path} does not say {missing[0]}, so another version wrote it; go on with that one, or begin a new "
                f"run from its model with --model.path {checkpoint / 'model'}"
            )
        if stored["sums"] and not isinstance(stored["sums"][0], list):  # an older version stored the sum over the ranks
            stored["sums"] = [stored["sums"]]
        return cls(**{name: stored[name] for name in names})

    def write(self, checkpoint: Path) -> None:
        """Write the state where `read` finds it."""
        write_json(vars(self), checkpoint / "state" / "trainer.json")


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: the run's `checkpoints/`.
        keep_last: how many of the newest checkpoints are kept; 0 keeps all.
        keep_every: checkpoints at multiples of this number of steps are always kept; 0 turns this off.
    """

    folder: Path
    keep_last: int = 0
    keep_every: int = 0

    def latest(self, patience: float = 0) -> Path | None:
        """Return the newest complete checkpoint, if any; changes nothing on disk, as a run may be training here.

        Args:
            patience: seconds to wait for files that a network file system may not show yet.
        """
        pointer = self.folder / "latest"
        if not pointer.is_file():
            return None
        name = pointer.read_text(errors="replace").strip()
        if not NAME.fullmatch(name):
            raise UserError(f"{pointer} names {name[:80]!r}, which is no checkpoint; write a name such as step-0001000")
        places = (name, f".replaced-{name}")  # the latter exists between the two renames of `save`
        for place, wait in (*((place, 0.0) for place in places), (name, patience)):
            if not unseen(self.folder, [f"{place}/state/trainer.json"], wait):
                return self.folder / place
        if pointer.read_text(errors="replace").strip() != name:  # there is a newer one since, and this one was deleted
            return self.latest()
        raise UserError(f"{pointer} names {name}, which is not there; write the name of a whole one into it")

    def latest_step(self) -> int | None:
        """Return the step of the checkpoint that `latest` names, which may be broken; None if it names none."""
        pointer = self.folder / "latest"
        name = pointer.read_text(errors="replace").strip() if pointer.is_file() else ""
        return _step_of(Path(name)) if NAME.fullmatch(name) else None

    def begun(self) -> bool:
        """Whether a checkpoint was ever written, whole or not."""
        return any(True for _ in self._all())

    def newest_whole(self, read: Callable[[Path], Any] = lambda checkpoint: None) -> tuple[Path | None, list[str]]:
        """Return the checkpoint to go on from, after verifying its checksums; only for the run that writes here.

        Args:
            read: called with a whole checkpoint; raises a UserError if the checkpoint cannot be used.

        Returns:
            The checkpoint that `latest` names if it is whole, or else the newest whole one before it, or None if there
            has never been any; and for each checkpoint passed over a sentence on what is wrong with it.

        Raises:
            UserError: there are checkpoints, but none is whole.
        """
        self._settle_replaced()
        patience, named, wrong = patience_for(self._all()), None, []
        try:
            named = self.latest(patience)
        except UserError as error:
            wrong.append(str(error))
        # Checkpoints after the one that `latest` names belong to an abandoned start, whose records are gone.
        older = [path for path in self._all() if named is None or _step_of(path) <= _step_of(named)]
        for path in sorted(older, key=_step_of, reverse=True):
            try:
                verify(path, alone=True, patience=patience)
                read(path)
            except UserError as error:
                wrong.append(str(error))
            else:
                return path, wrong
        if wrong:
            raise UserError(f"no checkpoint in {self.folder} is whole ({wrong[0]}), or give another --output")
        return None, []

    def save(self, step: int, write: Callable[[Path], Mapping[str, str] | None]) -> Path:
        """Let every rank `write` into a hidden folder, then rename that to its final name in one step; collective.

        Args:
            step: the step, which names the checkpoint.
            write: writes files and exchanges nothing with other ranks. It returns name in the folder → SHA-256 of
                those files that are on the disk and need not be read again for their checksum.

        Raises:
            NotSavedError: on every rank, if any could not write. `latest` is then unchanged.
        """
        final = self.folder / name_of(step)
        partial = self.folder / f".partial-{final.name}"
        try:
            distributed.together(lambda: self._prepare(partial), only=0)
            known = dict(ChainMap(*distributed.together(lambda: write(partial) or {})))
            # The names are collected only now, as some libraries first write into files with temporary names.
            written = set().union(*distributed.together(lambda: names_below(partial)))
            distributed.together(lambda: self._finish(partial, final, written, known), only=0)
        except NotSavedError:
            if distributed.rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise
        return final

    def adopt(self, checkpoint: Path) -> Path:
        """Make another run's checkpoint the newest of this run, by hard links where possible, else by copies.

        Raises:
            UserError: it cannot be copied, and the folder then holds no part of it; or `latest` cannot be written, and
                the whole copy stays, from which the same command goes on.
        """
        adopted = self.folder / name_of(RunState.read(checkpoint).step)  # its own folder may have any name
        partial = self.folder / f".partial-{adopted.name}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            shutil.copytree(checkpoint, partial, copy_function=_link)
            partial.replace(adopted)
            self.point_to(adopted)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror  # the first of a list
            raise UserError(
                f"{checkpoint} cannot be copied to {adopted} ({why}); make room there, or give another --output, and "
                "start the same command again"
            ) from None
        return adopted

    def point_to(self, checkpoint: Path) -> None:
        """Make `latest` name this checkpoint of the folder."""
        with replacing(self.folder / "latest", to_disk=True) as pointer:
            pointer.write_text(f"{checkpoint.name}\n")

    def _all(self) -> Iterator[Path]:
        return (path for path in self.folder.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir())

    def _prepare(self, partial: Path) -> None:
        for leftover in self.folder.glob(".partial-*"):
            shutil.rmtree(leftover)
        self._settle_replaced()
        for part in ("model", "surrogate", "state"):
            (partial / part).mkdir(parents=True)

    def _finish(self, partial: Path, final: Path, written: set[str], known: Mapping[str, str]) -> None:
        if absent := unseen(partial, written, UNSEEN):
            raise UserError(f"{partial / min(absent)} was written on another machine and is not seen on the first one")
        with ThreadPoolExecutor(1) as pool:  # the other files are hashed from memory while the disk takes them
            flushing = pool.submit(lambda: [flush(partial / name) for name in written - known.keys()])
            write_checksums(partial, known, written)
            flushing.result()
        for path in (partial / CHECKSUMS, *(path for path in partial.rglob("*") if path.is_dir()), partial):
            flush(path)
        replaced = self.folder / f".replaced-{final.name}"
        if final.exists():  # written by an earlier start of this run, which was then resumed from before this step
            final.replace(replaced)
        partial.replace(final)
        self.point_to(final)
        self._settle_replaced()
        self._delete_old(final)

    def _settle_replaced(self) -> None:
        """Delete checkpoints that a new one has replaced; bring one back if its replacement never appeared."""
        for replaced in self.folder.glob(".replaced-*"):
            final = self.folder / replaced.name.removeprefix(".replaced-")
            if final.exists():
                delete_unless_kept(replaced)
            else:
                replaced.replace(final)

    def _delete_old(self, newest: Path) -> None:
        """Delete the checkpoints that `keep_last` and `keep_every` do not keep; `latest` names `newest` already."""
        # Checkpoints of later steps come first, as they belong to a start that this run has gone back from.
        others = [path for path in self._all() if path != newest]
        older = sorted(others, key=lambda path: (_step_of(path) < _step_of(newest), _step_of(path)))
        for path in older[: max(0, len(older) - self.keep_last + 1)] if self.keep_last else ():
            if not self.keep_every or _step_of(path) % self.keep_every:
                delete_unless_kept(path)


def _step_of(path: Path) -> int:
    """Return the step of a checkpoint; names alone are not in its order, as those of ten million steps are longer."""
    return int(path.name.rpartition("-")[2])


def patience_for(checkpoints: Iterable[Path]) -> float:
    """Return the seconds to wait for files of checkpoints that this machine may not see yet.

    More than 0 if the run is on several machines, or if several ranks, perhaps on other machines, wrote a checkpoint.
    """
    if distributed.machines() > 1:
        return UNSEEN
    for checkpoint in checkpoints:
        with suppress(UserError):
            if RunState.read(checkpoint).world_size > 1:
                return UNSEEN
    return 0


def _link(source: str, target: str) -> None:
    """Hard-link `source` as `target`, or copy it where that fails; files of a checkpoint are never written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
