"""The kernels for a GPU, run by an interpreter against float64 and compiled ahead of time: the whole script."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.interpreted import needs_triton

ROOT = Path(__file__).resolve().parents[2]
MOST_REGISTERS = 255  # of a thread, of every architecture
# Sums of up to 300 products in float32; and one unit in the last place of bfloat16, which the interpreter rounds down.
LARGEST = {"float32": 2e-6, "bfloat16": 2**-7}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    """What the script writes, with nothing compiled before."""
    folder = tmp_path_factory.mktemp("kernels")
    command = [sys.executable, str(ROOT / "scripts" / "inspect_kernels.py"), "--output", str(folder / "kernels.json")]
    subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": str(folder / "cache")}, check=True)
    return json.loads((folder / "kernels.json").read_text())


@needs_triton
def test_every_kernel_is_as_exact_as_its_dtype(found):
    cases = {(row["kernel"], row["case"]) for row in found["errors"]}
    assert {case for _, case in cases} >= {"empty S", "rank 0", "nothing", "long rows"}
    wrong = [row for row in found["errors"] if not row["error"] <= LARGEST[row["dtype"]]]
    assert not wrong


@needs_triton
def test_every_kernel_compiles_for_every_architecture_and_spills_nothing(found):
    kernels = {row["kernel"] for row in found["resources"]}
    assert kernels >= {row["kernel"] for row in found["errors"]}
    for dtype in ("float32", "bfloat16"):
        for architecture in ("sm_80", "sm_90", "sm_100"):
            rows = [row for row in found["resources"] if (row["dtype"], row["architecture"]) == (dtype, architecture)]
            assert {row["kernel"] for row in rows} == kernels
            assert all(0 < row["registers"] < MOST_REGISTERS and not row["spilled"] for row in rows)


@needs_triton
def test_what_is_recorded_is_what_is_compiled_now(found):
    """Registers depend on Triton's version alone, which is pinned; `scripts/inspect_kernels.py` records them anew."""
    recorded = json.loads((ROOT / "results" / "kernels" / "kernels.json").read_text())
    assert recorded["triton"] == found["triton"], "run python scripts/inspect_kernels.py"
    assert recorded["resources"] == found["resources"], "run python scripts/inspect_kernels.py"
