"""Checks of trainings on a device against the CPU: steps of every method; whole runs, also resumed and on all GPUs."""

import math
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen, TimeoutExpired
from typing import NamedTuple

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from salaad.common.files import read_json
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from salaad.config.run import RunConfig
from scripts.contender import Contender
from scripts.on_device.check import Check, not_made
from scripts.reliability.toy_run import ROOT, launch_command, toy_arguments, write_text, write_tokenizer

ROUNDING = 2e-3  # limit after some steps of Adam where float32 sums are made in another order
REPEATED = 5e-5  # limit of a training repeated on one device, where some sums are made in another order each time
FLIPPED = 2e-2  # limit of rank and density, where rounding may flip a few entries
PATIENCE, GRACE = 600, 60  # seconds after which a training is told to end, and that it then has to do so
MIDDLE = 8  # the step from which the resumed training goes on
# With these settings the dual and both thresholds have left zero by `MIDDLE`, and the penalty shows in the loss.
TOY = {"salaad__every": 1, "salaad__rho_constant": 20}
STEPS = 10
# A device draws other random numbers than the CPU, so there is no dropout. The loss falls by a sixth or more, and
# SALAAD's penalty is strong enough to show in it.
LEARNING = ("--lora.dropout=0", "--relora.dropout=0", "--optimizer.warmup=0", "--salaad.rho_constant=10")
TINY_METHODS = ("full_rank", "salaad", "lora", "relora")


def steps(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield checks of the loss after ten steps of every method, against these steps on the CPU."""
    for method in TINY_METHODS if tiny else SETTINGS:
        config = read_command_line([*small_run(tiny), *LEARNING, "--method", method])[0]
        there, here = (loss_after_steps(config, place) for place in (device, torch.device("cpu")))
        yield Check(f"{STEPS} steps of {method}", abs(there / here - 1), ROUNDING)


def compiled(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield a check of the loss after ten steps of a compiled model, against one not compiled on the same device."""
    words = [*small_run(tiny), *LEARNING, "--method=salaad", "--model.num_hidden_layers=1"]
    before = counters["frames"]["ok"]
    there, here = (
        loss_after_steps(read_command_line([*words, f"--train.compile={value}"])[0], device)
        for value in ("true", "false")
    )
    problem = "" if counters["frames"]["ok"] > before else "nothing was compiled"
    yield Check(f"{STEPS} compiled steps", abs(there / here - 1), ROUNDING, problem)


def small_run(tiny: bool) -> list[str]:
    """Return options of train.py for a small model and short sequences."""
    words = ["--config", "nano", "--data.sequence_length=64"]
    return words + ["--model.hidden_size=32", "--model.intermediate_size=48", "--model.vocab_size=256"] * tiny


def batches_of(config: RunConfig, count: int) -> list[dict[str, Tensor]]:
    """Batches of four rows, on the CPU, all drawn beforehand: a step may draw random numbers of its own."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(2, config.model.vocab_size // 4, (4, 64), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def loss_after_steps(config: RunConfig, device: torch.device) -> float:
    """Return the loss of a batch after `STEPS` steps that alternate between this batch and another."""
    torch.manual_seed(0)
    contender = Contender(config, device)
    batches = batches_of(config, 2)
    for i in range(STEPS):
        contender.step(batches[i % 2])
    with torch.no_grad():
        return float(contender.loss(*(ids.to(device) for ids in batches[0].values())))


class Ended(NamedTuple):
    """The result of a finished training.

    Args:
        losses: variant (X, L+S) → the logarithm of its perplexity.
        structure: mean rank ratio of L and density of S, in which a lost state shows long before it does in X.
    """

    losses: dict[str, float]
    structure: dict[str, float]


@dataclass(frozen=True)
class Toy:
    """Whole trainings of a toy model on a device.

    Args:
        device: where the trainings compute, unless GPUs are hidden from them.
        work: folder of the runs.
        texts: files by part, as `write_text` returns them.
        tokenizer: folder of the tokenizer.
    """

    device: torch.device
    work: Path
    texts: dict[str, list[str]]
    tokenizer: str

    def trained(self, name: str, processes: int = 1, hidden: bool = False, **options: object) -> Ended:
        """Train to the end, on the CPU if `hidden`, and return the result.

        Raises:
            RuntimeError: the training failed, or did not end within `PATIENCE`.
        """
        on_cpu = hidden or self.device.type == "cpu"
        words = toy_arguments(self.texts, self.tokenizer, train__batch=8, **TOY, **options)
        command, environment = launch_command(words, self.work / name, processes if on_cpu else 1)
        if processes == 1:
            command = [sys.executable, *command[2:]]  # without the launcher, which takes seconds
        elif not on_cpu:
            command[2:2] = ["--multi_gpu", "--num_processes", str(processes), "--main_process_port", "0"]
        environment |= {"CUDA_VISIBLE_DEVICES": ""} if on_cpu else {}
        perform(command, environment)
        variants = read_json(self.work / name / "summary.json")["variants"]
        losses = {variant: math.log(figures["perplexity"]) for variant, figures in variants.items()}
        return Ended(losses, {key: variants["L+S"][key] for key in ("rank_ratio", "density")})


def perform(command: list[str], environment: dict[str, str]) -> None:
    """Run the command of a training; errors are raised as `Toy.trained` says."""
    with Popen(command, cwd=ROOT, env=environment, stdout=DEVNULL, stderr=PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=PATIENCE)
        except TimeoutExpired:
            process.terminate()  # by which a launcher ends what it started
            try:
                process.communicate(timeout=GRACE)
            except TimeoutExpired:
                process.kill()
            raise RuntimeError(f"a training did not end within {PATIENCE:g} seconds") from None
    if process.returncode:
        raise RuntimeError((said.strip().splitlines() or ["killed"])[-1])


def runs(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield checks of the validation loss of X and of L + S after whole trainings.

    A training on the device is compared with one on the CPU. A training with overlapping updates, one resumed from the
    middle and those on several processes are compared with the first on the same device.
    """
    with tempfile.TemporaryDirectory() as work:
        toy = Toy(device, Path(work), write_text(Path(work)), write_tokenizer(Path(work) / "tokenizer"))
        alone = toy.trained("alone", train__save_every=MIDDLE)
        reference = toy.trained("cpu", hidden=True)
        yield Check("training", largest_difference(alone.losses, reference.losses), ROUNDING)
        middle = toy.work / "alone" / "checkpoints" / f"step-{MIDDLE:07d}"
        for name, options in (
            ("training with updates beside it", {"salaad__overlap": "true"}),
            ("resumed training", {"resume": middle}),
        ):
            yield from repeated(name, toy.trained(name.replace(" ", "-"), **options), alone)
        processes = most_processes(device)
        for name, shard in (("training", "none"), ("training with --train.shard optimizer", "optimizer")):
            name = f"{name} on {processes} processes"
            if processes == 1:
                yield not_made(name, "it takes several GPUs")
                continue
            found = toy.trained(f"many-{shard}", processes, train__shard=shard)
            yield Check(name, largest_difference(found.losses, alone.losses), ROUNDING)


def repeated(name: str, again: Ended, alone: Ended) -> Iterator[Check]:
    """Yield checks that the training `again` ended as `alone` did on the same device."""
    yield Check(name, largest_difference(again.losses, alone.losses), REPEATED)
    yield Check(f"{name}, L and S", largest_difference(again.structure, alone.structure), FLIPPED)


def largest_difference(found: Mapping[str, float], wanted: Mapping[str, float]) -> float:
    """The largest relative difference of two figures of one name."""
    return max(abs(found[name] / figure - 1) for name, figure in wanted.items())


def most_processes(device: torch.device) -> int:
    """Return the most of 1, 2, 4 or 8 processes for which the machine has GPUs; two on a CPU."""
    count = torch.cuda.device_count() if device.type == "cuda" else 2
    return max(power for power in (1, 2, 4, 8) if power <= count)
