"""LORO's exact step against a dense tangent projection and retraction in float64."""

import pytest
import torch

from salaad.common.errors import UserError
from salaad.methods.loro import Loro, LoroLinear, adam_direction, exact_step
from salaad.methods.low_rank_layers import factored_layers
from salaad.methods.optimizer import step_unless
from tests.helpers.tiny_llama import IDS, config_of, llama

OPTIONS = ("--loro.rank", "4", "--loro.every", "3", "--loro.rewarmup", "2", "--train.steps", "12")


def dense_step(W, G, lr, rank):
    """W − lr·(projection of G onto the tangent space of rank-`rank` matrices at W), truncated to that rank."""
    U, _, Vh = torch.linalg.svd(W)
    U, V = U[:, :rank], Vh[:rank].mT
    projected = U @ U.mT @ G + G @ V @ V.mT - U @ U.mT @ G @ V @ V.mT
    left, sigma, right = torch.linalg.svd(W - lr * projected)
    return left[:, :rank] * sigma[:rank] @ right[:rank]


@pytest.mark.parametrize("shape", [(20, 30), (30, 20), (12, 12)])
def test_the_exact_step_is_that_on_the_manifold(shape):
    generator = torch.Generator().manual_seed(0)
    out, width = shape
    M, N, G = (torch.randn(*size, generator=generator).double() for size in ((out, 4), (width, 4), shape))
    new_M, new_N = exact_step(M, N, G @ N, G.mT @ M, 0.3)  # the factors' gradients for a gradient G of W
    torch.testing.assert_close(new_M @ new_N.mT, dense_step(M @ N.mT, G, 0.3, 4), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(new_M.mT @ new_M, new_N.mT @ new_N, rtol=1e-9, atol=1e-9)  # both factors have √σ
    assert not (new_M.mT @ new_M - (new_M.mT @ new_M).diagonal().diag()).abs().max() > 1e-9


def test_the_factors_begin_xavier_normal():
    torch.manual_seed(0)
    settings = config_of("loro", "--loro.rank", "100", "--loro.init", "xavier").loro
    layer = LoroLinear(torch.nn.Linear(300, 200, bias=False), settings)
    assert layer.M.std().item() == pytest.approx((2 / 300) ** 0.5, rel=0.03)
    assert layer.N.std().item() == pytest.approx((2 / 400) ** 0.5, rel=0.03)


def test_factors_begin_with_a_product_of_the_dense_size():
    torch.manual_seed(0)
    linear = torch.nn.Linear(300, 200, bias=False)
    torch.nn.init.normal_(linear.weight, std=0.02)
    layer = LoroLinear(linear, config_of("loro", "--loro.rank", "50", "--loro.init", "scaled").loro)
    assert (layer.M @ layer.N.mT).std().item() == pytest.approx(0.02, rel=0.05)  # of 60,000 entries, rank 50
    assert layer.M.std().item() == pytest.approx(layer.N.std().item(), rel=0.05)


def loro(model, *words, dtype=torch.float32):
    config = config_of("loro", *OPTIONS, *words)
    Loro.rebuild(model, config)
    model.to(dtype)
    method = Loro(model, config)
    return method, *method.build_optimizer()


def test_three_steps_are_two_on_the_factors_and_one_on_the_manifold():
    """The reference is Adam written out in float64; the third step starts from the factors after the second."""
    model = llama()
    words = ("--optimizer.warmup", "0", "--optimizer.lr", "0.01")
    method, optimizer, schedule = loro(model, *words, dtype=torch.float64)
    layers = factored_layers(model)
    factors = {(name, key): getattr(layer, key) for name, layer in layers.items() for key in "MN"}
    mine = {place: p.detach().clone() for place, p in factors.items()}
    mean, square = dict.fromkeys(mine, 0.0), dict.fromkeys(mine, 0.0)
    norm = model.model.norm.weight
    for step in range(1, 4):
        model(input_ids=IDS, labels=IDS).loss.backward()
        lr, direction = 0.01 * method.rate(step - 1), {}
        for place, p in factors.items():
            mean[place] = 0.9 * mean[place] + 0.1 * p.grad
            square[place] = 0.999 * square[place] + 0.001 * p.grad**2
            root = (square[place] / (1 - 0.999**step)).sqrt()
            direction[place] = mean[place] / (1 - 0.9**step) / (root + 1e-6)
        before = norm.detach().clone()
        step_unless(torch.zeros(()), optimizer)
        assert not torch.equal(norm, before)  # other parameters take an ordinary step every time
        schedule.step()
        optimizer.zero_grad()
        method.after_step(optimizer, step, torch.zeros(()))
        for name in layers:
            M, N, dM, dN = (where[name, key] for where in (mine, direction) for key in "MN")
            if step < 3:
                mine[name, "M"], mine[name, "N"] = M - lr * 4 / 16 * dM, N - lr * 4 / 16 * dN
                for key in "MN":
                    torch.testing.assert_close(factors[name, key].detach(), mine[name, key], rtol=1e-6, atol=1e-8)
                continue
            # The projection onto the tangent space of a G with G·N = dM and Gᵀ·M = dN, Adam's directions.
            (Q_M, R_M), (Q_N, R_N) = torch.linalg.qr(M), torch.linalg.qr(N)
            right, left = dM @ torch.linalg.inv(R_N), torch.linalg.inv(R_M).mT @ dN.mT
            projected = Q_M @ left + (right - Q_M @ (Q_M.mT @ right)) @ Q_N.mT
            U, sigma, Vh = torch.linalg.svd(M @ N.mT - lr * projected)
            expected = U[:, :4] * sigma[:4] @ Vh[:4]
            layer = layers[name]
            torch.testing.assert_close((layer.M @ layer.N.mT).detach(), expected, rtol=1e-5, atol=1e-7, msg=name)
    assert all(not value.any() for state in optimizer.state.values() for value in state.values())


def test_an_exact_step_after_a_broken_gradient_is_left_out():
    model = llama()
    method, optimizer, _ = loro(model)
    for step in (1, 2):
        model(input_ids=IDS, labels=IDS).loss.backward()
        step_unless(torch.zeros(()), optimizer)
        method.after_step(optimizer, step, torch.zeros(()))
        optimizer.zero_grad()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    method.after_step(optimizer, 3, torch.ones(()))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert any(value.any() for state in optimizer.state.values() for value in state.values())


def test_the_learning_rate_rises_again_after_an_exact_step():
    _, _, schedule = loro(llama(), "--optimizer.warmup", "0.25")
    plain, factors = schedule.lr_lambdas
    assert [factors(step) for step in (2, 5, 8)] == [0, 0, 0]  # the exact steps are the third, sixth and ninth
    assert plain(3) == pytest.approx(0.5 * 1.0) and plain(4) > plain(3) and factors(4) == plain(4)


def test_an_optimizer_without_adams_direction_is_refused():
    with pytest.raises(UserError, match=r"optimizer.name is RMSprop, but loro steps along Adam's direction"):
        Loro.check(llama(), config_of("loro", *OPTIONS, "--optimizer.name", "RMSprop"))


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.999), (0.9, 0.0)])
def test_the_direction_is_the_one_in_which_adam_moved(betas):
    p = torch.nn.Parameter(torch.zeros(50, dtype=torch.float64))
    optimizer = torch.optim.Adam([p], lr=1.0, betas=betas)
    for step in range(2):
        p.grad = torch.linspace(-1, 2, 50).double() * (step + 1)
        before = p.detach().clone()
        optimizer.step()
    torch.testing.assert_close(adam_direction(optimizer, p), before - p.detach(), rtol=2e-6, atol=1e-9)
