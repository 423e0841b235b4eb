"""The choice between the factored and the dense form, for storing and for opening a block, against counted bytes."""

import copy
import json
from pathlib import Path

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from salaad.factored.fixed_size import factor, mark_factored, slr_modules
from salaad.factored.layers import SlrActivated, SlrLinear
from salaad.factored.replacement import put_dense
from salaad.factored.smaller_form import disk_bytes, form_for_file, opened_bytes, resident_bytes, takes_dense_form
from tests.factored.test_fixed_size import ARCHITECTURES, blocks_of, gpt2, llama
from tests.helpers.families import model_of
from tests.helpers.models import IDS, logits, open_folder
from tests.helpers.slr_weights import assert_opened_as, dense, distance, parts, whole_numbers

Q = "model.layers.0.self_attn.q_proj"


def stored_bytes(folder: Path, name: str = Q) -> int:
    """Return the bytes that a block's tensors take in the file."""
    tensors = load_file(folder / "model.safetensors")
    return sum(t.numel() * t.element_size() for key, t in tensors.items() if key.startswith(f"{name}."))


def save(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


# U and V of the 32×32 block have 192 numbers; an entry's place takes 3 to 4 bits in the file and 32 in memory.
@pytest.mark.parametrize(
    ("dtype", "nnz", "stored_in_parts", "opened_in_parts"),
    [
        (torch.float32, 300, True, True),
        (torch.float32, 500, True, False),
        (torch.float32, 700, True, False),
        (torch.float32, 800, False, False),
        (torch.bfloat16, 200, True, True),
        (torch.bfloat16, 500, True, False),
        (torch.bfloat16, 760, False, False),
    ],
)
def test_a_block_is_stored_packed_where_that_is_smaller_and_opens_in_the_form_that_takes_less_memory(
    tmp_path, dtype, nnz, stored_in_parts, opened_in_parts
):
    slr = whole_numbers(nnz)
    with form_for_file("float"):
        model = factor(llama().to(dtype), {Q: slr})
    assert isinstance(model.get_submodule(Q), SlrLinear) == stored_in_parts
    save(model, tmp_path / "first")
    assert disk_bytes(slr, dtype.itemsize) == stored_bytes(tmp_path / "first") - 32 * dtype.itemsize  # without its bias
    assert (disk_bytes(slr, dtype.itemsize) < 1024 * dtype.itemsize) == stored_in_parts
    opened = open_folder(tmp_path / "first")
    assert isinstance(opened.get_submodule(Q), SlrLinear) == opened_in_parts
    assert opened_bytes(model) == resident_bytes(opened.to(dtype))
    weight = opened.get_submodule(Q).weight.detach()
    assert weight.dtype == dtype and torch.equal(weight.double(), dense(slr))
    assert torch.equal(opened.get_submodule(Q).bias, model.get_submodule(Q).bias)
    # The opened block is saved in the form that it has now, and config.json lists it only if that is factored.
    again = open_folder(save(opened, tmp_path / "again"))
    entry = json.loads((tmp_path / "again" / "config.json").read_text()).get("quantization_config", {"blocks": {}})
    assert (Q in entry["blocks"]) == opened_in_parts == bool(slr_modules(again))
    assert torch.equal(again.get_submodule(Q).weight.detach(), weight)
    with form_for_file("float"):
        as_stored = open_folder(tmp_path / "first")
    assert isinstance(as_stored.get_submodule(Q), SlrLinear) == stored_in_parts
    save(as_stored, tmp_path / "copy")
    assert stored_bytes(tmp_path / "copy") == stored_bytes(tmp_path / "first")


@pytest.mark.parametrize("make", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_every_kind_of_layer_opens_dense_where_that_takes_less_memory(tmp_path, make):
    model = make()
    with form_for_file("float"):
        factor(model, blocks_of(model))
    model.bfloat16()
    opened = open_folder(save(model, tmp_path), dtype=torch.bfloat16)
    assert assert_opened_as(opened, model) > 0
    assert opened_bytes(model) == resident_bytes(opened.bfloat16()) < resident_bytes(model)
    assert distance(logits(opened.float()), logits(model.float())) < 0.02  # dense weights are sums rounded to bfloat16
    assert all(parameter.requires_grad for parameter in opened.parameters() if parameter.numel())


def test_the_base_model_of_a_folder_opens_dense_blocks_under_its_own_names(tmp_path):
    model = gpt2()
    with form_for_file("float"):
        factor(model, {"transformer.h.0.attn.c_proj": whole_numbers(500)})
    base = AutoModel.from_pretrained(save(model, tmp_path), local_files_only=True)
    assert not slr_modules(base)
    weight = base.get_submodule("h.0.attn.c_proj").weight.detach()
    assert torch.equal(weight.mT.double(), dense(whole_numbers(500)).mT)


def test_the_base_model_is_saved_without_the_head_that_it_lacks(tmp_path):
    model = llama()
    with form_for_file("float"):
        factor(model, {Q: whole_numbers(300), "lm_head": parts(512, 32, 3, 9000)})
    base = AutoModel.from_pretrained(save(model, tmp_path / "first"), local_files_only=True)
    again = AutoModel.from_pretrained(save(base, tmp_path / "again"), local_files_only=True)
    assert list(slr_modules(again)) == [Q.removeprefix("model.")]
    with torch.no_grad():
        assert torch.equal(again(IDS).last_hidden_state, base(IDS).last_hidden_state)


def test_a_model_whose_blocks_all_opened_dense_is_an_ordinary_one(tmp_path):
    model = llama()
    with form_for_file("float"):
        factor(model, {Q: whole_numbers(600)})
    opened = open_folder(save(model, tmp_path / "first"))
    before = logits(opened)
    assert torch.equal(logits(opened.dequantize()), before)
    opened = open_folder(tmp_path / "first")
    save(opened, tmp_path / "again")
    assert "quantization_config" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert torch.equal(logits(open_folder(tmp_path / "again")), before)


def test_a_layer_that_becomes_dense_keeps_what_moves_its_inputs_between_devices(tmp_path):
    model = llama()
    with form_for_file("float"):
        factor(model, {Q: whole_numbers(600)})
    layer, seen = model.get_submodule(Q), []

    class Watcher(ModelHook):
        def pre_forward(self, module, *args, **kwargs):
            seen.append(module)
            return args, kwargs

    add_hook_to_module(layer, Watcher())
    put_dense(model, Q, nn.Linear(32, 32))
    logits(model)
    assert seen == [model.get_submodule(Q)] and type(seen[0]) is nn.Linear


def test_an_embedding_that_scales_its_rows_stays_dense(tmp_path):
    model = model_of("gemma", vocab_size=512, tie_word_embeddings=False)
    slr = parts(512, model.config.hidden_size, 3, 500)
    twin = copy.deepcopy(model)
    twin.model.embed_tokens.weight.data.copy_(slr.dense())
    factor(model, {"model.embed_tokens": slr})
    assert not slr_modules(model)
    assert torch.equal(logits(open_folder(save(model, tmp_path))), logits(twin))


def test_a_layer_with_an_activation_between_its_factors_has_no_dense_form():
    layer, plain = SlrActivated(32, 32, 3, 900), SlrLinear(32, 32, 3, 900)
    for each in (layer, plain):
        each.fill(whole_numbers(900))
    assert takes_dense_form(plain, 4) and not takes_dense_form(layer, 4)
    assert opened_bytes(layer) == resident_bytes(layer) and opened_bytes(plain) == 4 * 1024 < resident_bytes(plain)


# U and V take 64 bytes and two scales per rank, S a byte per entry and a scale per 128; a dense block takes 2048 bytes.
@pytest.mark.parametrize(("rank", "nnz", "in_parts"), [(3, 1000, True), (16, 840, False), (16, 500, True)])
def test_in_int8_a_block_is_stored_packed_where_that_is_smaller_than_the_dense_floats(tmp_path, rank, nnz, in_parts):
    slr = parts(32, 32, rank, nnz)
    model = llama().to(torch.bfloat16)
    with form_for_file("int8"):
        factor(model, {Q: slr, "lm_head": parts(512, 32, 3, 500)})
    mark_factored(model, 1, in_int8=True)
    save(model, tmp_path)
    numbers = 64 * rank + nnz + 4 * (2 * rank + -(-nnz // 128))
    low = max(0, (1024 // nnz).bit_length() - 1)  # low bits of a place, stored as they are; the others in unary
    packed = numbers + -(-nnz * low // 8) + -(-(nnz + (1024 >> low) + 1) // 8)
    assert (packed < 2048) == in_parts
    assert stored_bytes(tmp_path) - 2 * 32 == (packed if in_parts else 2048)
    opened = open_folder(tmp_path)
    assert (type(opened.get_submodule(Q)) is nn.Linear) == (nnz > 350 or not in_parts)
    assert distance(opened.get_submodule(Q).weight.detach(), dense(slr)) < 0.02
