"""The benchmarks: their clocks, the products they name, the memory they plan for, and the ADMM updates they time."""

import re
import sys

import pytest
import torch

from salaad.common.errors import UserError
from salaad.common.files import read_json
from salaad.config.command_line import read_command_line
from salaad.factored import cpu_kernels
from salaad.methods.salaad import round as admm_round
from salaad.spectral.cost import RATES
from scripts import bench_admm, bench_inference, bench_training, devices, live_tensors
from scripts.on_device.trainings import batches_of, small_run

GPU = torch.device("cuda")


class Event:
    """A fake CUDA event, whose time comes from a counter and is known once somebody has waited for an event."""

    time, waited = 0.0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.time += 1.0
        self.at = Event.time

    def synchronize(self) -> None:
        Event.waited += 1

    def elapsed_time(self, other: "Event") -> float:
        assert Event.waited
        return 1e3 * (other.at - self.at)


@pytest.fixture
def events(monkeypatch):
    """Fake CUDA events in place of a GPU's; any other wait for the device is an error."""
    Event.time, Event.waited = 0.0, 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: pytest.fail("waits for the device"))
    return Event


def test_the_host_waits_once_for_all_marks_of_a_gpu(events):
    marks = devices.Marks(GPU)
    assert marks.take() == []
    for _ in range(4):
        marks.set()
    assert events.waited == 0
    assert marks.take() == [1.0, 1.0, 1.0] and marks.take() == []
    assert events.waited == 1


def test_marks_on_a_cpu_are_its_clock(monkeypatch):
    clock = iter([1.0, 3.0, 6.0])
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(clock))
    marks = devices.Marks(torch.device("cpu"))
    for _ in range(3):
        marks.set()
    assert marks.take() == [2.0, 3.0]


@pytest.mark.parametrize(("device", "updates"), [("cpu", [1.0] * 4), ("cuda", [2.0] * 4)])
def test_a_step_is_counted_whole_and_an_update_on_a_gpu_by_all_that_it_delays(device, updates, events):
    """A step's three marks lie 1 s apart, and so do two steps; the time between two steps belongs to neither."""
    config = read_command_line([*small_run(True), "--method=full_rank"])[0]
    contender = bench_training.Contender(config, torch.device("cpu"))
    contender._marks = devices.Marks(GPU)
    for batch in batches_of(config, 2):
        contender.step(batch)
    contender.forget_times()
    contender.device = torch.device("cpu")
    for _ in range(2):
        for batch in batches_of(config, 2):
            contender.step(batch)
        contender.device = torch.device(device)
        contender.count_times()
        contender.device = torch.device("cpu")
    assert contender.seconds == [2.0] * 4 and contender.updates == updates


def test_salaad_pulls_in_every_step_that_is_timed():
    """Steps of a benchmark would else lie in the first part of a run, in which nothing draws X yet."""
    config = read_command_line([*small_run(True), "--salaad.onset=0.25", "--salaad.release=0.5"])[0]
    contender = bench_training.Contender(config, torch.device("cpu"))
    *first, last = batches_of(config, bench_training.ROUND)
    for batch in first:
        contender.step(batch)
    salaad = contender.method.salaad
    assert float(salaad.penalty()) > 0
    contender.step(last)
    assert {name for _, name, _ in salaad.drain_records()} == set(salaad.blocks)


def test_periodic_work_is_found_amid_a_round_and_shared_over_its_period(toy, monkeypatch):
    """Steps take 1 s; the fifth in a round of ten has 3 s of periodic work on top."""

    class Timed(bench_training.Contender):
        def step(self, batch):
            super().step(batch)
            self.counted = getattr(self, "counted", 0) + 1

        def count_times(self):
            assert self.period is None or self.counted % bench_training.ROUND == bench_training.ROUND // 2
            round_ = [1.0] * bench_training.ROUND
            work = [0.0] * bench_training.ROUND
            if self.period is not None:
                round_[4], work[4] = 4.0, 3.0
            self.seconds, self.updates = self.seconds + round_, self.updates + work

    monkeypatch.setattr(bench_training, "Contender", Timed)
    monkeypatch.setattr(bench_training, "matmul_peak", lambda *_: 1e12)
    words = ["--config=nano", *toy(salaad__every=30)]
    configs = {name: read_command_line([*words, "--method", name])[0] for name in ("full_rank", "salaad")}
    found = bench_training.measure(configs, torch.device("cpu"), 20)["methods"]
    assert found["full_rank"]["seconds_per_step"] == 1 and found["full_rank"]["over_full_rank"] == 1
    assert found["salaad"]["periodic_seconds"] == pytest.approx(3)
    assert found["salaad"]["over_full_rank"] == pytest.approx(1.1)


@pytest.mark.parametrize(
    ("also", "said"),
    [
        ("SALAAD", "--also SALAAD has no colon; give a name and options"),
        ("full_rank: --optimizer.lr=1", "--also full_rank would replace what all are compared with; give another name"),
        ("SALAAD: --salaad.every=0", "salaad.every is 0"),
    ],
)
def test_one_more_way_to_train_that_is_none_is_one_sentence(also, said, monkeypatch):
    monkeypatch.setattr(bench_training, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(sys, "argv", ["bench_training.py", "--methods=salaad", "--config=nano", f"--also={also}"])
    with pytest.raises(UserError, match=re.escape(said)):
        bench_training.main()


@pytest.mark.parametrize(
    ("triton", "library", "device", "dtype", "said"),
    [
        (True, True, "cuda", torch.bfloat16, "Triton's"),
        (False, True, "cuda", torch.float32, "torch's"),
        (True, True, "cuda", torch.float64, "torch's"),
        (False, True, "cpu", torch.float32, "compiled"),
        (False, True, "cpu", torch.bfloat16, "torch's"),
        (False, False, "cpu", torch.float32, "torch's"),
    ],
)
def test_the_products_that_are_named_are_those_that_compute(triton, library, device, dtype, said, monkeypatch):
    monkeypatch.setattr(bench_inference.native, "uses_triton", lambda _: triton)
    monkeypatch.setattr(cpu_kernels, "library", lambda: ("linear", "rows") if library else None)
    assert bench_inference.products(torch.device(device), dtype) == said


# ---- what fits into a GPU


def small(method: str, *words: str):
    return read_command_line(["--config=350m", "--train.batch=16", f"--method={method}", *words])[0]


def test_what_does_not_fit_side_by_side_is_planned_one_after_the_other_and_what_does_not_fit_is_refused():
    configs = {method: small(method) for method in ("full_rank", "salaad")}
    weights = 4 * 367.97e6
    kept, more = bench_training.needs(configs["full_rank"])
    assert kept == pytest.approx(3 * weights, rel=1e-3)  # the weights and two moments
    activations = 16 * 256 * 24 * 1024 * 34 * 4
    assert more == pytest.approx(weights + activations, rel=0.1)  # the tolerance is for the logits
    salaad = bench_training.needs(configs["salaad"])
    assert salaad[0] > kept + 8 * 302e6  # R and T of every block
    together, alone = kept + sum(salaad), sum(salaad)
    assert bench_training.planned(configs, together + 1e6) == [["full_rank", "salaad"]]
    assert bench_training.planned(configs, together - 1e6) == [["full_rank"], ["salaad"]]
    with pytest.raises(UserError, match=r"salaad needs \d\d GB, there are 2\d"):
        bench_training.planned(configs, alone - 1e9)


def test_what_needs_more_memory_than_there_is_is_a_result(monkeypatch):
    configs = {method: small(method) for method in ("full_rank", "salaad")}
    monkeypatch.setattr(bench_training, "open_text", lambda *_, **__: pytest.fail("it is begun"))
    found = bench_training.measure(configs, GPU, 10, room=1e9)
    assert list(found) == ["left_out"] and "there are 1" in found["left_out"]


def test_one_after_the_other_is_compared_by_medians(monkeypatch):
    seen = []

    def alternating(configs, *_):
        seen.append(list(configs))
        seconds = [{"full_rank": 1.0, "salaad": 1.2}[method] for method in configs for _ in range(20)]
        return {m: bench_training.Measured(seconds, seconds, None, 1.0, 1, {}) for m in configs}

    monkeypatch.setattr(bench_training, "alternating", alternating)
    monkeypatch.setattr(bench_training, "matmul_peak", lambda *_: 1e12)
    monkeypatch.setattr(bench_training, "open_text", lambda *_, **__: None)
    configs = {method: small(method) for method in ("full_rank", "salaad")}
    room = max(sum(bench_training.needs(config)) for config in configs.values()) + 1e6
    found = bench_training.measure(configs, torch.device("cpu"), 20, room)
    assert seen == [["full_rank"], ["salaad"]] and not found["side_by_side"]
    assert found["methods"]["salaad"]["over_full_rank"] == pytest.approx(1.2)


def test_memory_on_a_gpu_is_what_its_allocator_gave(monkeypatch):
    counts = {"now": 100, "peak": 900}
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: counts["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: counts["peak"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: counts.update(peak=counts["now"]))
    assert live_tensors.most_bytes(lambda: counts.update(peak=350), GPU) == 250


# ---- the ADMM


def test_an_update_is_as_exact_as_the_solver_that_is_timed_and_shared_by_its_blocks(monkeypatch):
    """Measured on the CPU with the rates of an H100, by which blocks are stacked."""
    monkeypatch.setattr(admm_round, "rates_of", lambda device: RATES["h100"])
    monkeypatch.setattr(bench_admm, "blocks_at_once", lambda n, m, count, device: count)
    like = read_json(bench_admm.SPECTRA)["blocks"]["model.layers.2.mlp.gate_proj"]
    for phase in like:
        rows = bench_admm.measure((48, 80), 3, phase, like[phase], 1, torch.device("cpu"))
        [update] = [row for row in rows if row["rung"] == "update"]
        assert update["method"] in ("gram", "products") and update["blocks"] == 3
        assert update["error"] < 1e-3 and update["rank_error"] < 0.05 and update["density_error"] < 0.01
    monkeypatch.setattr(bench_admm, "update_round", lambda blocks: [torch.zeros(8)] * len(blocks))  # does nothing
    rows = bench_admm.measure((48, 80), 3, phase, like[phase], 1, torch.device("cpu"))
    assert next(row for row in rows if row["rung"] == "update")["error"] > 0.1


def test_a_round_has_as_many_blocks_as_the_model_or_as_fit(monkeypatch):
    assert bench_admm.blocks_at_once(1024, 2736, 72, torch.device("cpu")) == 1
    for free, expected in ((80e9, 72), (1e7, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, 80e9))
        assert bench_admm.blocks_at_once(1024, 2736, 72, GPU) == expected
    free = 6e9  # 0.8 of it, less 16 numbers per entry of a full stack, holds blocks of 16 bytes per entry
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 80e9))
    held = (0.8 * free - 4 * 16 * 2**26) / (16 * 1024 * 2736)
    assert bench_admm.blocks_at_once(1024, 2736, 72, GPU) == int(held)


def test_works_take_turns_and_their_first_round_is_not_counted(monkeypatch):
    clock = iter([0, 9, 9, 18, 20, 21, 21, 23, 30, 33, 33, 37])  # begin and end of a, b, a, b, a, b
    monkeypatch.setattr(devices.time, "perf_counter", lambda: next(clock))
    done = []
    works = {"a": lambda: done.append("a"), "b": lambda: done.append("b")}
    assert devices.in_turns(works, 2, torch.device("cpu")) == {"a": [1, 3], "b": [2, 4]}
    assert done == ["a", "b"] * 3
