"""scripts/host_reads.py: it counts what makes the host wait for a device, and nothing else."""

import pytest
import torch
from torch import nn

from scripts.host_reads import DEVICE, HostReads


def host(x: torch.Tensor) -> torch.Tensor:
    """A tensor in the host's memory, of the shape of x."""
    return torch.zeros(x.shape)


READING = {
    "float()": float,
    "item()": lambda x: x.item(),
    "bool()": bool,
    "tolist()": lambda x: x.tolist(),
    "numpy()": lambda x: x.numpy(),
    "cpu()": lambda x: x.cpu(),
    'to("cpu")': lambda x: x.to("cpu"),
    'to("cpu", dtype)': lambda x: x.to("cpu", torch.float64),
    'to(device="cpu")': lambda x: x.to(device="cpu"),
    'to(torch.device("cpu"))': lambda x: x.to(torch.device("cpu")),
    "to(a tensor of the host)": lambda x: x.to(host(x)),
    "copy_ into the host": lambda x: host(x).copy_(x),
    "copy_ into a part of the host's": lambda x: torch.zeros(2)[0].copy_(x),
    "nonzero()": lambda x: x.nonzero(),
    "x[mask]": lambda x: x[x > 0],
    "the copy that was enqueued just now": lambda x: x.to("cpu", non_blocking=True).tolist(),
    "a part of it": lambda x: x.reshape(1).to("cpu", non_blocking=True)[0].item(),
}


@pytest.mark.parametrize("what", list(READING))
def test_a_read_is_counted_once(what):
    x = torch.tensor(2.0)
    with HostReads() as reads:
        READING[what](x)
    assert (reads.count, reads.earlier) == (1, 0)
    READING[what](x)  # nothing is counted after the context
    assert reads.count == 1


WAITING_FOR_NOTHING = {
    "a copy that is looked at by nobody": lambda x: x.to("cpu", non_blocking=True),
    "to the device where it is": lambda x: x.to(DEVICE),
    "to the place of another": lambda x: x.to((x + 1).device),
    "to a tensor there": lambda x: x.to(x + 1),
    "another dtype": lambda x: x.to(torch.float64),
    "copy_ on the device": lambda x: x.new_zeros(()).copy_(x),
    "copy_ onto the device": lambda x: x.copy_(torch.tensor(1.0)),
    "a number of the host": lambda _: torch.tensor([1.0, 2.0]).sum().item(),
    "a list of the host": lambda _: (torch.arange(3) * 2).tolist(),
    "what the device was given": lambda _: torch.tensor([1.0]).to(DEVICE).sum(),
}


@pytest.mark.parametrize("what", list(WAITING_FOR_NOTHING))
def test_what_waits_for_nothing_is_not_counted(what):
    x = torch.tensor(2.0)
    with HostReads() as reads:
        WAITING_FOR_NOTHING[what](x)
    assert (reads.count, reads.earlier) == (0, 0)


def test_what_was_sent_to_the_device_has_to_be_read_from_it_and_what_was_read_has_not():
    with HostReads() as reads:
        there = torch.tensor([1.0, 2.0]).to(DEVICE)
        here = (there * 2).cpu()
        assert reads.count == 1 and here.sum().item() == 6
        assert reads.count == 1 and there.sum().item() == 3
        assert reads.count == 2


def test_an_answer_of_the_step_before_is_told_from_one_of_this_step():
    x = torch.tensor(2.0)
    with HostReads() as reads:
        answer = x.to("cpu", non_blocking=True)
        reads.next_step()
        x.add_(1)
        assert answer.item() == 2
        assert (reads.count, reads.earlier) == (0, 1)
        assert float(x) == 3
        assert (reads.count, reads.earlier) == (1, 1)


@pytest.mark.parametrize("owner", [torch.cuda.Event, torch.cuda.Stream, torch.cuda])
def test_a_wait_for_an_event_a_stream_or_the_device_is_counted(monkeypatch, owner):
    waited = []
    monkeypatch.setattr(owner, "synchronize", waited.append)  # there is no device here
    with HostReads() as reads:
        owner.synchronize("it")
    assert reads.count == 1 and waited == ["it"]


def test_what_a_hook_of_a_gradient_reads_is_counted():
    weight, found = nn.Parameter(torch.ones(3)), []
    weight.register_post_accumulate_grad_hook(lambda p: found.append((p.grad.tolist(), p.grad.cpu(), float(p.grad[0]))))
    with HostReads() as reads:
        weight.sum().backward()
    assert len(found) == 1 and reads.count == 3
