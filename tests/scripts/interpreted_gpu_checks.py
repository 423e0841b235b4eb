"""The check that GPU kernels are used, with Triton's interpreter."""

import pytest
import torch

from salaad.common import native
from salaad.factored import gpu_products
from salaad.methods.salaad import passes
from scripts.on_device import kernels

CPU = torch.device("cpu")


def test_all_are_used():
    assert kernels.used(CPU) == (kernels.USED, 0, 0, "", "")


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (passes, "_takes", "the update, the penalty"),
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
