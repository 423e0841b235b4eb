"""The records of a run: metrics.jsonl, blocks.jsonl, evaluations.jsonl, Weights & Biases and the progress bar."""

import json
import math
import os
import secrets
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from mmap import ACCESS_READ, mmap
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from tqdm import tqdm

from salaad.common.errors import UserError
from salaad.common.files import only_finite, replacing
from salaad.config.run import RunConfig, WandbConfig
from salaad.model.perplexity import Perplexity

RECORDS = ("metrics.jsonl", "blocks.jsonl", "evaluations.jsonl")
PHASES = ("train", "admm", "sync", "save", "evaluate")


class Recorder:
    """The writer of a run's records: every record is written once, by the main rank; on other ranks it does nothing.

    Args:
        folder: the run's folder.
        config: the run's configuration.
        start: step that the run goes on from; later lines of an interrupted start are dropped.
        tokens: non-padding tokens up to the last logged line before `start`.
        active: whether this rank writes.
        progress: column of blocks.jsonl → what the progress bar calls its mean over the blocks.
        read: what was read of the training text before `start`, as `text_read` takes it.
        due: whether the evaluation at `start` is still to come; lines of an earlier one are then dropped, too.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        start: int,
        tokens: int,
        active: bool,
        progress: Mapping[str, str] = MappingProxyType({}),
        read: Mapping[str, int] = MappingProxyType({}),
        due: bool = False,
    ) -> None:
        self.active = active
        self.tokens = tokens
        self._progress = progress
        self._latest: dict[str, Mapping[str, Any]] = {}
        self._read = read
        self._start, self._steps, self._began = start, config.train.steps, time.monotonic()
        if not active:
            return
        self._files = {}
        for name in RECORDS:
            _drop_lines_after(folder / name, start - 1 if due and name == "evaluations.jsonl" else start)
            self._files[name] = _Lines(folder / name)
        self._bar = tqdm(
            total=config.train.steps, initial=start, unit="step", disable=not sys.stderr.isatty(), dynamic_ncols=True
        )
        self._wandb = _start_wandb(folder, config.wandb, config.to_dict())

    def begin(self) -> None:
        """Begin to measure how fast steps are; what came before, such as reading text, tells nothing of the rest."""
        self._began = time.monotonic()
        if self.active:
            self._bar.unpause()

    def log(self, *, new_tokens: int, seconds: dict[str, float], **values: Any) -> None:
        """Write a line of metrics.jsonl: tokens and wall time by phase since the last line, and the values."""
        if not self.active:
            return
        self.tokens += new_tokens
        if values["loss"] is None:
            self.say(f"no step was taken up to step {values['step']} since the last line")
        speed = new_tokens / (sum(seconds.values()) - seconds["evaluate"])
        row = {"step": values.pop("step"), "tokens": self.tokens, **values, "tokens_per_second": speed}
        self._files["metrics.jsonl"].add(row | {"seconds": seconds})
        self._write_out("metrics.jsonl")
        if self._wandb:
            self._wandb.log(row | {f"seconds/{phase}": value for phase, value in seconds.items()}, step=row["step"])
        self._bar.update(row["step"] - self._bar.n)
        loss = "–" if row["loss"] is None else f"{row['loss']:.3f}"
        means = {}
        for column, label in self._progress.items():
            latest = [columns[column] for columns in self._latest.values() if column in columns]
            if latest:
                means[label] = f"{fmean(latest):.3f}"
        if self._bar.disable:
            self._say_progress(row["step"], {"loss": loss, "tokens/s": f"{speed:.0f}", **means})
        self._bar.set_postfix({"loss": loss, "tok/s": f"{speed:.0f}", **means})

    def _say_progress(self, step: int, shown: Mapping[str, str]) -> None:
        """Print a line of progress in place of the bar, which needs a terminal."""
        left = (time.monotonic() - self._began) / max(1, step - self._start) * (self._steps - step)
        figures = ", ".join(f"{value} {key}" if key == "tokens/s" else f"{key} {value}" for key, value in shown.items())
        self.say(f"step {step:,} of {self._steps:,}: {figures}, {tqdm.format_interval(left)} left")

    def blocks(self, records: Iterable[tuple[int, str, Mapping[str, Any], str | None]]) -> None:
        """Write a line of blocks.jsonl for every (step, block, columns, remark), and print the remark, if any."""
        if not self.active:
            return
        for step, name, columns, remark in records:
            self._latest[name] = columns
            if remark is not None:
                self.say(remark)
            self._files["blocks.jsonl"].add({"step": step, "block": name, **columns})
            if self._wandb:
                values = {f"blocks/{name}/{key}": value for key, value in columns.items()}
                self._wandb.log(values, step=step)
        self._write_out("blocks.jsonl")

    def evaluation(
        self, step: int, variant: str, result: Perplexity, precision: str, figures: Mapping[str, float]
    ) -> None:
        """Write a line of evaluations.jsonl: a variant's perplexity at a step, its parameters and other figures.

        A number that is not finite becomes null, as JSON has no NaN.
        """
        if not self.active:
            return
        row = {
            "step": step,
            "variant": variant,
            "loss": result.loss,
            "perplexity": result.perplexity,
            "legacy_perplexity": result.legacy_perplexity,
            "tokens": result.tokens,
            "precision": precision,
            **figures,
        }
        self._files["evaluations.jsonl"].add(only_finite(row))
        self._write_out("evaluations.jsonl")
        if self._wandb:
            values = {"loss": result.loss, "perplexity": result.perplexity, **figures}
            self._wandb.log({f"validation/{variant}/{key}": value for key, value in values.items()}, step=step)
        self.say(f"step {step}: perplexity of {variant} {result.perplexity:.2f}")

    def text_read(self, step: int, counts: Mapping[str, int]) -> None:
        """Print what the last call did not know of: text that could not be used, and text that is read again.

        Args:
            step: step up to which the text was read.
            counts: from `counts_in`.
        """
        skipped, known = (sum(of.get(name, 0) for name in ("bad", "empty", "lost")) for of in (counts, self._read))
        if skipped > known:
            self.say(
                f"documents skipped so far: {counts['bad']} broken, {counts['empty']} without text, "
                f"{counts['lost']} parts of files lost"
            )
        if counts["passes"] > self._read.get("passes", 0):
            told = f"step {step:,}: the training text repeats; pass {counts['passes'] + 1} over it has begun"
            if cut := counts.get("long", 0):
                told += f"; {cut:,} documents did not fit into a row; a new run with --data.packing true reads all"
            self.say(told)
        self._read = counts

    def say(self, text: str) -> None:
        """Print a line without breaking the bar; it is lost if the output cannot be written, as on a full disk."""
        if self.active:
            with suppress(OSError):
                self._bar.write(text)

    def close(self) -> None:
        """Finish the files, the bar and the Weights & Biases run."""
        if not self.active:
            return
        self._bar.close()
        for file in self._files.values():
            file.close()
        if self._wandb:
            self._wandb.finish()

    def secure(self) -> None:
        """Flush every line to the disk, before a checkpoint that relies on these lines is complete.

        Raises:
            OSError: the lines cannot be written now; they are kept for the next call.
        """
        for lines in self._files.values() if self.active else ():
            lines.write_out(to_disk=True)

    def _write_out(self, name: str) -> None:
        try:
            self._files[name].write_out()
        except OSError as error:
            self.say(f"{name} cannot be written now ({error.strerror}); its lines are kept for the next time")


class _Lines:
    """A file to which JSON lines are appended; no line is lost while the disk is full for some time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._waiting = b""

    def add(self, row: dict[str, Any]) -> None:
        self._waiting += json.dumps(row).encode() + b"\n"

    def write_out(self, to_disk: bool = False) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]
        if to_disk:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        self.write_out()
        self._file.close()


def _drop_lines_after(path: Path, step: int) -> None:
    """Keep the lines up to `step`; a resumed run writes the later ones again.

    They are in the order of the steps, and looked for from the end, as those of a long run fill gigabytes.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        with mmap(file.fileno(), 0, access=ACCESS_READ) as text:
            end = text.rfind(b"\n") + 1  # a line cut off by a kill has no end
            while end:
                begin = text.rfind(b"\n", 0, end - 1) + 1
                if _step_of(text[begin:end]) <= step:
                    break
                end = begin
        file.truncate(end)
        os.fsync(file.fileno())


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity for a line that is not ours, as after a power cut, so that it is dropped."""
    try:
        return json.loads(line)["step"]
    except (ValueError, TypeError, KeyError):
        return math.inf


def _start_wandb(folder: Path, settings: WandbConfig, config: dict[str, Any]) -> Any:
    """Start the Weights & Biases run, or go on with the one this folder began."""
    if settings.mode == "disabled":
        return None
    import wandb  # imported here, as it takes a second

    identity = folder / "wandb_id"
    if not identity.exists() or not identity.stat().st_size:  # empty after a power cut
        with replacing(identity, to_disk=True) as temporary:
            temporary.write_text(secrets.token_hex(4))
    try:
        return wandb.init(
            project=settings.project,
            name=folder.name,
            id=identity.read_text(),
            resume="allow",
            mode=settings.mode,
            dir=str(folder),
            config=config,
        )
    except wandb.Error as error:
        why = " ".join(str(error).split())
        raise UserError(f"wandb.mode {settings.mode} fails ({why}); log in with wandb login, or set offline") from None
