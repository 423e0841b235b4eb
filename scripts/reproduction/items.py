"""A table or figure of the paper (an item): the trainings it needs, its measurement, and its stored result."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from salaad.common.errors import UserError
from salaad.common.files import REMAKE, read_object, write_json
from salaad.common.provenance import provenance
from scripts.reproduction.cost import measured_hours
from scripts.reproduction.grid import Run, Scale, distinct


@dataclass
class Measured:
    """The result of measuring an item.

    Args:
        rows: mappings of plain values, for the JSON file and for judging the claims.
        tables: caption → Markdown table.
        pictures: caption → file name in the scale's folder of results.
        notes: sentences that the report prints under the tables and pictures.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


SECOND = "other-text"  # of the options that items read, the one with which a result has a further column
TRAINED_BY = {"name", "command", "commit", "machine", "tokens", "hours"}
PARTS = ("item", "title", "section", "command", "hub", "commit", "machine", "trainings", *Measured.__annotations__)


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper, or an experiment beyond it.

    Args:
        name: as typed on the command line; also the name of the result file.
        title: one line.
        section: section and table of the paper.
        runs: scale → the trainings that the item needs.
        measure: scale → numbers, tables and pictures, from finished trainings.
        folders: scale → the trainings whose run folder the measurement opens, so that their record is not enough; all
            of `runs` unless given.
        reads: options of scripts/reproduce.py whose files the measurement reads.
        hub: a command that measures a model from the hub, for which our trainings stand in here; the report prints it.
    """

    name: str
    title: str
    section: str
    runs: Callable[[Scale], list[Run]]
    measure: Callable[[Scale], Measured]
    folders: Callable[[Scale], list[Run]] | None = None
    reads: tuple[str, ...] = ()
    hub: str | None = None

    def result(self, scale: Scale) -> Path:
        """Return the path of the stored result, a JSON file."""
        return scale.results / f"{self.name}.json"

    def kept(self, path: Path) -> dict[str, Any]:
        """Return a stored result of this item.

        Raises:
            UserError: the file is damaged or lacks a part of what an item writes.
        """
        result = read_object(path, cure=REMAKE)
        if lacking := [part for part in PARTS if part not in result]:
            raise UserError(f"{path} has no {' and no '.join(lacking)}; restore it, or measure {self.name} --again")
        if not all(one.keys() >= TRAINED_BY for one in result["trainings"]):
            told = "a training without a name, command, commit, machine, tokens or hours"
            raise UserError(f"{path} has {told}; restore it, or measure {self.name} --again")
        return result

    def done(self, scale: Scale) -> bool:
        """Return whether the result is stored, made from exactly the trainings that the item needs now, and complete.

        It is not complete if a second text is given that the item reads, and the result is of one text alone.
        """
        if not self.result(scale).exists():
            return False
        result = self.kept(self.result(scale))
        if self.is_of_others(scale, result) or (self._reads_second(scale) and SECOND not in result["command"]):
            return False
        return not any(run.record(scale).exists() and not run.recorded(scale) for run in self.runs(scale))

    def require_second_text(self, scale: Scale) -> None:
        """Raise a UserError if the stored result is of two texts, of which measuring it now would lose the second."""
        path, command = self.result(scale), ""
        with suppress(UserError):  # a damaged file has nothing to lose
            command = str(read_object(path, cure=REMAKE).get("command")) if path.exists() else ""
        if SECOND in command and not self._reads_second(scale):
            raise UserError(
                f"{path} has perplexities on a second text, which would be lost; give --{SECOND} FILE, or move the "
                "result away to measure without"
            )

    def _reads_second(self, scale: Scale) -> bool:
        return SECOND in self.reads and SECOND in scale.asked

    def is_of_others(self, scale: Scale, result: Mapping[str, Any]) -> bool:
        """Return whether a result was made from other trainings than the item needs now, by their names."""
        kept = {training["name"] for training in result["trainings"]}
        return kept != {run.name(scale) for run in self.runs(scale)}

    def missing(self, scale: Scale, again: bool = False) -> list[Run]:
        """Return the trainings to run before measuring; with `again`, a record counts only with its run folder."""
        opened = {run.name(scale) for run in (self.folders or self.runs)(scale)}
        runs = distinct(self.runs(scale), scale)
        return [r for r in runs if not (r.done(scale) if again or r.name(scale) in opened else r.recorded(scale))]

    def command(self, scale: Scale) -> str:
        """Return the command that measures the item."""
        return scale.command(self.name, reads=self.reads)

    def outdated(self, scale: Scale, result: Mapping[str, Any]) -> bool:
        """Return whether a training behind a result has been recorded anew since."""
        return any(
            run.recorded(scale) and trained_by(run, scale) not in result["trainings"] for run in self.runs(scale)
        )

    def write(self, scale: Scale) -> dict[str, Any]:
        """Measure the item, write the result as JSON and return it."""
        scale.results.mkdir(parents=True, exist_ok=True)
        measured = self.measure(scale)
        about = {"item": self.name, "title": self.title, "section": self.section, "scale": scale.name}
        about |= {"command": self.command(scale), "hub": self.hub, **provenance()}
        trained = [trained_by(run, scale) for run in distinct(self.runs(scale), scale)]
        kept = {**about, "trainings": trained, **asdict(measured)}
        write_json(kept, self.result(scale))
        return kept


def trained_by(run: Run, scale: Scale) -> dict[str, Any]:
    """Return the origin of a training's numbers: command, commit, machine, tokens and wall time in hours."""
    record = run.kept(scale)
    summary = record["summary"]
    return {
        "name": run.name(scale),
        **{key: record[key] for key in ("command", "commit", "machine")},
        "tokens": summary["tokens"],
        "hours": measured_hours(summary),
    }
