"""ADMM updates concurrent with the next forward pass: the same numbers, and no result is read before it is ready."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from salaad import Salaad, SalaadConfig
from salaad.common.errors import NotFiniteError
from salaad.methods.salaad import round as admm_round
from salaad.spectral.cost import RATES
from tests.methods.test_own_loop import IDS, Loop, assert_equal, llama, numbers

CONFIG = SalaadConfig(rho=0.05, rank_ratio=0.2, density=0.2, delta_alpha=0.1, delta_beta=0.05, every=2)
DEVICE = replace(RATES["h100"], eigenvectors=1e-7)


@pytest.fixture(params=["ladder", "stacks"])
def solvers(request, monkeypatch):
    """Run with the solvers of a CPU, and with those of a device that the host must not wait for, on the CPU."""
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


def test_closing_lets_the_model_go_where_the_last_update_met_a_weight_that_is_not_finite():
    each = loop(replace(CONFIG, overlap=True))
    each.run(0, 1)
    block = each.salaad.weights[each.salaad.blocks[0]]
    with torch.no_grad():
        block[0, 0] = torch.inf
    each.salaad.step()  # begins an update
    with pytest.raises(NotFiniteError):
        each.salaad.close()
    with torch.no_grad():
        block[0, 0] = 0
    before = {name: p.clone() for name, p in each.model.named_parameters()}
    other = llama()
    other.load_state_dict(before)
    for model in (each.model, other):
        model(input_ids=IDS[0], labels=IDS[0]).loss.backward()
    for mine, plain in zip(each.model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)  # no penalty was added
    Salaad(each.model, CONFIG).close()


def test_an_update_is_recorded_at_its_step_though_no_gradient_came_after_it():
    plain, beside = (loop(replace(CONFIG, overlap=overlap)) for overlap in (False, True))
    for each in (plain, beside):
        each.run(0, 2)
        each.salaad.step()
    assert plain.salaad.counts() == beside.salaad.counts()
    assert plain.salaad.drain_records() == beside.salaad.drain_records()


class Streams:
    """Fakes of torch's CUDA streams that record, in order, the work, waits and kept memory of every stream."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[torch.device] = []
        self.events: list[tuple[str, ...]] = []
        self._active = ["main"]
        streams = self

        class Stream:
            def __init__(self, device: torch.device, name: str = "side") -> None:
                self.name = name
                if name == "side":
                    streams.made.append(device)

            def wait_stream(self, other: "Stream") -> None:
                streams.events.append((self.name, "waits for", other.name))

        @contextmanager
        def inside(stream: Stream) -> Iterator[None]:
            streams._active.append(stream.name)
            yield
            streams._active.pop()

        patch.setattr(torch.cuda, "Stream", Stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream(device, streams._active[-1]))
        patch.setattr(torch.cuda, "stream", inside)

    def note(self, what: str) -> None:
        """Record work that is given to the active stream."""
        self.events.append((self._active[-1], what))


@pytest.fixture
def streams(monkeypatch) -> Iterator[Streams]:
    yield Streams(monkeypatch)
    admm_round._stream_of.cache_clear()


def fake_block(streams: Streams, index: int = 0) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Return stand-ins for a block and for its weight on the GPU `index`."""

    def update(X: SimpleNamespace) -> torch.Tensor:
        streams.note("ladder")
        return torch.zeros(8)

    kept = SimpleNamespace(record_stream=lambda stream: streams.note(f"keeps T for {stream.name}"))
    block = SimpleNamespace(state=SimpleNamespace(T=kept), update=update, avoid_products=False)
    return block, SimpleNamespace(device=torch.device("cuda", index))


def test_rounds_of_a_device_share_a_stream_whose_memory_is_kept_once(streams, monkeypatch):
    """torch hands out 32 streams in turn, and its allocator never gives one stream the memory of another."""
    monkeypatch.setattr(admm_round, "_stacks", lambda blocks: [])
    for index in (0, 1, 0, 1, 0):
        admm_round.Round([fake_block(streams, index)], overlap=True).end()
    assert streams.made == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_an_update_beside_comes_after_the_weights_and_before_what_uses_its_result(streams, monkeypatch):
    verdict = SimpleNamespace(tolist=lambda: streams.note("read") or [[0.0] * 5])
    attempt = SimpleNamespace(solver="products", verdict=verdict)
    monkeypatch.setattr(admm_round, "_stacks", lambda blocks: [("a kind", [0])])
    monkeypatch.setattr(admm_round, "_attempt", lambda *_: streams.note("stack") or attempt)
    monkeypatch.setattr(torch, "cat", lambda verdicts: verdicts[0])
    begun = admm_round.Round([fake_block(streams)], overlap=True)
    streams.note("forward")
    begun.end()
    assert streams.events == [
        ("side", "waits for", "main"),  # main's optimizer may still move the weights
        ("main", "keeps T for side"),  # side reads the old T after the block has dropped it
        ("side", "stack"),
        ("main", "forward"),
        ("side", "read"),
        ("side", "ladder"),
        ("main", "waits for", "side"),  # before the penalty reads the new T
    ]
