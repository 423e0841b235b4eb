"""Forward passes of factored layers and models never make the host wait; an embedding pads its rows' entries for that.

They compute as on a GPU, without the compiled CPU products, which read tensors as arrays of the host.
"""

import pytest
import torch

from salaad.factored import operators
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.layers import SlrEmbedding, SlrLinear
from salaad.model.loss import SummedLoss
from scripts.host_reads import HostReads
from tests.helpers.slr_weights import dense, gaussian, parts
from tests.helpers.tiny_llama import IDS, llama

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


@pytest.mark.parametrize("nnz", [0, 40])
@pytest.mark.parametrize("rows", [1, 50])
def test_a_linear_layer_reads_nothing(rows, nnz):
    layer = SlrLinear.from_slr(parts(16, 24, 4, nnz))
    x = gaussian(rows, 24)
    layer(x)  # the first call makes the layer's sparse tensor
    with HostReads() as reads, torch.no_grad():
        layer(x)
    assert (reads.count, reads.uploads) == (0, 0)


@pytest.mark.parametrize("nnz", [0, 40])
def test_an_embedding_off_the_cpu_reads_nothing(nnz):
    slr = parts(16, 24, 4, nnz)
    layer = SlrEmbedding.from_slr(slr)
    ids = torch.tensor([[3, 0], [15, 3]])
    with HostReads() as reads, torch.no_grad():
        found = operators.plain_rows(ids, *layer._tensors)
    assert (reads.count, reads.uploads) == (0, 0)
    torch.testing.assert_close(found.double(), dense(slr)[ids], rtol=1e-5, atol=1e-5)


@pytest.fixture
def off_the_cpu(monkeypatch):
    """Compute as on a GPU: products in torch, and the embedding's rows without shapes that depend on values."""
    monkeypatch.setattr(operators, "compiled_products", lambda *_: None)
    monkeypatch.setattr(operators, "rows_in_torch", operators.plain_rows)


def factored_llama():
    """Return a LLaMA whose projections, embedding and head are U·V + S; one projection lacks U·V, one lacks S."""
    model = llama().eval()
    names = [name for name, p in model.named_modules() if getattr(p, "weight", None) is not None and p.weight.ndim == 2]
    blocks = {name: parts(*model.get_submodule(name).weight.shape, 3, 20, seed=k) for k, name in enumerate(names)}
    for name, rank, nnz in ((names[2], 0, 20), (names[3], 3, 0)):
        blocks[name] = parts(*model.get_submodule(name).weight.shape, rank, nnz)
    model = factor(model, blocks)
    assert len(slr_modules(model)) == len(names) == 16
    return model


@pytest.mark.parametrize(
    "forward",
    [
        lambda loss, cache: loss.model(input_ids=IDS),
        lambda loss, cache: loss.model(input_ids=IDS[:, :1], past_key_values=cache),
        lambda loss, cache: loss(IDS, IDS),
    ],
    ids=["a text", "the next token", "the loss"],
)
def test_a_whole_model_given_no_mask_reads_nothing(off_the_cpu, forward):
    model = factored_llama()
    loss = SummedLoss(model)
    with torch.no_grad():
        cache = model(input_ids=IDS).past_key_values  # this call also makes the sparse tensors
        with HostReads() as reads:
            forward(loss, cache)
    assert reads.count == 0


def test_training_a_whole_model_reads_nothing(off_the_cpu):
    model = factored_llama()
    loss = SummedLoss(model)
    with HostReads() as reads:
        loss(IDS, IDS).backward()
    assert reads.count == 0 and all(p.grad is not None for p in model.parameters() if p.numel())
