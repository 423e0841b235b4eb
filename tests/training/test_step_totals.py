"""The running totals of a log interval: of several ranks, saved in the middle of it and read again."""

import math
from pathlib import Path

import torch

from salaad.common import distributed
from salaad.common.files import write_json
from salaad.runs.checkpoints import RunState
from salaad.training.step_totals import StepTotals
from tests.helpers.ranks import run_ranks

# Shares of a loss by rank and step whose sums depend, by rounding, on the order in which they are added.
SHARES = [[1.0, 1e-16, 1e-16, 3e-17], [1e-16, 1e-16, 2e-16, 1e-17], [1e-16, 7e-17, 1e-16, 1e-16]]


def add_steps(totals: StepTotals, steps: range) -> None:
    for step in steps:
        share = torch.tensor(SHARES[distributed.rank()][step], dtype=torch.float64)
        totals.add(share, torch.tensor(10.0), torch.tensor(0.0))


def interval(folder: Path, begun: int | None) -> list[float]:
    """Return the totals of the four steps; after `begun` steps of three ranks they pass through a checkpoint."""
    device, earlier = torch.device("cpu"), RunState().sums
    if begun is not None:
        folder = folder / str(begun)
        if distributed.world_size() == len(SHARES):
            totals = StepTotals(device)
            add_steps(totals, range(begun))
            sums = distributed.gather(totals.own())
            if distributed.rank() == 0:
                RunState(sums=sums).write(folder)
            distributed.barrier()
        earlier = RunState.read(folder).sums
    totals = StepTotals(device, earlier)
    add_steps(totals, range(begun or 0, 4))
    return totals.read()


def test_a_line_of_three_ranks_is_the_same_to_the_bit_after_a_resume_inside_its_interval(tmp_path):
    for begun in (1, 2, 3):
        (tmp_path / str(begun) / "state").mkdir(parents=True)
    whole = run_ranks(interval, 3, tmp_path, tmp_path, None)
    assert [run_ranks(interval, 3, tmp_path, tmp_path, begun) for begun in (1, 2, 3)] == [whole] * 3
    loss, *others = interval(tmp_path, 3)  # one rank, which adds its own share of the last step alone
    shares = [share for rank in SHARES for share in rank[:3]] + [SHARES[0][3]]
    assert others == [4.0, 40.0]
    assert math.isclose(loss, math.fsum(shares), rel_tol=1e-15)  # half a unit in the last place for each of few sums


def test_a_sum_over_the_ranks_from_an_older_version_counts_once(tmp_path):
    (tmp_path / "state").mkdir()
    RunState().write(tmp_path)
    path = tmp_path / "state" / "trainer.json"
    write_json({**vars(RunState()), "sums": [2.5, 3.0, 30.0]}, path)
    [found] = {tuple(one) for one in run_ranks(read_totals, 2, tmp_path, tmp_path)}
    assert found == (2.5, 3.0, 30.0)


def read_totals(folder: Path) -> list[float]:
    return StepTotals(torch.device("cpu"), RunState.read(folder).sums).read()
