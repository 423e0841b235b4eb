"""What every way to train costs beside full-rank training: step time, periodic work and memory, side by side.

    python scripts/bench_training.py --steps 100 --threads 1 --config nano.yaml --output results/bench/methods-nano.json
    python scripts/bench_training.py --steps 20 --config 60m.yaml --train.batch 4 --data.source python-docs
    python scripts/bench_training.py --methods salaad,galore --config 350m.yaml --train.compile true
    python scripts/bench_training.py --config nano-20.yaml --also "SALAAD: --salaad.embedding=false"

Options that this script does not know are options of train.py. All models take the same batches of the configured text.
Rounds of ten steps alternate, so that a machine whose speed drifts slows all alike; a method's periodic work (an ADMM
update, a merge, a new subspace, an exact step) comes amid each round, whatever its own period. A step then costs

    the mean of the steps without periodic work + the periodic work over its own period

and is compared with the full-rank round just before. On a GPU the host waits only between two rounds: it runs ahead as
in a training, and work that overlaps with steps (`salaad.overlap`) counts by how much it delays them. Memory is that of
live tensors, whose peak is taken in a step; on a GPU it is what the allocator has handed out.

Models that do not fit into a GPU side by side are measured one after the other, and compared by medians of all rounds.
If one does not fit by itself, nothing is measured, and the result says which one and how much memory it would need.
"""

import argparse
import gc
import math
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table, megabytes
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check, split_list
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from salaad.config.run import RunConfig
from salaad.data.batches import TrainingStream
from salaad.data.text import Text, open_text
from salaad.methods.registry import method_of
from salaad.model.build import training_flops
from salaad.model.parameters import trained_parameters
from salaad.training.launch import start_accelerator
from salaad.training.plan import memory_by_kind
from scripts.contender import ROUND, Contender
from scripts.devices import now
from scripts.outlines import outline_of

PEAK_SIZE = 8192
ROOM = 0.93  # share of a GPU's free memory that tensors can use; the rest is lost to fragmentation
# Indices in a round of the two steps that can contain periodic work: the last step of a period, and the next one.
PERIODIC = (ROUND // 2 - 1, ROUND // 2)


def matmul_peak(device: torch.device, precision: str) -> float:
    """Operations per second of a large matrix product in the precision of the training."""
    size = PEAK_SIZE if device.type == "cuda" else PEAK_SIZE // 8
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = a @ b
    best = float("inf")
    for _ in range(5):
        start = now(device)
        for _ in range(10):
            torch.matmul(a, b, out=out)
        best = min(best, (now(device) - start) / 10)
    return 2 * size**3 / best


class Measured(NamedTuple):
    """The measurements of one contender, kept after its model is freed.

    Args:
        seconds: duration of every counted step.
        updates: the part of each step's seconds that can contain periodic work.
        period: steps from one piece of periodic work to the next in a real run; None if there is none.
        flops: operations of a step.
        trained: parameters that the optimizer moves.
        memory: bytes by kind.
    """

    seconds: list[float]
    updates: list[float]
    period: int | None
    flops: float
    trained: int
    memory: dict[str, int]


def needs(config: RunConfig) -> tuple[float, float]:
    """Return the bytes that a contender keeps on a GPU between two steps, and those that a step needs in addition."""
    method, model = method_of(config), outline_of(config)
    method.rebuild(model, config)
    whole = sum(memory_by_kind(config, model, 1).values())
    kept = sum(size for kind, size in method.memory(model, config, 1).items() if kind != "gradients")
    return kept, whole - kept


def planned(configs: Mapping[str, RunConfig], room: float) -> list[list[str]]:
    """Return the groups of methods to measure side by side: all in one, or one each where `room` bytes are too few.

    Raises:
        UserError: a method does not fit by itself.
    """
    bytes_of = {method: needs(config) for method, config in configs.items()}
    for method, (kept, more) in bytes_of.items():
        if kept + more > room:
            raise UserError(f"{method} needs {(kept + more) / 1e9:.0f} GB, there are {room / 1e9:.0f}")
    together = sum(kept for kept, _ in bytes_of.values()) + max(more for _, more in bytes_of.values())
    return [list(configs)] if together <= room else [[method] for method in configs]


def measure(configs: Mapping[str, RunConfig], device: torch.device, steps: int, room: float = math.inf) -> dict:
    """Return the figures of all methods (see `figures`), or `left_out` with the reason if one does not fit.

    Args:
        configs: method → configuration of its run, full_rank among them; all have the same model and text.
        device: where the models train.
        steps: counted steps of each method.
        room: bytes that the device has for all models.
    """
    config = configs["full_rank"]
    try:
        groups = planned(configs, room)
    except UserError as error:
        return {"left_out": str(error)}
    text = open_text(config.data, vocab_size=config.model.vocab_size)
    measured: dict[str, Measured] = {}
    for methods in groups:
        try:
            measured |= alternating({method: configs[method] for method in methods}, text, device, steps)
        except torch.OutOfMemoryError as error:
            return {"left_out": f"{', '.join(methods)}: {' '.join(str(error).split())[:200]}"}
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    peak, side_by_side = matmul_peak(device, config.train.precision), len(groups) == 1
    positions = config.train.batch * config.data.sequence_length
    vanilla = [mean_of_others(seconds) for seconds in rounds_of(measured["full_rank"].seconds)]
    vanilla = vanilla if side_by_side else [statistics.median(vanilla)] * len(vanilla)
    found = {method: figures(own, vanilla, positions, peak) for method, own in measured.items()}
    return {"methods": found, "matmul_peak_flops": peak, "side_by_side": side_by_side}


def alternating(configs: Mapping[str, RunConfig], text: Text, device: torch.device, steps: int) -> dict[str, Measured]:
    """Train methods in alternating rounds on the same batches; return the measurements of each."""
    config = next(iter(configs.values()))
    stream = iter(TrainingStream(text, config.data, batch=config.train.batch, rank=0, world_size=1, seed=config.seed))
    contenders = {method: Contender(own, device) for method, own in configs.items()}
    memory = {}
    for method, contender in contenders.items():
        for _ in range(ROUND - 1):
            contender.step(next(stream))
        memory[method] = contender.memory(next(stream))
    # The thresholds of the ADMM must have left zero before an update costs what it costs in the rest of the run; half a
    # round more moves the update to the middle of the counted rounds.
    for _ in range(2 * ROUND + ROUND // 2):
        batch = next(stream)
        for contender in contenders.values():
            contender.step(batch)
    for contender in contenders.values():
        contender.forget_times()
    for _ in range(max(1, steps // ROUND)):
        batches = [{key: rows.to(device) for key, rows in next(stream).items()} for _ in range(ROUND)]
        for contender in contenders.values():
            for batch in batches:
                contender.step(batch)
            contender.count_times()
    positions = config.train.batch * config.data.sequence_length
    return {
        method: Measured(
            contender.seconds,
            contender.updates,
            contender.period,
            training_flops(contender.model, config.data.sequence_length) * positions,
            trained_parameters(contender.model),
            memory[method],
        )
        for method, contender in contenders.items()
    }


def figures(own: Measured, vanilla: list[float], positions: int, peak: float) -> dict[str, Any]:
    """Return what a method costs: time per step, also over full-rank's; periodic work; throughput; memory.

    Args:
        own: measurements of the method.
        vanilla: seconds of a full-rank step, round by round.
        positions: tokens of a step, padding included.
        peak: operations per second of the device.
    """
    ordinary = [mean_of_others(seconds) for seconds in rounds_of(own.seconds)]
    work = [sum(seconds[i] - mean_of_others(seconds) for i in PERIODIC) for seconds in rounds_of(own.updates)]
    periodic = max(0.0, statistics.median(work)) if own.period else 0.0
    shared = periodic / own.period if own.period else 0.0
    ratios = [(usual + shared) / other for usual, other in zip(ordinary, vanilla, strict=True)]
    per_step = statistics.median(ordinary) + shared
    return {
        "seconds_per_step": per_step,
        "over_full_rank": statistics.median(ratios),
        "periodic_seconds": periodic,
        "period": own.period,
        "tokens_per_second": positions / per_step,
        "utilisation": own.flops / per_step / peak,
        "trained": own.trained,
        **{f"{kind}_bytes": size for kind, size in own.memory.items()},
    }


def rounds_of(seconds: list[float]) -> list[list[float]]:
    """Split the seconds of all steps into rounds of `ROUND` steps."""
    return [seconds[i : i + ROUND] for i in range(0, len(seconds), ROUND)]


def mean_of_others(seconds: list[float]) -> float:
    """The mean over the steps of a round in which no periodic work comes."""
    return statistics.mean(seconds[i] for i in range(ROUND) if i not in PERIODIC)


def table(result: dict) -> str:
    """Return a Markdown table, a line per method."""
    rows = [
        (
            method,
            f"{row['seconds_per_step'] * 1e3:,.1f} ms",
            f"{row['over_full_rank']:.3f}",
            f"{row['periodic_seconds'] * 1e3:,.1f} ms every {row['period']}" if row["period"] else "–",
            megabytes(row["weights_bytes"]),
            megabytes(row["optimizer_bytes"]),
            megabytes(row["method_bytes"]),
            megabytes(row["peak_bytes"]),
        )
        for method, row in result["methods"].items()
    ]
    header = ("method", "step", "over full-rank", "periodic work", "weights", "optimizer", "method", "peak")
    return markdown_table(header, rows)


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=",".join(SETTINGS), help="which, separated by commas; full_rank always")
    parser.add_argument("--also", action="append", default=[], help="one more way to train, NAME: OPTIONS of train.py")
    parser.add_argument("--steps", type=int, default=100, help="counted steps of each method")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options, rest = parser.parse_known_args()
    at_least(options, 1, "steps", "threads")
    methods = dict.fromkeys(["full_rank", *split_list(options.methods)])
    configs = {method: read_command_line([*rest, "--method", method])[0] for method in methods}
    for name, colon, words in (one.partition(":") for one in options.also):
        check(name != "full_rank", "--also full_rank would replace what all are compared with; give another name")
        check(bool(colon), f"--also {name} has no colon; give a name and options, such as 'SALAAD: --salaad.every=5'")
        configs[name] = read_command_line([*rest, *words.split()])[0]
    config = configs["full_rank"]
    torch.set_num_threads(options.threads)
    accelerator = start_accelerator(config)
    device = accelerator.device
    room = ROOM * torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    result = measure(configs, device, options.steps, room)
    print(f"left out: {result['left_out']}" if "left_out" in result else table(result))
    if options.output:
        write_json({"config": config.to_dict(), **provenance(), **result}, options.output)


if __name__ == "__main__":
    run_command(main)
