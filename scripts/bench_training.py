"""What SALAAD costs on top of vanilla training: step time side by side in one process, and the state of the ADMM.

    python scripts/bench_training.py --steps 100 --threads 1 --config nano.yaml
    python scripts/bench_training.py --steps 20 --config 60m.yaml --train.batch 4 --data.source python-docs
    python scripts/bench_training.py --config 350m.yaml --train.precision bf16-mixed --train.compile true

What this script does not know goes to train.py's options. Both models take the same batches of the configured text.
Rounds of K steps of the two alternate, so that a machine whose speed drifts slows both; the median of what each round
took over the vanilla round just before it is the overhead.
"""

import argparse
import statistics
import time
from dataclasses import replace

import torch

from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least
from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig
from salaad.data.batches import TrainingStream
from salaad.data.text import open_text
from salaad.methods.registry import method_of
from salaad.model.build import model_source, training_flops
from salaad.model.loss import IGNORED, SummedLoss
from salaad.training.launch import start_accelerator

PEAK_SIZE = 8192


class Contender:
    """One method with its own copy of the model and its own optimizer."""

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.config, self.device = config, device
        method, source = method_of(config), model_source(config.model, config.data.sequence_length)
        self.model = source.build(config.seed, 0, 1)
        method.rebuild(self.model, config)
        self.model.to(device, torch.bfloat16 if config.train.precision == "bf16" else torch.float32).train()
        self.method = method(self.model, config)
        self.optimizer, _ = self.method.build_optimizer()
        self.steps, self.taken = 0, torch.zeros((), device=device)
        if config.train.compile:
            self.model.base_model.compile()
        self.loss = SummedLoss(self.model)
        self.seconds: list[float] = []
        self.admm_seconds: list[float] = []
        self.peak = self.resident = 0

    def warm_up(self, batch: dict[str, torch.Tensor]) -> None:
        """A first step, after which the optimizer's state is there too, and what this contender holds is known."""
        before = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
        self.step(batch, counted=False)
        grown = (torch.cuda.memory_allocated() if self.device.type == "cuda" else 0) - before
        weights = sum(p.nbytes for p in self.model.parameters())
        self.resident = grown + weights + self.method.state_bytes()

    def step(self, batch: dict[str, torch.Tensor], counted: bool) -> None:
        """One training step, as train.py takes it."""
        start = _now(self.device)
        rows, labels = batch["input_ids"].to(self.device), batch["labels"].to(self.device)
        tokens = (labels[:, 1:] != IGNORED).sum()
        size = self.config.train.micro_batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16-mixed"):
            for micro, targets in zip(rows.split(size), labels.split(size), strict=True):
                (self.loss(micro, targets) / tokens).backward()
        self.method.after_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        middle = _now(self.device)
        self.steps += 1
        self.method.after_step(self.optimizer, self.steps, self.taken)
        end = _now(self.device)
        if counted:
            self.seconds.append(end - start)
            self.admm_seconds.append(end - middle)


def matmul_peak(device: torch.device, precision: str) -> float:
    """Operations per second of a large matrix product in the precision of the training."""
    size = PEAK_SIZE if device.type == "cuda" else PEAK_SIZE // 8
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = a @ b
    best = float("inf")
    for _ in range(5):
        start = _now(device)
        for _ in range(10):
            torch.matmul(a, b, out=out)
        best = min(best, (_now(device) - start) / 10)
    return 2 * size**3 / best


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def means(seconds: list[float], size: int) -> list[float]:
    """Of each part of this size."""
    return [statistics.mean(seconds[i : i + size]) for i in range(0, len(seconds), size)]


def measure(config: RunConfig, device: torch.device, steps: int) -> dict:
    """Alternate rounds of K steps of both methods; returns medians per step, overhead and utilisation."""
    K = config.salaad.every
    text = open_text(config.data, vocab_size=config.model.vocab_size)
    stream = iter(TrainingStream(text, config.data, batch=config.train.batch, rank=0, world_size=1, seed=config.seed))
    contenders = {method: Contender(replace(config, method=method), device) for method in ("full_rank", "salaad")}
    # Thresholds have to leave zero before an update costs what it will cost for the rest of the run.
    for contender in contenders.values():
        contender.warm_up(next(stream))
    for _ in range(3 * K):
        batch = next(stream)
        for contender in contenders.values():
            contender.step(batch, counted=False)
    for _ in range(max(1, steps // K)):
        batches = [next(stream) for _ in range(K)]
        for contender in contenders.values():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for batch in batches:
                contender.step(batch, counted=True)
            if device.type == "cuda":
                contender.peak = max(contender.peak, torch.cuda.max_memory_allocated())
    positions = config.train.batch * config.data.sequence_length
    peak = matmul_peak(device, config.train.precision)
    flops = training_flops(contenders["salaad"].model, config.data.sequence_length) * positions
    result, rounds = {}, {}
    for method, contender in contenders.items():
        # An update comes every K steps: the mean over each round, and the median of the rounds.
        rounds[method] = means(contender.seconds, K)
        per_step = statistics.median(rounds[method])
        result[method] = {
            "seconds_per_step": per_step,
            "admm_seconds_per_step": statistics.median(means(contender.admm_seconds, K)),
            "tokens_per_second": positions / per_step,
            "utilisation": flops / per_step / peak,
        }
        if device.type == "cuda":
            # Both methods share the device: what the other one holds all the time is not this one's.
            others = sum(c.resident for c in contenders.values() if c is not contender)
            result[method]["peak_memory_bytes"] = contender.peak - others
    ratios = (ours / vanilla for ours, vanilla in zip(rounds["salaad"], rounds["full_rank"], strict=True))
    result["overhead"] = statistics.median(ratios) - 1
    method = contenders["salaad"].method
    dense = sum(4 * X.numel() for X in method.salaad.weights.values())
    result["admm_buffers_per_block"] = method.state_bytes() / dense
    result["matmul_peak_flops"] = peak
    return result


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="counted steps of each method")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options, rest = parser.parse_known_args()
    at_least(options, 1, "steps", "threads")
    config, _ = read_command_line(rest)
    torch.set_num_threads(options.threads)
    accelerator = start_accelerator(config)
    result = measure(config, accelerator.device, options.steps)
    rows = [
        (
            method,
            f"{result[method]['seconds_per_step'] * 1e3:.1f} ms",
            f"{result[method]['admm_seconds_per_step'] * 1e3:.2f} ms",
            f"{result[method]['tokens_per_second']:,.0f}",
            f"{result[method]['utilisation']:.1%}",
        )
        for method in ("full_rank", "salaad")
    ]
    print(markdown_table(("method", "step", "of it ADMM update", "tokens/s", "matmul utilisation"), rows))
    print(
        f"\noverhead {result['overhead']:.1%}; ADMM state {result['admm_buffers_per_block']:.2f} dense buffers a block"
    )
    if options.output:
        write_json({"config": config.to_dict(), **provenance(), **result}, options.output)


if __name__ == "__main__":
    run_command(main)
