"""Factored models on several ranks, with blocks that lack U·V, S or both, trained by DistributedDataParallel."""

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from salaad.common import distributed
from salaad.factored.fixed_size import factor, slr_modules
from tests.factored.test_fixed_size import blocks_of, llama, tied_llama
from tests.helpers.models import open_folder
from tests.helpers.ranks import run_ranks

TEXT = torch.randint(3, 512, (3, 4, 8), generator=torch.Generator().manual_seed(5))


def trained(folder: Path, ranks: int = 1, thawed: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights after three steps on `TEXT`, of which a rank takes the rows that are its own.

    All parameters may be frozen and thawed before, as a training that freezes the model for a while does.
    """
    model: PreTrainedModel = open_folder(folder)
    if thawed:
        model.requires_grad_(False).requires_grad_(True)
    assert {layer.nnz > 0 for layer in slr_modules(model).values()} == {True, False}
    forward = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for rows in TEXT:
        mine = rows[distributed.rank() :: ranks]
        forward(input_ids=mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def trained_on_two(folders: list[Path], thawed: bool) -> list[dict[str, torch.Tensor]]:
    return [trained(folder, 2, thawed) for folder in folders]


@pytest.mark.parametrize("thawed", [False, True])
def test_two_ranks_train_a_model_with_blocks_without_s_as_one_does(tmp_path, thawed):
    folders = [tmp_path / "llama", tmp_path / "tied"]
    for make, folder in zip((llama, tied_llama), folders, strict=True):
        model = make()
        factor(model, blocks_of(model)).save_pretrained(folder)
    first, second = run_ranks(trained_on_two, 2, tmp_path, folders, thawed)
    for folder, one, other in zip(folders, first, second, strict=True):
        before = dict(open_folder(folder).named_parameters())
        for name, alone in trained(folder).items():
            assert torch.equal(one[name], other[name]), name
            moved = (alone - before[name]).norm()
            # The gradient is summed in another order: roundings of its size, which three steps may enlarge.
            assert (one[name] - alone).norm() <= 1e-3 * moved, name
