"""The work of opening a folder grows with its blocks as the files do, counted in both formats."""

import copy
import math

import pytest

from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.elastic_file import SizeRange
from salaad.factored.fixed_size import factor, slr_modules
from salaad.model import weight_headers
from tests.factored.test_fixed_size import blocks_of, llama
from tests.helpers.models import open_folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of each format a folder with 2 layers and one with 12."""
    root = tmp_path_factory.mktemp("folders")
    for layers in (2, 12):
        model = llama(num_hidden_layers=layers)
        blocks = blocks_of(model)
        queue = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in blocks.items()})
        save_elastic(copy.deepcopy(model), [SizeRange(blocks, queue)], 1000, root / f"elastic-{layers}")
        factor(model, blocks).save_pretrained(root / f"fixed-{layers}")
    return root


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_headers_are_added_up_as_often_for_many_blocks_as_for_few(folders, kind, monkeypatch):
    sizes = []
    monkeypatch.setattr(weight_headers, "prod", lambda shape: sizes.append(shape) or math.prod(shape))
    times = []
    for layers in (2, 12):
        sizes.clear()
        headers = weight_headers.read_headers([folders / f"{kind}-{layers}" / "model.safetensors"])
        open_folder(folders / f"{kind}-{layers}")
        times.append(len(sizes) / len(headers))
    assert 0 < times[1] <= 1.1 * times[0]


@pytest.mark.parametrize("kind", ["fixed", "elastic"])
def test_transformers_gets_as_many_patterns_for_many_blocks_as_for_few(folders, kind):
    found = [open_folder(folders / f"{kind}-{layers}") for layers in (2, 12)]
    assert len(slr_modules(found[1])) > 4 * len(slr_modules(found[0])) > 0
    for patterns in ("_keys_to_ignore_on_load_unexpected", "_keys_to_ignore_on_load_missing"):
        few, many = (len(getattr(model, patterns)) for model in found)
        assert many == few
