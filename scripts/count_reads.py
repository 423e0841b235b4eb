"""How often the host waits for a device, and how many operations it asks of it: in a step, a forward pass, an update.

    git worktree add --detach ../before 7add67b
    python scripts/count_reads.py --other ../before --output results/admm/reads.json

Operations are counted on the CPU (`host_reads.py`); nothing is timed. Where the code treats a GPU differently from a
CPU, its path for a GPU is counted: blocks are updated in stacks, and rows of a factored embedding are taken by
operations whose sizes do not depend on values. Triton's kernels cannot be counted without a GPU; the torch operations
in place of them are. The model is that of `nano`; an ADMM round has ten blocks of 256×256, 688×256 and 256×688, or
small copies of all blocks of 350m, in stacks of as many as there would be of the full-size blocks.

With `--other` the rows are counted in another checkout of the project too, one that updates one block after the other
on every device.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import Tensor

from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.factored import operators
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad.update import SOLVERS
from salaad.spectral.cost import RATES
from scripts.checkouts import commit_of, python_in, require_checkout, require_success
from scripts.counted_rows import MANY, SHAPES, Counts, Shapes, all_rows, counts, drawn, round_of
from scripts.trainings import ROOT

OF_350M = 32**2  # entries of a block of 350m over those of its small copy in `MANY`
STACKED = {"gram": "stacked, by eigenvectors", "products": "stacked, by products alone"}
KINDS = {
    "reads": "reads by the host",
    "eigensolvers": "eigensolvers, which wait inside",
    "uploads": "copies to the device",
    "operators": "operators",
}


def counts_here() -> Iterator[tuple[str, Counts]]:
    """Yield the name and the counts of every row in this checkout."""
    with patch.object(operators, "rows_in_torch", operators.plain_rows):
        yield from all_rows()
    for shapes, smaller in ((SHAPES, 1), (MANY, OF_350M)):
        for solver, how in STACKED.items():
            yield f"{round_of(shapes)}, {how}", stacked_counts(shapes, solver, smaller)


def stacked_counts(shapes: Shapes, solver: str, smaller: int) -> Counts:
    """Return the counts of a round of stacked blocks by one solver, in the middle of a training, as on a GPU."""
    blocks = [drawn(shape, seed, solver) for seed, shape in enumerate(shapes)]
    rows: list[Tensor] = []
    with as_on_a_device(smaller):
        found = counts(lambda: rows.extend(admm_round.update_round(blocks)))
    used = {SOLVERS[int(row[-1])] for row in rows}
    assert used == {solver}, f"updated by {', '.join(used)}"
    return found


@contextmanager
def as_on_a_device(smaller: int) -> Iterator[None]:
    """Context manager for updates as on a GPU, in stacks of as many blocks as if each were `smaller` times as large."""
    rates, most = replace(RATES["cpu"], waits=True), admm_round.MOST_ENTRIES // smaller
    with patch.multiple(admm_round, rates_of=lambda device: rates, MOST_ENTRIES=most):
        yield


def counts_in(checkout: Path) -> dict[str, Counts]:
    """Return the rows of `counted_rows.py` for another checkout, counted in a process that imports its modules.

    Raises:
        UserError: the process failed.
    """
    done = python_in(checkout, ["-c", "from scripts.counted_rows import print_rows; print_rows()"], ROOT)
    require_success(done, f"counting in {checkout}")
    return dict(json.loads(done.stdout))


def as_one(now: Mapping[str, Counts], before: Mapping[str, Counts]) -> list[dict[str, Any]]:
    """Return rows of the counts before and now; a stacked round now is set against one block after the other before."""
    once = dict(before)
    for shapes in (SHAPES, MANY):
        for how in STACKED.values():
            once[f"{round_of(shapes)}, {how}"] = before.get(f"{round_of(shapes)}, one after the other")
    return [{"what": what, "before": once.get(what), "now": found} for what, found in now.items()]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table, a line per row; each cell has the counts before and now."""
    lines = []
    for row in rows:
        before = row["before"] or {}
        lines.append((row["what"], *(f"{_number(before.get(kind))}, {_number(row['now'][kind])}" for kind in KINDS)))
    return markdown_table(("before, now", *KINDS.values()), lines)


def _number(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"


def main() -> None:
    """Count, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, help="another checkout of this project, to count there as well")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    other, before = {}, {}
    if options.other:
        require_checkout(options.other, "salaad")
        other = {"other": commit_of(options.other)}
        before = counts_in(options.other)
    rows = as_one(dict(counts_here()), before)
    print(table(rows))
    if options.output:
        write_json({"rows": rows, **provenance(), **other}, options.output)


if __name__ == "__main__":
    run_command(main)
