"""A LLaMA of two layers for the tests of the methods, and the configuration of a method for it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig

IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(**sizes: int) -> LlamaForCausalLM:
    """Return a LLaMA, always with the same weights; hidden size 16 and feed-forward width 24 unless `sizes` differ."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=None, eos_token_id=None))


def config_of(method: str, *words: str) -> RunConfig:
    """Return the configuration of a run with this method and these options, at hidden size 16."""
    return read_command_line(["--method", method, "--model.hidden_size", "16", *words])[0]
