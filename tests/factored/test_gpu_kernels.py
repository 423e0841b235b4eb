"""The rules that decide where the factored layers' GPU kernels are used."""

import copy
import math
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from salaad.common import native
from salaad.common.gpus import GPUS, gpu_of
from salaad.factored import gpu_products, slr_weight
from salaad.factored.gpu_products import fewest_rows_for_dense
from salaad.factored.layers import SlrLinear
from salaad.factored.siblings import join_siblings
from salaad.factored.slr_tensors import column_dtype
from salaad.spectral.cost import rates_of
from salaad.spectral.gpu_names import known_name
from tests.helpers.slr_weights import parts

GPU = torch.device("cuda", 0)


@pytest.fixture
def machine(monkeypatch):
    """A function that imitates a machine with the given GPU and Triton; neither has to be there."""

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
    assert column_dtype(GPU, 2**15) == torch.int16
    assert column_dtype(GPU, 2**15 + 1) == torch.int32
    assert column_dtype(torch.device("cpu"), 2**15) == torch.int32


def test_columns_of_16_bits_are_good_for_everything_that_torch_does():
    """Torch computes with such columns in a layer on a GPU whose kernels cannot take its dtype, such as float64."""
    slr = parts(30, 40, 3, 200)
    layer, other = SlrLinear.from_slr(slr), SlrLinear.from_slr(slr)
    other._buffers["S_columns"] = other.S_columns.short().view(torch.uint8)
    layer, other, x = layer.double(), other, torch.randn(5, 40).double()
    other.U.data, other.V.data, other.S_values.data = layer.U.data, layer.V.data, layer.S_values.data
    assert other.columns.dtype == torch.int16
    assert torch.equal(layer(x), other(x)) and torch.equal(layer.weight, other.weight)
    assert all(map(torch.equal, layer.packed().values(), other.packed().values()))
    assert other.float().S_columns.dtype == torch.int32  # on a CPU, a change of dtype widens them again


# n×m of the projections of the 60M and the 1B model; `EVERY` combines them with GPUs, ranks, densities and dtypes.
SHAPES = [(512, 512), (1376, 512), (512, 1376), (2048, 2048), (5461, 2048), (2048, 5461)]
EVERY = [
    (GPUS[name], shape, rank_ratio, density, dtype)
    for name in GPUS
    for shape in SHAPES
    for rank_ratio in (0.01, 0.05, 0.15, 0.5)
    for density in (0.0, 0.001, 0.05, 0.3)
    for dtype in gpu_products.DTYPES
]


def fewest_rows(gpu, shape, rank_ratio, density, dtype) -> float:
    n, m = shape
    return fewest_rows_for_dense(shape, round(rank_ratio * min(shape)), round(density * n * m), dtype, gpu)


def test_every_number_of_rows_that_is_multiplied_as_it_is_has_a_valid_grid():
    """CUDA allows 65535 programs in the third dimension of a grid."""
    for case in EVERY:
        assert 1 < fewest_rows(*case) < float("inf")
        most = math.ceil(fewest_rows(*case)) - 1
        assert -(-most // gpu_products._MOST) <= 65535


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 500), (torch.bfloat16, 50)])
def test_a_batch_is_decoded_in_parts_and_a_text_is_read_by_dense_weights(name, dtype, most):
    """The ranks and the density are the paper's targets; the shapes are those of the 1B model, meant for a GPU."""
    for shape in SHAPES[3:]:
        for rank_ratio in (0.05, 0.15):
            assert gpu_products._MOST < fewest_rows(GPUS[name], shape, rank_ratio, 0.05, dtype) < most


@pytest.mark.parametrize("dtype", gpu_products.DTYPES)
def test_more_entries_and_slower_caches_let_the_dense_weight_pay_earlier(dtype, monkeypatch):
    for gpu in GPUS.values():
        found = [fewest_rows(gpu, (5461, 2048), 0.15, density, dtype) for density in (0, 0.001, 0.01, 0.03, 0.05)]
        assert found == sorted(found, reverse=True)
    at = {}
    for caches in (1, 2, 4, 8):
        monkeypatch.setattr(gpu_products, "_CACHES", caches)
        at[caches] = fewest_rows(GPUS["a100"], (5461, 2048), 0.15, 0.05, dtype)
    assert at[1] < at[2] < at[4] < at[8]


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dense_weight_is_made_from_the_row_on_where_the_counted_times_cross(name, dtype):
    """The expected times count the bytes that the programs of the kernels request for eight rows of x."""
    gpu, n, m, rank, nnz, size = GPUS[name], 2048, 5461, 300, 500_000, dtype.itemsize
    fewest = fewest_rows_for_dense((n, m), rank, nnz, dtype, gpu)
    of_V = rank * 8 * m * size
    of_U = n * 8 * rank * 4 + nnz * 8 * gpu_products._SECTOR
    memory = (rank * (n + m) + nnz) * size + 2 * nnz
    eight = memory / gpu.bandwidth + (of_V + of_U) / (gpu_products._CACHES * gpu.bandwidth)
    eight += 8 * 2 * (rank * (n + m) + nnz) / gpu.peaks["fp32"]
    made = n * m * size, n * m * size, nnz * (2 * size + 2)  # written, read by the product, changed by S
    dense = 2 * rank * n * m / gpu.peak(dtype) + sum(made) / gpu.bandwidth
    assert fewest * eight / 8 == pytest.approx(dense + fewest * 2 * n * m / gpu.peak(dtype))


def test_a_weight_that_is_small_in_parts_is_made_dense_only_where_a_grid_ends():
    slow = replace(GPUS["a100"], peaks=dict.fromkeys(GPUS["a100"].peaks, 1e12), bandwidth=1e13)
    assert fewest_rows_for_dense((1000, 1000), 10, 1000, torch.float32, slow) == 8 * 65535 + 1


def test_a_gpu_that_is_not_known_is_taken_for_another_with_one_warning(machine):
    machine()
    known_name.cache_clear(), rates_of.cache_clear()
    with pytest.warns(
        UserWarning, match=r"^Tesla V100 is not among .* \(h100, h200, a100, 4090\); .* as for an A100"
    ) as said:
        assert gpu_of(GPU) is GPUS["a100"] and rates_of(GPU) is GPUS["a100"].rates
    assert len(said) == 1


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "4090"),
    ],
)
def test_a_gpu_is_known_by_its_own_name(name, known, monkeypatch):
    known_name.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gpu_of(GPU) is GPUS[known]
        assert gpu_of(torch.device("cpu")) is GPUS["a100"]  # for kernels that an interpreter runs


@pytest.mark.parametrize("assign", [False, True])
def test_what_was_stored_on_a_gpu_is_loaded_on_a_cpu_and_the_other_way_round(assign, monkeypatch):
    slr, x = parts(30, 40, 3, 200), torch.randn(5, 40)
    expected = SlrLinear.from_slr(slr)(x)
    for wide, narrow in ((True, False), (False, True)):
        kinds = [torch.int32 if first else torch.int16 for first in (wide, narrow)]
        layers = []
        for kind in kinds:
            monkeypatch.setattr(slr_weight, "column_dtype", lambda *_, kind=kind: kind)
            layers.append(SlrLinear.from_slr(slr))
        given, layer = layers
        layer.S_values.data.zero_(), layer._buffers["S_columns"].zero_()
        layer.load_state_dict(given.state_dict(), assign=assign)
        assert layer.columns.dtype == kinds[1] and torch.equal(layer.columns.int(), given.columns.int())
        torch.testing.assert_close(layer(x), expected)


def test_a_copy_of_grouped_layers_is_a_group_of_its_own():
    model = torch.nn.ModuleDict({end: SlrLinear.from_slr(parts(8, 9, 2, 5)) for end in ("gate_proj", "up_proj")})
    join_siblings(dict(model.items()))
    twin = copy.deepcopy(model)
    assert twin["gate_proj"].siblings.layers == tuple(twin.values())
    assert model["up_proj"].siblings.layers == tuple(model.values())


def test_layers_are_given_the_same_x_by_their_roles_and_widths():
    widths = {
        "decoder.0.self_attn.q_proj": 8,
        "decoder.0.self_attn.k_proj": 8,
        "decoder.0.self_attn.v_proj": 8,
        "decoder.0.self_attn.out_proj": 8,
        "decoder.0.fc1": 8,
        "layers.1.self_attn.q_a_proj": 8,  # DeepSeek's: only the first (a) projections get the same x
        "layers.1.self_attn.kv_a_proj_with_mqa": 8,
        "layers.1.self_attn.q_b_proj": 6,
        "layers.1.self_attn.kv_b_proj": 5,
        "layers.2.mlp.experts.0.gate_proj": 8,
        "layers.2.mlp.experts.0.up_proj": 8,
        "layers.2.mlp.experts.1.gate_proj": 8,
        "layers.3.mlp.experts.gate_up_proj.0": 8,
        "layers.3.mlp.experts.gate_up_proj.1": 8,
        "h.0.attn.c_attn": 8,
    }
    layers = {name: SlrLinear.from_slr(parts(7, width, 2, 5)) for name, width in widths.items()}
    join_siblings(layers)
    names = {layer: name for name, layer in layers.items()}
    groups = {tuple(names[one] for one in layer.siblings.layers) for layer in names if layer.siblings}
    every = list(layers)
    assert groups == {tuple(every[:3]), tuple(every[5:7]), tuple(every[9:11])}


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None  # whoever imports it is told that it is not there
import torch, warnings
import salaad
from salaad.common import native
from salaad.factored.layers import SlrLinear
from tests.helpers.slr_weights import dense, distance, parts
warnings.simplefilter("error")
slr, x = parts(9, 33, 4, 60), torch.randn(3, 33)
assert distance(SlrLinear.from_slr(slr)(x), x.double() @ dense(slr).T) < 1e-5
print(native.why_not(torch.device("cuda", 0)))
"""


def test_without_triton_the_package_computes(tmp_path):
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Triton is not installed")
