"""Attention without a mask in training: the same bits, no read by the host, and only for plainly causal models."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from salaad.model.causal import CAUSAL, is_plainly_causal
from salaad.model.loss import SummedLoss
from scripts.host_reads import HostReads

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
LLAMA = {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64}
IDS = torch.randint(0, 64, (3, 20), generator=torch.Generator().manual_seed(1))


def model_of(kind: str, **sizes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))


PLAIN = {
    "llama": LLAMA,
    "grouped": {**LLAMA, "num_key_value_heads": 2},
    "qwen2": {**LLAMA, "num_key_value_heads": 2},
    "qwen3": {**LLAMA, "num_key_value_heads": 4, "head_dim": 8},
    "mistral": {**LLAMA, "num_key_value_heads": 2, "sliding_window": None},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64, "n_positions": 64},
    "gpt_neox": {**LLAMA, "use_parallel_residual": True},
}


def loss_and_gradients(wrapper, ids):
    loss = wrapper(ids, ids)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in wrapper.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", PLAIN)
def test_without_a_mask_loss_and_gradients_are_the_same_bits_and_nothing_is_read(kind, monkeypatch):
    family = "llama" if kind == "grouped" else kind
    sizes = {**PLAIN[kind], "attention_dropout": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
    model = model_of(family, **sizes)
    assert is_plainly_causal(model)
    wrapper = SummedLoss(model.train())
    with HostReads() as reads:
        mine = loss_and_gradients(wrapper, IDS)
    assert reads.count == 0
    assert model.config._attn_implementation == "sdpa" and CAUSAL not in model.config.to_json_string()
    monkeypatch.setattr("salaad.model.causal._PLAIN", ())
    usual = loss_and_gradients(SummedLoss(model_of(family, **sizes).train()), IDS)
    assert torch.equal(mine[0], usual[0])
    assert all(torch.equal(mine[1][name], value) for name, value in usual[1].items())


def test_a_token_does_not_see_what_follows():
    model = model_of("llama", **LLAMA).eval()
    changed = IDS.clone()
    changed[:, 12:] = 0
    wrapper = SummedLoss(model)
    one, other = (wrapper.hidden_and_head(ids)[0].unflatten(0, IDS.shape) for ids in (IDS, changed))
    torch.testing.assert_close(one[:, :12], other[:, :12])
    assert (one[:, 12:] - other[:, 12:]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("mistral", {"sliding_window": 4}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}),
        ("gemma2", {"head_dim": 8, "num_key_value_heads": 2}),
    ],
)
def test_a_model_with_windows_keeps_its_masks(kind, sizes):
    assert not is_plainly_causal(model_of(kind, **{**LLAMA, **sizes}))


def test_another_implementation_of_attention_is_left_alone():
    model = model_of("llama", **LLAMA)
    model.set_attn_implementation("eager")
    assert not is_plainly_causal(model)
    SummedLoss(model)(IDS, IDS)
    assert model.config._attn_implementation == "eager"


def test_compiled_attention_has_no_mask_and_is_causal():
    model = model_of("llama", **LLAMA)
    wrapper, seen = SummedLoss(model), []

    def note(graph, inputs):
        seen.extend(node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target))
        return graph

    model.base_model.compile(backend=note)
    wrapper(IDS, IDS)
    assert len(seen) == 2
    for node in seen:
        mask = node.kwargs.get("attn_mask", node.args[3] if len(node.args) > 3 else None)
        assert mask is None and node.kwargs["is_causal"] is True


def test_recomputed_activations_see_the_same(monkeypatch):
    model = model_of("llama", **LLAMA)
    usual = loss_and_gradients(SummedLoss(model_of("llama", **LLAMA).train()), IDS)
    model.activation_checkpointing_enable()
    found = loss_and_gradients(SummedLoss(model.train()), IDS)
    assert torch.equal(found[0], usual[0])
    assert all(torch.equal(found[1][name], value) for name, value in usual[1].items())
