"""A LLaMA of two layers for the tests of the methods, and the configuration of a method for it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig

IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))


def llama(**sizes: int) -> LlamaForCausalLM:
    """Width 16, feed-forward width 24 unless told otherwise; always the same weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, **sizes}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=None, eos_token_id=None))


def config_of(method: str, *words: str) -> RunConfig:
    """What `--method` and the options give on a width of 16."""
    return read_command_line(["--method", method, "--model.hidden_size", "16", *words])[0]
