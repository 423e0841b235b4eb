"""Which weights of which model become blocks."""

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PhiConfig, PhiForCausalLM

from salaad.common.errors import UserError
from salaad.config.methods import SalaadConfig
from salaad.model.roles import find_blocks

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "o_proj"}
PROJECTIONS_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def llama(tied: bool = False, layers: int = 3) -> LlamaForCausalLM:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=layers, tie_word_embeddings=tied))


def gpt2(layers: int = 2) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=layers, n_head=2, vocab_size=16, n_positions=8))


def plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6), nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 5, bias=False), nn.Embedding(7, 3))
    )


def names(model: nn.Module, *roles: str, **settings) -> list[str]:
    return list(find_blocks(model, SalaadConfig(roles=roles, **settings)))


def llama_names(layers: int = 3) -> list[str]:
    return [
        f"model.layers.{i}.{part}.{module}"
        for i in range(layers)
        for part, modules in (("self_attn", PROJECTIONS), ("mlp", PROJECTIONS_MLP))
        for module in modules.values()
    ]


def gpt2_names(*modules: str, layers: int = 2) -> list[str]:
    return [f"transformer.h.{i}.{module}" for i in range(layers) for module in modules]


@pytest.mark.parametrize("tied", [False, True])
def test_llama_gives_its_seven_projections_in_every_layer(tied):
    model = llama(tied)
    blocks = find_blocks(model, SalaadConfig())
    assert sorted(blocks) == sorted(llama_names())
    assert len(blocks) == 7 * 3
    assert all(blocks[name] is model.get_submodule(name).weight for name in blocks)


def test_blocks_come_in_the_models_own_order_whatever_the_order_of_the_roles():
    order = [name for name, _ in llama().named_modules() if name in llama_names()]
    assert names(llama()) == order
    assert names(llama(), "down", "up", "gate", "o", "v", "k", "q") == order
    assert names(llama(), "q", "q", "re:q_proj$") == [name for name in order if name.endswith("q_proj")]


@pytest.mark.parametrize(("role", "module"), [*PROJECTIONS.items(), *PROJECTIONS_MLP.items()])
def test_a_role_selects_its_projection_in_every_layer(role, module):
    assert names(llama(), role) == [name for name in llama_names() if name.endswith(module)]


@pytest.mark.parametrize(
    ("switches", "added"),
    [
        ({"embedding": True}, ["model.embed_tokens"]),
        ({"lm_head": True}, ["lm_head"]),
        ({"embedding": True, "lm_head": True}, ["model.embed_tokens", "lm_head"]),
    ],
)
def test_embedding_and_lm_head_are_added_by_their_switches_or_as_roles(switches, added):
    assert set(names(llama(), **switches)) == set(llama_names()) | set(added)
    assert set(names(llama(), "q", **switches)) == set(names(llama(), "q")) | set(added)
    assert names(llama(), *switches) == added


@pytest.mark.parametrize(
    ("switches", "name"),
    [
        ({"embedding": True}, "model.embed_tokens"),
        ({"lm_head": True}, "lm_head"),
        ({"embedding": True, "lm_head": True}, "model.embed_tokens"),
    ],
)
def test_a_tied_embedding_is_one_block_under_the_name_that_was_asked_for(switches, name):
    model = llama(tied=True)
    blocks = find_blocks(model, SalaadConfig(**switches))
    assert len(blocks) == 7 * 3 + 1
    assert blocks[name] is model.model.embed_tokens.weight is model.lm_head.weight


def test_gpt2_gives_its_fused_attention_output_and_mlp_weights():
    model = gpt2()
    blocks = find_blocks(model, SalaadConfig())
    assert list(blocks) == gpt2_names("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert blocks["transformer.h.0.attn.c_attn"].shape == (8, 24)  # Conv1D keeps its weight transposed


@pytest.mark.parametrize(
    ("role", "module"),
    [
        ("q", "attn.c_attn"),
        ("k", "attn.c_attn"),
        ("v", "attn.c_attn"),
        ("o", "attn.c_proj"),
        ("up", "mlp.c_fc"),
        ("down", "mlp.c_proj"),
    ],
)
def test_gpt2_roles_tell_the_two_c_proj_apart(role, module):
    assert names(gpt2(), role) == gpt2_names(module)


def test_gpt2_has_its_tied_embedding_once():
    assert names(gpt2(), "embedding", "lm_head") == ["transformer.wte"]
    assert names(gpt2(), "lm_head") == ["lm_head"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("re:.", ["0", "2.0", "2.1"]),  # the LayerNorm's weight has one dimension
        (r"re:^2\.", ["2.0", "2.1"]),
        ("re:^0$", ["0"]),
        (r"re:\.0$", ["2.0"]),
    ],
)
def test_a_pattern_is_searched_in_the_module_names_of_any_model(pattern, found):
    assert names(plain(), pattern) == found


def test_patterns_and_roles_add_up():
    assert names(llama(), "q", r"re:layers\.0\..*down") == [
        name for name in names(llama()) if "q_proj" in name or name.endswith("layers.0.mlp.down_proj")
    ]


@pytest.mark.parametrize(
    ("model", "roles", "pieces"),
    [
        (llama, ("query",), ("'query'", "q, k, v, o", "re:PATTERN")),
        (llama, ("re:nothing",), ("'re:nothing'", "matches no 2-D weight")),
        (llama, ("q", "re:["), ("'re:['", "no regular expression")),
        (gpt2, ("gate",), ("'gate'", "matches no 2-D weight", "q, k, v, o, up, down")),
        (plain, ("q",), ("'q'", "matches no 2-D weight", "re:PATTERN")),
        (plain, (), ("no known family", "--roles 're:PATTERN'", "such as 0, 2.0")),
        (plain, ("re:^1$",), ("'re:^1$'", "matches no 2-D weight")),
        (nn.Identity, (), ("no known family", "no 2-D weight")),
    ],
)
def test_what_selects_nothing_is_refused_by_name(model, roles, pieces):
    with pytest.raises(UserError) as error:
        names(model(), *roles)
    assert all(piece in str(error.value) for piece in pieces), str(error.value)


@pytest.mark.parametrize("switches", [{"embedding": True}, {"lm_head": True}])
def test_a_model_of_no_known_family_is_refused_also_where_its_embedding_or_head_could_be_found(switches):
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 16}
    model = PhiForCausalLM(PhiConfig(**sizes, num_hidden_layers=1))
    with pytest.raises(UserError, match=r"no known family; .* such as model\.layers\.0\.self_attn\.q_proj, model"):
        names(model, **switches)
    assert len(names(model, "re:layers", **switches)) == 7


@pytest.mark.parametrize("wrapped", [["q_proj"], ["down_proj"]])
def test_a_model_wrapped_by_peft_is_refused_with_the_reason_and_one_taken_out_of_it_is_not(wrapped):
    adapted = peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=wrapped))
    with pytest.raises(UserError, match=r"wrapped by PEFT.*merge_and_unload"):
        names(adapted)
    assert names(adapted.merge_and_unload()) == llama_names()


@pytest.mark.parametrize("switch", ["embedding", "lm_head"])
def test_a_switch_for_what_the_model_does_not_have_is_refused(switch):
    with pytest.raises(UserError, match=switch):
        names(plain(), "re:.", **{switch: True})


def test_weights_that_are_no_parameters_are_no_blocks():
    model = plain()
    model[0].weight = None
    model[2][0].register_parameter("weight", None)
    model.buffer = nn.Module()
    model.buffer.register_buffer("weight", torch.ones(3, 3))
    assert names(model, "re:.") == ["2.1"]
