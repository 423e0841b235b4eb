"""ADMM updates beside the next step's forward pass: the same numbers, and nothing is read too soon."""

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from salaad import Salaad, SalaadConfig
from salaad.methods.salaad import round as admm_round
from salaad.spectral.cost import RATES
from tests.methods.test_own_loop import Loop, assert_equal, llama, numbers

CONFIG = SalaadConfig(rho=0.05, rank_ratio=0.2, density=0.2, delta_alpha=0.1, delta_beta=0.05, every=2)
DEVICE = replace(RATES["h100"], eigenvectors=1e-7)


@pytest.fixture(params=["ladder", "stacks"])
def solvers(request, monkeypatch):
    """A CPU's, and those of a device that the host must not wait for, played on the CPU."""
    if request.param == "stacks":
        monkeypatch.setattr(admm_round, "rates_of", lambda device: DEVICE)


def loop(config: SalaadConfig, **options: object) -> Loop:
    model = llama()
    return Loop(model, Salaad(model, config, **options))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"schedule": "staggered"}, {}),
        ({"pull": "decoupled"}, {}),
        ({"release": 0.4}, {"total_steps": 20}),
    ],
)
def test_the_numbers_are_those_of_updates_at_once(solvers, settings, options):
    plain, beside = (loop(replace(CONFIG, overlap=overlap, **settings), **options) for overlap in (False, True))
    for each in (plain, beside):
        each.run(0, 20)
        each.salaad.finish()
    assert plain.salaad.drain_records() == beside.salaad.drain_records()
    assert_equal(numbers(plain), numbers(beside))


def test_a_state_saved_between_two_steps_is_that_after_the_update():
    plain, beside = (loop(replace(CONFIG, overlap=overlap)) for overlap in (False, True))
    for each in (plain, beside):
        each.run(0, 4)  # the fourth step begins an update
    mine, theirs = (each.salaad.state_dict() for each in (beside, plain))
    assert mine["updated_at"] == theirs["updated_at"]
    assert_equal(numbers(plain), numbers(beside))


def test_an_update_ends_after_the_forward_pass_and_before_a_weight_moves(monkeypatch):
    events: list[str] = []
    begin, end = admm_round.Round.__init__, admm_round.Round.end
    monkeypatch.setattr(admm_round.Round, "__init__", lambda self, *args: events.append("begin") or begin(self, *args))
    monkeypatch.setattr(admm_round.Round, "end", lambda self: events.append("end") or end(self))
    each = loop(replace(CONFIG, overlap=True))
    each.model.register_forward_hook(lambda *_: events.append("forward"))
    each.optimizer.register_step_pre_hook(lambda *_: events.append("move"))
    each.run(0, 3)
    assert events == ["forward", "move", "forward", "move", "begin", "forward", "end", "move"]


def test_closing_ends_the_update_before_the_weights_go_their_own_way():
    plain, beside = (loop(replace(CONFIG, overlap=overlap)) for overlap in (False, True))
    for each in (plain, beside):
        each.run(0, 2)
        each.salaad.close()
        with torch.no_grad():
            for parameter in each.model.parameters():
                parameter.zero_()
    assert_equal(numbers(plain), numbers(beside))


def test_rounds_of_a_device_share_a_stream_whose_memory_is_kept_once(monkeypatch):
    """torch hands out 32 streams in turn, and its allocator never gives one stream the memory of another."""
    made: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

        def wait_stream(self, other: object) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream.__new__(Stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(admm_round, "_stacks", lambda blocks: [])
    # No more of a block and its weight on a GPU is looked at before there is a stack.
    block = SimpleNamespace(state=SimpleNamespace(), update=lambda X: torch.zeros(8))
    for index in (0, 1, 0, 1, 0):
        weight = SimpleNamespace(device=torch.device("cuda", index))
        admm_round.Round([(block, weight)], beside=True).end()
    admm_round._stream_of.cache_clear()
    assert made == [torch.device("cuda", 0), torch.device("cuda", 1)]
