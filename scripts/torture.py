"""Break a training run in the ways a cluster does, and measure what is lost and the seconds to recover.

    python scripts/torture.py                     every drill, about an hour on two cores
    python scripts/torture.py --quick             a few tries of each, ten minutes
    python scripts/torture.py --drills kill,disk  some drills; an existing --output keeps the rows of the others

Every drill starts the trainer as a user does, breaks it from outside, starts the same command again, and compares the
finished run with one that was left alone: weights, L and S, optimizer, place in the data, and every line of the
records, bit for bit. Prints a table; the last line is the verdict, and the exit code is 0 if nothing was lost.
"""

import argparse
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.errors import UserError, run_command
from scripts.reliability.drills import DRILLS, Drills
from scripts.reliability.fault_table import Row, require_table, save, table
from scripts.reliability.requirements import require_hypothesis
from scripts.reliability.training_process import Training


def main() -> None:
    """Run the drills; exit code 0 if nothing was lost.

    Raises:
        UserError: an option is wrong, or a drill needs what is not installed; no drill has begun.
        SystemExit: with the verdict.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few tries of each drill")
    parser.add_argument("--drills", default=",".join(DRILLS), help=f"some of {', '.join(DRILLS)}")
    parser.add_argument("--seed", type=int, default=0, help="determines the moments at which a run is broken")
    parser.add_argument("--output", type=Path, help="JSON file to write; rows of other drills in it are kept")
    options = parser.parse_args()
    chosen = list(dict.fromkeys(name.strip() for name in options.drills.split(",")))
    unknown = [name for name in chosen if name not in DRILLS]
    if unknown:
        raise UserError(f"--drills {options.drills}: {unknown[0]!r} is no drill; give some of {', '.join(DRILLS)}")
    if "hostile" in chosen:
        require_hypothesis("the drill hostile")
    if options.output:
        require_table(options.output)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as work:
        for row in run_drills(Drills(Path(work), options.quick, options.seed), chosen):
            rows.append(row)
            print(f"{row.fault}: {row.tries} tries, lost: {', '.join(row.lost) or 'nothing'}; {row.note}", flush=True)
            if options.output and row.tries:  # no later run would replace the row of a drill that broke off
                save(row, options.output)
    print("\n" + table([asdict(row) for row in rows]) + "\n")
    lost = [f"{row.fault} ({', '.join(row.lost)})" for row in rows if row.lost]
    tries = sum(row.tries for row in rows)
    print(f"LOST: {'; '.join(lost)}" if lost else f"{len(rows)} faults, {tries} tries: nothing was lost")
    raise SystemExit(1 if lost else 0)


def run_drills(drills: Drills, names: list[str]) -> Iterator[Row]:
    """Yield the rows of these drills; a drill that breaks off ends with a row without tries, and no other follows."""
    for name in names:
        try:
            yield from getattr(drills, name)()
        except Exception:
            traceback.print_exc()
            for training in Training.started:
                if training.alive:
                    training.kill()
            yield Row(name, lost=["the drill"], note="broke off")
            return


if __name__ == "__main__":
    run_command(main)
