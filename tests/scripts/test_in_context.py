"""Loss on tokens that repeat a bigram of their row and on others, against plain Python and known losses."""

import itertools
import re
from math import log
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from scripts import in_context
from scripts.in_context import losses, repeated_bigrams, table
from scripts.results_tables.elastic import in_context_table


def test_a_bigram_is_repeated_if_it_stood_anywhere_before_in_the_row():
    rows = torch.randint(0, 4, (50, 23), generator=torch.Generator().manual_seed(0))
    rows[0] = 7  # overlapping bigrams of equal tokens
    for row, found in zip(rows.tolist(), repeated_bigrams(rows).tolist(), strict=True):
        bigrams = list(itertools.pairwise(row))
        assert found == [False, *(bigram in bigrams[:place] for place, bigram in enumerate(bigrams))]


class Copying(nn.Module):
    """Gives probability ¾ to token 1 and shares the rest among the three others, whatever it reads."""

    device = torch.device("cpu")

    def forward(self, input_ids):
        logits = torch.tensor([1 / 12, 3 / 4, 1 / 12, 1 / 12]).log()
        return SimpleNamespace(logits=logits.expand(*input_ids.shape, 4))


def test_losses_are_means_over_the_tokens_of_each_kind_without_padding():
    ids = torch.tensor([[1, 1, 1, 1, 0, 2], [3, 2, 3, 2, 0, 0]])
    labels = ids.clone()
    labels[1, 4:] = -100
    found = losses(Copying(), [{"input_ids": ids, "labels": labels}])
    likely, unlikely = log(4 / 3), log(12)
    # Repeated are the third and fourth 1, and the second 2 after the second 3.
    assert found["copied"] == (pytest.approx((2 * likely + unlikely) / 3), 3)
    assert found["other"] == (pytest.approx((likely + 4 * unlikely) / 5), 5)
    assert found["all"] == (pytest.approx((3 * likely + 5 * unlikely) / 8), 8)


@pytest.mark.parametrize("content", ['{"a": 1}', "[1]", '{"rows": 5}', '{"rows": [{"model": "m"}]}'])
def test_a_file_of_another_script_is_not_taken(command, tmp_path, content):
    path = tmp_path / "rows.json"
    path.write_text(content)
    code, out, err = command(in_context, "--checkpoints", tmp_path, "--output", path)
    assert (code, out) == (2, []) and re.match(rf"error: {path} .*; give another --output$", err[0])
    assert path.read_text() == content


def test_the_table_has_a_line_per_checkpoint_and_the_number_of_tokens():
    row = {"model": "full-rank-1", "step": 12000, "all": (3.8, 1100), "copied": (2.25, 100), "other": (3.9551, 1000)}
    row |= {"commit": "abc", "machine": "a machine"}
    for text in (table([row]), in_context_table({"rows": [row]})):
        cells = [cell.strip() for cell in text.splitlines()[2].split("|")[1:-1]]
        assert cells == ["full-rank-1", "12,000", "3.800", "2.250", "3.955"]
    assert "over 100 validation tokens that are copied and 1,000 that are not: a token is" in text
