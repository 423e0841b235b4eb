"""Users' loops that could train without the penalty, or with it twice: each works or raises an error that says so."""

import copy
import gc
import pickle
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from salaad import Salaad, SalaadConfig
from salaad.common.errors import NotFiniteError, UserError
from salaad.methods.salaad import plugin
from tests.helpers.ranks import run_ranks

CONFIG = SalaadConfig(roles=("re:.",), rho=0.5, every=2)


def toy() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))


def rows(seed: int = 0) -> Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return model(rows(seed).to(next(model.parameters()).dtype)).float().square().mean()


def penalty_of(salaad: Salaad, name: str) -> Tensor:
    """The penalty's gradient ρ(X − T) by the paper's formula, in float64."""
    block, X = salaad.surrogates[name], salaad.weights[name].detach().double()
    return block.rho * (X - block.low_rank().double() - block.sparse().double()) + block.dual().double()


# ---- a weight that is no longer the one watched


def replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def assign(model: nn.Module) -> None:
    model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("change", [replace, assign])
def test_a_step_says_that_the_model_has_another_weight_than_the_one_watched(change):
    model = toy()
    salaad = Salaad(model, CONFIG)
    change(model)
    loss_of(model).backward()
    with pytest.raises(
        UserError, match=r"another weight in block 0 than the one that is watched.*make the Salaad after"
    ):
        salaad.step()


@pytest.mark.parametrize(
    "change", [lambda model: model.bfloat16(), lambda model: model.requires_grad_(False)], ids=["cast", "frozen"]
)
def test_a_step_says_that_a_weight_was_cast_or_frozen(change):
    model = toy()
    salaad = Salaad(model, CONFIG)
    change(model)
    with pytest.raises(UserError, match=r"block 0 was torch.float32 on cpu and trained, and is now"):
        salaad.step()


def test_a_backward_says_that_the_model_is_on_another_device_than_l_and_s():
    model = toy()
    salaad = Salaad(model, CONFIG)
    block = salaad.surrogates["0"]
    block.T = block.T.to("meta")  # a stand-in for model.to(device), as a CPU may be the only device
    with pytest.raises(UserError, match=r"block 0 is on cpu now, but its L and S are on meta; make the Salaad after"):
        loss_of(model).backward()


def test_a_backward_says_that_a_gradient_is_sparse():
    model = nn.Embedding(8, 4, sparse=True)
    salaad = Salaad(model, SalaadConfig(roles=("re:",), rho=0.5))
    with pytest.raises(UserError, match="has a sparse gradient, which the penalty cannot join; make its layer with"):
        model(torch.tensor([1, 3])).sum().backward()
    salaad.close()


def test_weights_loaded_in_place_are_still_watched():
    model, other = toy(), toy()
    salaad = Salaad(model, CONFIG)
    model.load_state_dict(other.state_dict())
    loss_of(model).backward()
    salaad.step()
    assert salaad.steps == 1


# ---- twice on the same weights


def test_a_second_salaad_on_the_same_weights_is_refused_until_the_first_is_closed():
    model = toy()
    first = Salaad(model, CONFIG)
    with pytest.raises(UserError, match=r"watched by another Salaad already.*call close\(\)"):
        Salaad(model, CONFIG)
    first.close()
    first.close()  # may be called again
    with Salaad(model, CONFIG) as second:
        loss_of(model).backward()
        task = torch.autograd.grad(loss_of(model), model[0].weight)[0]
        torch.testing.assert_close(
            (model[0].weight.grad - task).double(), penalty_of(second, "0"), rtol=1e-4, atol=1e-6
        )
    Salaad(model, CONFIG)


def test_a_salaad_that_could_not_be_made_does_not_watch_the_weights(monkeypatch):
    """As where memory does not suffice, which a user answers by fewer roles; a notebook keeps the error's frames."""
    model = toy()

    def no_memory(*_):
        raise MemoryError

    with monkeypatch.context() as context:
        context.setattr(plugin, "Surrogate", no_memory)
        with pytest.raises(MemoryError) as kept:
            Salaad(model, CONFIG)
    Salaad(model, CONFIG).close()
    del kept


def test_a_closed_salaad_leaves_the_gradient_alone_and_refuses_to_step_or_to_join_one():
    model = toy()
    with Salaad(model, CONFIG) as salaad:
        pass
    loss_of(model).backward()
    assert torch.equal(model[0].weight.grad, torch.autograd.grad(loss_of(model), model[0].weight)[0])
    for use in (salaad.step, salaad.join_gradients):
        with pytest.raises(UserError, match="was closed and lets the model go"):
            use()


def test_a_model_that_nobody_holds_any_more_is_freed_with_its_salaad():
    model = toy()
    Salaad(model, CONFIG)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_a_salaad_that_nobody_holds_any_more_lets_the_model_go_at_once(pull):
    """As one made in a function that has returned; garbage is not collected in between."""
    model, plain, config = toy(), toy(), SalaadConfig(roles=("re:.",), rho=0.5, every=2, pull=pull)
    torch.optim.SGD(plain.parameters())  # the first one of a process imports what leaves garbage with all frames
    gc.disable()
    try:
        gone = weakref.ref(pretrained(model, config))
        assert gone() is None
        plain.load_state_dict(model.state_dict())
        for each in (model, plain):  # the same steps without a Salaad
            steps_of(each, None, "bobobo")
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        Salaad(model, config).close()
    finally:
        gc.enable()


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_salaads_that_nobody_holds_any_more_leave_no_hooks_that_gather(pull):
    """Those on the steps of optimizers go when the next Salaad is made, as torch may be calling them."""
    model, hooks = toy(), (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    counts = []
    for _ in range(5):
        Salaad(model, SalaadConfig(roles=("re:.",), pull=pull))
        counts.append(sum(map(len, hooks)))
    assert counts[1:] == counts[1:2] * 4
    X = model[0].weight
    assert not X._backward_hooks and not X._post_accumulate_grad_hooks


def pretrained(model: nn.Module, config: SalaadConfig) -> Salaad:
    salaad = Salaad(model, config)
    steps_of(model, salaad, "bosbos")
    return salaad


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_a_copy_that_would_train_without_the_penalty_is_refused_with_the_cure(pull):
    model = toy()
    salaad = model.salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.5, every=2, pull=pull))
    cure = r", as its hooks stay with the first model; .*load_state_dict\(salaad\.state_dict\(\)\)"
    for refused in (copy.copy, pickle.dumps):
        with pytest.raises(UserError, match=f"cannot be copied or pickled{cure}"):
            refused(salaad)
    steps_of(model, salaad, "bosbos")
    other = copy.deepcopy(copy.deepcopy(model))  # as AveragedModel copies it
    with pytest.raises(UserError, match=f"was copied with the module that holds it and does nothing{cure}"):
        other.salaad.step()
    with pytest.raises(UserError, match="does nothing"):
        other.salaad.scaler = None
    assert not hasattr(other.salaad, "closed")
    second = Salaad(other, salaad.config)
    second.load_state_dict(salaad.state_dict())
    for each, its in ((model, salaad), (other, second)):
        steps_of(each, its, "bosbos")
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# ---- gradients that no backward accumulated


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=["plain", "fused", "foreach"])
def test_gradients_of_autograd_grad_are_noticed_and_join_gradients_is_the_cure(options):
    model = toy()
    salaad, optimizer = Salaad(model, CONFIG), torch.optim.AdamW(model.parameters(), **options)

    def backward() -> None:
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss_of(model), list(model.parameters())), strict=True
        ):
            parameter.grad = gradient

    backward()
    task = model[0].weight.grad.clone()
    salaad.join_gradients()
    torch.testing.assert_close((model[0].weight.grad - task).double(), penalty_of(salaad, "0"), rtol=1e-4, atol=1e-6)
    joined = model[0].weight.grad.clone()
    salaad.join_gradients()
    assert torch.equal(model[0].weight.grad, joined)  # the penalty joins once a step
    optimizer.step()
    salaad.step()
    backward()
    optimizer.step()
    with pytest.raises(UserError, match=r"autograd\.grad calls no hooks; call loss\.backward\(\)"):
        salaad.step()


def test_a_backward_in_the_optimizers_closure_is_noticed():
    """As Lightning trains: the gradients of the step before are there until the closure makes new ones."""
    trained = []
    for in_closure in (True, False):
        model = toy()
        salaad, optimizer = Salaad(model, CONFIG), torch.optim.SGD(model.parameters(), lr=0.1)

        def backward(model: nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss

        for _ in range(4):
            if not in_closure:
                backward()
            optimizer.step(backward if in_closure else None)
            salaad.step()
        trained.append(model[0].weight.detach())
    assert torch.equal(*trained)


@pytest.mark.parametrize("salaad_first", [True, False])
def test_optimizers_that_step_during_the_backward_need_the_salaad_before_them(salaad_first):
    model = toy()
    salaad = Salaad(model, CONFIG) if salaad_first else None
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    if not salaad_first:
        salaad = Salaad(model, CONFIG)
        with pytest.raises(UserError, match=r"block 1 has no gradient left .* make the Salaad before such hooks"):
            loss_of(model).backward()
        return
    block, X = salaad.surrogates["0"], model[0].weight.detach().clone()
    gradient = torch.autograd.grad(loss_of(model), model[0].weight)[0]
    expected = X - 0.1 * (gradient + block.rho * (X - block.T))
    loss_of(model).backward()
    salaad.step()
    torch.testing.assert_close(model[0].weight.detach(), expected)


def test_a_block_that_a_step_does_not_reach_is_no_mistake():
    model = toy()
    salaad, optimizer = Salaad(model, CONFIG), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model[0](rows()).square().mean().backward()
        optimizer.step()
        salaad.step()
    assert salaad.steps == 3


# ---- once per optimizer step


def steps_of(model: nn.Module, salaad: Salaad, calls: str) -> None:
    """Do what each letter of `calls` says: backward, optimizer's step and zero_grad, salaad.step, salaad.skip."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for call in calls:
        if call == "b":
            loss_of(model).backward()
        elif call == "o":
            optimizer.step()
            optimizer.zero_grad()
        else:
            {"s": salaad.step, "t": salaad.skip}[call]()


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ("bsbos" + "bsbos", "two calls of salaad.step(), so the penalty would count twice"),  # once a micro-batch
        ("bo" + "bo", "moved the weights twice without salaad.step()"),
        ("bso" + "bso", "salaad.step() after it"),
    ],
)
def test_a_salaad_step_that_does_not_follow_each_step_of_the_optimizer_is_noticed(calls, words):
    model = toy()
    with pytest.raises(UserError) as error:
        steps_of(model, Salaad(model, CONFIG), calls)
    assert words in str(error.value)


def test_an_optimizer_that_a_loop_deletes_after_its_step_has_moved_the_weights():
    model = toy()
    salaad = Salaad(model, CONFIG)
    for _ in range(3):
        steps_of(model, salaad, "bo")  # with an optimizer of its own
        gc.collect()
        salaad.step()
    assert salaad.steps == 3


def test_steps_of_a_warm_up_at_a_learning_rate_of_0_count():
    model = toy()
    salaad, optimizer = Salaad(model, CONFIG), torch.optim.SGD(model.parameters(), lr=0.1)
    for rate in (0.1, 0.0, torch.tensor(0.0), 0.1):
        optimizer.param_groups[0]["lr"] = rate
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        salaad.step()
    assert salaad.steps == 4


@pytest.mark.parametrize("calls", ["bbos" * 3, "bos" + "bt" + "bos", "bos" + "s" + "bos", "bos" + "os" * 2 + "bos"])
def test_micro_batches_gradients_thrown_away_and_steps_without_a_gradient_are_no_mistakes(calls):
    model = toy()
    salaad = Salaad(model, CONFIG)
    steps_of(model, salaad, calls)
    assert salaad.steps == calls.count("s")


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_state_of_an_optimizer_may_be_read_at_any_time_by_torch_distributed_checkpoint(kind, pull):
    """It lets an optimizer without a state step, on gradients of 0 and at a learning rate of 0."""
    trained = []
    for later in (True, False):
        model = toy()
        optimizer = kind(model.parameters(), lr=0.1)

        def read(model=model, optimizer=optimizer) -> None:
            set_optimizer_state_dict(model, optimizer, get_optimizer_state_dict(model, optimizer))

        if not later:
            read()  # before anything is watched
        salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.5, every=2, pull=pull))
        for seed in range(4):
            if later:
                read()
            loss_of(model, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
            if later:
                read()
            salaad.step()
        trained.append(model[0].weight.detach())
        salaad.close()
    assert torch.equal(*trained)


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_of_two_backward_passes_a_step_the_second_begins_anew_after_a_skip_and_with_a_warning_without(
    skips, set_to_none
):
    """As SAM trains: the first gradient only moves the weights to where the second, which is taken, is computed."""
    model = toy()
    salaad, optimizer = Salaad(model, CONFIG), torch.optim.SGD(model.parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            loss_of(model, 0).backward()
            optimizer.zero_grad(set_to_none)
            if skips:
                salaad.skip()
            loss_of(model, 1).backward()
            loss_of(model, 1).backward()  # a further micro-batch, which begins no gradient anew
            task = 2 * torch.autograd.grad(loss_of(model, 1), model[0].weight)[0].double()
            expected = task + penalty_of(salaad, "0") if skips else task
            torch.testing.assert_close(model[0].weight.grad.double(), expected, rtol=1e-4, atol=1e-6)
            optimizer.step()
            optimizer.zero_grad(set_to_none)
            salaad.step()
    words = [str(one.message) for one in said]
    # In each of two steps: for each of two blocks, or for the first, where the gradient must be looked at.
    assert len(words) == (0 if skips else 4 if set_to_none else 2)
    assert all("call salaad.skip() after a gradient that is thrown away" in sentence for sentence in words)


def test_a_gradient_that_is_scaled_between_micro_batches_is_not_thrown_away():
    model = toy()
    with warnings.catch_warnings(), Salaad(model, CONFIG) as salaad:
        warnings.simplefilter("error")
        loss_of(model, 0).backward()
        task = torch.autograd.grad(loss_of(model, 0), model[0].weight)[0].double()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        clipped = model[0].weight.grad.clone()
        loss_of(model, 0).backward()
        assert salaad.steps == 0
    torch.testing.assert_close(model[0].weight.grad.double(), clipped.double() + task, rtol=1e-4, atol=1e-6)


def test_a_step_that_a_grad_scaler_leaves_out_is_no_mistake():
    model = toy()
    scaler = torch.amp.GradScaler("cpu")
    salaad, optimizer = Salaad(model, CONFIG, scaler=scaler), torch.optim.SGD(model.parameters(), lr=0.1)
    for factor in (1.0, torch.inf, 1.0):
        scaler.scale(loss_of(model) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        salaad.step()
    assert salaad.steps == 3


def test_the_second_moments_are_those_of_the_newest_optimizer():
    model = toy()
    salaad = Salaad(model, CONFIG)
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        salaad.step()
    rows, columns = salaad.second_moments()["0"]
    moment = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert torch.equal(rows, moment.mean(1))
    assert torch.equal(columns, moment.mean(0))


# ---- scaled losses


@pytest.mark.parametrize("later", [False, True])
def test_the_penalty_shares_the_scale_of_a_grad_scaler(later):
    scaled, plain = [], []
    for gradients, scaler in ((scaled, torch.amp.GradScaler("cpu", init_scale=2.0**12)), (plain, None)):
        model = toy()
        salaad = Salaad(model, CONFIG, scaler=None if later else scaler)
        salaad.scaler = scaler
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(5):
            loss = loss_of(model, seed)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if scaler is not None:
                scaler.unscale_(optimizer)
            gradients.append(model[0].weight.grad.clone())
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            salaad.step()
            optimizer.zero_grad()
    for mine, theirs in zip(scaled, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_grad_scaler_that_the_salaad_was_not_given_is_noticed():
    model = toy()
    salaad, optimizer = Salaad(model, CONFIG), torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model)).backward()
    scaler.step(optimizer)
    scaler.update()
    with pytest.raises(UserError, match=r"scaled by a GradScaler.*scaler=scaler"):
        salaad.step()


# ---- bfloat16


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "Adafactor", "Rprop", "ASGD"])
def test_a_model_in_bfloat16_trains_with_any_optimizer(kind):
    model = toy().bfloat16()
    salaad, optimizer = Salaad(model, CONFIG), getattr(torch.optim, kind)(model.parameters(), lr=0.01)
    before = model[0].weight.detach().clone()
    for seed in range(3):
        loss_of(model, seed).backward()
        assert model[0].weight.grad.dtype == torch.bfloat16
        optimizer.step()
        salaad.step()
        optimizer.zero_grad()
    assert not torch.equal(before, model[0].weight)


def test_in_bfloat16_the_mean_of_the_joined_gradients_is_the_coupled_gradient():
    X, G = (0.02 * torch.randn(32, 48)).bfloat16(), torch.randn(32, 48).bfloat16()
    model = nn.Sequential(nn.Linear(48, 32, bias=False)).bfloat16()
    with torch.no_grad():
        model[0].weight.copy_(X)
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=0.05, every=10**6))
    total, steps = torch.zeros(32, 48, dtype=torch.float64), 2000
    for _ in range(steps):
        (model[0].weight * G).sum().backward()
        total += model[0].weight.grad.double() - G.double()
        model.zero_grad()
        salaad.step()
    U, s, Vh = np.linalg.svd(X.double().numpy(), full_matrices=False)
    k = round(0.15 * 32)
    penalty = 0.05 * (X.double() - torch.from_numpy((U[:, :k] * s[:k]) @ Vh[:k]))
    slope = float((total / steps * penalty).sum() / penalty.square().sum())
    # One rounding to bfloat16 is off by at most 2⁻⁷·|G|, a standard deviation below 4e-3 a number; over 2000 steps and
    # 1536 numbers the slope's is below 4e-3 / (1e-3·sqrt(1536·2000)), that is 0.003.
    assert slope == pytest.approx(1, abs=0.015)
    nearest = ((G.float() + penalty.float()).bfloat16().double() - G.double() - penalty).norm()
    assert (total / steps - penalty).norm() < nearest / 10  # rounded to nearest, most of the penalty would be lost


def test_float16_weights_are_refused_with_the_cure():
    with pytest.raises(
        UserError, match=r"torch.float16, which has no room for the penalty.*float32 under torch.autocast"
    ):
        Salaad(toy().half(), CONFIG)


# ---- numbers that are not finite, records nobody reads


def test_a_weight_that_is_not_finite_stops_the_step_that_updates_it():
    model = toy()
    salaad = Salaad(model, CONFIG)
    with torch.no_grad():
        model[1].weight[0, 0] = torch.nan
    salaad.step()
    with pytest.raises(NotFiniteError, match="block 1 is not finite at step 2"):
        salaad.step()


def test_a_weight_in_float64_that_has_no_place_in_float32_is_refused():
    model = toy().double()
    with torch.no_grad():
        model[1].weight[0, 0] = 1e39
    with pytest.raises(NotFiniteError, match="block 1 is not finite at step 0"):
        Salaad(model, CONFIG)
    with torch.no_grad():
        model[1].weight[0, 0] = 1.0
    salaad = Salaad(model, CONFIG)
    with torch.no_grad():
        model[1].weight[0, 0] = 1e39
    salaad.step()
    with pytest.raises(NotFiniteError, match="block 1 is not finite at step 2"):
        salaad.step()


def test_records_that_nobody_drains_are_bounded_to_the_newest():
    model = toy()
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), every=1), most_records=3)
    for _ in range(7):
        salaad.step()
    assert [(step, name) for step, name, _ in salaad.drain_records()] == [(s, n) for s in (5, 6, 7) for n in "01"]


# ---- wrapped and sharded models


def in_parallel() -> list[Tensor]:
    """Return the gradients of a model that was wrapped before the Salaad was made, and of one wrapped after."""
    found = []
    for before in (False, True):
        model = toy()
        wrapped = DistributedDataParallel(model) if before else model
        salaad = Salaad(wrapped, CONFIG)
        assert salaad.blocks == ("0", "1")
        wrapped = wrapped if before else DistributedDataParallel(model)
        loss_of(wrapped, dist.get_rank()).backward()
        found += [model[0].weight.grad, model[1].weight.grad]
    return found


def sharded(before: bool) -> str:
    model = toy()
    salaad = None if before else Salaad(model, CONFIG)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    try:
        salaad = salaad or Salaad(model, CONFIG)
        loss_of(model).backward()
        salaad.step()
    except UserError as error:
        return str(error)
    return "nothing was said"


def test_a_wrapped_model_gets_the_coupled_gradient_however_early_it_was_wrapped(tmp_path):
    model = toy()
    salaad = Salaad(model, CONFIG)
    task = torch.autograd.grad((loss_of(model, 0) + loss_of(model, 1)) / 2, [model[0].weight, model[1].weight])
    expected = [gradient.double() + penalty_of(salaad, name) for gradient, name in zip(task, "01", strict=True)]
    for gradients in run_ranks(in_parallel, 2, tmp_path):
        for mine, theirs in zip(gradients, expected * 2, strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("before", [True, False])
def test_sharded_weights_are_refused_on_every_rank(tmp_path, before):
    for sentence in run_ranks(sharded, 2, tmp_path, before):
        assert "spread over the processes" in sentence if before else "another weight in block" in sentence


def test_a_model_in_fully_sharded_data_parallel_is_refused_by_that_name():
    """Its weights are parts of flat vectors, so that no role would match any."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = FullyShardedDataParallel(toy(), device_id=torch.device("cpu"), use_orig_params=True)
        with pytest.raises(UserError, match=r"in FullyShardedDataParallel or .* train with DistributedDataParallel"):
            Salaad(model, CONFIG)
    finally:
        dist.destroy_process_group()


def test_a_model_of_deepspeed_is_refused_by_that_name():
    """Its engine is a module around the model; ZeRO-3 takes the values out of the weights and marks these."""
    engine = type("DeepSpeedEngine", (nn.Sequential,), {})
    marked = toy()
    next(marked.parameters()).ds_id = 0
    for model in (engine(toy()), marked):
        with pytest.raises(UserError, match=r"or DeepSpeed, .* train with DistributedDataParallel"):
            Salaad(model, CONFIG)


def test_a_step_says_that_a_weight_became_a_part_of_a_flat_vector():
    """So FullyShardedDataParallel with use_orig_params leaves the parameters that it finds."""
    model = toy()
    salaad = Salaad(model, CONFIG)
    model[0].weight.data = torch.zeros(24)
    with pytest.raises(UserError, match=r"another weight in block 0 than the one that is watched.*FSDP"):
        salaad.step()


def test_a_model_with_a_frozen_layer_is_refused_with_a_cure_for_a_single_layer():
    model = toy()
    model[0].requires_grad_(False)
    with pytest.raises(UserError, match=r"block 0 is frozen, .* single layers by re:PATTERN"):
        Salaad(model, CONFIG)
    Salaad(model, SalaadConfig(roles=("re:^1$",))).close()


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = toy()
    with pytest.raises(UserError, match=r"block 0 has no values yet .* make the Salaad after the weights are loaded"):
        Salaad(model, CONFIG)


class OnApple(nn.Parameter):
    """A weight that says to be on an Apple GPU, which this machine lacks."""

    device = property(lambda _: torch.device("mps"))


def test_a_model_on_a_device_without_float64_is_refused_with_the_cure():
    model = toy()
    for layer in model:
        layer.weight = OnApple(layer.weight.detach())
    with pytest.raises(UserError, match=r"block 0 is on mps, .* move the model to the CPU, .*use_cpu=True"):
        Salaad(model, CONFIG)


def test_a_model_that_is_spread_over_devices_is_refused():
    model = toy()
    model[1].to("meta")
    with pytest.raises(UserError, match=r"block 0 is on cpu and block 1 on meta, .* load the model onto one"):
        Salaad(model, CONFIG)
