"""Checks of every kernel by itself against float64, and of whether the package uses the kernels where it should.

On a CPU Triton's interpreter runs them in a separate process, since Triton decides at its import whether to interpret.
"""

import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch

from salaad.common import native
from salaad.common.files import read_json
from salaad.config.methods import SalaadConfig
from salaad.factored import gpu_products
from salaad.methods.salaad.round import update_round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.model.loss import summed_cross_entropy
from scripts.on_device.check import Check, matrix, not_made
from scripts.on_device.factored import models
from scripts.trainings import ROOT

# float32: sums, with a GPU's own exponential. Else two roundings, in bfloat16 towards zero by the interpreter.
LIMITS = {"float32": 1e-5, "bfloat16": 2**-7, "float16": 2**-9}
USED = "kernels are used"


def kernels(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield a check that kernels are used, and checks of the largest relative error of every kernel and case."""
    if device.type == "cpu" and not native.INTERPRETED:
        yield from interpreted()
        return
    reason = native.why_not(device) if native.is_wanted() else "SALAAD_NATIVE is 0"
    if reason:
        yield Check(USED, math.nan, 0, reason)
        return
    yield used(device)
    from scripts.kernels.accuracy import errors  # Triton, which may be missing

    for row in errors(device, large=not tiny):
        name = ", ".join(filter(None, (row["kernel"], row["dtype"], row["case"])))
        # In an update all but X is float32, whatever the dtype of X.
        yield Check(name, row["error"], LIMITS["float32" if row["kernel"] == "divide_kernel" else row["dtype"]])


def interpreted() -> Iterator[Check]:
    """Yield the checks of `kernels` from a process in which Triton interprets, if Triton is installed."""
    if find_spec("triton") is None:
        yield not_made("kernels", "Triton is not installed")
        return
    with TemporaryDirectory() as folder:
        result = Path(folder, "checks.json")
        command = [sys.executable, "scripts/gpu_checks.py", "--device=cpu", "--tiny", "--kinds=kernels"]
        environment = os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run([*command, "--output", result], cwd=ROOT, env=environment, capture_output=True, text=True)
        if not result.exists():
            raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
        yield from map(Check.from_row, read_json(result)["checks"])


@torch.no_grad()
def used(device: torch.device) -> Check:
    """Check that factored model, ADMM update, penalty and loss launch kernels; the error counts those that do not."""
    from salaad.methods.salaad import gpu_kernels as admm  # Triton, which may be missing
    from salaad.model import gpu_kernels as loss

    launchers = {
        "few rows times U·V + S": (gpu_products, "linear_of_several"),
        "rows of U·V + S": (gpu_products.Products, "rows"),
        "the update": (admm, "sparse_and_dual"),
        "the penalty": (admm, "add_penalty"),
        "the loss": (loss, "cross_entropy_"),
    }
    X = matrix(24, 40).float().to(device)
    with ExitStack() as stack:
        seen = {
            what: stack.enter_context(patch.object(owner, name, autospec=True, side_effect=getattr(owner, name)))
            for what, (owner, name) in launchers.items()
        }
        models(tiny=True)[0].to(device)(torch.zeros(1, 1, dtype=torch.int64, device=device))
        block = Surrogate(X, 0.1, SalaadConfig())
        update_round([(block, X)])
        block.add_penalty_gradient(torch.zeros_like(X), X)
        summed_cross_entropy(X, X, torch.zeros(len(X), dtype=torch.int64, device=device))
    left = [what for what, launcher in seen.items() if not launcher.called]
    return Check(USED, len(left), 0, f"torch computes {', '.join(left)}" if left else "")
