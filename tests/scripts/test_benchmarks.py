"""The benchmarks' clocks, what they say computes, and where."""

import pytest
import torch

from salaad.config.command_line import read_command_line
from salaad.factored import cpu_kernels
from scripts import bench_inference, bench_training, devices
from scripts.on_device.trainings import batches_of, small_run

GPU = torch.device("cuda")


class Event:
    """An event of a GPU whose time is that of a counter; it is known once somebody has waited."""

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
    """A GPU's clock without a GPU, on which any other wait is an error."""
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
    """Between its three marks lies a second each, and another between two steps, which is in no step."""
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


def test_periodic_work_is_found_amid_a_round_and_shared_over_its_period(monkeypatch):
    """Steps of 1 s, whose fifth in a round of ten has 3 s of work more."""

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
    text = ["--data.source=python-docs", "--data.packing=true", "--data.workers=0", "--train.batch=2"]
    size = ["--config=nano", "--data.sequence_length=64", "--model.hidden_size=32", "--model.intermediate_size=48"]
    words = [*size, *text, "--model.vocab_size=4096", "--salaad.every=30"]
    configs = {name: read_command_line([*words, "--method", name])[0] for name in ("full_rank", "salaad")}
    found = bench_training.measure(configs, torch.device("cpu"), 20)["methods"]
    assert found["full_rank"]["seconds_per_step"] == 1 and found["full_rank"]["over_full_rank"] == 1
    assert found["salaad"]["periodic_seconds"] == pytest.approx(3)
    assert found["salaad"]["over_full_rank"] == pytest.approx(1.1)


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
