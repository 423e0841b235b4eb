"""Opened models of which a user replaces layers, or takes the base model, before they are saved."""

import pytest
import torch
from torch import nn
from transformers import AutoModel

from salaad.factored.fixed_size import factor, mark_factored, slr_modules
from tests.factored.test_fixed_size import Q, blocks_of, gpt2, llama
from tests.helpers.models import IDS, logits, open_folder
from tests.helpers.slr_weights import parts


def test_a_head_in_parts_that_was_resized_is_saved_dense(tmp_path):
    blocks = {"lm_head": parts(512, 32, 3, 100), Q: parts(32, 32, 2, 10)}
    factor(llama(), blocks).save_pretrained(tmp_path / "before")
    model = open_folder(tmp_path / "before")
    model.resize_token_embeddings(520)
    model.save_pretrained(tmp_path / "after")
    opened = open_folder(tmp_path / "after")
    assert list(slr_modules(opened)) == [Q] and opened.lm_head.weight.shape == (520, 32)
    assert torch.equal(logits(opened), logits(model))


def test_a_model_whose_only_block_was_replaced_opens(tmp_path):
    factor(llama(), {Q: parts(32, 32, 2, 10)}).save_pretrained(tmp_path / "before")
    model = open_folder(tmp_path / "before")
    model.set_submodule(Q, nn.Linear(32, 32))
    model.save_pretrained(tmp_path / "after")
    opened = open_folder(tmp_path / "after")
    assert not slr_modules(opened) and torch.equal(logits(opened), logits(model))


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
