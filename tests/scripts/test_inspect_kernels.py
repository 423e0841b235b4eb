"""scripts/inspect_kernels.py: GPU kernels compiled ahead of time, and what is recorded of them."""

import json
import re
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

from scripts import inspect_kernels
from tests.helpers.kernel_rows import taken_by
from tests.helpers.needs import needs_triton

ROOT = Path(__file__).resolve().parents[2]
MOST_REGISTERS = 255  # of a thread, on every architecture
# Compiled here, as what changes a kernel shows on one of them; the recorded file has each dtype on each.
COMPILED = {"float32": 80, "bfloat16": 90, "float16": 100}


@pytest.fixture
def recorded() -> dict:
    return json.loads((ROOT / "results" / "kernels" / "kernels.json").read_text())


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> list[dict]:
    """Rows of every case in one of its dtypes, each in turn, on one architecture, compiled with an empty cache."""
    from scripts.kernels import resources

    alike = defaultdict(list)
    for case in resources.cases():
        alike[case.kernel.__name__, case.what].append(case)
    chosen = [cases[i % len(cases)] for i, cases in enumerate(alike.values())]
    assert {case.dtype for case in chosen} == COMPILED.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        return [resources.resources(case, COMPILED[case.dtype]) for case in chosen]


@needs_triton
def test_every_kernel_compiles_for_every_architecture_and_spills_nothing(recorded):
    cases = {(row["kernel"], row["case"]) for row in recorded["resources"]}
    assert {kernel for kernel, _ in cases} >= {row["kernel"] for row in recorded["errors"]}
    assert {case for _, case in cases} >= {"B=1", "B=2", "B=4", "B=8", "B=1, 2 layers", "B=1, 3 layers"}
    assert {case for _, case in cases} >= {"B=1, not aligned", "B=8, 32 bits", "chosen, 32 bits", "all, 32 bits"}
    for dtype in COMPILED:
        for architecture in ("sm_80", "sm_90", "sm_100"):
            rows = [
                row for row in recorded["resources"] if (row["dtype"], row["architecture"]) == (dtype, architecture)
            ]
            assert {row["kernel"] for row in rows} == taken_by(dtype, cases)
            assert all(0 < row["registers"] < MOST_REGISTERS and not row["spilled"] for row in rows)


@needs_triton
def test_what_is_recorded_is_what_is_compiled_now(recorded, compiled):
    """Registers depend on Triton's version alone, which is pinned; `scripts/inspect_kernels.py` records them anew."""
    assert recorded["triton"] == version("triton"), "run python scripts/inspect_kernels.py"
    assert all(row in recorded["resources"] for row in compiled), "run python scripts/inspect_kernels.py"
    cases = {(row["kernel"], row["case"]) for row in compiled}
    assert cases == {(row["kernel"], row["case"]) for row in recorded["resources"]}


@needs_triton
def test_the_script_writes_what_it_measures_and_prints_a_line_per_case(recorded, monkeypatch, tmp_path, capsys):
    for name in ("errors", "resources"):
        monkeypatch.setattr(inspect_kernels, f"measured_{name}", lambda name=name: recorded[name])
    monkeypatch.setattr("sys.argv", ["inspect_kernels.py", "--output", str(tmp_path / "kernels.json")])
    inspect_kernels.main()
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert all(written[key] == recorded[key] for key in ("errors", "resources", "triton"))
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    for row in recorded["resources"]:
        assert [row["kernel"], row["dtype"], row["case"]] in [line[:3] for line in lines]


@needs_triton
@pytest.mark.parametrize("dtype", COMPILED)
def test_V_is_read_16_bytes_at_once_where_it_is_aligned_and_number_by_number_elsewhere(dtype):
    from scripts.kernels import resources

    read = {}
    for case in resources.cases():
        if (case.kernel.__name__, case.dtype) == ("multiply_by_V", dtype) and case.what.startswith("B=1"):
            ptx = resources.compile_for(case, 90).asm["ptx"]
            read[case.what] = len(re.findall(r"ld\.global\.b(?:16|32)\b", ptx))
    aligned = {"B=1": 0, "B=1, 2 layers": 0, "B=1, 3 layers": 0}
    assert read == aligned | {"B=1, not aligned": 8}  # 1024 numbers per program, read by 128 threads
