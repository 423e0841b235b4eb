"""Robust PCA against planted matrices and a NumPy loop; its statistics against noise and hand computation."""

import numpy as np
import pytest
import torch
from torch import Tensor

import salaad.rpca
from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.evaluation.structure import (
    RpcaRow,
    RpcaStatistics,
    gaussian_control,
    model_statistics,
    statistics,
    summarise,
)
from salaad.methods.salaad.surrogate import Surrogate
from salaad.rpca import rpca

DTYPES = (torch.float64, torch.float32)
PLANTED = ((64, 64, 3), (60, 160, 2), (160, 40, 2), (512, 64, 2), (96, 250, 6))


def noise(n: int, m: int, seed: int = 0) -> Tensor:
    return torch.randn(n, m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(n: int, m: int, rank: int, density: float = 0.05) -> tuple[Tensor, Tensor]:
    """Return L of the given rank, with entries of about unit size, and S, with nonzero entries of size 0.5 to 1.5."""
    L = noise(n, rank, 1) @ noise(rank, m, 2) / rank**0.5
    generator = torch.Generator().manual_seed(3)
    size, sign, place = torch.rand(3, n, m, generator=generator, dtype=torch.float64)
    return L, torch.where(place < density, (0.5 + size) * (sign - 0.5).sign(), 0)


def relative(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true.double()).norm() / true.double().norm())


def numpy_rpca(D: np.ndarray, growth: float = 1.5) -> tuple[np.ndarray, np.ndarray]:
    """Return L and S by the same algorithm in NumPy, with full SVDs and without scaling D."""
    lam = 1 / np.sqrt(max(D.shape))
    spectral = np.linalg.svd(D, compute_uv=False)[0]
    L, Y, mu = np.zeros_like(D), D / max(spectral, np.max(np.abs(D)) / lam), 1.25 / spectral
    while True:
        R = D - L + Y / mu
        S = np.sign(R) * np.maximum(np.abs(R) - lam / mu, 0)
        U, s, Vh = np.linalg.svd(D - S + Y / mu, full_matrices=False)
        L = U @ np.diag(np.maximum(s - 1 / mu, 0)) @ Vh
        Y = Y + mu * (D - L - S)
        mu = min(growth * mu, 1e7 * 1.25 / spectral)
        if np.linalg.norm(D - L - S) <= 1e-7 * np.linalg.norm(D):
            return L, S


@pytest.fixture
def iterations(monkeypatch) -> list[float]:
    """A list that gets one entry for every singular-value thresholding in the test."""
    calls = []
    svt = salaad.rpca.svt
    monkeypatch.setattr(salaad.rpca, "svt", lambda *args: calls.append(args[1]) or svt(*args))
    return calls


# ---- the decomposition


@pytest.mark.parametrize("method", ["auto", "exact"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "m", "rank"), PLANTED)
def test_low_rank_plus_sparse_is_recovered_to_1e_6_in_either_type(n, m, rank, dtype, method):
    true_L, true_S = planted(n, m, rank)
    D = (true_L + true_S).to(dtype)
    before = D.clone()
    L, S = rpca(D, method=method)
    assert L.dtype == S.dtype == dtype
    assert L.shape == S.shape == D.shape
    assert relative(L, true_L) <= 1e-6
    assert relative(S, true_S) <= 1e-6
    assert torch.linalg.matrix_rank(L, rtol=1e-6) == rank
    assert torch.equal(S.abs() > 1e-4, true_S != 0)
    assert torch.count_nonzero(S) <= 1.05 * torch.count_nonzero(true_S)  # exact zeros, not only small numbers
    assert torch.equal(D, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["planted", "noise"])
def test_the_pair_satisfies_the_tolerance_within_forty_iterations(kind, dtype, iterations):
    D = (sum(planted(40, 160, 2)) if kind == "planted" else noise(40, 160)).to(dtype)
    L, S = rpca(D)
    rounding = 0 if dtype == torch.float64 else 6e-8
    assert relative(L.double() + S.double(), D) <= 1e-7 + rounding
    assert len(iterations) <= 40


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tolerance_out_of_reach_ends_where_the_residual_stops_falling(dtype, iterations):
    D = noise(24, 60).to(dtype)
    L, S = rpca(D, tolerance=1e-30)
    assert len(iterations) < 900
    assert relative(L.double() + S.double(), D) <= (1e-13 if dtype == torch.float64 else 1e-7)


def test_max_iterations_ends_the_loop(iterations):
    rpca(noise(10, 20), max_iterations=3)
    assert len(iterations) == 3


@pytest.mark.parametrize("growth", [1.5, 1.1])
@pytest.mark.parametrize("shape", [(30, 30), (24, 70), (70, 24)])
@pytest.mark.parametrize("kind", ["planted", "noise"])
def test_it_is_the_algorithm_written_a_second_time(kind, shape, growth):
    D = sum(planted(*shape, 2)) if kind == "planted" else 0.02 * noise(*shape) + 0.003
    L, S = rpca(D, growth=growth)
    expected_L, expected_S = (torch.from_numpy(part) for part in numpy_rpca(D.numpy(), growth))
    assert relative(L, expected_L) <= 1e-9
    assert relative(S, expected_S) <= 1e-9
    assert torch.equal(S != 0, expected_S != 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_transposing_the_matrix_transposes_its_parts(dtype):
    D = noise(30, 75).to(dtype)
    parts = rpca(D)
    for part, transposed in zip(parts, rpca(D.mT), strict=True):
        assert relative(transposed.mT, part) <= (1e-11 if dtype == torch.float64 else 1e-7)
    assert statistics(*parts) == statistics(*(part.mT for part in parts))


@pytest.mark.parametrize(("dtype", "scale"), [(torch.float64, 1e-200), (torch.float64, 1e200), (torch.float32, 1e-30)])
def test_scaling_the_matrix_scales_its_parts(dtype, scale):
    D = noise(20, 50)
    for part, scaled in zip(rpca(D), rpca((scale * D).to(dtype)), strict=True):
        assert relative(scaled.double() / scale, part) <= (1e-11 if dtype == torch.float64 else 1e-6)


def test_lambda_moves_everything_into_either_part():
    D = noise(20, 50)
    L, S = rpca(D, 10.0)
    assert relative(L, D) <= 1e-6
    assert not S.any()
    L, S = rpca(D, 0.001)
    assert relative(S, D) <= 1e-6
    assert not L.any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 30), (30, 1), (5, 5)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_row_one_column_constants_and_zeros_are_matrices_too(shape, dtype):
    for D in (noise(*shape), torch.full(shape, -0.3), torch.zeros(shape)):
        D = D.to(dtype)
        L, S = rpca(D)
        torch.testing.assert_close(L + S, D, rtol=1e-5, atol=1e-6)
        assert statistics(L, S).rank_ratio <= 1
    assert not L.any()
    assert not S.any()
    assert statistics(L, S) == RpcaStatistics(rank_ratio=0, density=0)


def test_a_parameter_is_decomposed_without_a_graph():
    L, S = rpca(torch.nn.Parameter(noise(6, 9)))
    assert not L.requires_grad
    assert not S.requires_grad


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: rpca(torch.tensor([[1.0, torch.nan], [torch.inf, 0.0]])), "D has 2 of 4 entries that are not finite"),
        (lambda: rpca(torch.ones(3)), r"torch.float32 of shape \(3,\); give a matrix"),
        (lambda: rpca(torch.ones(0, 3)), r"of shape \(0, 3\)"),
        (lambda: rpca(torch.ones(2, 3, dtype=torch.int64)), "D is torch.int64"),
        (lambda: rpca(torch.ones(2, 3, dtype=torch.bfloat16)), "bfloat16, too coarse .* give float32 or float64"),
        (lambda: rpca(torch.ones(2, 3), lam=0), "lam is 0; give a finite number above 0"),
        (lambda: rpca(torch.ones(2, 3), lam=float("nan")), "lam is nan"),
        (lambda: rpca(torch.ones(2, 3), growth=1.0), "growth is 1.0; give a finite number above 1"),
        (lambda: rpca(torch.ones(2, 3), tolerance=-1e-7), "tolerance is -1e-07"),
        (lambda: rpca(torch.ones(2, 3), max_iterations=0), "max_iterations is 0"),
        (lambda: rpca(torch.ones(2, 3), max_iterations=3.5), "max_iterations is 3.5; give a whole number"),
    ],
)
def test_what_cannot_be_decomposed_is_told_in_a_sentence(call, sentence):
    with pytest.raises(ValueError, match=sentence):
        call()


# ---- what it finds in SALAAD's own matrices


def test_a_surrogate_is_recovered_where_the_weight_beside_it_looks_like_noise():
    """The weight has decaying singular values, outliers and 10 % noise, and follows T as a task loss would let it."""
    n, m = 96, 96
    U, V = (torch.linalg.qr(noise(n, n, seed))[0] for seed in (1, 2))
    parts = ((U * 0.9 ** torch.arange(n)) @ V.mT, planted(n, m, 1)[1], noise(n, m, 3))
    data = sum(size * part / part.norm() for size, part in zip((2.0, 1.0, 0.2), parts, strict=True)).float()
    X = data
    block = Surrogate(X, 1.0, SalaadConfig(rank_ratio=0.2, density=0.05, delta_alpha=0.05, delta_beta=0.002))
    for _ in range(300):
        block.update(X)
        X = (data + 3 * block.T) / 4
    assert 0.15 < block.rank_ratio < 0.25
    assert 0.03 < block.density < 0.07
    D = block.deployed()
    L, S = rpca(D)
    found = statistics(L, S)
    assert found.rank_ratio == pytest.approx(block.rank_ratio, abs=0.011)
    assert found.density == pytest.approx(block.density, abs=0.02)
    assert relative(L, block.low_rank()) < 5e-3
    assert relative(S, block.sparse()) < 1e-2
    assert found.sparsity == 1 - found.density
    before = statistics(*rpca(data))
    assert before.rank_ratio > 2 * found.rank_ratio
    assert before.density > 0.5


def test_rounding_to_bfloat16_alone_fills_the_sparse_part():
    D = sum(planted(96, 96, 3))
    exact, rounded = (statistics(*rpca(matrix)) for matrix in (D, D.bfloat16().double()))
    assert exact.density < 0.06
    assert rounded.density > 0.5
    assert rounded.rank_ratio > exact.rank_ratio


# ---- statistics and controls


def test_statistics_count_by_definition_4_1():
    L = torch.diag(torch.tensor([90.0, 9.0, 0.95, 0.05]))
    S = torch.zeros(4, 6)
    S[0, :3] = 1e-20
    L = torch.cat([L, torch.zeros(4, 2)], dim=1)
    assert statistics(L, S).rank_ratio == 3 / 4
    assert statistics(L, S, gamma=0.99).rank_ratio == 2 / 4
    assert statistics(L, S).density == 3 / 24
    assert statistics(L, S).sparsity == 21 / 24
    assert statistics(L.mT, S.mT) == statistics(L, S)


def test_noise_alone_looks_half_low_rank_and_mostly_dense():
    control = gaussian_control(0.02 * noise(256, 256))
    for growth, density in ((1.5, 0.70), (1.1, 0.57)):
        L, S = rpca(control, growth=growth)
        found = statistics(L, S)
        assert int(torch.linalg.matrix_rank(L, rtol=1e-9)) / 256 == pytest.approx(0.565, abs=0.015)
        assert found.rank_ratio == pytest.approx(0.54, abs=0.015)  # effective: 6 to 8 make up the last 0.1 % of Σσ
        assert found.density == pytest.approx(density, abs=0.03)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16])
def test_a_control_has_the_shape_mean_and_variance_of_its_matrix(dtype):
    D = (3 + 0.5 * torch.rand(200, 300, generator=torch.Generator().manual_seed(0))).to(dtype)
    control = gaussian_control(D, seed=1)
    assert control.shape == D.shape
    assert control.dtype == dtype
    assert control.double().mean() == pytest.approx(float(D.double().mean()), abs=5e-3)
    assert control.double().std() == pytest.approx(float(D.double().std()), rel=2e-2)
    assert torch.equal(control, gaussian_control(D, seed=1))
    assert not torch.equal(control, gaussian_control(D, seed=2))
    assert torch.equal(gaussian_control(torch.zeros(1, 1)), torch.zeros(1, 1))


# ---- a model


WEIGHTS = {
    "model.embed_tokens.weight": (90, 20),
    "model.layers.0.self_attn.q_proj.weight": (20, 20),
    "model.layers.0.mlp.down_proj": (20, 50),
    "model.layers.11.self_attn.q_proj.weight": (20, 20),
}


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return {name: 0.02 * noise(*shape, seed).float() for seed, (name, shape) in enumerate(WEIGHTS.items())}


def test_a_model_gives_one_row_per_matrix_in_its_order(weights):
    rows = list(model_statistics(weights))
    assert [row.name for row in rows] == [name.removesuffix(".weight") for name in weights]
    assert [row.kind for row in rows] == ["embed_tokens", "q_proj", "down_proj", "q_proj"]
    assert [row.depth for row in rows] == [None, 0, 0, 11]
    for row, weight in zip(rows, weights.values(), strict=True):
        L, S = rpca(weight.double())
        own = statistics(L, S)
        assert (row.rank_ratio, row.density) == (own.rank_ratio, own.density)
        assert row.error == pytest.approx(relative(L + S, weight))
        assert 0 < row.error <= 1e-7
        # The weights are noise themselves, and so are their controls: neither equal nor far apart.
        assert row.control_density != row.density
        assert row.control_density == pytest.approx(row.density, abs=0.1)
        assert row.control_rank_ratio == pytest.approx(row.rank_ratio, abs=0.15)


def test_an_expert_is_of_the_kind_of_its_projection():
    X = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    names = ("model.layers.2.mlp.experts.gate_up_proj.3", "model.layers.2.mlp.experts.1.down_proj.weight")
    rows = list(model_statistics(dict.fromkeys(names, X)))
    assert [(row.kind, row.depth) for row in rows] == [("gate_up_proj", 2), ("down_proj", 2)]


def test_rows_do_not_depend_on_the_rest_of_the_model_and_controls_do_on_the_seed(weights):
    rows = list(model_statistics(weights))
    assert list(model_statistics({name: weights[name] for name in reversed(weights)})) == rows[::-1]
    reseeded = list(model_statistics(weights, seed=1))
    assert [row.density for row in reseeded] == [row.density for row in rows]
    assert [row.control_density for row in reseeded] != [row.control_density for row in rows]
    assert [row.density for row in model_statistics(weights, growth=1.1)] != [row.density for row in rows]
    ranks = [row.rank_ratio for row in model_statistics(weights, gamma=0.5)]
    assert all(less < row.rank_ratio for less, row in zip(ranks, rows, strict=True))


def test_rows_come_one_by_one_and_wrong_weights_before_the_first(weights, iterations):
    rows = model_statistics({**weights, "lm_head.weight": torch.zeros(3, 4, dtype=torch.bfloat16)})
    assert not iterations
    next(rows)
    assert 0 < len(iterations) <= 80
    last = list(rows)[-1]
    assert last == RpcaRow("lm_head", "lm_head", None, 0, 0, 0, 0, 0)
    iterations.clear()
    with pytest.raises(UserError, match=r"norm\.weight is torch.float32 of shape"):
        next(model_statistics({**weights, "norm.weight": torch.ones(4)}))
    with pytest.raises(UserError, match="lm_head has 1 of 4 entries that are not finite"):
        next(model_statistics({**weights, "lm_head": torch.tensor([[1, 2], [3, torch.nan]])}))
    assert not iterations


def test_summaries_are_mean_and_deviation_by_hand():
    ratios = {("q_proj", 0): (0.2, 0.1), ("up_proj", 0): (0.4, 0.3), ("q_proj", 1): (0.6, 0.4), ("x", None): (0.8, 0.0)}
    rows = [
        RpcaRow(f"{kind}{depth}", kind, depth, rank, density, rank / 2, 1 - density, 0.0)
        for (kind, depth), (rank, density) in ratios.items()
    ]
    kinds = summarise(iter(rows), by="kind")
    assert list(kinds) == ["q_proj", "up_proj", "x"]
    assert list(kinds["q_proj"]) == ["rank_ratio", "density", "control_rank_ratio", "control_density"]
    assert kinds["q_proj"]["rank_ratio"] == pytest.approx((0.4, 0.2, 2))
    assert kinds["q_proj"]["density"] == pytest.approx((0.25, 0.15, 2))
    assert kinds["q_proj"]["control_rank_ratio"] == pytest.approx((0.2, 0.1, 2))
    assert kinds["q_proj"]["control_density"] == pytest.approx((0.75, 0.15, 2))
    assert kinds["up_proj"]["rank_ratio"] == pytest.approx((0.4, 0.0, 1))
    depths = summarise(rows, by="depth")
    assert list(depths) == [0, 1, None]
    assert depths[0]["density"] == pytest.approx((0.2, 0.1, 2))
    everything = summarise(rows)
    assert list(everything) == [None]
    assert everything[None]["rank_ratio"] == pytest.approx((0.5, 0.05**0.5, 4))
    assert summarise([]) == {}
