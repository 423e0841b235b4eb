"""The tables of results/kernels: what scripts/inspect_kernels.py measured of the GPU kernels without a GPU."""

from salaad.common.files import read_json
from scripts.inspect_kernels import error_table, resource_table
from scripts.results_tables import RESULTS


def sections() -> dict[str, str]:
    """Return the tables of errors by kernel and case, and of registers, shared memory and spills."""
    result = read_json(RESULTS / "kernels" / "kernels.json")
    told = f"Triton {result['triton']}, commit {result['commit']}."
    return {
        "kernel-errors": error_table(result["errors"]),
        "kernel-resources": f"{resource_table(result['resources'])}\n\n{told}",
    }
