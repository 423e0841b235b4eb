"""Whether the GPU computes what the CPU does: kernels, solvers, the ADMM, factored layers, training, resume, ranks.

    python scripts/gpu_checks.py --output results/gpu/NAME/checks.json
    python scripts/gpu_checks.py --kinds kernels,graphs
    python scripts/gpu_checks.py --device cpu --tiny

Every check gives one error and the limit that it must not exceed. References are computed in float64 on the CPU, except
for training, whose reference is the same training in float32 on the CPU, in one process, without interruption. CUDA
graphs, and the host's waiting for a GPU, are left out on a CPU.
"""

import argparse
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.provenance import provenance
from salaad.common.validation import split_list
from scripts.devices import require_device
from scripts.on_device.check import FAILED, Check
from scripts.on_device.factored import graphs, layers
from scripts.on_device.kernels import kernels
from scripts.on_device.mathematics import solvers, updates
from scripts.on_device.trainings import runs, steps
from scripts.on_device.waiting import waits

KINDS: dict[str, Callable[[torch.device, bool], Iterator[Check]]] = {
    "kernels": kernels,
    "solvers": solvers,
    "updates": updates,
    "layers": layers,
    "graphs": graphs,
    "waits": waits,
    "steps": steps,
    "runs": runs,
}


def all_checks(device: torch.device, tiny: bool, kinds: Sequence[str]) -> Iterator[Check]:
    """Every check of some kinds; one that breaks off is a row too, and the others go on."""
    for kind in kinds:
        try:
            yield from KINDS[kind](device, tiny)
        except Exception as error:
            traceback.print_exc()
            yield Check(kind, math.nan, 0.0, " ".join(str(error).split())[:200] or type(error).__name__)


def main() -> None:
    """Compare, print a table, write JSON.

    Raises:
        UserError: there is no such device or kind, or a check does not pass.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, to check the checks")
    parser.add_argument("--kinds", default=",".join(KINDS), help="which, separated by commas; all unless given")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    require_device(options.device)
    kinds = split_list(options.kinds)
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UserError(f"--kinds has {unknown[0]!r}, which is none; give some of {', '.join(KINDS)}")
    checks = []
    for check in all_checks(torch.device(options.device), options.tiny, kinds):
        checks.append(check)
        print(f"{check.name}: {check.found} (limit {check.limit:.0e}), {check.outcome}", flush=True)
    if options.output:
        write_json({**provenance(), "checks": [check.row for check in checks]}, options.output)
    failed = [check.name for check in checks if check.outcome == FAILED]
    if failed:
        raise UserError(f"{len(failed)} of {len(checks)} checks do not pass ({', '.join(failed)}); report them")


if __name__ == "__main__":
    run_command(main)
