"""The tables of results/scaling that are computed from shapes alone."""

import torch
from torch import nn

from scripts.results_tables import scaling


def test_moments_that_go_with_the_blocks_leave_the_embedding_on_top():
    """Four blocks shared by two ranks, a large embedding and a small head, which goes to the other rank."""
    parameters = [nn.Parameter(torch.empty(rows, 10)) for rows in (10, 10, 10, 10, 60, 5)]
    blocks = {f"block {i}": parameter for i, parameter in enumerate(parameters[:4])}
    owners = scaling._like_the_admm(parameters, blocks, 2, "round_robin")
    assert sorted(owners[:4]) == [0, 0, 1, 1] and owners[4] != owners[5]
    assert scaling._fullest(parameters, owners, 2) == (20 + 60) * 2 / 105


def test_a_run_that_does_not_fit_has_what_would_and_its_hours(monkeypatch):
    monkeypatch.setattr(scaling, "PAPERS", ("350m",))
    [row] = [
        line for line in scaling.hours_table().splitlines() if line.startswith("| 350m") and "fp32 |  4090" in line
    ]
    cells = [cell.strip() for cell in row.split("|")[4:-1]]
    assert cells[0].startswith("with micro_batch 16: ") and cells[2].replace(".", "").isdigit()
