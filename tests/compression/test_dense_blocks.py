"""Blocks that would cost more as L + S than dense, in cuts by energy: dense and whole, against counts by hand."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from salaad.compression.cut import Whole, all_sizes, cut
from salaad.compression.variants import Variant
from salaad.factored.slr import Slr
from tests.helpers.deploying import compress, evaluate, rows_of
from tests.helpers.models import logits, open_folder
from tests.helpers.training import last_checkpoint

MODEL = "model/model.safetensors"
LARGE, OTHER, FIXED = (8, 6), (20, 30), 7  # shapes of the blocks, and parameters that are no blocks'


def split(shape: tuple[int, int], rank: int, size: float) -> Slr:
    """Return a random L of the given rank plus an S in which every second entry is zero, both of `size`."""
    generator = torch.Generator().manual_seed(sum(shape))
    U, V = (torch.randn(sides, generator=generator) for sides in ((shape[0], rank), (rank, shape[1])))
    S = torch.randn(shape, generator=generator)
    S.view(-1)[::2] = 0
    return Slr.from_parts(size * U @ V, size * S, rank)


def whole() -> Whole:
    parts = {"large": split(LARGE, 4, size=1e4), "other": split(OTHER, 5, size=1.0)}
    return Whole(parts, FIXED, lambda name: parts[name].dense())


def worth(slr: Slr) -> Tensor:
    """Return the energy per parameter of every unit."""
    return torch.cat([slr.sigma.square() / sum(slr.shape), slr.values.square()])


@pytest.mark.parametrize("refine", [0, 5])
@pytest.mark.parametrize("room", [0, 60, 300])
def test_it_costs_what_it_does_dense_and_the_others_share_the_rest(room, refine):
    """All units of the large block are worth more than any other, and cost 4·14 + 24 where the block dense has 48."""
    of = whole()
    assert worth(of.parts["large"]).min() > worth(of.parts["other"]).max()
    small = cut(of, Variant("some", FIXED + 48 + room, refine=refine))
    torch.testing.assert_close(small["large"].dense(), of.parts["large"].dense(), rtol=1e-4, atol=1)
    assert (small["large"].rank, small["large"].nnz) == (4, 24)
    assert room - sum(OTHER) < small["other"].parameters <= room


def test_below_its_size_it_is_cut_like_the_others():
    small = cut(whole(), Variant("less", FIXED + 47))
    assert 47 - sum(LARGE) < small["large"].parameters < 48 and small["other"].parameters == 0


def test_hpa_counts_as_the_paper_does():
    of, budget = whole(), FIXED + 48 + 300
    small = cut(of, Variant("hpa", budget, 0.5))
    assert FIXED + sum(slr.parameters for slr in small.values()) <= budget
    assert small["large"].rank < 4 and small["large"].nnz < 24


@pytest.mark.parametrize("refine", [0, 5])
def test_the_sizes_of_an_elastic_folder_are_counted_alike(refine):
    of = whole()
    begins = Variant("begins", FIXED + 48 + 60, refine=refine)
    parts, queue = all_sizes(of, begins)
    kept = queue.keep(begins.budget - FIXED)
    for name, slr in cut(of, begins).items():
        assert kept[name] == (slr.rank, slr.nnz)
        torch.testing.assert_close(parts[name].cut(*kept[name]).dense(), slr.dense(), rtol=1e-4, atol=1e-4)
    assert queue.parameters == 48 + of.parts["other"].parameters


def test_no_folder_stores_fewer_numbers_than_it_counts(runs, tmp_path):
    """At nine tenths of the toy run, most blocks would cost more in parts than dense."""
    compress(runs / "salaad", tmp_path / "cut", budget=0.9, dtype="float32")
    compress(runs / "salaad", tmp_path / "whole", dtype="float32")
    record = json.loads((tmp_path / "cut" / "compression.json").read_text())
    assert (
        record["parameters"][1] <= 0.9 * record["parameters"][0]
        and record["parameters"][1] <= record["numbers_stored"][1]
    )
    X, small, l_plus_s = (
        logits(open_folder(folder))
        for folder in (next((runs / "salaad" / "checkpoints").glob("*/model")), tmp_path / "cut", tmp_path / "whole")
    )
    assert (small - X).norm() < 1.05 * (l_plus_s - X).norm()


def test_a_budget_above_all_of_l_plus_s_is_counted_alike_in_every_way(runs, tmp_path):
    """In the toy run L + S has more parameters by the paper's count than the dense model."""
    dense = sum(math.prod(tensor.shape) for tensor in load_file(last_checkpoint(runs / "salaad") / MODEL).values())
    counted = set()
    for options in ({"budget": dense}, {}):
        compress(runs / "salaad", tmp_path / f"{len(options)}", dtype="float32", lm_head="false", **options)
        counted.add(json.loads((tmp_path / f"{len(options)}" / "compression.json").read_text())["parameters"][1])
    compress(runs / "salaad", tmp_path / "elastic", dtype="float32", elastic=True)
    counted.add(json.loads((tmp_path / "elastic" / "compression.json").read_text())["parameters"][1])
    for folder, variants in ((tmp_path / "elastic", f"{dense},L+S"), (runs / "salaad", f"{dense}@energy")):
        evaluate("perplexity", folder, tmp_path / folder.name, variants=variants, tokens=500)
        rows = rows_of(tmp_path / folder.name, "perplexity")
        counted |= {row["parameters"] for row in rows}
        assert {row["implied_kappa"] for row in rows} == {None}
    assert len(counted) == 1 and counted.pop() < dense
    evaluate("perplexity", runs / "salaad", tmp_path / "paper", variants="L+S", tokens=500)
    assert rows_of(tmp_path / "paper", "perplexity")[0]["parameters"] > dense
