"""A forward of a factored layer makes the host wait for nothing; an embedding pads the entries of its rows for that."""

import pytest
import torch

from salaad.factored import operators
from salaad.factored.layers import SlrEmbedding, SlrLinear
from scripts.host_reads import HostReads
from tests.helpers.slr_weights import dense, gaussian, parts

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")


@pytest.mark.parametrize("nnz", [0, 40])
@pytest.mark.parametrize("rows", [1, 50])
def test_a_linear_layer_reads_nothing(rows, nnz):
    layer = SlrLinear.from_slr(parts(16, 24, 4, nnz))
    x = gaussian(rows, 24)
    layer(x)  # makes its sparse tensor
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
