"""The kernels of the factored layers for a GPU: run by an interpreter, and what decides where they are used."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from salaad.common import native
from salaad.common.gpus import GPUS, gpu_called
from salaad.factored import gpu_products
from salaad.factored.gpu_products import fewest_rows_for_dense
from salaad.factored.layers import SlrLinear
from salaad.factored.siblings import join_siblings
from tests.helpers.interpreted import needs_triton, passes_interpreted
from tests.helpers.slr_weights import parts

GPU = torch.device("cuda", 0)


@needs_triton
def test_layers_compute_with_interpreted_kernels():
    assert passes_interpreted(Path(__file__).with_name("interpreted_gpu_kernels.py"))


@pytest.fixture
def machine(monkeypatch):
    """A machine whose GPU and Triton are as told: nothing of it is there."""

    def of(triton: bool = True, there: bool = True, capability: tuple[int, int] = (9, 0), trial: str | None = None):
        monkeypatch.setattr(native, "find_spec", lambda name: name if triton else None)
        monkeypatch.setattr(native, "_trial", lambda device: trial)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
        native.uses_triton.cache_clear()

    yield of
    native.uses_triton.cache_clear()


@pytest.mark.parametrize(
    ("about", "reason"),
    [
        ({"triton": False}, "Triton is not installed"),
        ({"there": False}, "torch finds no GPU"),
        ({"capability": (7, 0)}, "Tesla V100 has compute capability 7.0, and 8.0 is needed"),
        ({"trial": "Triton cannot run a kernel (no compiler)"}, r"cannot run a kernel \(no compiler\)"),
    ],
)
def test_a_gpu_without_the_kernels_is_told_of_once(about, reason, machine):
    machine(**about)
    with pytest.warns(UserWarning, match=f"{reason}.*, so torch's operations are used on cuda:0") as said:
        assert not native.uses_triton(GPU)
    assert not native.uses_triton(GPU)
    assert len(said) == 1


def test_nothing_is_said_where_the_kernels_work_or_are_not_wanted(machine, monkeypatch):
    machine()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.uses_triton(GPU) and not native.uses_triton(torch.device("cpu"))
        monkeypatch.setenv("SALAAD_NATIVE", "0")
        native.uses_triton.cache_clear()
        assert not native.uses_triton(GPU)


def test_columns_have_16_bits_only_where_the_kernels_read_them(machine):
    machine()
    assert gpu_products.column_dtype(GPU, 2**15) == torch.int16
    assert gpu_products.column_dtype(GPU, 2**15 + 1) == torch.int32
    assert gpu_products.column_dtype(torch.device("cpu"), 2**15) == torch.int32


def test_columns_of_16_bits_are_good_for_everything_that_torch_does():
    """As in a layer on a GPU whose kernels cannot take a dtype, such as float64."""
    slr = parts(30, 40, 3, 200)
    layer, other = SlrLinear.from_slr(slr), SlrLinear.from_slr(slr)
    other._buffers["S_columns"] = other.S_columns.short().view(torch.uint8)
    layer, other, x = layer.double(), other, torch.randn(5, 40).double()
    other.U.data, other.V.data, other.S_values.data = layer.U.data, layer.V.data, layer.S_values.data
    assert other.columns.dtype == torch.int16
    assert torch.equal(layer(x), other(x)) and torch.equal(layer.weight, other.weight)
    assert all(map(torch.equal, layer.packed().values(), other.packed().values()))
    assert other.float().S_columns.dtype == torch.int32  # back where they are best


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA GeForce RTX 4090", "other"]
)
def test_the_dense_weight_is_made_from_the_row_on_where_the_modelled_times_cross(name, dtype):
    gpu, (n, m), rank, nnz, element = gpu_called(name), (2048, 5461), 300, 500_000, dtype.itemsize
    fewest, dense, plain = fewest_rows_for_dense((n, m), rank, nnz, dtype, gpu), gpu.peak(dtype), gpu.peaks["fp32"]

    def by_parts(rows: float) -> float:
        read = (rank * (n + m) + nnz) * element + 2 * nnz
        work = rank * (n + m) + gpu_products._LOOKUP * nnz
        return rows / gpu_products._MOST * read / gpu.bandwidth + 2 * rows * work / plain

    def by_dense(rows: float) -> float:
        moved = 2 * n * m * element + nnz * (2 * element + 2)
        return 2 * rank * n * m / dense + moved / gpu.bandwidth + 2 * rows * n * m / dense

    assert by_parts(fewest) == pytest.approx(by_dense(fewest))
    assert by_parts(fewest / 2) < by_dense(fewest / 2) and by_parts(2 * fewest) > by_dense(2 * fewest)
    assert fewest > gpu_products._MOST  # one read of U, V and S is never given up


def test_a_weight_that_is_small_in_parts_is_never_made_dense():
    slow = replace(GPUS["a100"], peaks=dict.fromkeys(GPUS["a100"].peaks, 1e12), bandwidth=1e13)
    assert fewest_rows_for_dense((1000, 1000), 10, 1000, torch.float32, slow) == float("inf")


def test_a_copy_of_grouped_layers_is_a_group_of_its_own():
    model = torch.nn.ModuleDict({end: SlrLinear.from_slr(parts(8, 9, 2, 5)) for end in ("gate_proj", "up_proj")})
    join_siblings(dict(model.items()))
    twin = copy.deepcopy(model)
    assert twin["gate_proj"].siblings.layers == tuple(twin.values())
    assert model["up_proj"].siblings.layers == tuple(model.values())
