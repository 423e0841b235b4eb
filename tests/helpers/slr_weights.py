"""Random matrices U·V + S, and their dense values in float64."""

import numpy as np
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from salaad.factored.slr import Slr
from salaad.factored.slr_weight import SlrWeight


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts(n: int, m: int, rank: int, nnz: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Slr:
    """Return random U (n×rank), V (rank×m) and S with `nnz` entries, the largest first."""
    generator = torch.Generator().manual_seed(seed)
    U, V, values = (torch.randn(*size, generator=generator) / 4 for size in ((n, rank), (rank, m), (nnz,)))
    positions = torch.randperm(n * m, generator=generator)[:nnz].int()
    values = values[values.abs().argsort(descending=True)]
    return Slr((n, m), U.to(dtype), V.to(dtype), positions, values.to(dtype))


def whole_numbers(nnz: int) -> Slr:
    """A 32×32 block of rank 3 in small whole numbers, so that U·V + S is exact in any order of summation."""
    generator = torch.Generator().manual_seed(0)
    U, V = (torch.randint(-2, 3, size, generator=generator).float() for size in ((32, 3), (3, 32)))
    values = torch.randint(1, 5, (nnz,), generator=generator).float().sort(descending=True).values
    return Slr((32, 32), U, V, torch.randperm(1024, generator=generator)[:nnz].int(), values)


def sparse(slr: Slr) -> np.ndarray:
    """S (n×m) in float64, entry by entry."""
    S = np.zeros(slr.shape)
    for position, value in zip(slr.positions.tolist(), slr.values.tolist(), strict=True):
        S[divmod(position, slr.shape[1])] = value
    return S


def dense(slr: Slr) -> Tensor:
    """U·V + S in float64."""
    return torch.from_numpy(slr.U.double().numpy() @ slr.V.double().numpy() + sparse(slr))


def distance(a: Tensor, b: Tensor) -> float:
    """‖a − b‖ / ‖b‖."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def held_by(layer: SlrWeight) -> Tensor:
    """U·V + S of a layer in float64, with S made dense by torch's own sparse CSR tensors."""
    entries = layer.S_starts, layer.columns, layer.S_values.detach().double()
    S = torch.sparse_csr_tensor(*entries, layer.shape, check_invariants=True)
    return layer.U.detach().double() @ layer.V.detach().double() + S.to_dense()


def assert_opened_as(opened: nn.Module, saved: nn.Module) -> int:
    """Assert that `opened` has `saved`'s tensors, blocks dense where that takes less memory; return how many are."""
    mine, theirs = opened.state_dict(), saved.state_dict()
    dense_now = 0
    for name, layer in saved.named_modules():
        if not isinstance(layer, SlrWeight):
            continue
        (n, m), element = layer.shape, layer.U.element_size()
        in_parts = sum(tensor.numel() * element for tensor in (layer.U, layer.V, layer.S_values))
        in_parts += 4 * (layer.nnz + max(n, m) + 1)
        assert isinstance(opened.get_submodule(name), SlrWeight) == (in_parts < n * m * element), name
        if in_parts < n * m * element:
            continue
        dense_now += 1
        weight, bits = mine.pop(f"{name}.weight"), torch.finfo(layer.U.dtype).eps
        weight = weight.mT if isinstance(opened.get_submodule(name), Conv1D) else weight
        # The opened weight is rounded once, after a sum in float32.
        assert weight.dtype == layer.U.dtype
        torch.testing.assert_close(weight.double(), held_by(layer), rtol=bits / 2 + 1e-6, atol=1e-6)
        theirs = {key: t for key, t in theirs.items() if not key.startswith(f"{name}.") or key == f"{name}.bias"}
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key
    return dense_now
