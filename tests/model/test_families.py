"""The usual families by their default roles: what becomes a block, what is told to be left out, and a small model."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from salaad import Salaad, SalaadConfig
from salaad.common.errors import UserError
from salaad.factored.fixed_size import slr_modules
from salaad.model.coverage import left_out, said
from salaad.model.roles import find_blocks

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {**EXPERTS, **LATENT, "num_key_value_heads": 4, "n_routed_experts": 4, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "falcon": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 32},
    "llama4_text": {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8},
    "deepseek_v2": {**DEEPSEEK, "n_group": 1, "topk_group": 1},
    "deepseek_v3": {**DEEPSEEK, "n_group": 2, "topk_group": 1},
}
ROUTERS = ("mlp.gate.weight", "shared_expert_gate.weight", "router.weight")
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(family: str, **other: int) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **other})
    ).eval()


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
        }
    )
    blocks = find_blocks(model, SalaadConfig(roles=("re:plain",)))
    reasons = {name: one.reason for one in left_out(model, blocks) for name in one.names}
    assert "nn.MultiheadAttention" in reasons["attention.in_proj_weight"]
    assert "weight normalization" in reasons["normed.parametrizations.weight.original1"]
    assert "without a role" in reasons["attention.out_proj.weight"]
    assert reasons["kernel.weight"].startswith("3-D")
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
    assert dict(said(model, salaad.weights))["blocks"] in text


def test_a_model_of_no_known_family_is_asked_for_a_pattern():
    with pytest.raises(UserError, match=r"no known family; name its weights by the role re:PATTERN.*such as 0, 1"):
        find_blocks(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)), SalaadConfig())
