"""Owners of blocks, and trainings on two ranks, which must arrive at what one process computes."""

import copy
import dataclasses
import io
import time
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from salaad import Salaad, SalaadConfig
from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.methods.registry import method_of
from salaad.methods.salaad import ownership
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_llama import config_of, llama

CONFIG = SalaadConfig(roles=("re:.",), rho=0.3, every=2, rank_ratio=0.4, density=0.3, delta_alpha=1.0, delta_beta=0.05)
BLOCKS = ("0", "2", "4")
STEPS = 6

costs_of_blocks = st.dictionaries(st.text("abc", min_size=1, max_size=4), st.integers(1, 20), min_size=1, max_size=15)


# ---- owners


@settings(deadline=None)
@given(costs_of_blocks, st.integers(1, 8))
def test_the_blocks_are_dealt_back_and_forth_the_dearest_first(costs, ranks):
    owners = ownership.assign_owners(costs, ranks)
    dearest_first = sorted(sorted(costs), key=costs.get, reverse=True)
    turns = [*range(ranks), *reversed(range(ranks))] * len(costs)
    assert list(owners) == list(costs)  # every block has one owner, in the model's order
    assert [owners[name] for name in dearest_first] == turns[: len(costs)]


@settings(deadline=None)
@given(costs_of_blocks, st.integers(1, 8))
def test_balanced_owners_are_no_further_apart_than_one_block(costs, ranks):
    owners = ownership.assign_owners(costs, ranks, "balanced")
    assert list(owners) == list(costs)
    loads = np.bincount([owners[name] for name in costs], weights=list(costs.values()), minlength=ranks)
    # The least expensive block of a rank was assigned last, when no rank had a smaller load.
    for busy in range(ranks):
        mine = [costs[name] for name in costs if owners[name] == busy]
        assert not mine or loads[busy] - min(mine) <= loads.min() + 1e-9


def test_one_dear_block_is_made_up_for():
    costs = {"embedding": 6.0, **{f"block {i}": 1.0 for i in range(12)}}
    owners = {how: ownership.assign_owners(costs, 3, how) for how in ("round_robin", "balanced")}
    assert ownership.imbalance(costs, owners["balanced"], 3) == 1.0
    assert ownership.imbalance(costs, owners["round_robin"], 3) > 1.5


@settings(deadline=None)
@given(costs_of_blocks, st.integers(1, 8), st.randoms())
def test_owners_do_not_depend_on_the_order_of_the_blocks(costs, ranks, random):
    shuffled = list(costs.items())
    random.shuffle(shuffled)
    assert ownership.assign_owners(dict(shuffled), ranks) == ownership.assign_owners(costs, ranks)


@settings(deadline=None)
@given(costs_of_blocks, st.integers(1, 8))
def test_imbalance_is_the_largest_load_over_the_mean_load(costs, ranks):
    owners = ownership.assign_owners(costs, ranks)
    loads = np.bincount([owners[name] for name in costs], weights=list(costs.values()), minlength=ranks)
    assert ownership.imbalance(costs, owners, ranks) == pytest.approx(loads.max() / loads.mean())


@pytest.mark.parametrize(
    ("costs", "owners", "ranks", "expected"),
    [
        ({"a": 1.0, "b": 1.0}, {"a": 0, "b": 1}, 2, 1.0),
        ({"a": 3.0, "b": 1.0}, {"a": 0, "b": 1}, 2, 1.5),
        ({"a": 1.0}, {"a": 0}, 4, 4.0),  # more ranks than blocks
    ],
)
def test_imbalance_by_hand(costs, owners, ranks, expected):
    assert ownership.imbalance(costs, owners, ranks) == expected


def test_the_cost_of_an_update_knows_no_orientation_and_grows_with_either_side():
    assert ownership.update_cost(30, 70) == ownership.update_cost(70, 30)
    assert ownership.update_cost(30, 70) < ownership.update_cost(30, 71) < ownership.update_cost(31, 71)


def test_one_process_exchanges_with_itself():
    values = torch.tensor([1.0, 2.0])
    assert (distributed.world_size(), distributed.rank()) == (1, 0)
    assert distributed.all_sum(values).tolist() == distributed.broadcast(values, 0).tolist() == [1.0, 2.0]
    assert distributed.gather("a") == ["a"]
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 3.0)
    distributed.average_gradients([parameter])
    assert parameter.grad.tolist() == [3.0, 3.0]
    distributed.barrier()


# ---- two processes


def toy(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 16), nn.Tanh(), nn.Linear(16, 4))
    return model.to(dtype)


def rows(step: int) -> Tensor:
    return torch.randn(8, 12, generator=torch.Generator().manual_seed(step))


def loss_of(outputs: Tensor) -> Tensor:
    return outputs.float().square().mean()


def train(micro_batches: int = 1) -> dict[str, Any]:
    """Train the toy model on this rank's rows, and return all that must not depend on the number of ranks."""
    rank, ranks = distributed.rank(), distributed.world_size()
    model = toy()
    salaad = Salaad(model, CONFIG)
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03)
    gradients, penalties = [], []
    for step in range(STEPS):
        mine = rows(step)[rank::ranks]
        for part in mine.chunk(micro_batches)[:-1]:
            with wrapped.no_sync():
                (loss_of(wrapped(part)) / micro_batches).backward()
        (loss_of(wrapped(mine.chunk(micro_batches)[-1])) / micro_batches).backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        penalties.append(salaad.penalty().item())
        optimizer.step()
        salaad.step()
        optimizer.zero_grad(set_to_none=False)
    before = copy.deepcopy(model.state_dict())
    with salaad.deployed():
        deployed = copy.deepcopy(model.state_dict())
    return {
        "gradients": gradients,
        "penalties": penalties,
        "summary": salaad.summary(),
        "records": [(step, block, *vars(record).values()) for step, block, record in salaad.drain_records()],
        "deployed": deployed,
        "restored": all(torch.equal(value, before[name]) for name, value in model.state_dict().items()),
        "owners": salaad.owners,
        "owned": list(salaad.surrogates),
        "state": salaad.counts(),
    }


def exchange() -> list:
    """Return the results of a sum, a broadcast and a gather on this rank."""
    mine = torch.tensor([1.0 + distributed.rank(), 10.0])
    distributed.barrier()
    return [
        distributed.all_sum(mine.clone()).tolist(),
        distributed.broadcast(mine.clone(), 1).tolist(),
        distributed.gather({"rank": distributed.rank()}),
    ]


def both() -> tuple[dict[str, Any], dict[str, Any], list]:
    return train(), train(micro_batches=2), exchange()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory) -> list:
    return run_ranks(both, 2, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return train()


def assert_close_trees(mine: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert (value - theirs[name]).norm() <= tolerance * theirs[name].norm(), name


@pytest.mark.parametrize("run", [0, 1], ids=["whole batch", "micro-batches"])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_gradient_of_each_rank_is_that_of_the_coupled_loss_on_the_whole_batch(two_ranks, rank, run):
    model = toy()
    penalty = sum(
        CONFIG.rho / 2 * (X - truncated(X)).square().sum() for X in (model[int(name)].weight for name in BLOCKS)
    )
    parameters = dict(model.named_parameters())
    gradient = torch.autograd.grad(loss_of(model(rows(0))) + penalty, list(parameters.values()))
    assert_close_trees(two_ranks[rank][run]["gradients"][0], dict(zip(parameters, gradient, strict=True)), 1e-5)


def truncated(X: Tensor) -> Tensor:
    """The initial T: the weight truncated to the target rank, in float64 NumPy."""
    U, s, Vh = np.linalg.svd(X.detach().double().numpy(), full_matrices=False)
    k = max(1, round(CONFIG.rank_ratio * min(X.shape)))
    return torch.from_numpy((U[:, :k] * s[:k]) @ Vh[:k]).float()


@pytest.mark.parametrize("run", [0, 1], ids=["whole batch", "micro-batches"])
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_train_like_one(two_ranks, alone, rank, run):
    result = two_ranks[rank][run]
    for step in range(STEPS):
        # Gradients agree to float32 rounding at first; in training the difference grows a little.
        assert_close_trees(result["gradients"][step], alone["gradients"][step], 1e-5 if step < 2 else 1e-4)
    assert result["penalties"] == pytest.approx(alone["penalties"], rel=1e-4)
    assert result["summary"] == pytest.approx(alone["summary"], rel=1e-3)
    assert result["state"] == alone["state"]
    assert_close_trees(result["deployed"], alone["deployed"], 1e-4)
    assert result["restored"]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_hears_of_every_update_in_the_models_order(two_ranks, alone, rank):
    records = two_ranks[rank][0]["records"]
    assert [record[:2] for record in records] == [(step, block) for step in (2, 4, 6) for block in BLOCKS]
    for mine, theirs in zip(records, alone["records"], strict=True):
        assert mine[:2] + mine[-1:] == theirs[:2] + theirs[-1:]
        assert mine[2:-1] == pytest.approx(theirs[2:-1], rel=1e-3, abs=1e-5)


def test_both_ranks_hold_the_same_to_the_bit(two_ranks):
    first, second = (result[0] for result in two_ranks)
    for name, value in first["deployed"].items():
        assert torch.equal(value, second["deployed"][name])
    for mine, theirs in zip(first["gradients"], second["gradients"], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for key in ("penalties", "summary", "records", "owners", "state"):
        assert first[key] == second[key]


def test_a_surrogate_exists_on_its_owner_only(two_ranks):
    first, second = (result[0] for result in two_ranks)
    # By cost: 20×16, then 12×20, then 16×4.
    assert first["owners"] == {"2": 0, "0": 1, "4": 1}
    assert (first["owned"], second["owned"]) == (["2"], ["0", "4"])


def test_small_exchanges_give_every_rank_the_same(two_ranks):
    for result in two_ranks:
        assert result[2] == [[3.0, 20.0], [2.0, 10.0], [{"rank": 0}, {"rank": 1}]]


def penalty_after_a_slow_rank() -> tuple[float, str]:
    """Let rank 1 come late to the penalty; return it, and what this rank printed on standard error."""
    distributed.TOLD_AFTER = 0.5
    salaad, said = Salaad(toy(), CONFIG), io.StringIO()
    distributed.barrier()
    with redirect_stderr(said):
        if distributed.rank() == 1:
            time.sleep(3)
        return float(salaad.penalty()), said.getvalue()


def test_a_rank_that_waits_for_the_penalty_of_another_says_so(tmp_path):
    expected = sum(
        CONFIG.rho / 2 * float((X - truncated(X)).square().sum())
        for X in (toy()[int(name)].weight.detach() for name in BLOCKS)
    )
    waiting, slow = run_ranks(penalty_after_a_slow_rank, 2, tmp_path)
    assert waiting[0] == slow[0] == pytest.approx(expected, rel=1e-5)
    assert "for rank 1" in waiting[1]


# ---- no rank waits while it makes its blocks


def deploy_and_note() -> list[str]:
    """Return what this rank does while L + S takes the place of X: which blocks it makes, and every exchange."""
    salaad, done = Salaad(toy(), CONFIG), []
    for name, surrogate in salaad.surrogates.items():

        def made(of=name, deployed=surrogate.deployed):
            done.append(f"made {of}")
            return deployed()

        surrogate.deployed = made
    exchange = distributed.broadcast
    distributed.broadcast = lambda values, owner: (done.append("exchanged"), exchange(values, owner))[1]
    try:
        with salaad.deployed():
            pass
    finally:
        distributed.broadcast = exchange
    return done


def test_a_rank_makes_all_its_blocks_before_it_waits_for_anothers(tmp_path):
    for done in run_ranks(deploy_and_note, 2, tmp_path):
        made = [what for what in done if what.startswith("made")]
        assert made and done[: len(made)] == made and done[len(made) :] == ["exchanged"] * len(BLOCKS)


SLOW, LAYERS = 0.5, 8  # seconds for a block, and how many there are


def deploy_slowly() -> float:
    """Return the seconds until L + S has taken the place of X, where each block takes half a second to make."""
    model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(LAYERS)))
    salaad = Salaad(model, CONFIG)
    for surrogate in salaad.surrogates.values():

        def made(deployed=surrogate.deployed):
            time.sleep(SLOW)
            return deployed()

        surrogate.deployed = made
    distributed.barrier()
    begun = time.monotonic()
    with salaad.deployed():
        return time.monotonic() - begun


def test_two_ranks_make_their_blocks_at_the_same_time(tmp_path):
    # Each rank makes half of the blocks, in 2 s; one rank after the other would take 4 s.
    for seconds in run_ranks(deploy_slowly, 2, tmp_path):
        assert LAYERS / 2 * SLOW <= seconds < 0.75 * LAYERS * SLOW


def averaged_together(limit: int) -> tuple[int, list[Tensor]]:
    """Return the number of exchanges that averaging the gradients of several weights takes, and the means."""
    weights = [nn.Parameter(torch.zeros(size)) for size in (3, 5, 2, 7)]
    weights[2] = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    for i, weight in enumerate(weights):
        weight.grad = torch.arange(len(weight), dtype=weight.dtype) * (i + 1) + distributed.rank()
    calls, reduce, bucket = [], dist.all_reduce, distributed._BUCKET
    dist.all_reduce, distributed._BUCKET = lambda values: (calls.append(1), reduce(values))[1], limit
    try:
        distributed.average_gradients(weights)
    finally:
        dist.all_reduce, distributed._BUCKET = reduce, bucket
    return len(calls), [weight.grad for weight in weights]


def averaged_where_a_rank_reaches_nothing() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of all blocks where the first rank's are 1, and the weights less T of this rank's blocks."""
    config = config_of("salaad", "--train.precision=bf16", "--salaad.rho=1", "--salaad.rank_ratio=0.2")
    model = llama().bfloat16()
    method = method_of(config)(model, config)
    weights = method.salaad.weights
    if distributed.rank() == 0:
        sum(X.sum() for X in weights.parameters.values()).backward()
    method.after_backward()
    apart = {name: weights[name].detach().float() - one.T for name, one in method.salaad.surrogates.items()}
    return {name: X.grad for name, X in weights.parameters.items()}, apart


def test_the_penalty_joins_a_gradient_that_its_owner_did_not_compute(tmp_path):
    """In pure bfloat16; an expert that no token of its owner has reached has no gradient there."""
    (found, first), (again, second) = run_ranks(averaged_where_a_rank_reaches_nothing, 2, tmp_path)
    assert first and second and first.keys().isdisjoint(second)
    for name, apart in (first | second).items():
        assert apart.abs().max() > 0.01
        torch.testing.assert_close(found[name], 0.5 + apart, rtol=1e-5, atol=1e-6)
        assert torch.equal(found[name], again[name])


@pytest.mark.parametrize(("limit", "calls"), [(2**20, 3), (12, 4)])  # by runs of one dtype; each gradient alone
def test_gradients_are_averaged_many_at_once(tmp_path, limit, calls):
    for counted, found in run_ranks(averaged_together, 2, tmp_path, limit):
        assert counted == calls
        for i, gradient in enumerate(found):
            expected = torch.arange(len(gradient), dtype=torch.float64) * (i + 1) + 0.5
            torch.testing.assert_close(gradient.double(), expected, rtol=0.01 if i == 2 else 1e-6, atol=0)
            assert gradient.dtype == (torch.bfloat16 if i == 2 else torch.float32)


# ---- compressed gradients


def steps_with(hook: Any, first: int, pull: str = "coupled") -> str:
    """Train three steps with a communication hook from step `first` on; return the error, or "" without one."""
    model = toy()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Salaad(model, dataclasses.replace(CONFIG, pull=pull)) as salaad:
        for step in range(3):
            if step == first and isinstance(hook, BuiltinCommHookType):
                wrapped._register_builtin_comm_hook(hook)
            elif step == first:
                wrapped.register_comm_hook(None, hook)
            loss_of(wrapped(rows(0))).backward()
            optimizer.step()
            try:
                salaad.step()
            except UserError as error:
                return f"step {step}: {error}"
    return ""


BUILT_IN = BuiltinCommHookType


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(
    ("hook", "name"),
    [
        (allreduce_hook, None),
        (fp16_compress_hook, "fp16_compress_hook"),
        (BUILT_IN.ALLREDUCE, None),
        (BUILT_IN.FP16_COMPRESS, "BuiltinCommHookType.FP16_COMPRESS"),
    ],
)
def test_a_hook_that_compresses_gradients_is_refused(tmp_path, hook, name, first):
    said = f"step {first}: DistributedDataParallel sends gradients through {name}, in whose" if name else ""
    for found in run_ranks(steps_with, 2, tmp_path, hook, first):
        assert found.startswith(said) if name else found == ""


def test_beside_a_decoupled_pull_gradients_may_be_compressed(tmp_path):
    for found in run_ranks(steps_with, 2, tmp_path, fp16_compress_hook, 0, "decoupled"):
        assert found == ""


# ---- processes that come and go, or of which a part trains


def test_a_process_that_came_after_the_salaad_was_made_is_noticed_before_the_optimizer_steps(monkeypatch):
    """The penalty, which is averaged over the processes, would be too weak or, with an owner in each, too strong."""
    model = toy()
    salaad = Salaad(model, CONFIG)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(UserError, match=r"made at a world size of 1, which is 2 now; make it after init_process_group"):
        loss_of(model(rows(0))).backward()
    with pytest.raises(UserError, match="made at a world size of 1, which is 2 now"):
        salaad.step()


def without_the_other(folder: Path) -> list[str]:
    """Return what each use of this rank's blocks says once the group of all ranks is gone."""
    salaad = Salaad(toy(), CONFIG)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    uses = [
        salaad.step,
        salaad.summary,
        salaad.counts,
        salaad.index,
        salaad.state_dict,
        salaad.penalty,
        salaad.drain_records,
        salaad.compress,
        salaad.join_gradients,
        lambda: salaad.save(folder),
        lambda: salaad.deployed().__enter__(),
    ]
    said = []
    for parameter in salaad.weights.values():
        parameter.grad = torch.zeros_like(parameter)
    for use in uses:
        with pytest.raises(UserError) as error:
            use()
        said.append(str(error.value))
    return said


def test_the_blocks_of_one_rank_are_not_taken_for_those_of_all(tmp_path):
    for said in run_ranks(without_the_other, 2, tmp_path, tmp_path / "saved"):
        assert all("made at a world size of 2, which is 1 now" in sentence for sentence in said)
    assert not (tmp_path / "saved").exists()


def step_over_a_part(pull: str) -> str:
    """Return what rank 0 says when it trains alone in a group of two."""
    alone = dist.new_group([0])
    if distributed.rank() == 1:
        return ""
    model = toy()
    wrapped = DistributedDataParallel(model, process_group=alone)
    with Salaad(model, dataclasses.replace(CONFIG, pull=pull)), pytest.raises(UserError) as error:
        loss_of(wrapped(rows(0))).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    return str(error.value)


@pytest.mark.parametrize("pull", ["coupled", "decoupled"])
def test_gradients_that_are_averaged_over_a_part_of_the_processes_are_refused(tmp_path, pull):
    said, _ = run_ranks(step_over_a_part, 2, tmp_path, pull)
    assert "averages the gradients over 1 of 2 processes, over all of which the blocks are spread" in said


class Experts(nn.Module):
    """Rows are multiplied by those of four experts that are chosen."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor, chosen: list[int]) -> Tensor:
        for i in chosen:
            x = x + self.experts[i](x)
        return x


def step_without_one_expert() -> list[str]:
    """Return the warnings of a step in which each rank's data miss one of the two experts that it owns."""
    torch.manual_seed(0)
    model = Experts()
    salaad = Salaad(model, SalaadConfig(roles=("re:experts",), rho=1.0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    mine = [i for i in range(4) if salaad.owners[f"experts.{i}"] == distributed.rank()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        wrapped(torch.randn(3, 8), [i for i in range(4) if i != mine[0]]).square().sum().backward()
        optimizer.step()
        salaad.step()
    salaad.close()
    return [str(one.message) for one in caught if "without the penalty" in str(one.message)]


def test_a_block_that_the_data_of_its_owner_do_not_reach_is_named(tmp_path):
    for said in run_ranks(step_without_one_expert, 2, tmp_path):
        assert len(said) == 1 and "experts." in said[0] and 'pull="decoupled"' in said[0]


# ---- pure bfloat16: the blocks' gradients are kept and averaged in float32


def bfloat16_step() -> dict[str, Any]:
    """Run a backward pass in pure bfloat16 as the trainer does; return its gradients and the parts of their sum."""
    rank, ranks = distributed.rank(), distributed.world_size()
    model = toy(torch.bfloat16)
    for layer in (model[0], model[2], model[4]):
        layer.weight.grad_dtype = torch.float32
    salaad = Salaad(model, SalaadConfig(roles=("re:.",), rho=1e-3, rank_ratio=0.4))
    mine = rows(0)[rank::ranks].bfloat16()
    alone = torch.autograd.grad(loss_of(model(mine)), list(salaad.weights.values()))
    distributed.exclude_from_averaging(model, salaad.weights.values())
    wrapped = DistributedDataParallel(model)
    loss_of(wrapped(mine)).backward()
    dtypes = {name: X.grad.dtype for name, X in salaad.weights.items()}
    distributed.average_gradients(salaad.weights.values())
    return {
        "dtypes": dtypes,
        "gradients": {name: X.grad for name, X in salaad.weights.items()},
        "without penalty": dict(zip(salaad.blocks, alone, strict=True)),
        "penalty": {
            name: 1e-3 * (salaad.weights[name].detach().float() - s.T) for name, s in salaad.surrogates.items()
        },
        "bias": model[0].bias.grad,
    }


def tied_step() -> Tensor:
    """Run a backward pass in pure bfloat16 of a model whose embedding, also its head, is averaged apart."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)}).bfloat16()
    model["head"].weight = model["embedding"].weight
    model["head"].weight.grad_dtype = torch.float32
    model.forward = lambda ids: model["head"](model["embedding"](ids))
    model.register_parameter("other", nn.Parameter(torch.ones(1)))
    distributed.exclude_from_averaging(model, [model["head"].weight])
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    wrapped(torch.tensor([distributed.rank()])).float().square().sum().backward()
    return model["head"].weight.grad


def test_a_tied_weight_is_left_out_by_each_of_its_names(tmp_path):
    first, second = run_ranks(tied_step, 2, tmp_path)
    assert first.dtype == second.dtype == torch.float32 and not torch.equal(first, second)  # each its own


@pytest.fixture(scope="module")
def two_ranks_in_bfloat16(tmp_path_factory) -> list[dict[str, Any]]:
    return run_ranks(bfloat16_step, 2, tmp_path_factory.mktemp("ranks"))


def test_every_rank_keeps_the_gradients_of_all_blocks_in_float32_in_pure_bfloat16(two_ranks_in_bfloat16):
    for result in two_ranks_in_bfloat16:
        assert set(result["dtypes"].values()) == {torch.float32}


def test_averaging_in_float32_keeps_the_whole_penalty_in_pure_bfloat16(two_ranks_in_bfloat16):
    first, second = two_ranks_in_bfloat16
    penalties = first["penalty"] | second["penalty"]
    assert set(penalties) == set(BLOCKS)
    for name, penalty in penalties.items():
        mean = (first["without penalty"][name].float() + second["without penalty"][name].float()) / 2
        assert torch.equal(first["gradients"][name], second["gradients"][name])
        assert (first["gradients"][name] - mean - penalty).norm() < 1e-3 * penalty.norm()
    assert torch.equal(first["bias"], second["bias"])  # DistributedDataParallel averages all but the blocks
    assert first["bias"].dtype == torch.bfloat16


def failing() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank one fails")


def test_the_helper_brings_back_an_error_of_any_rank(tmp_path):
    with pytest.raises(Exception, match="rank one fails"):
        run_ranks(failing, 2, tmp_path)
