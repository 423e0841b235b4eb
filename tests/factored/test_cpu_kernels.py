"""The factored layers' compiled CPU products, against dense products in float64 and against torch's products."""

import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from ctypes.util import find_library
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from salaad.common.errors import UserError
from salaad.factored import cpu_kernels
from salaad.factored.layers import SlrEmbedding, SlrLinear
from salaad.factored.slr import Slr
from tests.helpers.slr_weights import dense, distance, parts

ROOT = Path(__file__).resolve().parents[2]
AVX2 = "avx2" in cpu_kernels._processor().split()
compiled = pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler")


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference of y from `exact`, relative to the largest number of `exact`."""
    return ((y.double() - exact).abs().max() / exact.abs().max().clamp(min=1e-30)).item()


@pytest.fixture(autouse=True)
def threads():
    """Restore torch's number of threads after the test."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@compiled
def test_the_library_is_there_where_a_compiler_is():
    assert cpu_kernels.library() is not None


@compiled
@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 70), st.integers(1, 70), st.integers(0, 9), st.integers(0, 100), st.integers(1, 70), st.booleans()
)
@example(5, 7, 2, 30, 1, True)
def test_a_product_is_that_of_the_dense_matrix(n, m, rank, percent, rows, bias):
    slr = parts(n, m, rank, max(1, n * m * percent // 100))
    b = torch.randn(n) if bias else None
    layer, x = SlrLinear.from_slr(slr, b), torch.randn(rows, m)
    exact = x.double() @ dense(slr).T + (0 if b is None else b.double())
    assert layer._native(x) is not None
    for _ in range(2):  # twice, since the first call must not change the weights
        assert error(layer(x), exact) < 1e-5


@pytest.fixture
def narrower(request, monkeypatch, tmp_path):
    """Compile the products for the processor `request.param` instead of this machine's."""
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path))
    monkeypatch.setattr(
        cpu_kernels, "FLAGS", tuple(flag.replace("native", request.param) for flag in cpu_kernels.FLAGS)
    )
    cpu_kernels.library.cache_clear()
    yield
    cpu_kernels.library.cache_clear()


@compiled
@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of another kind of processor")
@pytest.mark.parametrize(
    "narrower",
    ["x86-64", pytest.param("haswell", marks=pytest.mark.skipif(not AVX2, reason="no AVX2"))],
    indirect=True,
)
def test_machines_with_narrower_vectors_compute_the_same(narrower):
    slr = parts(37, 45, 6, 500)
    layer = SlrLinear.from_slr(slr)
    for rows in range(1, 40):
        x = torch.randn(rows, 45)
        assert error(layer(x), x.double() @ dense(slr).T) < 1e-5


@compiled
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17, 64, 300])
@pytest.mark.parametrize("shape", [(256, 640, 40, 9000), (640, 256, 0, 9000), (512, 1280, 160, 9000)])
def test_threads_change_nothing(shape, rows):
    layer, x = SlrLinear.from_slr(parts(*shape)), torch.randn(rows, shape[1])
    found = []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        products, tensors = layer._native(x)
        found.append(products.linear(x, None, tensors))
    exact = x.double() @ dense(parts(*shape)).T
    assert all(error(y, exact) < 1e-5 for y in found)
    if rows * shape[2] * sum(shape[:2]) < cpu_kernels._FEW:  # else torch multiplies by U and V, and sums in any order
        assert all(torch.equal(y, found[0]) for y in found)


@compiled
@pytest.mark.parametrize("shape", [(40, 30, 3, 200), (512, 1280, 160, 90000)])
def test_a_layer_that_several_threads_of_python_use_at_once_keeps_them_apart(shape):
    layer, inputs = SlrLinear.from_slr(parts(*shape)), [torch.randn(1 + i, shape[1]) for i in range(40)]
    alone = [layer(x) for x in inputs]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(layer, inputs))
    assert all(map(torch.equal, together, alone))


@compiled
@pytest.mark.parametrize("rows", [2, 7, 16, 33])
def test_a_row_that_is_not_finite_stays_alone(rows):
    layer, x = SlrLinear.from_slr(parts(40, 30, 3, 200)), torch.randn(rows, 30)
    clean = layer(x)
    x[1, 4] = float("nan")
    found = layer(x)
    assert found[1].isnan().any()
    others = [row for row in range(rows) if row != 1]
    assert torch.equal(found[others], clean[others])


@compiled
def test_shapes_and_layouts_of_x_are_those_of_a_linear_layer():
    slr = parts(40, 30, 3, 200)
    layer, W = SlrLinear.from_slr(slr), dense(slr)
    for x in (torch.randn(30), torch.randn(2, 5, 30), torch.randn(30, 6).T, torch.randn(4, 60)[:, ::2]):
        assert error(layer(x), x.double() @ W.T) < 1e-5
    assert layer(torch.randn(0, 30)).shape == (0, 40)
    with pytest.raises(RuntimeError, match="shape"):
        layer(torch.randn(2, 29))


@compiled
@pytest.mark.parametrize("n, m, rank, rows", [(40, 30, 3, 1), (40, 30, 3, 4), (40, 30, 3, 3000), (400, 300, 100, 1000)])
def test_autocast_and_the_default_dtype_change_nothing(n, m, rank, rows):
    slr = parts(n, m, rank, 200)
    linear, embedding = SlrLinear.from_slr(slr, torch.randn(n)), SlrEmbedding.from_slr(slr)
    x, ids = torch.randn(rows, m), torch.randint(0, n, (rows,))
    expected = linear(x), embedding(ids)
    with torch.autocast("cpu", torch.bfloat16):
        assert all(map(torch.equal, (linear(x), embedding(ids)), expected))
    torch.set_default_dtype(torch.float64)
    try:
        assert all(map(torch.equal, (linear(x), embedding(ids)), expected))
    finally:
        torch.set_default_dtype(torch.float32)


@compiled
@pytest.mark.parametrize("count", [1, 3, 200, 5000])
def test_rows_of_an_embedding_are_those_of_the_table(count):
    slr = parts(90, 24, 5, 300)
    layer, ids = SlrEmbedding.from_slr(slr), torch.randint(0, 90, (1, count))
    assert layer._native(ids) is not None
    found = layer(ids)
    assert found.shape == (1, count, 24)
    assert error(found, dense(slr)[ids]) < 1e-5


@compiled
@pytest.mark.parametrize("count", [1, 5000])
@pytest.mark.parametrize("wrong", [-1, 90])
def test_a_row_that_is_not_there_is_refused(count, wrong):
    layer, ids = SlrEmbedding.from_slr(parts(90, 24, 5, 300)), torch.zeros(count, dtype=torch.int64)
    ids[-1] = wrong
    with pytest.raises(IndexError):
        layer(ids)


@compiled
def test_weights_that_were_moved_are_found_again():
    slr, other, larger = parts(40, 30, 3, 200), parts(40, 30, 3, 200, seed=1), parts(40, 30, 7, 300, seed=2)
    layer, x = SlrLinear.from_slr(slr), torch.randn(5, 30)

    def found(expected: Slr) -> float:
        return error(layer(x), x.double() @ dense(expected).T)

    assert found(slr) < 1e-5
    layer.to(torch.float64).to(torch.float32)
    assert found(slr) < 1e-5
    layer.U.data, layer.V.data = other.U.clone(), other.V.clone()
    assert found(Slr(slr.shape, other.U, other.V, slr.positions, slr.values)) < 1e-5
    layer.fill(larger)
    assert found(larger) < 1e-5
    layer.U.data, layer.V.data = layer.U.data[:, :2], layer.V.data[:2]
    assert found(Slr(larger.shape, larger.U[:, :2], larger.V[:2], larger.positions, larger.values)) < 1e-5


@compiled
@pytest.mark.parametrize("rows", [1, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_bias_of_another_dtype_is_added_as_it_is(rows, dtype):
    slr, b = parts(40, 30, 3, 200), torch.randn(40).to(dtype)
    layer, x = SlrLinear.from_slr(slr, b), torch.randn(rows, 30)
    assert layer(x).dtype == torch.float32
    assert error(layer(x), x.double() @ dense(slr).T + b.double()) < 1e-5


@compiled
def test_a_gradient_is_that_of_the_weights_that_were_used():
    slr = parts(40, 30, 3, 200)
    layer, x = SlrLinear.from_slr(slr), torch.randn(5, 30, requires_grad=True)
    y = layer(x)
    layer.fill(parts(40, 30, 4, 100, seed=1))
    y.sum().backward()
    assert error(x.grad, dense(slr).sum(0).expand(5, -1)) < 1e-5
    y = layer(x)
    with torch.no_grad():
        layer.U.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@compiled
def test_a_gradient_passes_under_autocast():
    slr = parts(40, 30, 3, 200)
    layer, x = SlrLinear.from_slr(slr), torch.randn(5, 30, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x).sum().backward()
        assert error(layer.weight, dense(slr)) < 1e-6
    assert error(x.grad, dense(slr).sum(0).expand(5, -1)) < 1e-5


@compiled
@pytest.mark.parametrize("bias", [False, True])
def test_a_gradient_passes_to_x_and_leaves_the_product_as_it_was(bias):
    slr = parts(40, 30, 3, 200)
    layer = SlrLinear.from_slr(slr, torch.randn(40) if bias else None)
    x = torch.randn(2, 5, 30, requires_grad=True)
    y = layer(x)
    with torch.no_grad():
        assert torch.equal(layer(x), y)
    coefficients = torch.randn_like(y)
    (y * coefficients).sum().backward()
    assert error(x.grad, coefficients.double() @ dense(slr)) < 1e-5


@compiled
@pytest.mark.filterwarnings("ignore:Dynamo does not know")  # the sparse product of torch
def test_a_traced_layer_computes_the_same():
    layer, x = SlrLinear.from_slr(parts(40, 30, 3, 200)), torch.randn(5, 30)
    traced = torch.compile(layer, backend="eager")
    torch.testing.assert_close(traced(x), layer(x))


@compiled
def test_a_layer_under_vmap_computes_the_same():
    layer, x = SlrLinear.from_slr(parts(40, 30, 3, 200)), torch.randn(5, 30)
    torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x))


@compiled
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_what_watches_a_layer_sees_its_operations():
    slr = parts(40, 30, 3, 200)
    layer, x = SlrLinear.from_slr(slr, torch.randn(40)), torch.randn(5, 30)
    with FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() >= 2 * 5 * 3 * (40 + 30)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (5, 40)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    assert error(tangent, dense(slr).sum(1).expand(5, -1)) < 1e-5
    torch.testing.assert_close(torch.jit.trace(layer.requires_grad_(False), x)(x), layer(x))


@compiled
def test_an_empty_table_has_no_rows_to_give():
    layer = SlrEmbedding.from_slr(parts(0, 4, 0, 0))
    assert layer(torch.zeros(0, dtype=torch.int64)).shape == (0, 4)


@pytest.fixture
def fresh_library(tmp_path, monkeypatch):
    """Make `library` look for the compiled products again, in a cache of the test's own; and again after the test."""
    monkeypatch.setenv("SALAAD_CACHE", str(tmp_path))
    cpu_kernels.library.cache_clear()
    yield
    cpu_kernels.library.cache_clear()


def no_home() -> Path:
    """Raise what `Path.home` does for a user without HOME and without an entry among the users."""
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"SALAAD_NATIVE": "0"}, ""),
        ({"CXX": "no-such-compiler"}, "no-such-compiler cannot compile cpu_kernels.cpp"),
        ({"CXX": "false"}, "torch's products are used"),
        ({"CXX": "sh -c 'echo >&2; exit 1'"}, "(CalledProcessError)"),  # it says nothing but an empty line
        ({"CXX": r"sh -c 'printf \\377 >&2; exit 1'"}, "torch's products are used"),  # no UTF-8
        ({"SALAAD_CACHE": "", "HOME": ""}, "this user has no home folder for a cache; name a folder in SALAAD_CACHE"),
    ],
)
def test_without_a_compiler_torch_multiplies(environment, said, fresh_library, tmp_path, monkeypatch, recwarn):
    monkeypatch.setattr(Path, "home", no_home if "HOME" in environment else Path.home)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    slr, x = parts(40, 30, 3, 200), torch.randn(5, 30)
    layer = SlrLinear.from_slr(slr)
    assert cpu_kernels.library() is None and layer._native(x) is None
    assert distance(layer(x), x.double() @ dense(slr).T) < 1e-5
    assert said in " ".join(str(warning.message) for warning in recwarn)
    assert not list(tmp_path.glob("native-*/native.so"))


@compiled
def test_a_library_without_our_functions_is_not_used(fresh_library, monkeypatch):
    monkeypatch.setattr(cpu_kernels, "_compiled", lambda _: find_library("m"))  # that of mathematics
    with pytest.warns(UserWarning, match="the library cannot be loaded"):
        assert cpu_kernels.library() is None


def test_a_compiler_that_is_no_command_is_refused(monkeypatch, fresh_library):
    monkeypatch.setenv("CXX", "g++ 'half")
    with pytest.raises(UserError, match="which is no command"):
        cpu_kernels.library()


def test_a_switch_that_is_neither_on_nor_off_is_refused(monkeypatch, fresh_library):
    monkeypatch.setenv("SALAAD_NATIVE", "off")
    with pytest.raises(UserError, match="SALAAD_NATIVE is 'off', but only 0 and 1 are known; give one of them"):
        cpu_kernels.library()
