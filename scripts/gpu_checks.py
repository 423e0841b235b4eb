"""Whether the GPU computes what the CPU does: kernels, solvers, the ADMM, factored layers, training, resume, ranks.

    python scripts/gpu_checks.py --output results/gpu/NAME/checks.json
    python scripts/gpu_checks.py --kinds kernels,graphs
    python scripts/gpu_checks.py --device cpu --tiny

Every check gives one error and the limit that it must not exceed. References are computed in float64 on the CPU, except
for ADMM updates and trainings, which are compared with the same updates or training in float32 on the CPU; a training
that was resumed, compiled or shared by processes is compared with a plain one on the same device. CUDA graphs, and the
host's waiting for a GPU, are left out on a CPU. Every check is written as soon as it is made: the same command goes on
with the kinds that are not finished, first those that were never begun, if commit and machine are the same.
"""

import argparse
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, read_object, write_json
from salaad.common.provenance import provenance
from salaad.common.validation import split_list
from scripts.devices import require_device
from scripts.on_device.check import FAILED, Check
from scripts.on_device.factored import graphs, layers
from scripts.on_device.kernels import kernels
from scripts.on_device.mathematics import solvers, updates
from scripts.on_device.trainings import compiled, runs, steps
from scripts.on_device.waiting import waits

KINDS: dict[str, Callable[[torch.device, bool], Iterator[Check]]] = {
    "kernels": kernels,
    "solvers": solvers,
    "updates": updates,
    "layers": layers,
    "graphs": graphs,
    "waits": waits,
    "steps": steps,
    "compiled": compiled,
    "runs": runs,
}


class Kept:
    """The checks made so far, written to a JSON file after each of them.

    Args:
        path: the JSON file, if one is to be written. The checks in it are kept if it has the values in `about`.
        about: the provenance, the device and whether shapes are tiny.
        kinds: the kinds of checks that are wanted.

    Attributes:
        left: the kinds that are not finished: those that are wanted, and those that the file has left from before.

    Raises:
        UserError: the file is none of this script, or cannot be read.
    """

    def __init__(self, path: Path | None, about: Mapping[str, Any], kinds: Sequence[str]) -> None:
        self._path, self._about = path, dict(about)
        old = kept_checks(path) if path and path.exists() else {}
        if any(old.get(key) != value for key, value in about.items()):
            old = {}
        self._begun: list[str] = old.get("begun", [])
        never = [kind for kind in kinds if kind not in self._begun]
        self.left = sorted(dict.fromkeys([*never, *old.get("left", [])]), key=self._was_begun)
        self._rows: list[dict[str, Any]] = [row for row in old.get("checks", []) if row["kind"] not in self.left]

    def _was_begun(self, kind: str) -> bool:
        """Return whether a kind was begun before; if unfinished, it may never end, so the others come first."""
        return kind in self._begun

    @property
    def checks(self) -> list[Check]:
        """All checks made so far."""
        return [Check.from_row(row) for row in self._rows]

    def begin(self, kind: str) -> None:
        """Record that the checks of a kind come next."""
        self._begun = [*dict.fromkeys([*self._begun, kind])]
        self._write()

    def add(self, kind: str, check: Check) -> None:
        """Record a check of a kind."""
        self._rows.append({"kind": kind, **check.row})
        self._write()

    def end(self, kind: str) -> None:
        """Record that all checks of a kind are made."""
        self.left.remove(kind)
        self._write()

    def _write(self) -> None:
        if self._path:
            content = {**self._about, "begun": self._begun, "left": self.left, "checks": self._rows}
            write_json(content, self._path)


def kept_checks(path: Path) -> dict[str, Any]:
    """Return the content of a JSON file of this script.

    Raises:
        UserError: the file is none of this script, or cannot be read.
    """
    found = read_object(path, cure="give another --output")
    rows = found.get("checks")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "kind" in row for row in rows):
        raise UserError(f"{path} has no results of gpu_checks.py; give another --output")
    return found


def checks_of(kind: str, device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield every check of a kind; an exception becomes a failed check."""
    try:
        yield from KINDS[kind](device, tiny)
    except Exception as error:
        traceback.print_exc()
        yield Check(kind, math.nan, 0.0, " ".join(str(error).split())[:200] or type(error).__name__)


def main() -> None:
    """Make the checks that are left, print each, write JSON.

    Raises:
        UserError: there is no such device or kind, or a check does not pass.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"), help="what is checked")
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, to check the checks")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, separated by commas; all unless given")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    require_device(options.device)
    kinds = split_list(options.kinds)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--kinds has {unknown[0]!r}, which is none; give some of {', '.join(KINDS)}")
    kept = Kept(options.output, {**provenance(), "device": options.device, "tiny": options.tiny}, kinds)
    for kind in [kind for kind in kept.left if kind in kinds]:
        kept.begin(kind)
        for check in checks_of(kind, torch.device(options.device), options.tiny):
            kept.add(kind, check)
            print(f"{check.name}: {check.found} (limit {check.limit:.0e}), {check.outcome}", flush=True)
        kept.end(kind)
    failed = [check.name for check in kept.checks if check.outcome == FAILED]
    if failed:
        raise UserError(f"{len(failed)} of {len(kept.checks)} checks do not pass ({', '.join(failed)}); report them")


if __name__ == "__main__":
    run_command(main)
