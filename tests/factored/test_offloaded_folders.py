"""Folders opened with a device map that offloads modules: U, V and S are loaded again as they are, or it is refused."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.elastic_file import SizeRange
from salaad.factored.fixed_size import SlrConfig, SlrQuantizer, factor, mark_factored, slr_modules
from tests.factored.test_fixed_size import blocks_of, llama, logits, open_folder

REST = dict.fromkeys(("model.layers.1", "model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
PARTLY = {"model.layers.0": "disk", **REST}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Form → a folder of the same blocks."""
    root, blocks = tmp_path_factory.mktemp("offloaded"), blocks_of(llama())
    for form in ("float", "int8"):
        model = factor(llama(), copy.deepcopy(blocks))
        mark_factored(model, 1, in_int8=form == "int8")
        model.save_pretrained(root / form)
    queue = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in blocks.items()})
    save_elastic(llama(), [SizeRange(blocks, queue)], 1000, root / "elastic")
    return {form: root / form for form in ("float", "int8", "elastic")}


def offloaded(folder, tmp_path, device_map, **options) -> PreTrainedModel:
    return open_folder(folder, device_map=device_map, offload_folder=tmp_path, **options)


@pytest.mark.parametrize("device_map", [PARTLY, {"": "disk"}])
def test_a_folder_of_floats_computes_and_is_saved_from_the_disk(folders, tmp_path, device_map):
    model = offloaded(folders["float"], tmp_path / "used", device_map)
    assert any(layer.U.is_meta for layer in slr_modules(model).values())
    expected = logits(open_folder(folders["float"]))
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(logits(open_folder(tmp_path / "saved")), expected)
    with pytest.raises(UserError, match="offloaded, and only weights in memory can be summed; open the folder without"):
        model.dequantize()
    assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("form", ["int8", "elastic"])
@pytest.mark.parametrize("device_map", [PARTLY, {"": "disk"}])
def test_numbers_that_no_file_holds_as_they_are_used_are_refused(folders, tmp_path, form, device_map):
    with pytest.raises(UserError, match=rf"offloads modules to disk, where an? .*{form}.* loses U, V and S; leave"):
        offloaded(folders[form], tmp_path, device_map)
    assert slr_modules(offloaded(folders[form], tmp_path, {"": "cpu"}))


def test_a_map_that_transformers_infers_is_refused_too(folders, tmp_path):
    with pytest.raises(UserError, match="loses U, V and S"):
        offloaded(folders["elastic"], tmp_path, "auto", max_memory={"cpu": 20_000})


def test_the_host_of_a_gpu_counts_as_offloaded_and_alone_it_does_not():
    quantizer = SlrQuantizer(SlrConfig(numbers="int8"))
    for fine in (
        None,
        "auto",
        {"": "cpu"},
        {"": 0},
        {"a": 0, "b": 1},
        {"a": "mps", "b": "cpu"},
        {"": torch.device("cpu")},
    ):
        quantizer.validate_environment(device_map=fine)
    for lost, where in (({"a": 0, "b": "cpu"}, "cpu"), ({"a": 0, "b": "cpu", "c": "disk"}, "cpu and disk")):
        with pytest.raises(UserError, match=f"offloads modules to {where}, where"):
            quantizer.validate_environment(device_map=lost)


def test_offloaded_positions_are_refused(folders, tmp_path):
    with pytest.raises(UserError, match=r"positions of S in model\.layers.0.* are offloaded and would be lost"):
        offloaded(folders["float"], tmp_path, PARTLY, offload_buffers=True)
