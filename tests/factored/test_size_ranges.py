"""A folder with several ranges of sizes, against folders of one range each, and against dense matrices."""

import copy
import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, GPT2Config, GPT2LMHeadModel, logging

from salaad.common.errors import UserError
from salaad.compression.opening import open_deployment
from salaad.compression.variants import Variant
from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.elastic_file import ElasticFile, SizeRange
from salaad.factored.slr import Slr
from salaad.model.build import ModelFolder
from salaad.model.parameters import count_parameters
from salaad.model.weight_headers import weight_files
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, evaluate, refused, rows_of
from tests.helpers.models import logits, open_folder

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")

SIZES = (0.8, 0.65, 0.5)


@pytest.fixture(scope="module")
def ranges(runs, tmp_path_factory) -> Path:
    """An elastic folder of three ranges, whose budgets were not given in order."""
    folder = tmp_path_factory.mktemp("ranges") / "three"
    compress(runs / "salaad", folder, elastic=True, budget="0.5,0.8,0.65", dtype="float32")
    return folder


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory) -> dict[float, Path]:
    """Size → the folder of a single range that begins at this size."""
    folder = tmp_path_factory.mktemp("alone")
    for size in SIZES:
        compress(runs / "salaad", folder / str(size), elastic=True, budget=size, dtype="float32")
    return {size: folder / str(size) for size in SIZES}


@pytest.mark.parametrize("size", [0.4, 0.5, 0.55, 0.64, 0.65, 0.7, 0.799, 0.8, 0.9, None])
def test_every_range_is_the_folder_that_begins_where_it_does(ranges, alone, size):
    begins = next((begin for begin in SIZES if size is None or begin <= size), SIZES[-1])
    found, expected = (open_folder(folder, budget=size).state_dict() for folder in (ranges, alone[begins]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


@pytest.mark.parametrize("size", [0.4, 0.64, 0.7])
def test_kappa_is_the_share_of_l_in_what_is_removed_from_l_plus_s_in_every_range(ranges, size):
    deployment = open_deployment(ModelOnDisk.open(ranges))
    variant = Variant(str(size), int(size * deployment.dense), stored=True)
    with ElasticFile.opened(weight_files(ranges)) as file:
        _, kept = deployment.entry.keep(file, variant.budget)
    from_l = removed = 0
    for name, (n, m, rank, nnz) in deployment.entry.blocks.items():
        l_part = (rank - kept[name][0]) * (n + m)
        from_l, removed = from_l + l_part, removed + l_part + nnz - kept[name][1]
    with deployment.opened(variant, torch.float32) as opened:
        assert opened.kappa == pytest.approx(from_l / removed)


def test_no_range_holds_more_than_sizes_below_the_next_need(ranges):
    entry, record = (json.loads((ranges / name).read_text()) for name in ("config.json", "compression.json"))
    entry = entry["quantization_config"]
    assert entry["format"] == 2 and [one["below"] for one in entry["smaller"]] == record["ranges_from"][:-1]
    shapes = {name: sizes[:2] for name, sizes in entry["blocks"].items()}

    def numbers_of(blocks: dict[str, list[int]]) -> dict[str, int]:
        return {name: rank * sum(shapes[name]) + nnz for name, (rank, nnz) in blocks.items()}

    def at_most_dense(numbers: dict[str, int]) -> int:
        return sum(min(number, prod(shapes[name])) for name, number in numbers.items())

    whole = numbers_of({name: sizes[2:] for name, sizes in entry["blocks"].items()})
    assert record["parameters"][1] == entry["fixed"] + at_most_dense(whole)
    held = entry["fixed"] + sum(whole.values())
    for one in entry["smaller"]:
        numbers = numbers_of(one["blocks"])
        largest = max(map(sum, shapes.values()))
        assert one["below"] - largest <= entry["fixed"] + at_most_dense(numbers) < one["below"]
        held += sum(numbers.values())
    assert record["numbers_stored"][1] == held
    tensors = load_file(ranges / "model.safetensors")
    assert held == sum(
        tensor.numel() for key, tensor in tensors.items() if not key.endswith(("S_places", "line")) and tensor.numel()
    )


def test_the_programs_take_every_size(ranges, alone, tmp_path):
    evaluate("perplexity", ranges, tmp_path / "found", variants="0.55,0.9", tokens=500)
    found = [row["perplexity"] for row in rows_of(tmp_path / "found", "perplexity")]
    for size, begin, perplexity in ((0.55, 0.5, found[0]), (0.9, 0.8, found[1])):
        evaluate("perplexity", alone[begin], tmp_path / str(size), variants=str(size), tokens=500)
        assert rows_of(tmp_path / str(size), "perplexity")[0]["perplexity"] == perplexity
    compress(ranges, tmp_path / "small", budget=0.55, dtype="float32")
    assert torch.equal(logits(open_folder(tmp_path / "small")), logits(open_folder(ranges, budget=0.55)))


# ---- the library without the programs


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2)).eval().requires_grad_(False)


def cut_at_random(model: GPT2LMHeadModel, rank: int, seed: int) -> tuple[dict[str, Slr], UnitQueue]:
    """Return random U·V + S of the projections, independent of the model's weights, and the queue of their units."""
    generator, parts = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in ("c_attn", "c_proj", "c_fc"):
            n, m = module.weight.shape
            L = torch.randn(n, rank, generator=generator) @ torch.randn(rank, m, generator=generator)
            S = torch.randn(n, m, generator=generator) * (torch.rand(n, m, generator=generator) < 0.05)
            parts[name] = Slr.from_parts(L / 20, S / 5, rank)
    return parts, UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()})


def test_vectors_of_a_range_are_those_that_were_fitted_with_it(tmp_path):
    model = gpt2()
    (large, many), (small, few) = cut_at_random(model, 6, 1), cut_at_random(model, 3, 2)
    fixed = count_parameters(model) - sum(slr.shape[0] * slr.shape[1] for slr in large.values())
    vectors = {name: torch.randn(p.shape) for name, p in model.named_parameters() if p.dim() == 1}
    below = fixed + few.parameters + 1
    save_elastic(copy.deepcopy(model), [SizeRange(large, many), SizeRange(small, few, vectors, below)], fixed, tmp_path)
    for budget, parts, own in ((None, large, {}), (below, large, {}), (below - 1, small, vectors)):
        expected = copy.deepcopy(model)
        kept = many.keep(below - fixed) if budget == below else {n: (slr.rank, slr.nnz) for n, slr in parts.items()}
        for name, slr in parts.items():
            expected.get_submodule(name).weight.data = slr.cut(*kept[name]).dense()
        for name, vector in own.items():
            expected.get_parameter(name).data.copy_(vector)
        # Products of two factors, and weights up to 1: only the rounding of float32 differs.
        torch.testing.assert_close(logits(open_folder(tmp_path, budget=budget)), logits(expected), rtol=1e-4, atol=1e-4)
        base = AutoModel.from_pretrained(tmp_path, **({} if budget is None else {"budget": budget}))
        found, whole = base.state_dict(), expected.base_model.state_dict()
        assert all(torch.equal(found[name], whole[name]) for name in whole if whole[name].dim() == 1)
    open_folder(tmp_path, budget=below - 1).save_pretrained(tmp_path / "again")
    assert torch.equal(logits(open_folder(tmp_path / "again")), logits(open_folder(tmp_path, budget=below - 1)))


# ---- invalid ranges


def with_entry(change: Callable[[dict], None]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return damage


DAMAGE = {
    "no list": lambda entry: entry.update(smaller=3),
    "no range": lambda entry: entry.update(smaller=["large", "small"]),
    "no size": lambda entry: entry["smaller"][0].pop("below"),
    "in another order": lambda entry: entry["smaller"].reverse(),
    "a block less": lambda entry: entry["smaller"][0]["blocks"].popitem(),
    "a rank that is none": lambda entry: entry["smaller"][1]["blocks"]["model.embed_tokens"].__setitem__(0, -1),
    "another rank": lambda entry: entry["smaller"][1]["blocks"]["model.embed_tokens"].__setitem__(0, 1),
    "a range more": lambda entry: entry["smaller"].append({**entry["smaller"][1], "below": 5}),
    "a vector that the model has not": lambda entry: entry["smaller"][1].update(vectors=["model.layers.9.norm"]),
    "a matrix as a vector": lambda entry: entry["smaller"][1].update(vectors=["lm_head.weight"]),
    "a vector that the files have not": lambda entry: entry["smaller"][1].update(vectors=["model.norm.weight"]),
    "vectors that are none": lambda entry: entry["smaller"][1].update(vectors=7),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_no_range_is_refused_in_a_sentence(ranges, tmp_path, damage):
    shutil.copytree(ranges, tmp_path / "copy")
    with_entry(DAMAGE[damage])(tmp_path / "copy")
    with pytest.raises(UserError, match="give a whole") as caught:
        ModelFolder(tmp_path / "copy").load(torch.float32, budget=20_000)
    assert "\n" not in str(caught.value)


def test_several_sizes_are_asked_of_one_folder_of_all(runs, tmp_path):
    said = refused("compress.py", f"--checkpoint={runs / 'salaad'}", "--budget=0.7,0.5", f"--output={tmp_path / 'out'}")
    assert said.endswith("--budget 0.7,0.5 names several sizes, and a folder holds one; give one, or add --elastic")
    assert not (tmp_path / "out").exists()
