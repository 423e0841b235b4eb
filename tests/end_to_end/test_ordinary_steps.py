"""How often the host waits for the device in a step: only for ADMM rounds, GaLore's subspaces, and SALAAD in pure bf16.

Waits are counted on the CPU over the whole loop, from the first line of a step to that of the next, with the solvers
that are chosen for a GPU. The result of the ranks' exchange is read one step later (`training/agreement.py`): that is
the only read in a step of a value that an earlier step has enqueued.
"""

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import train
from salaad.common import distributed
from salaad.config.methods import SETTINGS
from salaad.methods.salaad import round as admm_round
from salaad.spectral.cost import RATES, Rates
from salaad.training.agreement import Agreement
from scripts.host_reads import DEVICE, HostReads
from tests.helpers.ranks import run_ranks
from tests.helpers.training import run_training

STEPS, EVERY = 8, 3
RATES_OF_A_GPU = replace(RATES["h100"], eigenvectors=1e-7)  # so low that products are chosen here too


def waits_of(arguments: list[str], output: Path, rates: Rates = RATES_OF_A_GPU) -> list[tuple[int, int, int]]:
    """Train; return per step but the last: waits of the host, reads of an earlier step's copies, eigensolver calls.

    The step counter of an optimizer that is not fused is on the CPU wherever the weights are, so that reading it is no
    wait.
    """
    start, loop, look = train.start_accelerator, train.Trainer.train, Agreement.read
    seen = []

    def started(config):
        accelerator = start(config)
        accelerator.state.device = DEVICE
        return accelerator

    def counted(trainer: train.Trainer) -> None:
        with HostReads() as reads:
            counters = [entry["step"] for entry in trainer.optimizer.state.values() if entry]
            reads.put_on_host(*counters)

            def begin(agreement: Agreement) -> None:
                reads.next_step()
                seen.append((reads.count, reads.earlier, reads.decompositions))
                look(agreement)

            patch.setattr(Agreement, "read", begin)
            loop(trainer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admm_round, "rates_of", lambda device: rates)
        patch.setattr(train, "start_accelerator", started)
        patch.setattr(train.Trainer, "train", counted)
        run_training(arguments, output)
    assert len(seen) == STEPS
    return [
        tuple(after - before for before, after in zip(one, next_one, strict=True)) for one, next_one in pairwise(seen)
    ]


AT_ROUNDS = [0, 0, 1, 0, 0, 1, 0]
NEVER = [0] * (STEPS - 1)
CASES = {
    "salaad": ({}, AT_ROUNDS),
    "micro-batches": ({"train__micro_batch": 2}, AT_ROUNDS),
    "recomputed": ({"train__gradient_checkpointing": "true"}, AT_ROUNDS),
    "decoupled": ({"salaad__pull": "decoupled"}, AT_ROUNDS),
    "bf16-mixed": ({"train__precision": "bf16-mixed"}, AT_ROUNDS),
    "overlap": ({"salaad__overlap": "true"}, [0, *AT_ROUNDS[:-1]]),  # in the backward pass of the next step
    "full_rank in bf16": ({"method": "full_rank", "train__precision": "bf16"}, NEVER),
    # For an optimizer that is not fused, the host reads whether the gradient is finite (`step_unless`).
    "salaad in bf16": ({"train__precision": "bf16"}, [1 + rounds for rounds in AT_ROUNDS]),
    **{
        method: ({"method": method}, NEVER)
        for method, settings in SETTINGS.items()
        if method not in ("salaad", "galore") and settings.__module__.startswith("salaad.")  # not those of other tests
    },
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_waits_for_the_device_where_a_round_ends_and_nowhere_else(toy, tmp_path, case):
    options, expected = CASES[case]
    arguments = toy(train__steps=STEPS, train__log_every=STEPS, salaad__every=EVERY, **options)
    found = waits_of(arguments, tmp_path / "run")
    assert [waits for waits, _, _ in found] == expected
    assert [looks for _, looks, _ in found] == [0] + [1] * (STEPS - 2)


def test_galore_waits_for_a_new_subspace_and_for_nothing_else(toy, tmp_path):
    options = {"method": "galore", "galore__rank": 4, "galore__every": 4}
    found = waits_of(toy(train__steps=STEPS, train__log_every=STEPS, **options), tmp_path / "run")
    assert [step for step, (waits, _, inside) in enumerate(found, 1) if waits or inside] == [1, 5]


def waits_on_a_rank(runs: list[list[str]], output: Path) -> list[list[tuple[int, int, int]]]:
    """Return the results of `waits_of` for each run, on a rank of a process group that already exists."""
    rank = str(distributed.rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    train.leave_together = lambda accelerator: accelerator.wait_for_everyone()
    return [waits_of(arguments, output / str(i)) for i, arguments in enumerate(runs)]


def test_two_processes_wait_no_more_often_than_one(toy, tmp_path):
    plain = {"train__steps": STEPS, "train__log_every": STEPS, "salaad__every": EVERY}
    cases = [{}, {"salaad__overlap": "true"}, {"train__shard": "optimizer"}, {"method": "full_rank"}]
    expected = [AT_ROUNDS, [0, *AT_ROUNDS[:-1]], AT_ROUNDS, NEVER]
    runs = [toy(**plain, **case) for case in cases]
    for rank in run_ranks(waits_on_a_rank, 2, tmp_path, runs, tmp_path, timeout=120):
        assert [[waits for waits, _, _ in found] for found in rank] == expected
        assert all([looks for _, looks, _ in found] == [0] + [1] * (STEPS - 2) for found in rank)


def test_the_rates_of_a_gpu_as_they_are_take_eigenvectors_for_small_blocks(toy, tmp_path):
    """With eigenvectors each stack of blocks waits once more, inside the solver: here one of 32×32 and one of 48×32."""
    arguments = toy(train__steps=STEPS, train__log_every=STEPS, salaad__every=EVERY)
    found = waits_of(arguments, tmp_path / "run", RATES["h100"])
    assert [waits for waits, _, _ in found] == AT_ROUNDS
    assert [inside for _, _, inside in found] == [2 * rounds for rounds in AT_ROUNDS]


def test_torch_has_no_fused_step_for_bfloat16_weights_with_float32_gradients():
    """If torch gets one, the wait in pure bf16 can go (`step_unless`)."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([weight], fused=True)
    moments = {key: torch.zeros(4) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    with pytest.raises(RuntimeError, match="scalar type"):
        optimizer.step()
