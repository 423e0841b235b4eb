"""The table of scripts/torture.py: one row a fault, as Markdown and in the JSON file that `--output` names."""

import statistics
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from salaad.common.errors import UserError
from salaad.common.files import json_file, read_json, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance


@dataclass
class Row:
    """One row of the table: the tries of a fault, what was lost, and the seconds to recover."""

    fault: str
    tries: int = 0
    lost: list[str] = field(default_factory=list)
    recovery: list[float] = field(default_factory=list)
    note: str = ""


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""

    def recovery(seconds: list[float]) -> str:
        return f"{statistics.median(seconds):.1f} ({max(seconds):.1f})" if seconds else "–"

    header = ("fault", "tries", "lost", "seconds to recover: median (max)", "note")
    lines = [
        (r["fault"], f"{r['tries']:,}", ", ".join(r["lost"]) or "nothing", recovery(r["recovery"]), r["note"])
        for r in rows
    ]
    return markdown_table(header, lines)


def require_table(path: Path) -> None:
    """Write an empty table if there is no file; raise a UserError if the file is no table of ours or not writable."""
    try:
        rows = read_rows(path)
        json_file(str(path))
        write_rows(rows, path)
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error.strerror}); give a file you can write") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows in a file, none if there is no file; raise a UserError if the file is no table of ours."""
    if not path.exists():
        return []
    found = None
    with suppress(UserError):  # the message of read_json gives advice for checkpoints
        found = read_json(path)
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "fault" in row for row in rows):
        raise UserError(
            f"--output {path} is there and no table of ours, which rows could be added to; give another one"
        )
    return rows


def write_rows(rows: list[dict[str, Any]], path: Path) -> None:
    """Write the table that update_results.py reads."""
    write_json({"command": "python scripts/torture.py --output results/reliability.json", "rows": rows}, path)


def save(row: Row, path: Path) -> None:
    """Put a row into the file, in place of an older one of the same fault."""
    write_rows([r for r in read_rows(path) if r["fault"] != row.fault] + [asdict(row) | provenance()], path)
