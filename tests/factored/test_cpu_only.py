"""On a CPU nothing of a GPU is touched: neither its kernels nor torch.cuda, whatever is done with a factored model."""

import copy

import pytest
import torch

from salaad.common import native
from salaad.factored import gpu_products
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.layers import SlrLinear
from salaad.factored.siblings import Siblings
from tests.factored.test_fixed_size import IDS, blocks_of, llama
from tests.factored.test_replicas import replicas  # noqa: F401

pytestmark = pytest.mark.skipif(native.INTERPRETED, reason="the kernels of a GPU are interpreted on the CPU")


@pytest.fixture
def walled(monkeypatch):
    """Every way to a GPU fails the test."""
    places = [(gpu_products, name) for name in ("_kernels", "_products_like", "linear_of_several")]
    places += [(Siblings, "linear"), (native, "device_context"), (native, "why_not")]
    places += [(torch.cuda, name) for name in ("_lazy_init", "current_stream", "synchronize", "device")]
    for module, name in places:
        monkeypatch.setattr(module, name, lambda *_, name=name, **__: pytest.fail(f"{name} is called on a CPU"))


def test_a_model_is_used_trained_replicated_and_loaded(walled, replicas):  # noqa: F811
    model = factor(llama(), blocks_of(llama()))
    model(input_ids=IDS, labels=IDS).loss.backward()
    with torch.no_grad():
        expected = model(IDS).logits
        for each in (*replicas(model, 2), copy.deepcopy(model)):
            assert torch.equal(each(IDS).logits, expected)
        assert torch.equal(model(IDS.int()).logits, expected)
        for layer in slr_modules(model).values():
            layer.load_state_dict(layer.packed(in_int8=True), strict=False)
            assert {tensor.device.type for tensor in layer.state_dict().values()} == {"cpu"}
            if isinstance(layer, SlrLinear) and layer.nnz:
                with pytest.raises(RuntimeError):
                    layer(torch.ones(1, layer.in_features, dtype=torch.int64))
        model(IDS)
