"""Trainings on a device beside the same on the CPU: steps of every method; whole runs, interrupted, on all GPUs."""

import math
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from subprocess import run

import torch
from torch import Tensor

from salaad.common.files import read_json
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from salaad.config.run import RunConfig
from scripts.bench_training import Contender
from scripts.on_device.check import Check
from scripts.reliability.toy_run import ROOT, launch_command, toy_arguments, write_text, write_tokenizer

ROUNDING = 2e-3  # of products and reductions in float32 that are summed in another order, after some steps of Adam
STEPS = 10
# A device draws other numbers than the CPU does, so nothing is dropped. The loss falls by a sixth or more, and SALAAD's
# pull is strong enough to show in it.
LEARNING = ("--lora.dropout=0", "--relora.dropout=0", "--optimizer.warmup=0", "--salaad.rho_constant=10")
TINY_METHODS = ("full_rank", "salaad", "lora", "relora")


def steps(device: torch.device, tiny: bool) -> Iterator[Check]:
    """The loss after ten steps of every method, beside the same on the CPU."""
    for method in TINY_METHODS if tiny else SETTINGS:
        config = read_command_line([*small_run(tiny), *LEARNING, "--method", method])[0]
        there, here = (loss_after_steps(config, place) for place in (device, torch.device("cpu")))
        yield Check(f"{STEPS} steps of {method}", abs(there / here - 1), ROUNDING)


def small_run(tiny: bool) -> list[str]:
    """Options of train.py."""
    words = ["--config", "nano", "--data.sequence_length=64"]
    return words + ["--model.hidden_size=32", "--model.intermediate_size=48", "--model.vocab_size=256"] * tiny


def batches_of(config: RunConfig, count: int) -> list[dict[str, Tensor]]:
    """Batches of four rows, on the CPU, all drawn beforehand: a step may draw random numbers of its own."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(2, config.model.vocab_size // 4, (4, 64), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def loss_after_steps(config: RunConfig, device: torch.device) -> float:
    """The loss of a batch after some steps on it and on another one in turns."""
    torch.manual_seed(0)
    contender = Contender(config, device)
    batches = batches_of(config, 2)
    for i in range(STEPS):
        contender.step(batches[i % 2])
    with torch.no_grad():
        return float(contender.loss(*(ids.to(device) for ids in batches[0].values())))


def runs(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Validation loss of whole trainings beside one on the CPU: on the device, interrupted, on all GPUs."""
    with tempfile.TemporaryDirectory() as work:
        texts = write_text(Path(work))
        tokenizer = write_tokenizer(Path(work) / "tokenizer")

        def trained(name: str, processes: int = 1, hidden: bool = False, **options: object) -> float:
            words = toy_arguments(texts, tokenizer, train__batch=8, **options)
            command, environment = launch_command(words, Path(work) / name, 1)
            if processes > 1:
                command[2:2] = ["--multi_gpu", "--num_processes", str(processes), "--main_process_port", "0"]
            else:
                command = [sys.executable, *command[2:]]  # without the launcher, which takes seconds
            environment |= {"CUDA_VISIBLE_DEVICES": ""} if hidden or device.type == "cpu" else {}
            done = run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or ["killed"])[-1])
            return math.log(read_json(Path(work) / name / "summary.json")["variants"]["X"]["perplexity"])

        reference = trained("cpu", hidden=True)
        alone = trained("alone", train__save_every=6)
        yield Check("training", abs(alone / reference - 1), ROUNDING)
        beside = trained("beside", salaad__overlap="true")
        yield Check("training with updates beside it", abs(beside / reference - 1), ROUNDING)
        again = trained("again", resume=Path(work) / "alone" / "checkpoints" / "step-0000006")
        yield Check("resumed training", abs(again / reference - 1), ROUNDING)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            processes = max(count for count in (2, 4, 8) if count <= torch.cuda.device_count())
            yield Check(f"training on {processes} GPUs", abs(trained("many", processes) / reference - 1), ROUNDING)
