"""The checks of GPU kernels with Triton's interpreter: each against float64, and that the package uses them."""

import json
from pathlib import Path

import pytest
import torch

from salaad.common import native
from salaad.factored import gpu_products
from salaad.methods.salaad import elementwise
from scripts.kernels import accuracy
from scripts.on_device import kernels
from tests.helpers.kernel_rows import taken_by

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
# Sums of up to 300 products in float32; one unit in the last place of bfloat16, which the interpreter rounds down; two
# roundings to the nearest in float16, of half a unit each.
LARGEST = {"float32": 2e-6, "bfloat16": 2**-7, "float16": 2**-10}


@pytest.fixture(scope="module")
def errors() -> list[dict]:
    return list(accuracy.errors())


def test_every_kernel_is_as_exact_as_its_dtype_and_recorded(errors):
    cases = {(row["kernel"], row["case"]) for row in errors}
    assert {case for _, case in cases} >= {"empty S", "rank 0", "nothing", "long rows", "32 bits", "shifted"}
    for dtype in LARGEST:
        assert {row["kernel"] for row in errors if row["dtype"] == dtype} == taken_by(dtype, cases)
    assert not [row for row in errors if not row["error"] <= LARGEST[row["dtype"]]]
    recorded = json.loads((ROOT / "results" / "kernels" / "kernels.json").read_text())
    assert [key_of(row) for row in errors] == [key_of(row) for row in recorded["errors"]]


def key_of(row: dict) -> tuple:
    return tuple(value for key, value in row.items() if key != "error")


def test_every_kernel_is_a_check_on_a_device_and_passes(errors, monkeypatch):
    monkeypatch.setattr(accuracy, "errors", lambda device, large: iter(errors))
    found = {check.name: check for check in kernels.kernels(CPU, tiny=True)}
    names = {"divide_kernel", "penalty_kernel", "cross_entropy_kernel"}
    assert {f"{name}, bfloat16" for name in names} | {"add_rows_of_S, float16, 32 bits", kernels.USED} < set(found)
    assert all(check.error <= check.limit for check in found.values())
    assert found[kernels.USED] == (kernels.USED, 0, 0, "", "")


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (elementwise, "_takes", "the update, the penalty"),
        (gpu_products, "products", r"few rows times U·V \+ S, rows of U·V \+ S"),
        (native, "uses_triton", "few rows .*, rows .*, the update, the penalty, the loss"),
    ],
)
def test_what_torch_computes_is_named(owner, name, what, monkeypatch):
    monkeypatch.setattr(owner, name, lambda *_: None)
    found = kernels.used(CPU)
    assert found.outcome == "FAILED"
    with pytest.raises(ValueError, match=f"^torch computes {what}$"):
        raise ValueError(found.problem)
