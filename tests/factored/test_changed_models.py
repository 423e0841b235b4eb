"""Opened models of which a user replaces layers, or takes the base model, before they are saved."""

import copy
import json
import warnings
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModel

from salaad.common.errors import UserError
from salaad.factored.fixed_size import factor, mark_factored, slr_modules
from salaad.factored.smaller_form import form_for_file
from tests.factored.test_fixed_size import Q, blocks_of, gpt2, llama
from tests.helpers.models import IDS, logits, open_folder
from tests.helpers.slr_weights import parts, whole_numbers


def test_a_head_in_parts_that_was_resized_is_saved_dense(tmp_path):
    blocks = {"lm_head": parts(512, 32, 3, 100), Q: parts(32, 32, 2, 10)}
    factor(llama(), blocks).save_pretrained(tmp_path / "before")
    model = open_folder(tmp_path / "before")
    model.resize_token_embeddings(520)
    model.save_pretrained(tmp_path / "after")
    opened = open_folder(tmp_path / "after")
    assert list(slr_modules(opened)) == [Q] and opened.lm_head.weight.shape == (520, 32)
    assert torch.equal(logits(opened), logits(model))


@pytest.mark.parametrize("in_int8", [False, True])
def test_parameters_are_counted_anew_when_a_changed_model_is_saved(tmp_path, in_int8):
    """A block that opens dense still counts as U, V and S, as do rows of a table that were not there before."""
    blocks = {"lm_head": parts(512, 32, 3, 100), Q: parts(32, 32, 2, 10)}
    dense_in_memory = {"model.layers.1.self_attn.q_proj": parts(32, 32, 3, 560)}
    others = sum(p.numel() for n, p in llama().named_parameters() if n.removesuffix(".weight") not in blocks)
    others += 3 * 64 + 560 - 32 * 32
    with form_for_file("int8" if in_int8 else "float"):
        model = factor(llama(), blocks | dense_in_memory)
        mark_factored(model, others + 3 * (512 + 32) + 100 + 2 * 64 + 10, in_int8)
        model.save_pretrained(tmp_path / "first")
    model = open_folder(tmp_path / "first")
    assert slr_modules(model).keys() == blocks.keys()
    AutoModel.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "again")
    model.resize_token_embeddings(700)
    model.save_pretrained(tmp_path / "resized")
    found = {
        name: json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["parameters"]
        for name in ("first", "base", "again", "resized")
    }
    base = others + 2 * 64 + 10
    whole = base + 3 * (512 + 32) + 100
    resized = base + 188 * 32 + 700 * 32
    assert found == {"first": whole, "base": base, "again": whole, "resized": resized}


@pytest.mark.parametrize("size", [520, 500, 512])
def test_an_embedding_in_parts_is_resized_dense_and_a_head_after_it(tmp_path, size):
    blocks = {name: parts(512, 32, 3, 100, seed=k) for k, name in enumerate(("model.embed_tokens", "lm_head"))}
    factor(llama(pad_token_id=2), blocks | {Q: parts(32, 32, 2, 10)}).save_pretrained(tmp_path / "before")
    model = open_folder(tmp_path / "before")
    ids = IDS % 500
    with torch.no_grad():
        expected = model(ids).logits
    table = model.resize_token_embeddings(size)
    assert table is model.get_input_embeddings() and table.weight.shape == (size, 32)
    assert table.weight.requires_grad and (size == 512 or table.padding_idx == 2)
    assert list(slr_modules(model)) == ([Q] if size != 512 else ["model.embed_tokens", Q, "lm_head"])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits[..., :500], expected[..., :500], rtol=1e-4, atol=1e-5)
    model.save_pretrained(tmp_path / "after")
    opened = open_folder(tmp_path / "after")
    assert slr_modules(opened).keys() == slr_modules(model).keys()
    with torch.no_grad():
        assert torch.equal(opened(ids).logits, model(ids).logits)


def test_a_model_whose_only_block_was_replaced_opens(tmp_path):
    factor(llama(), {Q: parts(32, 32, 2, 10)}).save_pretrained(tmp_path / "before")
    model = open_folder(tmp_path / "before")
    model.set_submodule(Q, nn.Linear(32, 32))
    model.save_pretrained(tmp_path / "after")
    opened = open_folder(tmp_path / "after")
    assert not slr_modules(opened) and torch.equal(logits(opened), logits(model))


@pytest.mark.parametrize("form", ["float", "int8", "all dense"])
def test_a_given_state_dict_is_what_is_saved(tmp_path, form):
    if form == "all dense":
        with form_for_file("float"):
            model = factor(llama(), {Q: whole_numbers(600)})
    else:
        model = factor(llama(), blocks_of(llama()))
        mark_factored(model, 1000, form == "int8")
    model.save_pretrained(tmp_path / "before")
    model = open_folder(tmp_path / "before")
    assert bool(slr_modules(model)) == (form != "all dense")
    average = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in average.parameters():
            parameter.mul_(0.9).add_(0.01)
    before, expected = logits(model), logits(average)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # int8 has become floats
        model.save_pretrained(save_directory=tmp_path / "after", state_dict=average.state_dict())
    assert torch.equal(logits(open_folder(tmp_path / "after")), expected)
    assert torch.equal(logits(model), before)
    model.save_pretrained(tmp_path / "own")
    assert torch.equal(logits(open_folder(tmp_path / "own")), before)


def test_a_process_that_saves_no_tensors_gives_an_empty_state_dict(tmp_path):
    """As accelerate.get_state_dict returns on all ranks of FSDP but the first."""
    model = factor(llama(), {Q: parts(32, 32, 2, 10)})
    model.save_pretrained(tmp_path, is_main_process=False, state_dict={})
    assert not [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert not (tmp_path / "config.json").exists()  # which the first rank alone writes


def test_a_given_state_dict_of_another_form_is_refused(tmp_path):
    model = factor(llama(), {Q: parts(32, 32, 2, 10)})
    with pytest.raises(UserError, match=rf"no {Q}\.U, .* call model\.dequantize\(\) first"):
        model.save_pretrained(tmp_path, state_dict=llama().state_dict())


def test_a_model_whose_blocks_opened_dense_is_for_transformers_an_ordinary_one(tmp_path):
    with form_for_file("float"):
        factor(llama(), {Q: whole_numbers(600)}).save_pretrained(tmp_path)
    model = open_folder(tmp_path)
    for each in (model, model.base_model):
        assert getattr(each, "hf_quantizer", None) is None  # generate() compiles no model that has one
    assert model.dequantize() is model and model.dequantize(torch.bfloat16).dtype == torch.bfloat16
    gone = weakref.ref(model)
    del model, each
    assert gone() is None


@pytest.mark.parametrize("in_int8", [False, True])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_base_model_of_an_opened_model_is_saved_and_so_is_the_model_after_it(tmp_path, make, in_int8):
    model = factor(make(), blocks_of(make()))
    mark_factored(model, 1000, in_int8)
    model.save_pretrained(tmp_path / "whole")
    model = open_folder(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "again")
    base = AutoModel.from_pretrained(tmp_path / "base")
    assert slr_modules(base)
    with torch.no_grad():
        assert torch.equal(base(IDS).last_hidden_state, model.base_model(IDS).last_hidden_state)
    assert torch.equal(logits(open_folder(tmp_path / "again")), logits(model))
    dense = model.dequantize()
    dense.base_model.save_pretrained(tmp_path / "dense")
    with torch.no_grad():
        found = [
            each(IDS).last_hidden_state for each in (AutoModel.from_pretrained(tmp_path / "dense"), dense.base_model)
        ]
    assert torch.equal(*found)
