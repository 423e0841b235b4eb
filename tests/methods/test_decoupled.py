"""The decoupled pull against its formula and on two ranks; both pulls before their onset and after their release."""

import os
import signal

import pytest
import torch
from transformers import Adafactor

from salaad import Salaad, SalaadConfig
from salaad.common import distributed
from salaad.common.errors import NotFiniteError, UserError
from salaad.config.command_line import read_command_line
from salaad.methods.salaad.method import SalaadMethod
from salaad.model.build import describe_model, outline
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_llama import IDS, llama
from tests.helpers.training import lines, run_training, weights

SETTINGS = {"rank_ratio": 0.25, "density": 0.1, "every": 3, "pull": "decoupled", "pull_rate": 0.5, "embedding": True}


def step(model, optimizer, salaad=None, ids=IDS):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if salaad is not None:
        salaad.step()


@pytest.mark.parametrize("rho", [None, 1e-4])
def test_a_step_is_the_optimizers_and_then_a_part_of_the_way_to_T(rho):
    model, plain = llama().double(), llama().double()
    salaad = Salaad(model, SalaadConfig(**SETTINGS, rho=rho))
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, weight_decay=0.1) for each in (model, plain)]
    inverse = {name: X.numel() ** -0.5 for name, X in salaad.weights.items()}
    mean = sum(inverse.values()) / len(inverse)
    others = dict(plain.named_parameters())
    for _ in range(7):
        targets = {name: s.T.clone() for name, s in salaad.surrogates.items()}
        step(plain, optimizers[1])
        for name, T in targets.items():
            rate = 0.5 * (inverse[name] / mean if rho is None else 1)  # a block's rate λ is proportional to ρ
            X = others[f"{name}.weight"]
            X.data = X.data - 0.01 * rate * (X.data - T.double())
        step(model, optimizers[0], salaad)
        for name, X in salaad.weights.items():
            # The difference X − T is taken in float32, the dtype of T.
            torch.testing.assert_close(X.detach(), others[f"{name}.weight"].detach(), rtol=0, atol=1e-7)
    salaad.close()


class Wrapped(torch.optim.Optimizer):
    """An optimizer that lets another one step."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


def test_an_optimizer_that_wraps_another_pulls_once_and_tells_the_moments_of_both():
    distances = []
    for wrap in (lambda optimizer: optimizer, Wrapped):
        model = llama()
        salaad = Salaad(model, SalaadConfig(**SETTINGS | {"every": 10**6, "rho": 1e-4, "pull_rate": 10.0}))
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0))
        X = salaad.weights["model.layers.0.mlp.up_proj"].detach()
        T = salaad.surrogates["model.layers.0.mlp.up_proj"].T
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)  # only the pull moves the weights
        before = (X - T).norm()
        optimizer.step()
        distances.append((X - T).norm() / before)
        assert salaad.second_moments().keys() >= salaad.weights.keys()
        salaad.close()
    # All blocks have one ρ, so λ is 10: a step goes lr·λ = 0.1 of the way.
    torch.testing.assert_close(torch.stack(distances), torch.full((2,), 0.9), rtol=1e-5, atol=0)


@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, Wrapped], ids=["plain", "wrapped"])
def test_a_step_of_the_optimizer_that_fails_and_is_tried_again_pulls(wrap):
    """As where memory runs out and a loop frees some."""
    models = []
    for fails in (False, True):
        model = llama()
        salaad = Salaad(model, SalaadConfig(**SETTINGS))
        optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        model(input_ids=IDS, labels=IDS).loss.backward()
        if fails:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        optimizer.step()
        salaad.step()
        models.append(model)
        salaad.close()
    assert all(torch.equal(*both) for both in zip(*(model.parameters() for model in models), strict=True))


def test_an_optimizer_that_steps_on_copies_of_the_weights_is_refused():
    """As one that keeps bfloat16 weights in float32: what the pull moves is overwritten, and here nothing is moved."""
    model = llama()
    copies = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(copies, lr=0.1)
    with Salaad(model, SalaadConfig(**SETTINGS)) as salaad:
        salaad.step()  # a step that was left out, such as by a scaler
        model(input_ids=IDS, labels=IDS).loss.backward()
        for copied, p in zip(copies, model.parameters(), strict=True):
            copied.grad = p.grad.clone()
        optimizer.step()
        with pytest.raises(UserError, match=r"no optimizer has the weights of the blocks, .*; take pull=\"coupled\""):
            salaad.step()


def test_bfloat16_weights_come_as_near_to_T_as_float32_ones():
    """A step of 5e-4 of the distance is below what bfloat16 resolves: rounded to nearest, no weight would move."""
    distances = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = llama().to(dtype)
        salaad = Salaad(model, SalaadConfig(**SETTINGS | {"every": 10**6, "rho": 1e-4}))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        before = {name: X.detach().float() - salaad.surrogates[name].T for name, X in salaad.weights.items()}
        for _ in range(400):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            salaad.step()
        kept = [(X.detach().float() - salaad.surrogates[name].T).norm() for name, X in salaad.weights.items()]
        distances[dtype] = float(sum(kept) / sum(d.norm() for d in before.values()))
        salaad.close()
    assert distances[torch.float32] == pytest.approx((1 - 5e-4) ** 400, rel=1e-3)
    # The sum of 400 stochastic roundings adds noise of some hundredths of a weight.
    assert distances[torch.bfloat16] == pytest.approx(distances[torch.float32], abs=0.05)


def test_a_broken_step_draws_nothing():
    model = llama()
    salaad = Salaad(model, SalaadConfig(**SETTINGS))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    before = {name: X.detach().clone() for name, X in salaad.weights.items()}
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    assert all(torch.equal(X, before[name]) for name, X in salaad.weights.items())
    salaad.close()


@pytest.mark.parametrize("given", [False, True])
def test_beside_a_grad_scaler_weights_train_as_without_one(given):
    """To the bit, as the scale is a power of two; a step whose gradient is not finite draws nothing."""
    models = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=2)):
        model = llama()
        salaad = Salaad(model, SalaadConfig(**SETTINGS), scaler=scaler if given else None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in range(6):
            loss = model(input_ids=IDS, labels=IDS).loss * (torch.inf if i == 4 else 1)
            if scaler is None:
                loss.backward()
                if i != 4:
                    optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            salaad.step()
        models.append(model)
        salaad.close()
    assert all(torch.equal(*both) for both in zip(*(model.parameters() for model in models), strict=True))


def test_a_pull_of_weights_that_were_moved_to_another_device_is_refused_in_a_sentence():
    model = llama()
    salaad = Salaad(model, SalaadConfig(**SETTINGS))
    surrogate = salaad.surrogates[salaad.blocks[0]]
    surrogate.T = surrogate.T.to("meta")  # a stand-in for model.to(device), as a CPU may be the only device
    with pytest.raises(UserError, match=r"is on cpu now, but its L and S are on meta; make the Salaad after"):
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    salaad.close()


def test_a_pull_without_a_learning_rate_is_refused_in_a_sentence():
    """Adafactor of transformers has none where it chooses the size of a step itself."""
    model = llama()
    salaad = Salaad(model, SalaadConfig(**SETTINGS))
    with pytest.raises(UserError, match=r"has no learning rate lr, .* moves block model.*; give it one, or take pull="):
        step(model, Adafactor(model.parameters(), lr=None, relative_step=True))
    salaad.close()


def test_another_optimizer_draws_nothing():
    model = llama()
    salaad = Salaad(model, SalaadConfig(**SETTINGS))
    before = {name: X.detach().clone() for name, X in salaad.weights.items()}
    other = torch.nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    assert all(torch.equal(X, before[name]) for name, X in salaad.weights.items())
    salaad.close()


def pulled_in_a_part(**settings):
    """Return a model, a plain one, the first one's `Salaad` for eight steps with a strong pull, and an SGD for each."""
    model, plain = llama(), llama()
    salaad = Salaad(model, SalaadConfig(**SETTINGS | {"rho_constant": 50.0, **settings}), total_steps=8)
    return model, plain, salaad, [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_in_the_first_part_of_a_run_nothing_draws_the_weights(pull):
    model, plain, salaad, optimizers = pulled_in_a_part(pull=pull, onset=0.5)
    for _ in range(4):
        assert not salaad.is_pulled
        step(model, optimizers[0], salaad)
        step(plain, optimizers[1])
    assert all(torch.equal(p, model.get_parameter(name)) for name, p in plain.named_parameters())
    assert not salaad.drain_records()
    for name, surrogate in salaad.surrogates.items():
        assert surrogate.alpha == surrogate.beta == surrogate.nnz == 0
        torch.testing.assert_close(surrogate.deployed(), salaad.weights[name].detach())
    assert salaad.is_pulled
    for _ in range(2):
        step(model, optimizers[0], salaad)
        step(plain, optimizers[1])
    assert not any(torch.equal(X, plain.get_parameter(f"{name}.weight")) for name, X in salaad.weights.items())
    assert all(float(surrogate.tau_L) > 0 for surrogate in salaad.surrogates.values())  # the controller has begun
    salaad.close()


@pytest.mark.parametrize("schedule", ["synchronous", "staggered"])
def test_the_pull_begins_towards_the_weights_that_it_finds(schedule):
    model, _, salaad, optimizers = pulled_in_a_part(onset=0.25, every=7, schedule=schedule)
    for _ in range(2):
        step(model, optimizers[0], salaad)
    assert salaad.is_pulled
    assert all(torch.equal(surrogate.T, salaad.weights[name]) for name, surrogate in salaad.surrogates.items())
    salaad.close()


def test_a_weight_that_is_not_finite_is_told_before_the_pull_begins():
    model, _, salaad, optimizers = pulled_in_a_part(onset=0.5)
    step(model, optimizers[0], salaad)
    kept = {name: surrogate.T.clone() for name, surrogate in salaad.surrogates.items()}
    broken = salaad.blocks[2]
    with torch.no_grad():
        salaad.weights[broken][0, 1] = float("nan")
    salaad.step(may_be_left_out=True)
    with pytest.raises(NotFiniteError, match=broken.replace(".", r"\.")):
        salaad.step(may_be_left_out=True)
    assert all(torch.equal(surrogate.T, kept[name]) for name, surrogate in salaad.surrogates.items())
    salaad.close()


def test_a_longer_run_goes_on_from_the_thresholds_that_it_has(tmp_path):
    """Eight times as many steps put the present one before the onset again."""
    model, _, salaad, optimizers = pulled_in_a_part(onset=0.25)
    for _ in range(6):
        step(model, optimizers[0], salaad)
    salaad.save(tmp_path / "saved")
    before = {name: (surrogate.alpha, surrogate.beta) for name, surrogate in salaad.surrogates.items()}
    salaad.close()
    longer = Salaad.load(model, tmp_path / "saved", total_steps=64)
    for _ in range(3):
        assert not longer.is_pulled
        step(model, optimizers[0], longer)
    assert {step for step, *_ in longer.drain_records()} == {9}
    assert before == {name: (surrogate.alpha, surrogate.beta) for name, surrogate in longer.surrogates.items()}
    longer.close()


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_in_the_last_part_of_a_run_nothing_draws_the_weights(pull):
    model, plain, salaad, optimizers = pulled_in_a_part(pull=pull, release=0.5)
    for _ in range(4):
        assert salaad.is_pulled
        step(model, optimizers[0], salaad)
    plain.load_state_dict(model.state_dict())
    thresholds = {name: (record.alpha, record.beta) for _, name, record in salaad.drain_records()}
    for _ in range(4):
        assert not salaad.is_pulled
        step(model, optimizers[0], salaad)
        step(plain, optimizers[1])
    for name, p in plain.named_parameters():
        assert torch.equal(p, model.get_parameter(name)), name
    late = salaad.drain_records()  # L and S are still updated, with the thresholds that they had
    assert late and all(thresholds[name] == (record.alpha, record.beta) for _, name, record in late)
    assert len({record.rank_ratio for *_, record in late}) > 1
    salaad.close()


@pytest.mark.parametrize("part", ["onset", "release"])
def test_a_part_of_an_unknown_length_is_refused(part):
    with pytest.raises(UserError, match=rf"{part} is 0.2, a part of the training, whose length is not known; give"):
        Salaad(llama(), SalaadConfig(**{part: 0.2}))


def test_parts_longer_than_the_run_are_refused():
    with pytest.raises(UserError, match=r"onset 0.6 and salaad.release 0.5 are more than the whole run together; give"):
        SalaadConfig(onset=0.6, release=0.5)


def train_on_a_share(batch: int, schedule: str, onset: float) -> dict:
    """Train six steps on this rank's rows; return the weights."""
    model = llama()
    wrapped = model if distributed.world_size() == 1 else torch.nn.parallel.DistributedDataParallel(model)
    salaad = Salaad(model, SalaadConfig(**SETTINGS, schedule=schedule, onset=onset), total_steps=6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)
    rows = batch // distributed.world_size()
    ids = torch.randint(64, (batch, 12), generator=torch.Generator().manual_seed(1))
    mine = ids[distributed.rank() * rows :][:rows]
    for i in range(6):
        if i == 4:  # reload its own state, as a resume does
            salaad.load_state_dict(salaad.state_dict())
        step(wrapped, optimizer, salaad, mine)
    salaad.finish()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("schedule", "onset"), [("synchronous", 0.0), ("staggered", 0.0), ("synchronous", 0.4)])
def test_two_ranks_draw_like_one(tmp_path, schedule, onset):
    [alone] = run_ranks(train_on_a_share, 1, tmp_path, 4, schedule, onset)
    first, second = run_ranks(train_on_a_share, 2, tmp_path, 4, schedule, onset)
    for name, X in alone.items():
        assert torch.equal(first[name], second[name]), name
        if schedule == "synchronous":  # staggered updates depend on the owner's other blocks
            torch.testing.assert_close(first[name], X, rtol=0, atol=2e-5)


def bytes_kept(pull: str, release: float) -> tuple[int, int]:
    """Train four steps; return the bytes that this rank keeps, and those of its own blocks."""
    model = llama()
    salaad = Salaad(model, SalaadConfig(**SETTINGS | {"pull": pull, "release": release}), total_steps=5)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        step(model, optimizer, salaad)
    own = [value.nbytes for surrogate in salaad.surrogates.values() for value in surrogate.state_dict().values()]
    return salaad.state_bytes, sum(own)


@pytest.mark.parametrize(("pull", "release"), [("coupled", 0.0), ("decoupled", 0.0), ("decoupled", 0.4)])
def test_the_state_of_a_rank_has_the_targets_that_others_sent(tmp_path, pull, release):
    """A decoupled pull needs all targets on every rank: two ranks receive each block once between them, in float32.

    Once nothing is pulled any more, a rank lets them go.
    """
    received = sum(kept - own for kept, own in run_ranks(bytes_kept, 2, tmp_path, pull, release))
    weights = Salaad(llama(), SalaadConfig(**SETTINGS)).weights
    needed = pull == "decoupled" and not release
    assert received == (4 * sum(X.numel() for X in weights.values()) if needed else 0)


def test_a_run_with_a_decoupled_pull_resumes_to_the_bit(toy, tmp_path, monkeypatch):
    options = toy(salaad__pull="decoupled", salaad__pull_rate=20, salaad__onset=0.25, salaad__release=0.25)
    run_training(options, tmp_path / "whole")
    pending, original = {4, 10}, SalaadMethod.after_step

    def after_step(self, optimizer, step, discarded):
        original(self, optimizer, step, discarded)
        if step in pending:
            pending.discard(step)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SalaadMethod, "after_step", after_step)
    for _ in range(3):
        run_training(options, tmp_path / "pieces")
    assert not pending and lines(tmp_path / "whole") == lines(tmp_path / "pieces")
    first, second = weights(tmp_path / "whole"), weights(tmp_path / "pieces")
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def train_transposed(pull: str) -> list[torch.Tensor]:
    """Train a model for five steps, its weights lying column by column; return them, and then what is deployed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Linear(20, 16))
    for layer in model:
        layer.weight = torch.nn.Parameter(layer.weight.detach().t().contiguous().t())
    settings = {"pull": pull, "pull_rate": 0.5, "rho": 0.05, "every": 2, "delta_alpha": 0.05, "delta_beta": 0.005}
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), **settings))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = model if distributed.world_size() == 1 else torch.nn.parallel.DistributedDataParallel(model)
    for i in range(5):
        wrapped(torch.randn(8, 12, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        salaad.step()
    assert not any(layer.weight.is_contiguous() for layer in model)
    trained = [layer.weight.detach().clone() for layer in model]
    with salaad.deployed():
        return trained + [layer.weight.detach().clone() for layer in model]


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_two_ranks_draw_like_one_where_weights_lie_column_by_column(tmp_path, pull):
    alone = train_transposed(pull)
    first, second = run_ranks(train_transposed, 2, tmp_path, pull)
    for X, mine, other in zip(alone, first, second, strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, X, rtol=0, atol=1e-5)


def test_the_plan_of_a_run_has_the_targets_that_a_rank_holds_of_others():
    """A rank holds float32 targets of all blocks but its own; a single rank holds none, nor does a coupled pull."""
    words = ["--config", "nano", "--salaad.embedding=false"]
    decoupled = read_command_line([*words, "--salaad.pull=decoupled"])[0]
    model = outline(describe_model(decoupled.model, decoupled.data.sequence_length))
    what, square, wide = "targets of other owners' blocks", 128 * 128, 128 * 344
    blocks = 4 * (4 * square + 3 * wide)
    assert SalaadMethod.memory(model, decoupled, 1)[what] == 0
    assert SalaadMethod.memory(model, decoupled, 28)[what] == 4 * (blocks - square)  # each has one, the least a square
    assert what not in SalaadMethod.memory(model, read_command_line(words)[0], 28)


def test_the_plan_of_a_run_counts_no_updates_before_the_onset():
    config = read_command_line(["--config", "nano", "--train.steps=2000", "--salaad.every=5", "--salaad.onset=0.25"])[0]
    rows = dict(SalaadMethod.plan(outline(describe_model(config.model, config.data.sequence_length)), config, 1))
    assert rows["ADMM updates"] == "300 per block, synchronous"  # 1,500 steps, every fifth
    assert rows["pull"].endswith("in the first 25% of the run no pull, and L is X")
