"""Common model families by their default roles: the blocks, the weights reported as left out, and a small model."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModelForCausalLM

from salaad import Salaad, SalaadConfig
from salaad.common.errors import UserError
from salaad.factored.fixed_size import slr_modules
from salaad.model.build import ModelFolder
from salaad.model.coverage import coverage_rows, left_out
from salaad.model.roles import find_blocks
from tests.helpers.families import FAMILIES, IDS, model_of

ROUTERS = ("mlp.gate.weight", "shared_expert_gate.weight", "router.weight")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_blocks_are_all_matrices_of_the_layers_but_the_routers(family):
    model = model_of(family)
    matrices = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            matrices |= {f"{name}.{i}": matrix for i, matrix in enumerate(parameter)}
        elif parameter.ndim == 2 and (".layers." in name or ".h." in name) and not name.endswith(ROUTERS):
            matrices[name.removesuffix(".weight")] = parameter
    blocks = find_blocks(model, SalaadConfig())
    assert blocks.keys() == matrices.keys()
    assert len(blocks) >= 8
    assert all(blocks[name].data_ptr() == matrices[name].data_ptr() for name in blocks)
    assert all(torch.equal(blocks[name], matrices[name]) for name in blocks)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_is_in_a_block_or_told_to_be_left_out(family):
    model = model_of(family)
    blocks = find_blocks(model, SalaadConfig())
    out = left_out(model, blocks)
    inside = sum(X.numel() for X in blocks.values())
    assert inside + sum(one.parameters for one in out) == sum(p.numel() for p in model.parameters())
    names = {name for one in out for name in one.names}
    covered = {id(p) for p in blocks.parameters.values()}
    assert names == {name for name, p in model.named_parameters() if id(p) not in covered}
    assert not any("experts" in name for name in names)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_with_the_penalty_and_gets_its_admm_update(family):
    model = model_of(family)
    model.train()
    with Salaad(model, SalaadConfig(every=1, rho=0.1)) as salaad:
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.step()
        salaad.step()
        records = salaad.drain_records()
    assert [name for _, name, _ in records] == list(salaad.blocks)
    assert all(0 < record.rank_ratio <= 1 for *_, record in records)


@pytest.mark.parametrize(
    "family", ["llama", "phi3", "gpt2", "opt", "gpt_neox", "falcon", "deepseek_v3", "mixtral", "llama4_text"]
)
def test_a_small_model_of_the_family_is_written_and_opens_as_what_it_was(family, tmp_path):
    model = model_of(family)
    salaad = Salaad(model, SalaadConfig(every=1, rank_ratio=0.2, density=0.05, gamma=0.9))
    small = salaad.compress()
    assert slr_modules(small)
    with salaad.deployed(), torch.no_grad():
        expected = model(input_ids=IDS).logits
    small.save_pretrained(tmp_path / "small")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "small", local_files_only=True)
    assert slr_modules(opened).keys() == slr_modules(small).keys()
    with torch.no_grad():
        torch.testing.assert_close(opened(input_ids=IDS).logits, expected, rtol=1e-3, atol=1e-4)


# ---- what is covered by no role


def test_a_fused_weight_of_multihead_attention_and_a_weight_normed_layer_are_named_as_left_out():
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(8, 2),
            "normed": parametrizations.weight_norm(nn.Linear(8, 6)),
            "plain": nn.Linear(6, 4),
            "kernel": nn.Conv1d(4, 4, 3),
            "cell": nn.LSTM(4, 4),
        }
    )
    blocks = find_blocks(model, SalaadConfig(roles=("re:plain",)))
    reasons = {name: one.reason for one in left_out(model, blocks) for name in one.names}
    assert "nn.MultiheadAttention" in reasons["attention.in_proj_weight"]
    assert "weight normalization" in reasons["normed.parametrizations.weight.original1"]
    assert "without a role" in reasons["attention.out_proj.weight"]
    assert reasons["kernel.weight"].startswith("3-D")
    assert "no module's `weight`" in reasons["cell.weight_ih_l0"]
    assert "plain.weight" not in reasons


def test_print_says_how_much_of_the_model_is_blocks_and_what_is_not():
    model = model_of("mixtral")
    salaad = Salaad(model, SalaadConfig())
    text = repr(salaad)
    blocks = sum(X.numel() for X in salaad.weights.values())
    share = blocks / sum(p.numel() for p in model.parameters())
    assert f"blocks: {2 * (4 + 4 * 2)}, {blocks / 1e6:.2f} M of" in text
    assert f"({share:.0%})" in text
    for what in ("embedding, not asked for", "lm_head, not asked for", "biases and norms", "without a role"):
        assert f"left out: {what}" in text or what in text
    assert dict(coverage_rows(model, salaad.weights))["blocks"] in text


def test_a_model_of_no_known_family_is_asked_for_a_pattern():
    with pytest.raises(UserError, match=r"no known family; name its projections by the role re:PATTERN.*such as 0, 1"):
        find_blocks(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), SalaadConfig())


def test_a_model_of_more_than_text_is_refused_in_a_sentence(tmp_path):
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 24}
    text = {**heads, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 40}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config={**heads, "image_size": 28})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="is a gemma3 model of more than text; give the folder of a language model al"):
        ModelFolder(tmp_path)
