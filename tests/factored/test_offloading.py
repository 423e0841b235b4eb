"""A layer keeps none of the tensors that accelerate loads for a forward pass and offloads again after it."""

import gc

import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch.multiprocessing.reductions import StorageWeakRef

from salaad.common import native
from salaad.factored.layers import SlrActivated, SlrEmbedding, SlrLinear
from tests.helpers.slr_weights import parts


class Copies(dict):
    """Offloaded tensors, as on a disk or in the host's memory: every read returns a copy."""

    def __getitem__(self, name):
        return super().__getitem__(name).clone()


def activated(slr) -> SlrActivated:
    layer = SlrActivated(slr.shape[1], slr.shape[0], slr.rank, slr.nnz)
    layer.fill(slr)
    return layer


@pytest.mark.filterwarnings("ignore:a layer of 40×30 has numbers in torch.float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])  # our products, and torch's
@pytest.mark.parametrize("rows", [2, 300])
@pytest.mark.parametrize("kind", [SlrLinear.from_slr, SlrEmbedding.from_slr, activated])
def test_no_tensor_outlives_its_forward(kind, rows, dtype):
    layer = kind(parts(40, 30, 3, 200, dtype=dtype)).requires_grad_(False)
    x = torch.randint(0, 40, (rows,)) if isinstance(layer, SlrEmbedding) else torch.randn(rows, 30).to(dtype)
    expected = layer(x)
    elsewhere, executed = Copies(layer.named_parameters()), []

    class Watched(AlignDevicesHook):
        def pre_forward(self, module, *args, **kwargs):
            given = super().pre_forward(module, *args, **kwargs)
            executed.extend(StorageWeakRef(parameter.untyped_storage()) for parameter in module.parameters())
            return given

    add_hook_to_module(layer, Watched(execution_device="cpu", offload=True, weights_map=elsewhere))
    for _ in range(2):
        assert torch.equal(layer(x), expected)
        if native.INTERPRETED:
            gc.collect()  # the interpreter leaves reference cycles that hold a kernel's arguments
        assert layer.U.is_meta and all(storage.expired() for storage in executed)
    assert len(executed) == 2 * 3
