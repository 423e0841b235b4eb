"""How often the host waits for the device in the trainer's own steps: never, but for a round and for pure bfloat16.

Counted on the CPU from the first line of `Trainer.backward` to the last of `Method.after_step`, with the solvers of a
device that the host has to wait for.
"""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch

import train
from salaad.methods.full_rank import FullRank
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad.method import SalaadMethod
from salaad.spectral.cost import RATES
from scripts.host_reads import HostReads
from tests.helpers.training import run_training

STEPS, EVERY = 8, 3
RATES_OF_A_GPU = replace(RATES["h100"], eigenvectors=1e-7)  # so slow at eigenvectors that products are taken here too


def waits_of(arguments: list[str], output, monkeypatch) -> list[int]:
    """How often the host waits in each step of a run.

    A step counter of an optimizer that is not fused lies on the CPU wherever the weights are, so that reading it is no
    wait.
    """
    monkeypatch.setattr(admm_round, "rates_of", lambda device: RATES_OF_A_GPU)
    backward, steps, counting = train.Trainer.backward, [], ExitStack()

    def begin(trainer: train.Trainer, *given):
        steps.append((counting.enter_context(HostReads()), trainer.optimizer))
        return backward(trainer, *given)

    def ending(after_step):
        def end(*given):
            after_step(*given)
            counting.close()

        return end

    monkeypatch.setattr(train.Trainer, "backward", begin)
    for method in (FullRank, SalaadMethod):
        monkeypatch.setattr(method, "after_step", ending(method.after_step))
    with counting:
        run_training(arguments, output)
    counts = []
    for reads, optimizer in steps:
        counters = {entry["step"].data_ptr() for entry in optimizer.state.values()}
        counts.append(reads.count - sum(tensor.data_ptr() in counters for tensor in reads.read))
    return counts


AT_ROUNDS = [0, 0, 1, 0, 0, 1, 0, 0]
CASES = {
    "full_rank": ({"method": "full_rank"}, [0] * STEPS),
    "salaad": ({}, AT_ROUNDS),
    "micro-batches": ({"train__micro_batch": 2}, AT_ROUNDS),
    "decoupled": ({"salaad__pull": "decoupled"}, AT_ROUNDS),
    "bf16-mixed": ({"train__precision": "bf16-mixed"}, AT_ROUNDS),
    "overlap": ({"salaad__overlap": "true"}, [0, *AT_ROUNDS[:-1]]),  # in the backward pass of the next step
    "full_rank in bf16": ({"method": "full_rank", "train__precision": "bf16"}, [0] * STEPS),
    # Whether the gradient is finite, for an optimizer that is not fused (`step_unless`).
    "salaad in bf16": ({"train__precision": "bf16"}, [1 + rounds for rounds in AT_ROUNDS]),
}


@pytest.mark.parametrize("case", list(CASES))
def test_a_step_waits_for_the_device_where_a_round_ends_and_nowhere_else(toy, tmp_path, monkeypatch, case):
    options, expected = CASES[case]
    arguments = toy(train__steps=STEPS, train__log_every=STEPS, salaad__every=EVERY, **options)
    assert waits_of(arguments, tmp_path / "run", monkeypatch) == expected


def test_torch_has_no_fused_step_for_bfloat16_weights_with_float32_gradients():
    """If it gets one, the wait in pure bf16 can go (`step_unless`)."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    weight.grad = torch.ones(4)
    optimizer = torch.optim.AdamW([weight], fused=True)
    moments = {key: torch.zeros(4) for key in ("exp_avg", "exp_avg_sq")}
    optimizer.state[weight] = {"step": torch.zeros(()), **moments}
    with pytest.raises(RuntimeError, match="scalar type"):
        optimizer.step()


def test_what_a_hook_of_a_gradient_reads_is_counted():
    weight, found = torch.nn.Parameter(torch.ones(3)), []
    weight.register_post_accumulate_grad_hook(lambda p: found.append((p.grad.tolist(), p.grad.cpu(), float(p.grad[0]))))
    with HostReads() as reads:
        weight.sum().backward()
    assert len(found) == 1 and reads.count == 3
