"""Elastic folders, which open at any size, against folders of one size, dense matrices, and what safetensors reads."""

import copy
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    logging,
    modeling_utils,
)

from salaad.common.errors import UserError
from salaad.common.files import write_checksums
from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.elastic_file import SizeRange
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.slr import Slr
from salaad.model.build import ModelFolder
from salaad.model.folder_formats import ANY_SIZE, FIXED_SIZE
from tests.helpers.deploying import compress, ok, refused, rows_of
from tests.helpers.models import IDS, logits, open_folder, save_gpt2
from tests.helpers.surrogates import best_rank, dense_parts, l_plus_s
from tests.helpers.training import last_checkpoint

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")

DTYPES = ("bfloat16", "float32")
EMBEDDING = "model.embed_tokens"


@pytest.fixture(scope="module")
def runs(runs, tmp_path_factory) -> Path:
    """The toy runs without second moments, as earlier versions left them: all entries of a block weigh alike."""
    copy = tmp_path_factory.mktemp("alike") / "runs"
    shutil.copytree(runs, copy, ignore=shutil.ignore_patterns("second_moments.safetensors", "cache"))
    for method in ("salaad", "full_rank"):
        write_checksums(last_checkpoint(copy / method))
    return copy


@pytest.fixture(scope="module")
def elastic(runs, tmp_path_factory) -> dict[str, Path]:
    """Elastic folders of the SALAAD run in both dtypes."""
    folder = tmp_path_factory.mktemp("elastic")
    for dtype in DTYPES:
        compress(runs / "salaad", folder / dtype, elastic=True, dtype=dtype)
    return {dtype: folder / dtype for dtype in DTYPES}


@pytest.fixture(scope="module")
def floor_and_whole(runs) -> tuple[int, int]:
    """The parameters that are never compressed, and these with all of L + S, of no block more than it has dense.

    Counted in the checkpoint's files.
    """
    dense = sum(
        tensor.numel() for tensor in load_file(last_checkpoint(runs / "salaad") / "model/model.safetensors").values()
    )
    parts = dense_parts(runs / "salaad").values()
    floor = dense - sum(L.numel() for L, _, _ in parts)
    return floor, floor + sum(min(L.numel(), rank * sum(L.shape) + int((S != 0).sum())) for L, S, rank in parts)


def of_one_size(runs: Path, output: Path, budget: object, dtype: str, *arguments: object) -> Path:
    """Cut the run by energy to the budget (None: keep all of L + S) with compress.py; return the folder `output`."""
    asked = () if budget is None else ("--budget", budget)
    asked += () if budget is None or "--refine" in arguments else ("--refine", 0)
    compress(runs / "salaad", output, *asked, *arguments, dtype=dtype)
    return output


def assert_same_model(found: PreTrainedModel, expected: PreTrainedModel) -> None:
    """Assert that both models have the same factored layers, tensors equal to the bit, and equal logits."""
    found_state, expected_state = found.state_dict(), expected.state_dict()
    assert found_state.keys() == expected_state.keys()
    for key, tensor in expected_state.items():
        assert found_state[key].dtype == tensor.dtype
        assert torch.equal(found_state[key], tensor), key
    assert slr_modules(found).keys() == slr_modules(expected).keys()
    assert torch.equal(logits(found), logits(expected))


def entry_of(folder: Path) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def units_of(folder: Path, budget: int | None) -> dict[str, tuple[int, int]]:
    """Return block → (rank, nnz) at a budget (None: all), by walking `elastic.line` until a unit does not fit.

    A block costs no more than it does dense; once it costs as much, it has all of its units.
    """
    entry, line = entry_of(folder), load_file(folder / "model.safetensors")["elastic.line"].tolist()
    blocks, kept = entry["blocks"], {name: [0, 0] for name in entry["order"]}

    def spent() -> int:
        return entry["fixed"] + sum(cost_of(blocks[name], counts) for name, counts in kept.items())

    def walk() -> None:
        for level in line:
            for name, counts in zip(entry["order"], level, strict=True):
                for side, count in enumerate(counts):
                    for _ in range(count):
                        kept[name][side] += 1
                        if budget is not None and spent() > budget:
                            kept[name][side] -= 1
                            return

    walk()
    dense = {
        name for name, counts in kept.items() if cost_of(blocks[name], counts) == blocks[name][0] * blocks[name][1]
    }
    return {name: tuple(blocks[name][2:] if name in dense else counts) for name, counts in kept.items()}


def cost_of(sizes: list[int], counts: Sequence[int]) -> int:
    """Return the parameters of a block of `sizes` (n, m, …) with `counts` (rank, nnz), at most those it has dense."""
    n, m, *_ = sizes
    return min(n * m, counts[0] * (n + m) + counts[1])


def dense_of(tensors: dict[str, Tensor], name: str, rank: int, nnz: int) -> Tensor:
    """U·V + S (float64) of a block's first `rank` terms and `nnz` entries, whose places are little-endian numbers."""
    U, V = (tensors[f"elastic.{name}.{key}"][:rank].double() for key in "UV")
    W = U.mT @ V
    places = tensors[f"elastic.{name}.S_places"][:nnz].tolist()
    for place, value in zip(places, tensors[f"elastic.{name}.S_values"][:nnz].tolist(), strict=True):
        W[divmod(int.from_bytes(bytes(place), "little"), W.shape[1])] += value
    return W


# ---- every size is that of its own folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", ["floor", "floor and one", "20K", 0.5, "0.6", 34_567, 0.75, "all but one", "all"])
def test_a_size_is_bit_for_bit_the_folder_of_that_size(runs, elastic, floor_and_whole, tmp_path, dtype, size):
    """Most blocks are factored at the smaller of these sizes, and all are dense at the larger."""
    floor, whole = floor_and_whole
    named = {"floor": floor, "floor and one": floor + 1, "all but one": whole - 1, "all": whole}
    budget = named.get(size, size)
    expected = open_folder(of_one_size(runs, tmp_path / "made", budget, dtype))
    found = open_folder(elastic[dtype], budget=budget)
    assert found.dtype == getattr(torch, dtype)
    assert_same_model(found, expected)
    assert all(p.requires_grad for p in found.parameters() if p.numel())


def test_sizes_that_are_tried_cover_blocks_in_parts_and_dense_ones(elastic, floor_and_whole):
    in_parts = [len(slr_modules(open_folder(elastic["float32"], budget=size))) for size in (20_000, 0.6, 0.75)]
    assert in_parts[0] == len(entry_of(elastic["float32"])["blocks"]) > in_parts[1] > in_parts[2]
    assert EMBEDDING in slr_modules(open_folder(elastic["float32"], budget=0.5))


def test_a_budget_is_a_count_a_text_or_a_fraction(elastic):
    dense = entry_of(elastic["float32"])["dense"]
    expected = open_folder(elastic["float32"], budget=dense // 2)
    for same in ("0.5", 0.5, str(dense // 2), np.int64(dense // 2), f"{dense / 2e6:.6f}M"):
        assert_same_model(open_folder(elastic["float32"], budget=same), expected)


def test_an_architecture_may_have_a_setting_called_budget():
    class WithBudget(LlamaConfig):
        def __init__(self, budget: int = 1, **rest: object) -> None:
            super().__init__(**rest)
            self.budget = budget

    config = WithBudget(budget=5)
    assert config.budget == 5 and config.to_dict()["budget"] == 5 and "budget" not in LlamaConfig().to_dict()
    assert WithBudget.from_dict(config.to_dict(), budget=7).budget == 7


def test_a_config_json_may_have_a_key_called_budget(elastic, tmp_path):
    """As without this package: a dense folder opens and keeps it, and an elastic one still opens at any size."""
    save_gpt2(tmp_path / "dense")
    shutil.copytree(elastic["float32"], tmp_path / "elastic")
    for kind in ("dense", "elastic"):
        file = tmp_path / kind / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"budget": 3}))
        opened = open_folder(tmp_path / kind)
        opened.save_pretrained(tmp_path / f"{kind} again")
        assert opened.config.budget == open_folder(tmp_path / f"{kind} again").config.budget == 3
    assert open_folder(tmp_path / "dense", budget=4).config.budget == 4
    small = open_folder(tmp_path / "elastic", budget=20_000)
    assert_same_model(small, open_folder(elastic["float32"], budget=20_000))
    assert small.config.budget == 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_budget_it_is_all_of_l_plus_s(runs, elastic, tmp_path, dtype):
    found = open_folder(elastic[dtype])
    assert_same_model(found, open_folder(of_one_size(runs, tmp_path / "made", None, dtype)))
    if dtype == "float32":
        for name, (L, S, rank) in dense_parts(runs / "salaad").items():
            expected = best_rank(L, rank) + S
            weight = found.get_submodule(name).weight.detach().double()
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5 * float(L.abs().max()))


def test_a_folder_opens_in_another_dtype_as_the_folder_of_that_size_does(runs, elastic, tmp_path):
    for stored, dtype in (DTYPES, DTYPES[::-1]):
        for budget in (20_000, 0.6):
            made = of_one_size(runs, tmp_path / f"{stored}-{budget}", budget, stored)
            found, expected = (open_folder(elastic[stored], budget=budget, dtype=dtype), open_folder(made, dtype=dtype))
            assert {p.dtype for p in found.parameters()} == {getattr(torch, dtype)}
            assert_same_model(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_calibrated_order_gives_the_calibrated_folder_of_a_size(runs, elastic, tmp_path, dtype):
    calibrated = tmp_path / "elastic"
    compress(runs / "salaad", calibrated, elastic=True, calibrate=4, dtype=dtype)
    for budget in (20_000, 0.5):
        made = of_one_size(runs, tmp_path / str(budget), budget, dtype, "--calibrate", 4)
        assert_same_model(open_folder(calibrated, budget=budget), open_folder(made))
    assert not torch.equal(logits(open_folder(calibrated, budget=0.5)), logits(open_folder(elastic[dtype], budget=0.5)))


def test_a_split_of_a_vanilla_model_is_stored_in_the_same_way(runs, tmp_path):
    split = ("compress.py", "--checkpoint", runs / "full_rank", "--godec", "--roles", '["lm_head","down","embedding"]')
    ok(*split, "--elastic", "--output", tmp_path / "elastic")
    for budget in (20_000, 0.5):
        ok(*split, "--budget", budget, "--refine", 0, "--output", tmp_path / f"{budget}")
        found = open_folder(tmp_path / "elastic", budget=budget)
        assert "lm_head" in slr_modules(found)
        assert_same_model(found, open_folder(tmp_path / f"{budget}"))


# ---- the file


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_size_is_a_beginning_of_what_the_file_holds(elastic, floor_and_whole, dtype):
    folder, (floor, whole) = elastic[dtype], floor_and_whole
    tensors, before = load_file(folder / "model.safetensors"), None
    for budget in (floor, floor + 1, 20_000, 25_168, 35_000, 45_000, whole):
        found, kept = open_folder(folder, budget=budget, dtype=torch.float32), units_of(folder, budget)
        blocks = entry_of(folder)["blocks"]
        spent = floor + sum(cost_of(blocks[name], counts) for name, counts in kept.items())
        assert budget - max(sum(sizes[:2]) for sizes in blocks.values()) < spent <= budget
        for name, (rank, nnz) in kept.items():
            module, W = found.get_submodule(name), dense_of(tensors, name, rank, nnz)
            torch.testing.assert_close(module.weight.detach().double(), W, rtol=1e-6, atol=1e-6 * float(W.norm()))
            if name in slr_modules(found):
                assert (module.rank, module.nnz) == (rank, nnz)
                assert torch.equal(module.U.mT, tensors[f"elastic.{name}.U"][:rank].float())
                assert torch.equal(module.V, tensors[f"elastic.{name}.V"][:rank].float())
                values = tensors[f"elastic.{name}.S_values"][:nnz].float()
                assert torch.equal(module.S_values.sort().values, values.sort().values)
        assert before is None or all(mine[side] <= kept[name][side] for name, mine in before.items() for side in (0, 1))
        before = kept
    assert before == {name: tuple(sizes[2:]) for name, sizes in entry_of(folder)["blocks"].items()}


def test_the_file_keeps_the_largest_units_of_every_block_first(runs, elastic):
    tensors = load_file(elastic["float32"] / "model.safetensors")
    for name, (L, S, rank) in dense_parts(runs / "salaad").items():
        U, V = (tensors[f"elastic.{name}.{key}"].double() for key in "UV")
        torch.testing.assert_close(U.norm(dim=1) * V.norm(dim=1), torch.linalg.svdvals(L)[:rank], rtol=1e-4, atol=1e-6)
        values = tensors[f"elastic.{name}.S_values"].double()
        assert torch.equal(values.abs(), values.abs().sort(descending=True).values)
        places = [int.from_bytes(bytes(place), "little") for place in tensors[f"elastic.{name}.S_places"].tolist()]
        assert sorted(places) == S.flatten().nonzero().flatten().tolist()
        torch.testing.assert_close(values, S.flatten()[places], rtol=1e-5, atol=1e-8)


def test_the_line_stands_in_order_of_energy_per_parameter(runs, elastic):
    """Units kept at a size are worth no less, to within a level of 6.25 %, than the units left out.

    But for those of dense blocks, which have all of theirs.
    """
    parts = dense_parts(runs / "salaad")
    worth = {
        name: (
            torch.linalg.svdvals(L)[:rank].square() / sum(L.shape),
            S[S != 0].abs().sort(descending=True)[0].square(),
        )
        for name, (L, S, rank) in parts.items()
    }
    for budget in (20_000, 30_000, 45_000):
        blocks, kept = entry_of(elastic["float32"])["blocks"], units_of(elastic["float32"], budget)
        kept = {name: counts for name, counts in kept.items() if counts != tuple(blocks[name][2:])}
        assert kept
        inside = [w[:count] for name in kept for w, count in zip(worth[name], kept[name], strict=True)]
        outside = [w[count:] for name in kept for w, count in zip(worth[name], kept[name], strict=True)]
        assert torch.cat(outside).max() <= torch.cat(inside).min() * 1.0626


def write_behind(folder: Path, kept: dict[str, tuple[int, int]]) -> int:
    """Overwrite the bytes of all units after the kept ones, by the header's offsets; return the number of bytes."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header, written = json.loads(content[8 : 8 + length]), 0
    for name, counts in kept.items():
        for key, count in zip(("U", "V", "S_values", "S_places"), (counts[0], *counts, counts[1]), strict=True):
            about = header[f"elastic.{name}.{key}"]
            begin, end = (8 + length + offset for offset in about["data_offsets"])
            units = about["shape"][0]
            begin += (end - begin) // units * count if units else 0
            # Bytes of ones are NaN as a float; as a place they would lie outside the matrix, so places become zeros.
            content[begin:end] = (b"\0" if key == "S_places" else b"\xff") * (end - begin)
            written += end - begin
    file.write_bytes(content)
    return written


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("budget", [16_544, 20_000, 30_000, 45_000])
def test_what_lies_behind_a_size_in_the_file_does_not_matter_to_it(elastic, tmp_path, dtype, budget):
    shutil.copytree(elastic[dtype], tmp_path / "copy")
    kept, every = (units_of(elastic[dtype], size) for size in (budget, None))
    written = write_behind(tmp_path / "copy", kept)
    element = getattr(torch, dtype).itemsize
    costs = {name: sum(sizes[:2]) for name, sizes in entry_of(elastic[dtype])["blocks"].items()}
    behind = {name: (every[name][0] - rank, every[name][1] - nnz) for name, (rank, nnz) in kept.items()}
    # All places of these blocks take two bytes.
    assert written == sum(rank * costs[name] * element + nnz * (element + 2) for name, (rank, nnz) in behind.items())
    found = open_folder(tmp_path / "copy", budget=budget)
    assert_same_model(found, open_folder(elastic[dtype], budget=budget))
    assert all(tensor.isfinite().all() for tensor in found.state_dict().values())
    with pytest.raises(UserError, match="names places twice or outside; give a whole copy"):
        open_folder(tmp_path / "copy", budget=budget + 600)


def test_a_folder_in_several_files_opens_at_every_size_too(elastic, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(elastic["float32"], folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {key: f"model-0000{1 + k % 3}-of-00003.safetensors" for k, key in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({key: t for key, t in tensors.items() if files[key] == file}, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for budget in (20_000, 0.75, None):
        assert_same_model(open_folder(folder, budget=budget), open_folder(elastic["float32"], budget=budget))


# ---- the model in memory


def test_two_sizes_opened_one_after_the_other_are_each_their_own(elastic):
    folder = elastic["float32"]
    small = open_folder(folder, budget=20_000)
    expected = {key: tensor.clone() for key, tensor in small.state_dict().items()}
    large, whole = open_folder(folder, budget=0.75), open_folder(folder)
    assert not any(hasattr(model.config, "budget") for model in (small, large, whole))
    assert all(torch.equal(small.state_dict()[key], tensor) for key, tensor in expected.items())
    assert_same_model(open_folder(folder, budget=20_000), small)
    assert_same_model(open_folder(folder, budget=0.75), large)
    config = AutoConfig.from_pretrained(folder, budget=0.75)  # the way to a size with a configuration that is given
    assert_same_model(open_folder(folder, config=config), large)
    assert_same_model(open_folder(folder), whole)
    assert len({float(logits(model).sum()) for model in (small, large, whole)}) == 3


@pytest.mark.parametrize("budget", [20_000, 0.6, None])
def test_a_size_is_saved_as_an_ordinary_folder_of_one_size(elastic, tmp_path, budget):
    """At the largest size no block is factored, and the folder is that of an ordinary dense model."""
    model = open_folder(elastic["float32"], budget=budget)
    model.save_pretrained(tmp_path)
    assert not any(key.startswith("elastic.") for key in load_file(tmp_path / "model.safetensors"))
    config = (tmp_path / "config.json").read_text()
    assert "elastic" not in config and "budget" not in config
    assert ("quantization_config" in json.loads(config)) == bool(slr_modules(model)) == (budget is not None)
    assert_same_model(open_folder(tmp_path), model)
    with pytest.raises(UserError, match="is asked of a folder that holds one size; leave it out"):
        open_folder(tmp_path, budget=0.6)


def test_without_a_head_and_by_its_own_class_it_is_the_same_model(elastic):
    for budget in (20_000, 0.6, None):
        model = open_folder(elastic["float32"], budget=budget)
        assert_same_model(LlamaForCausalLM.from_pretrained(elastic["float32"], budget=budget), model)
        base, report = AutoModel.from_pretrained(elastic["float32"], budget=budget, output_loading_info=True)
        assert not report["missing_keys"] and not report["mismatched_keys"]
        assert slr_modules(base).keys() == {name.removeprefix("model.") for name in slr_modules(model)}
        with torch.no_grad():
            assert torch.equal(base(IDS).last_hidden_state, model.base_model(IDS).last_hidden_state)


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_a_device_map_changes_nothing(elastic, device_map):
    for budget in (20_000, 0.75):
        found = open_folder(elastic["bfloat16"], budget=budget, device_map=device_map)
        assert_same_model(found, open_folder(elastic["bfloat16"], budget=budget))


def test_nothing_is_missing_or_left_over_when_it_opens(elastic):
    for budget in (20_000, 0.6, 0.9, None):
        _, report = open_folder(elastic["float32"], budget=budget, output_loading_info=True)
        assert not any(report.values()), report


def test_a_size_can_be_copied_and_writes_text(elastic):
    tokenizer = AutoTokenizer.from_pretrained(elastic["float32"])
    model = open_folder(elastic["float32"], budget=0.5)
    assert_same_model(copy.deepcopy(model), model)
    text = tokenizer("the rank", return_tensors="pt")
    expected = text["input_ids"][0].tolist()
    for _ in range(4):
        with torch.no_grad():
            scores = model(torch.tensor([expected])).logits[0, -1]
        scores[tokenizer.eos_token_id] = -torch.inf
        expected.append(int(scores.argmax()))
    assert model.generate(**text, max_new_tokens=4, min_new_tokens=4, do_sample=False)[0].tolist() == expected


@pytest.mark.parametrize("changed", [{"format": 7}, {"blocks": {}}])
def test_a_folder_of_another_format_or_without_its_blocks_is_refused_in_a_sentence(elastic, tmp_path, changed):
    shutil.copytree(elastic["float32"], tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    config["quantization_config"] |= changed
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"has format 7, this version reads 1 or 2; use the version|give a whole"
    ) as caught:
        ModelFolder(tmp_path / "copy").load(torch.float32, budget=20_000)
    assert "\n" not in str(caught.value)


# ---- the programs


@pytest.mark.parametrize("dtype", DTYPES)
def test_compress_takes_a_size_out_of_an_elastic_folder(runs, elastic, tmp_path, dtype):
    """Every tensor in the file equals that of the folder which compress.py makes of the run at this size."""
    for budget in ("20K", "0.6", None):
        out = tmp_path / f"out-{budget}"
        asked = () if budget is None else ("--budget", budget)
        compress(elastic[dtype], out, *asked, dtype=dtype)
        made = of_one_size(runs, tmp_path / f"made-{budget}", budget, dtype)
        assert_same_model(open_folder(out), open_folder(elastic[dtype], budget=budget))
        found, expected = (load_file(folder / "model.safetensors") for folder in (out, made))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
        records = [json.loads((folder / "compression.json").read_text()) for folder in (out, made)]
        for key in ("parameters", "numbers_stored", "bytes_on_disk", "bytes_in_memory", "kappa", "blocks", "dtype",
                    "factored_blocks", "budget"):  # fmt: skip
            assert records[0][key] == records[1][key], key
        assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(made).get_vocab()


def test_the_perplexity_of_a_size_is_that_of_the_run_cut_by_energy(runs, elastic, tmp_path):
    common = ("--dtype", "float32", "--output", tmp_path)
    ok("evaluate.py", "perplexity", "--checkpoint", elastic["float32"], "--variants", "L+S,0.7,20K", *common)
    ok("evaluate.py", "perplexity", "--checkpoint", runs / "salaad", "--variants", "L+S,0.7@energy,20K@energy", *common)
    rows = rows_of(tmp_path, "perplexity")
    assert [row["variant"] for row in rows[:3]] == ["L+S", "0.7", "20K"]
    for found, expected in zip(rows[:3], rows[3:], strict=True):
        assert found["perplexity"] == pytest.approx(expected["perplexity"], rel=1e-5)
        # Of L + S uncut the paper's count has more, where a block has more than dense.
        for key in ("parameters",) * (found["budget"] is not None) + ("implied_kappa", "tokens", "budget"):
            assert found[key] == expected[key], key
    assert len({row["perplexity"] for row in rows[:3]}) == 3


# ---- units fitted to a size


def errors_of(model: PreTrainedModel, targets: dict[str, Tensor]) -> dict[str, float]:
    """Return ‖W − T‖_F of every block, with W the model's weight and T the target L + S."""
    return {name: float((model.get_submodule(name).weight.detach().double() - T).norm()) for name, T in targets.items()}


def total(errors: dict[str, float]) -> float:
    return sum(error**2 for error in errors.values()) ** 0.5


@pytest.fixture(scope="module")
def targets(runs) -> dict[str, Tensor]:
    return l_plus_s(runs / "salaad")


@pytest.fixture(scope="module")
def refined(runs, tmp_path_factory) -> Path:
    """An elastic folder whose units are fitted to 0.7 of the dense model."""
    folder = tmp_path_factory.mktemp("refined") / "elastic"
    compress(runs / "salaad", folder, elastic=True, refine=5, budget=0.7, dtype="float32")
    return folder


def test_the_size_that_units_are_fitted_to_is_the_refined_cut(runs, refined, targets, tmp_path):
    """The fitted size is also nearer to L + S, block by block, than the cut without refinement."""
    made = of_one_size(runs, tmp_path / "refined", 0.7, "float32", "--refine", 5)
    parameters = json.loads((made / "compression.json").read_text())["parameters"][1]
    assert_same_model(open_folder(refined, budget=parameters), open_folder(made))
    plain = errors_of(open_folder(of_one_size(runs, tmp_path / "plain", 0.7, "float32")), targets)
    fitted = errors_of(open_folder(refined, budget=0.7), targets)
    assert all(fitted[name] <= plain[name] * (1 + 1e-5) for name in plain)
    assert total(fitted) < 0.99 * total(plain)


def test_sizes_around_the_fitted_one_are_nested_and_come_closer_and_closer_to_l_plus_s(
    runs, refined, targets, floor_and_whole
):
    floor, _ = floor_and_whole
    tensors, before, errors = load_file(refined / "model.safetensors"), None, []
    for budget in (floor, 22_000, 28_000, 35_235, 37_000, 40_000, 45_000, 48_000, None):
        model, kept = open_folder(refined, budget=budget), units_of(refined, budget)
        for name, (rank, nnz) in kept.items():
            W = dense_of(tensors, name, rank, nnz)
            torch.testing.assert_close(
                model.get_submodule(name).weight.detach().double(), W, rtol=1e-6, atol=1e-6 * float(W.norm())
            )
        assert before is None or all(mine[side] <= kept[name][side] for name, mine in before.items() for side in (0, 1))
        before = kept
        errors.append(total(errors_of(model, targets)))
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == len(errors)
    size = total({name: float(T.norm()) for name, T in targets.items()})
    assert errors[0] == pytest.approx(size, rel=1e-6) and errors[-1] < 0.02 * size
    entries = [places for key, places in tensors.items() if key.endswith("S_places")]
    assert all(len(places.unique(dim=0)) == len(places) for places in entries)
    held = sum(rank * (n + m) + nnz for n, m, rank, nnz in entry_of(refined)["blocks"].values())
    assert held <= sum(
        rank * sum(L.shape) + int((S != 0).sum()) for L, S, rank in dense_parts(runs / "salaad").values()
    )


# ---- the library without the programs


def gpt2(tied: bool) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2, tie_word_embeddings=tied))
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
    return model.eval().requires_grad_(False)


def parts_of(model: PreTrainedModel) -> dict[str, Slr]:
    """Return random L + S of the shape of the weight of every projection, embedding and untied head.

    One block has no L, one no S, and one so many entries in S that it is smaller dense.
    """
    generator, found = torch.Generator().manual_seed(1), {}
    names = [name for name, module in model.named_modules() if getattr(module, "weight", torch.ones(1)).ndim == 2]
    tied = {"lm_head"} if model.config.tie_word_embeddings else set()
    for k, name in enumerate(sorted(set(names) - {"transformer.wpe"} - tied)):
        n, m = model.get_submodule(name).weight.shape
        rank, density = 0 if k == 2 else 6, {3: 0, 4: 0.7}.get(k, 0.2)
        L = torch.randn(n, 6, generator=generator) @ torch.randn(6, m, generator=generator)
        S = torch.randn(n, m, generator=generator) * (torch.rand(n, m, generator=generator) < density)
        found[name] = Slr.from_parts(L / 8, S / 2, rank)
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_a_gpt2_opens_at_every_size_as_its_cut_factored_in_memory(tmp_path, tied, monkeypatch):
    """GPT-2's projections keep their weights transposed, and have biases; a tied embedding stays dense and tied."""
    model = gpt2(tied)
    parts = parts_of(model)
    whole = sum(p.numel() for p in model.parameters())
    fixed = whole - sum(slr.shape[0] * slr.shape[1] for slr in parts.values())
    line = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()})
    save_elastic(copy.deepcopy(model), [SizeRange(parts, line)], fixed, tmp_path)
    largest = fixed + sum(slr.rank * sum(slr.shape) + slr.nnz for slr in parts.values())
    forms = set()
    monkeypatch.setattr(modeling_utils.logger, "warning", lambda said, *_: pytest.fail(said))
    for budget in (fixed + 1, fixed + 3000, (fixed + largest) // 2, largest, None):
        kept = units_of(tmp_path, budget)
        cut = {name: slr.cut(*kept[name]) for name, slr in parts.items()}
        expected = factor(copy.deepcopy(model), cut)
        found, report = open_folder(tmp_path, budget=budget, output_loading_info=True)
        assert not any(report.values()), report
        assert_same_model(found, expected)
        in_parts = slr_modules(found)
        forms |= {(name in in_parts, name.startswith("transformer.h")) for name in parts}
        assert (found.lm_head.weight is found.transformer.wte.weight) == tied
        assert ("transformer.wte" in in_parts) == (not tied and "transformer.wte" in slr_modules(expected))
        for name, slr in cut.items():
            W = slr.U.double() @ slr.V.double()
            W.view(-1)[slr.positions.long()] += slr.values.double()
            weight = found.get_submodule(name).weight.detach().double()
            turned = name in in_parts and name.startswith("transformer.h")
            torch.testing.assert_close(weight.mT if turned else weight, W, rtol=1e-5, atol=1e-5)
        base, expected_base = AutoModel.from_pretrained(tmp_path, budget=budget), expected.base_model
        with torch.no_grad():
            states = [each(IDS).last_hidden_state for each in (base, expected_base)]
        torch.testing.assert_close(*states, rtol=1e-4, atol=1e-4)
    assert forms == {(True, True), (False, True), (not tied, False)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_size_of_a_gpt2_is_saved_and_opens_again(tmp_path, tied):
    model = gpt2(tied)
    parts = parts_of(model)
    fixed = sum(p.numel() for p in model.parameters()) - sum(slr.shape[0] * slr.shape[1] for slr in parts.values())
    line = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()})
    save_elastic(model.to(torch.bfloat16), [SizeRange(parts, line)], fixed, tmp_path / "elastic")
    found = open_folder(tmp_path / "elastic", budget=fixed + 4000)
    assert found.dtype == torch.bfloat16 and slr_modules(found)
    found.save_pretrained(tmp_path / "saved")
    assert_same_model(open_folder(tmp_path / "saved"), found)


def test_a_folder_whose_only_block_is_tied_is_refused_before_anything_is_written(tmp_path, tiny_tokenizer_dir):
    model = tmp_path / "model"
    gpt2(tied=True).save_pretrained(model)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(model)
    arguments = ("--godec", "--roles", "re:wte$", "--elastic", "--output", tmp_path / "made")
    assert "all blocks of model are tied weights" in refused("compress.py", "--checkpoint", model, *arguments)
    assert not (tmp_path / "made").exists()


SEARCHED = "from importlib.util import find_spec; find_spec('transformers.modeling_utils')"  # which imports nothing


@pytest.mark.parametrize("first", [f"import salaad; {SEARCHED}", "import transformers.quantizers.auto, salaad"])
def test_a_new_process_that_knows_nothing_else_knows_all_formats_and_opens_a_size(elastic, first):
    code = f"{first}; from transformers import AutoModelForCausalLM as Any; "
    code += f"Any.from_pretrained({str(next(iter(elastic.values())))!r}, budget='0.6').dequantize(); "
    code += "from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING as known; "
    code += "print(*(name for name in known if 'salaad' in name), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert set(done.stdout.splitlines()) == {"salaad", "salaad-elastic", FIXED_SIZE, ANY_SIZE}, done.stderr
