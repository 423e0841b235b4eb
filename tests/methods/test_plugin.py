"""Salaad plugged into training loops: what reaches the gradient, what is updated when, what is deployed."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import salaad as salaad_package
from salaad import Salaad, SalaadConfig
from salaad.common.errors import NotFiniteError
from salaad.config.run import OptimizerConfig
from salaad.methods.optimizer import build_optimizer
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.salaad.surrogate import Surrogate
from tests.helpers.tiny_llama import config_of, llama

ANY = {"roles": ("re:.",)}
# Strong enough that L, S and the dual are all at work after a few updates.
LIVELY = {"rho": 0.05, "rank_ratio": 0.3, "density": 0.3, "delta_alpha": 0.05, "delta_beta": 0.005}


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gpt2() -> GPT2LMHeadModel:
    """A GPT-2 without dropout: Conv1D weights stored transposed, the embedding tied to the head."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=12)).eval()


def tokens(seed: int) -> Tensor:
    return torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(seed))


def gpt2_loss(model: nn.Module, seed: int) -> Tensor:
    return model(input_ids=tokens(seed), labels=tokens(seed)).loss


def toy(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(n, m) for n, m in pairwise(widths)))


def toy_loss(model: nn.Module, seed: int = 0) -> Tensor:
    return model(randn(8, model[0].in_features, seed=seed).to(model[0].weight.dtype)).float().square().mean()


def run(model: nn.Module, salaad: Salaad, steps: int, lr: float = 0.05) -> None:
    """Train a toy model with plain SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        toy_loss(model, step).backward()
        optimizer.step()
        salaad.step()
        optimizer.zero_grad()


def equation_3(surrogate: Surrogate, X: Tensor) -> Tensor:
    """The penalty of ℓ_ρ in the paper's variables, ρ/2·‖X − L − S + Y/ρ‖², for autograd."""
    L, S, Y = (part.to(X.dtype) for part in (surrogate.low_rank(), surrogate.sparse(), surrogate.dual()))
    return surrogate.rho / 2 * (X - L - S + Y / surrogate.rho).square().sum()


def gradient_of(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    """Return the loss's gradients by torch.autograd.grad, which calls no hook of Salaad."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor], rtol: float = 1e-5) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).norm() <= rtol * theirs[name].norm() + 1e-12, name


# ---- plug and play


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("embedding", [False, True])
def test_any_loop_gets_the_gradient_of_the_coupled_loss_for_blocks_and_of_the_task_loss_for_the_rest(
    optimizer, embedding
):
    model = gpt2()
    salaad = Salaad(model, SalaadConfig(every=2, embedding=embedding, **LIVELY))
    optimizer = optimizer(model.parameters(), lr=0.05)
    for seed in range(8):
        gpt2_loss(model, seed).backward()
        optimizer.step()
        salaad.step()
        optimizer.zero_grad()

    task = gpt2_loss(model, 99)
    blocks = salaad.surrogates.items()
    penalties = [equation_3(surrogate, model.get_submodule(name).weight) for name, surrogate in blocks]
    coupled, uncoupled = (gradient_of(loss, model) for loss in (task + sum(penalties), gpt2_loss(model, 99)))
    gpt2_loss(model, 99).backward()
    assert_same(gradients(model), coupled)
    # The penalty matters here, and for the blocks only; the tied embedding is a block if it was asked for.
    felt = {name for name in coupled if not torch.equal(coupled[name], uncoupled[name])}
    assert felt == {f"{name}.weight" for name in salaad.blocks}
    assert len(felt) == 8 + embedding
    assert all((coupled[name] - uncoupled[name]).norm() > 1e-2 * uncoupled[name].norm() for name in felt)
    assert all(s.nnz and s.rank and s.alpha and s.beta and s.dual().count_nonzero() for s in salaad.surrogates.values())
    assert salaad.penalty().item() == pytest.approx(sum(penalties).item(), rel=1e-4)


def test_the_penalty_moves_a_weights_energy_into_its_leading_singular_values():
    tails = []
    for rho in (0.0, 1.0):
        model = toy(24, 24, 24)
        run(model, Salaad(model, SalaadConfig(every=2, **{**LIVELY, **ANY, "rho": rho})), 80)
        s = np.linalg.svd(model[0].weight.detach().numpy(), compute_uv=False)
        tails.append(np.linalg.norm(s[6:]) / np.linalg.norm(s))
    assert tails[1] < tails[0] / 2


def test_surrogates_are_named_by_module_and_give_the_papers_matrices_at_the_weights_shape():
    model = gpt2()
    salaad = Salaad(model, SalaadConfig(**LIVELY))
    block = salaad.surrogates["transformer.h.1.attn.c_attn"]
    shape = model.transformer.h[1].attn.c_attn.weight.shape
    assert [part().shape for part in (block.low_rank, block.sparse, block.dual)] == [shape] * 3
    assert sorted(salaad.blocks) == sorted(salaad.surrogates)


class Experts(nn.Module):
    """Rows are multiplied by the sum of five matrices in one parameter."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(randn(5, 6, 8).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down_proj.sum(0).mT


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-5), (torch.bfloat16, 0.02)])
def test_the_experts_in_one_parameter_get_the_gradient_of_the_coupled_loss_in_one_call(dtype, rtol):
    """A call from the backward takes the host far longer than the sum that it computes for a small expert."""
    model, x = Experts(dtype), randn(4, 8, seed=1).to(dtype)
    with Salaad(model, SalaadConfig(**{**LIVELY, "rho": 5.0}, roles=("down",))) as salaad:
        wide = model.down_proj.detach().double().requires_grad_()
        penalty = sum(equation_3(surrogate, wide[int(name[-1])]) for name, surrogate in salaad.surrogates.items())
        (of_penalty,) = torch.autograd.grad(penalty, wide)
        expected = torch.autograd.grad((x.double() @ wide.sum(0).mT).square().mean(), wide)[0] + of_penalty
        model(x).square().mean().backward()
        assert len(salaad.surrogates) == 5 and not salaad._pull.pending
        assert len(model.down_proj._post_accumulate_grad_hooks) == len(model.down_proj._backward_hooks) == 1
    assert (model.down_proj.grad - expected).norm() <= rtol * expected.norm()
    assert of_penalty.norm() > 10 * rtol * expected.norm()


# ---- once per step


@pytest.mark.parametrize("set_to_none", [False, True])
def test_the_penalty_counts_once_however_many_micro_batches_a_step_has(set_to_none):
    model = toy(10, 12, 6)
    salaad = Salaad(model, SalaadConfig(every=1, **LIVELY, **ANY))
    for step in range(3):
        penalty = sum(equation_3(salaad.surrogates[name], model.get_submodule(name).weight) for name in salaad.blocks)
        expected = gradient_of(sum(toy_loss(model, 10 * step + part) for part in range(3)) + penalty, model)
        model.zero_grad(set_to_none)
        for part in range(3):
            toy_loss(model, 10 * step + part).backward()
        assert_same(gradients(model), expected)
        salaad.step()


def test_a_discarded_gradient_does_not_use_up_the_penalty_if_skip_is_called():
    model = toy(10, 6)
    salaad = Salaad(model, SalaadConfig(**LIVELY, **ANY))
    coupled = gradient_of(toy_loss(model) + equation_3(salaad.surrogates["0"], model[0].weight), model)
    task = gradient_of(toy_loss(model), model)
    for expected in (coupled, task, coupled):
        model.zero_grad()
        toy_loss(model).backward()
        assert_same(gradients(model), expected)
        if expected is task:
            salaad.skip()
    assert salaad.steps == 0


# ---- schedule

# Layers of 16×24, 8×16, 32×8 and 10×32; `BY_COST` names them from the most to the least expensive.
WIDTHS = (24, 16, 8, 32, 10)
BY_COST = ("0", "3", "2", "1")


def note_updates(salaad: Salaad) -> dict[str, list[int]]:
    """Return block → the steps of its surrogate's updates, which are added to it from now on."""
    steps: dict[str, list[int]] = {name: [] for name in salaad.surrogates}
    for name, surrogate in salaad.surrogates.items():

        def update(X: Tensor, name: str = name, original: Callable = surrogate.update) -> Tensor:
            steps[name].append(salaad.steps)
            return original(X)

        surrogate.update = update
    return steps


@pytest.mark.parametrize("every", [1, 2, 3, 4, 7, 10])
@pytest.mark.parametrize("schedule", ["synchronous", "staggered"])
@pytest.mark.parametrize("finish", [False, True])
def test_blocks_are_updated_when_the_schedule_says(every, schedule, finish):
    total = 23
    salaad = Salaad(toy(*WIDTHS), SalaadConfig(every=every, schedule=schedule, **ANY))
    steps = note_updates(salaad)
    for _ in range(total):
        salaad.step()
    if finish:
        salaad.finish()
        salaad.finish()  # nothing is left to do
    for i, name in enumerate(BY_COST):
        offset = math.floor(i * every / 4) if schedule == "staggered" else 0
        expected = [step for step in range(1, total + 1) if (step - offset) % every == 0]
        if finish and total not in expected:
            expected.append(total)
        assert steps[name] == expected
    recorded = {(step, name) for step, name, _ in salaad.drain_records()}
    assert recorded == {(step, name) for name in steps for step in steps[name]}


@pytest.mark.parametrize(
    ("every", "schedule", "onset"),
    [(5, "synchronous", 0.0), (5, "staggered", 0.25), (20, "staggered", 0.0), (3, "synchronous", 1.0)],
)
def test_the_plan_counts_the_updates_that_a_run_makes(every, schedule, onset):
    """12 steps with an update every fifth are three: after 5, 10 and 12, which is the last."""
    options = {"train.steps": 12, "salaad.every": every, "salaad.schedule": schedule, "salaad.onset": onset}
    config, model = config_of("salaad", *(f"--{key}={value}" for key, value in options.items())), llama()
    salaad = Salaad(model, config.settings, total_steps=12)
    for _ in range(12):
        salaad.step()
    salaad.finish()
    found = Counter(name for _, name, _ in salaad.drain_records())
    counts = {found[name] for name in salaad.blocks}
    words = dict(SalaadMethod.plan(model, config, 1))["ADMM updates"]
    assert words == " to ".join(map(str, sorted({min(counts), max(counts)}))) + f" per block, {schedule}"


def test_no_step_of_the_staggered_schedule_updates_more_blocks_than_it_must():
    widths = (8,) * 12
    salaad = Salaad(toy(*widths), SalaadConfig(every=4, schedule="staggered", **ANY))
    for _ in range(8):
        salaad.step()
    counts = np.bincount([step for step, *_ in salaad.drain_records()], minlength=9)[1:]
    assert counts.max() == math.ceil(11 / 4)
    assert counts[4:].sum() == 11


def test_the_schedule_goes_on_after_a_resume():
    config = SalaadConfig(every=3, schedule="staggered", **ANY)  # offsets 0, 0, 1 and 2 in order of cost
    first, second = Salaad(toy(*WIDTHS), config), Salaad(toy(*WIDTHS), config)
    for _ in range(4):
        first.step()
    second.load_state_dict(first.state_dict())
    steps = note_updates(second)
    second.finish()  # all but the third by cost, which step 4 has updated
    second.step()
    second.finish()
    assert steps == {"0": [4, 5], "3": [4, 5], "2": [5], "1": [4, 5]}


# ---- ρ


@pytest.mark.parametrize("constant", [0.03, 0.5])
def test_rho_is_equation_7(constant):
    model = toy(*WIDTHS)
    salaad = Salaad(model, SalaadConfig(rho_constant=constant, **ANY))
    for name in BY_COST:
        n, m = model.get_submodule(name).weight.shape
        assert salaad.surrogates[name].rho == pytest.approx(constant / (4 * math.sqrt(n * m)))


def test_an_absolute_rho_is_taken_for_every_block():
    salaad = Salaad(toy(*WIDTHS), SalaadConfig(rho=2e-7, rho_constant=9.0, **ANY))
    assert {surrogate.rho for surrogate in salaad.surrogates.values()} == {2e-7}


# ---- deployed


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def trained_toy(dtype: torch.dtype = torch.float32) -> tuple[nn.Sequential, Salaad]:
    model = toy(20, 24, 12).to(dtype)
    salaad = Salaad(model, SalaadConfig(every=2, gamma=0.95, **LIVELY, **ANY))
    run(model, salaad, 12)
    return model, salaad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_deployed_computes_with_l_at_its_effective_rank_plus_s_and_restores_the_weights_to_the_bit(dtype):
    model, salaad = trained_toy(dtype)
    before = snapshot(model)
    with salaad.deployed():
        assert torch.is_grad_enabled()
        for name, block in salaad.surrogates.items():
            U, s, Vh = np.linalg.svd(block.low_rank().double().numpy(), full_matrices=False)
            r = int(np.argmax(np.cumsum(s) / s.sum() >= 0.95)) + 1
            expected = torch.from_numpy((U[:, :r] * s[:r]) @ Vh[:r]).float() + block.sparse()
            torch.testing.assert_close(
                model.get_submodule(name).weight.detach(), expected.to(dtype), rtol=1e-2, atol=1e-4
            )
        assert not torch.equal(model[0].weight, before["0.weight"])
        assert torch.equal(model[0].bias, before["0.bias"])
    after = snapshot(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_deployed_restores_the_weights_after_an_exception():
    model, salaad = trained_toy()
    before = snapshot(model)
    with pytest.raises(ZeroDivisionError), salaad.deployed():
        raise ZeroDivisionError
    after = snapshot(model)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_deployed_within_autocast_computes_with_the_weights_of_the_moment():
    """Autocast keeps its bfloat16 copies of weights; each loss is compared with one in a new context."""
    model, salaad = trained_toy()
    expected = []
    for context in (nullcontext(), salaad.deployed()):
        with context, torch.autocast("cpu", torch.bfloat16):
            expected.append(toy_loss(model))
    assert expected[0] != expected[1]
    for order in ((0, 1, 0), (1, 0, 1)):
        with torch.autocast("cpu", torch.bfloat16):
            for i in order:
                with salaad.deployed() if i else nullcontext():
                    assert torch.equal(toy_loss(model), expected[i])


def test_training_goes_on_after_deployed_as_if_nothing_had_happened():
    results = []
    for interrupted in (False, True):
        model, salaad = trained_toy()
        with salaad.deployed() if interrupted else nullcontext():
            toy_loss(model)
        run(model, salaad, 5)
        results.append(snapshot(model))
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


# ---- pure bfloat16, with gradients in float32 as train.py keeps them


class Injected(nn.Module):
    """A module of one weight, whose task gradient is exactly what `backward` is given."""

    def __init__(self, X: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(*X.shape[::-1], bias=False)
        self.layer.weight = nn.Parameter(X.clone())
        self.layer.weight.grad_dtype = torch.float32

    def backward(self, gradient: Tensor) -> None:
        (self.layer.weight * gradient.to(self.layer.weight.dtype)).sum().backward()


def test_in_pure_bfloat16_the_gradient_of_a_block_is_float32_and_holds_the_whole_penalty():
    X, G = (0.02 * randn(64, 96)).bfloat16(), randn(64, 96, seed=1).bfloat16()
    model = Injected(X)
    salaad = Salaad(model, SalaadConfig(rho=1e-2, **ANY))
    gradient_without = G.float()
    model.backward(G)
    gradient = model.layer.weight.grad
    U, s, Vh = np.linalg.svd(X.double().numpy(), full_matrices=False)
    k = round(0.15 * 64)
    penalty = 1e-2 * (X.double() - torch.from_numpy((U[:, :k] * s[:k]) @ Vh[:k]))  # ρ(X − T): S = dual = 0 at the start
    assert 0 < penalty.norm() < 1e-3 * G.double().norm()
    assert gradient.dtype == torch.float32
    # The sum is rounded to float32: 2⁻²⁴ of a gradient of size 1.
    assert (gradient.double() - gradient_without.double() - penalty).abs().max() < 1e-6
    assert ((gradient - gradient_without).double() - penalty).norm() < 1e-3 * penalty.norm()
    assert salaad.blocks == ("layer",)


def test_in_pure_bfloat16_micro_batches_add_up_in_float32():
    model = Injected(0.02 * randn(8, 8).bfloat16())
    Salaad(model, SalaadConfig(rho=0.0, **ANY))
    parts = [randn(8, 8, seed=seed).bfloat16() for seed in range(5)]
    for part in parts:
        model.backward(part)
    torch.testing.assert_close(model.layer.weight.grad, sum(part.float() for part in parts), rtol=1e-6, atol=1e-6)


def moved_by_adamw(X: Tensor, rho: float, rounded: bool = False) -> Tensor:
    """Return the weight X after five steps of AdamW under random gradients of size 1 to 2 and the penalty of ρ.

    `rounded` is the mistake that the test must notice: it rounds the gradient with the penalty to bfloat16.
    """
    model = Injected(X)
    salaad = Salaad(model, SalaadConfig(rho=rho, every=100, **ANY))
    optimizer, _ = build_optimizer(model.parameters(), OptimizerConfig(lr=0.02, warmup=0), 100)
    for seed in range(5):
        noise = randn(*X.shape, seed=seed + 1)
        model.backward((noise.sign() * (1 + 0.9 * noise.abs().clamp_max(1))).bfloat16())
        if rounded:
            model.layer.weight.grad.copy_(model.layer.weight.grad.bfloat16())
        optimizer.step()
        salaad.step()
        optimizer.zero_grad()
    return model.layer.weight.detach().double()


def test_in_pure_bfloat16_adamw_reacts_to_the_penalty_as_it_does_in_float32():
    X = (0.02 * randn(384, 384)).bfloat16()
    rho = 0.03  # ρ|X − T| is about 5e-4 of the gradient, of which bfloat16 resolves 4e-3

    def effect(start: Tensor, **how: bool) -> Tensor:
        return moved_by_adamw(start, rho, **how) - moved_by_adamw(start, 0.0, **how)

    expected = effect(X.float())
    # A weight itself is rounded to bfloat16, so most weights do not move and some move too far. The mean over 150 000
    # of them, along the effect in float32, is 1 but for a sampling error of a few percent.
    slopes = [(effect(X, rounded=rounded) * expected).sum() / expected.square().sum() for rounded in (False, True)]
    assert slopes[0] == pytest.approx(1, abs=0.15)
    assert slopes[1] == pytest.approx(0, abs=0.05)


# ---- summary


def test_a_summary_counts_the_entries_of_each_block_once_and_right(monkeypatch):
    """S is a threshold of a whole matrix, of which a large model has hundreds."""
    _, salaad = trained_toy()
    sparse, counted = Surrogate.sparse, []
    monkeypatch.setattr(Surrogate, "sparse", lambda surrogate: counted.append(surrogate) or sparse(surrogate))
    found = salaad.summary()
    assert len(counted) == len(salaad.blocks)
    parts = [(s.rank, int((sparse(s) != 0).sum()), *s.T.shape) for s in salaad.surrogates.values()]
    assert found["density"] == pytest.approx(np.mean([nnz / (n * m) for _, nnz, n, m in parts]))
    assert found["block_parameters"] == sum(rank * n + rank * m + nnz for rank, nnz, n, m in parts)


def test_the_package_lists_its_public_names_before_they_are_imported():
    assert {"Salaad", "SalaadCallback", "SalaadConfig", "suggest"} == set(dir(salaad_package))


# ---- true float32


def legacy_medium() -> None:
    torch.set_float32_matmul_precision("medium")


def new_style() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


@pytest.fixture
def matmul_settings() -> Iterator[None]:
    """Put back torch's global settings after a test that changes them."""
    places = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [place.fp32_precision for place in places]
    yield
    torch.set_float32_matmul_precision("highest")
    for place, value in zip(places, before, strict=True):
        place.fp32_precision = value


def test_after_an_update_an_inherited_setting_goes_on_following_the_one_that_it_comes_from(matmul_settings):
    products = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    whole = torch.backends.fp32_precision
    try:
        for backend in products:
            backend.fp32_precision = "none"
        torch.backends.fp32_precision = "tf32"
        salaad = Salaad(toy(8, 8), SalaadConfig(every=1, **ANY))
        salaad.step()
        assert [backend.fp32_precision for backend in products] == ["tf32", "tf32"]
        torch.backends.fp32_precision = "ieee"
        assert [backend.fp32_precision for backend in products] == ["ieee", "ieee"]
    finally:
        torch.backends.fp32_precision = whole


@pytest.mark.parametrize("setting", [legacy_medium, new_style, nullcontext])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("method", ["exact", "gram"])
def test_the_admm_computes_in_true_float32_whatever_the_global_settings(matmul_settings, setting, autocast, method):
    results = []
    for disturbed in (False, True):
        model = toy(96, 64, 80)
        config = SalaadConfig(every=1, method=method, **LIVELY, **ANY)
        if disturbed:
            setting()
        before = [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and disturbed):
            salaad = Salaad(model, config)
            for seed in range(4):
                with torch.no_grad():
                    model[0].weight += 0.01 * randn(64, 96, seed=seed)
                salaad.step()
            with salaad.deployed():
                deployed = snapshot(model)
        assert before == [torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision]
        parts = [part() for s in salaad.surrogates.values() for part in (s.low_rank, s.sparse, s.dual)]
        results.append([*parts, *deployed.values(), salaad.penalty()])
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, theirs)


# ---- numbers that are not finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("method", ["exact", "gram", "auto"])
def test_a_weight_that_is_not_finite_stops_training_by_the_name_of_its_block(value, method):
    model = toy(6, 8, 4)
    salaad = Salaad(model, SalaadConfig(every=1, method=method, **ANY))
    model[1].weight.data[2, 3] = value
    with pytest.raises(
        NotFiniteError, match="block 1 is not finite at step 1; go on from the last good checkpoint"
    ) as error:
        salaad.step()
        salaad.drain_records()
    assert error.value.block == "1"


def test_a_weight_of_zeros_is_finite():
    model = toy(6, 8)
    nn.init.zeros_(model[0].weight)
    salaad = Salaad(model, SalaadConfig(every=1, **ANY))
    salaad.step()
    assert len(salaad.drain_records()) == 1


# ---- records and summary


@pytest.mark.parametrize(("method", "used"), [("exact", "exact"), ("gram", "gram"), ("auto", "gram")])
def test_records_hold_what_the_update_left_behind_in_the_models_order_and_are_given_once(method, used):
    model = toy(*WIDTHS)
    salaad = Salaad(model, SalaadConfig(every=2, method=method, **LIVELY, **ANY))
    run(model, salaad, 6)
    records = salaad.drain_records()
    assert [(step, block) for step, block, _ in records] == [(step, name) for step in (2, 4, 6) for name in "0123"]
    for _, name, record in records[-4:]:
        block, X = salaad.surrogates[name], model.get_submodule(name).weight.detach()
        gap = (X - block.low_rank() - block.sparse()).norm().item()
        assert record.rank_ratio == pytest.approx(block.rank / min(X.shape))
        assert record.density == pytest.approx(np.count_nonzero(block.sparse().numpy()) / X.numel())
        assert (record.alpha, record.beta) == pytest.approx((block.alpha, block.beta))
        assert record.delta == pytest.approx(gap, rel=1e-3, abs=1e-6)
        assert record.error == pytest.approx(gap / X.norm().item(), rel=1e-3, abs=1e-6)
        assert record.method == used
    assert salaad.drain_records() == []


def test_the_summary_counts_parameters_and_means_over_blocks():
    model = toy(*WIDTHS)
    salaad = Salaad(model, SalaadConfig(every=1, **LIVELY, roles=("re:^[0-2]$",)))
    run(model, salaad, 6)
    ranks, supports, shapes = [], [], []
    for name in "012":
        block = salaad.surrogates[name]
        s = np.linalg.svd(block.low_rank().double().numpy(), compute_uv=False)
        ranks.append(int(np.argmax(np.cumsum(s) / s.sum() >= 0.999)) + 1)
        supports.append(np.count_nonzero(block.sparse().numpy()))
        shapes.append(block.low_rank().shape)
    blocks = sum(r * (n + m) + nnz for r, nnz, (n, m) in zip(ranks, supports, shapes, strict=True))
    dense = 24 * 16 + 16 * 8 + 8 * 32
    biases_and_the_last_matrix = 16 + 8 + 32 + 10 + 32 * 10
    assert salaad.summary() == {
        "rank_ratio": pytest.approx(np.mean([r / min(shape) for r, shape in zip(ranks, shapes, strict=True)])),
        "density": pytest.approx(
            np.mean([nnz / math.prod(shape) for nnz, shape in zip(supports, shapes, strict=True)])
        ),
        "block_parameters": blocks,
        "block_parameters_dense": dense,
        "parameters": blocks + biases_and_the_last_matrix,
    }


def test_a_tied_embedding_counts_once_in_the_summary():
    model = gpt2()
    summary = Salaad(model, SalaadConfig(embedding=True)).summary()
    per_layer = 16 * 48 + 16 * 16 + 2 * 16 * 64
    assert summary["block_parameters_dense"] == 2 * per_layer + 32 * 16
    rest = sum(p.numel() for p in model.parameters()) - summary["block_parameters_dense"]
    assert summary["parameters"] == rest + summary["block_parameters"]
