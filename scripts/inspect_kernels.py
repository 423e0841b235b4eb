"""What the kernels for a GPU do without one: their errors in Triton's interpreter, and what they take when compiled.

python scripts/inspect_kernels.py --output results/kernels/kernels.json

All kernels are run on the CPU against float64, in a separate process, since Triton decides at its import whether to
interpret; and compiled ahead of time for an A100, an H100 and a B200. Nothing here says how fast a kernel is.
"""

import argparse
import json
import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from scripts.trainings import ROOT


def main() -> None:
    """Measure, print the tables, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    if find_spec("triton") is None:
        raise UserError("Triton is not installed; pip install -r tests/requirements.txt brings it")
    result = {"errors": measured_errors(), "resources": measured_resources()}
    print(f"{error_table(result['errors'])}\n\n{resource_table(result['resources'])}")
    if options.output:
        write_json({**result, "triton": version("triton"), **provenance()}, options.output)


def measured_errors() -> list[dict]:
    """The rows of `scripts.kernels.accuracy`, from a process whose Triton interprets."""
    code = "import json; from scripts.kernels.accuracy import errors; print(json.dumps(list(errors())))"
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def measured_resources() -> list[dict]:
    """The rows of `scripts.kernels.resources` for every kernel and architecture."""
    from scripts.kernels.resources import ARCHITECTURES, cases, resources  # Triton, which may be missing

    return [resources(case, architecture) for case in cases() for architecture in ARCHITECTURES]


def error_table(rows: list[dict]) -> str:
    """Return a table, a line per kernel and case, a column per dtype; a dash where a kernel does not take a dtype."""
    lines: dict[tuple[str, str], dict[str, str]] = {}
    for row in rows:
        lines.setdefault((row["kernel"], row["case"]), {})[row["dtype"]] = f"{row['error']:.1e}"
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    table = [(*key, *(errors.get(dtype, "–") for dtype in dtypes)) for key, errors in lines.items()]
    return markdown_table(("kernel", "case", *dtypes), table)


def resource_table(rows: list[dict]) -> str:
    """Return a table, a line per kernel, dtype and case; registers on every architecture, and the most of the rest."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["kernel"], row["dtype"], row["case"]), []).append(row)
    architectures = list(dict.fromkeys(row["architecture"] for row in rows))
    lines = [
        (
            *key,
            str(group[0]["warps"]),
            *(str(row["registers"]) for row in group),
            str(max(row["shared"] for row in group)),
            str(max(row["spilled"] for row in group)),
        )
        for key, group in groups.items()
    ]
    registers = tuple(f"registers, {architecture}" for architecture in architectures)
    return markdown_table(("kernel", "dtype", "case", "warps", *registers, "shared", "spilled"), lines)


if __name__ == "__main__":
    run_command(main)
