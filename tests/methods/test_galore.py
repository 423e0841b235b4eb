"""GaLore against pytorch-optimizer until the first refresh, and against NumPy beyond it."""

import math

import numpy as np
import pytest
import torch
from pytorch_optimizer import GaLore

from salaad.common.errors import UserError
from salaad.methods.galore import Galore, lying
from salaad.methods.low_rank_layers import projections
from salaad.methods.optimizer import step_unless
from salaad.methods.registry import method_of
from salaad.spectral import leading_left_vectors
from tests.helpers.tiny_llama import IDS, config_of, llama

# The oracles add ε before the bias correction, so ε is made too small to matter.
OPTIONS = ("--galore.rank", "4", "--optimizer.eps", "1e-30", "--optimizer.lr", "0.01", "--optimizer.warmup", "0")
FINE = torch.zeros(())


def galore(model, *words):
    config = config_of("galore", *OPTIONS, *words)
    Galore.check(model, config)
    method = Galore(model, config)
    return method, method.build_optimizer()[0]


def one_step(model, method, optimizer, step, broken=FINE):
    optimizer.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    gradients = {name: layer.weight.grad.clone() for name, layer in projections(model).items()}
    step_unless(broken, optimizer)
    method.after_step(optimizer, step, broken)
    return gradients


def test_it_trains_as_pytorch_optimizer_does_until_the_first_refresh():
    mine, theirs = llama(), llama()
    method, optimizer = galore(mine)
    projected = [layer.weight for layer in projections(theirs).values()]
    others = [p for p in theirs.parameters() if not any(p is W for W in projected)]
    settings = {"rank": 4, "update_proj_gap": 200, "scale": 0.25, "projection_type": "std"}
    oracle = GaLore([{"params": others}, {"params": projected, **settings}], lr=0.01, eps=1e-30)
    for step in range(1, 6):
        one_step(mine, method, optimizer, step)
        oracle.zero_grad()
        theirs(input_ids=IDS, labels=IDS).loss.backward()
        oracle.step()
    for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-4, atol=2e-5, msg=name)


def test_past_refreshes_a_weight_moves_as_numpy_moves_it():
    model = llama().double()
    method, optimizer = galore(model, "--galore.every", "3")
    layers = projections(model)
    W = {name: layer.weight.detach().numpy().copy() for name, layer in layers.items()}
    P, mean, square = {}, dict.fromkeys(W, 0.0), dict.fromkeys(W, 0.0)
    for step in range(1, 9):
        gradients = one_step(model, method, optimizer, step)
        for name, G in gradients.items():
            G = G.numpy() if G.shape[0] < G.shape[1] else G.numpy().T
            if step % 3 == 1:
                found = np.linalg.svd(G, full_matrices=False)[0][:, :4]
                # Signs are arbitrary: each vector takes the sign nearest to its predecessor, the first may have any.
                P[name] = found * np.where((found * P[name]).sum(0) < 0, -1, 1) if name in P else found
            R = P[name].T @ G
            mean[name] = 0.9 * mean[name] + 0.1 * R
            square[name] = 0.999 * square[name] + 0.001 * R**2
            direction = (mean[name] / (1 - 0.9**step)) / np.sqrt(square[name] / (1 - 0.999**step))
            change = 0.25 * P[name] @ direction
            lr = method.config.optimizer.lr
            W[name] -= lr * (change if W[name].shape[0] < W[name].shape[1] else change.T)
    for name, layer in layers.items():
        np.testing.assert_allclose(layer.weight.detach().numpy(), W[name], rtol=0, atol=1e-10, err_msg=name)


def test_the_subspace_holds_as_much_of_a_matrix_as_that_of_a_full_decomposition():
    for n, m, least in ((16, 24, 1e-2), (64, 64, 1e-2), (300, 700, 1e-2), (64, 96, 1e-12)):
        scales = torch.logspace(0, math.log10(least), n)
        Z = torch.randn(n, m, generator=torch.Generator().manual_seed(n)) * scales[:, None]
        P = leading_left_vectors(Z, n // 4).double()
        torch.testing.assert_close(P.mT @ P, torch.eye(n // 4).double(), rtol=0, atol=1e-5)
        best = torch.linalg.svdvals(Z.double())[: n // 4]
        kept = torch.linalg.vector_norm(P.mT @ Z.double())
        assert float(kept / torch.linalg.vector_norm(best)) > 1 - 1e-6
        exact = torch.linalg.svd(Z.double(), full_matrices=False)[0][:, : n // 4]
        assert torch.linalg.svdvals(P.mT @ exact).min() > 0.999  # no direction is lost, however small


def test_a_step_that_is_not_taken_changes_nothing_and_leaves_the_subspace_due():
    model = llama()
    method, optimizer = galore(model, "--galore.every", "2", "--optimizer.weight_decay", "0.1")
    one_step(model, method, optimizer, 1)
    one_step(model, method, optimizer, 2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    P = {name: value.clone() for name, value in method.P.items()}
    broken = torch.ones(())
    optimizer.zero_grad()
    (model(input_ids=IDS, labels=IDS).loss * float("nan")).backward()
    step_unless(broken, optimizer)
    method.after_step(optimizer, 3, broken)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert all(torch.equal(value, P[name]) for name, value in method.P.items())
    assert method.is_due
    one_step(model, method, optimizer, 4)
    assert not all(torch.equal(value, P[name]) for name, value in method.P.items())


def test_weight_decay_reaches_the_projected_weights():
    models = llama(), llama()
    for model, decay in zip(models, ("0", "0.5"), strict=True):
        method, optimizer = galore(model, "--optimizer.weight_decay", decay)
        W = {name: layer.weight.detach().clone() for name, layer in projections(model).items()}
        one_step(model, method, optimizer, 1)
    plain, decayed = (projections(model) for model in models)
    for name, layer in plain.items():
        torch.testing.assert_close(decayed[name].weight, layer.weight - 0.01 * 0.5 * W[name], rtol=1e-5, atol=1e-6)


def test_moments_have_the_size_of_the_subspace_and_the_plan_says_so():
    model = llama()
    method, optimizer = galore(model)
    one_step(model, method, optimizer, 1)
    moments = sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.dim())
    memory = Galore.memory(model, method.config, 1)
    assert memory["optimizer state"] == moments
    assert memory["subspaces"] == method.state_bytes()


def test_an_optimizer_without_moments_is_refused():
    with pytest.raises(UserError, match=r"optimizer.name is SGD, which keeps no moments .* give one of Adam"):
        method_of(config_of("galore")).check(llama(), config_of("galore", *OPTIONS, "--optimizer.name", "SGD"))


def test_lying_is_a_view_with_the_shorter_side_first():
    for shape in ((3, 5), (5, 3), (4, 4)):
        X = torch.zeros(shape)
        assert lying(X).shape == (min(shape), max(shape))
        lying(X).add_(1)
        assert X.all()
