"""An item of the paper: what it needs, how it is measured, and what of it is there."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from salaad.common.files import read_json, write_json
from salaad.common.provenance import provenance
from scripts.reproduction.grid import Run, Scale, distinct


@dataclass
class Measured:
    """What an item came to.

    Args:
        rows: plain values, for the JSON and for the claims.
        tables: Markdown, by caption.
        pictures: file names in the scale's results, by caption.
        notes: sentences that belong under it.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, str] = field(default_factory=dict)
    pictures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Item:
    """A table or figure.

    Args:
        name: as typed.
        title: one line.
        section: of the paper.
        runs: the trainings it needs.
        measure: from finished trainings to numbers, tables and pictures.
        folders: those of the trainings whose folder it opens, for which a record is not enough; all unless given.
        reads: options whose files it reads when it is measured.
        hub: a command that needs a model from the hub, and stands in the report beside what stands in for it.
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
        """Where its result is kept."""
        return scale.results / f"{self.name}.json"

    def done(self, scale: Scale) -> bool:
        """Whether its result is there, and of the trainings that it is made of today."""
        if not self.result(scale).exists():
            return False
        kept = [training["name"] for training in read_json(self.result(scale)).get("trainings", ())]
        return set(kept) == {run.name(scale) for run in self.runs(scale)}

    def missing(self, scale: Scale, again: bool = False) -> list[Run]:
        """The trainings that have to be run before it can be measured; `again` trusts no record without its folder."""
        opened = {run.name(scale) for run in (self.folders or self.runs)(scale)}
        runs = distinct(self.runs(scale), scale)
        return [r for r in runs if not (r.done(scale) if again or r.name(scale) in opened else r.recorded(scale))]

    def command(self, scale: Scale) -> str:
        """What makes it."""
        return scale.command(self.name, reads=self.reads)

    def outdated(self, scale: Scale) -> bool:
        """Whether a training of its result has been recorded anew since."""
        kept = read_json(self.result(scale))["trainings"]
        return any(run.recorded(scale) and trained_by(run, scale) not in kept for run in self.runs(scale))

    def write(self, scale: Scale) -> dict[str, Any]:
        """Measure it and keep the result."""
        scale.results.mkdir(parents=True, exist_ok=True)
        measured = self.measure(scale)
        about = {"item": self.name, "title": self.title, "section": self.section, "scale": scale.name}
        about |= {"command": self.command(scale), "hub": self.hub, **provenance()}
        trained = [trained_by(run, scale) for run in distinct(self.runs(scale), scale)]
        kept = {**about, "trainings": trained, **asdict(measured)}
        write_json(kept, self.result(scale))
        return kept


def trained_by(run: Run, scale: Scale) -> dict[str, Any]:
    """Where the numbers of a training come from: command, commit, machine, tokens and wall time."""
    record = read_json(run.record(scale))
    summary = record["summary"]
    return {
        "name": run.name(scale),
        **{key: record[key] for key in ("command", "commit", "machine")},
        "tokens": summary["tokens"],
        "hours": sum(summary["seconds"].values()) / 3600,
    }
