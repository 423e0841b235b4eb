"""Attention of whole rows, each token to all before it, without a mask that has to be made and looked at.

The mask code of transformers asks in every forward whether several sequences are packed into one row, and waits for the
device to know it; while it is compiled it makes the mask, which keeps torch's fastest attention kernels away. A row of
this package is one sequence whose padding comes last, so the kernels' own causal mask is all there is. Under the name
`CAUSAL` the same attention function is known to transformers, without a way to make a mask.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

CAUSAL = "salaad_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)

# Architectures whose mask is that of the causal kernel alone, as long as no layer has a window.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox")


def is_plainly_causal(model: nn.Module) -> bool:
    """Whether every layer of a model lets each token see all tokens before it, and computes so by torch's attention."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in _PLAIN or config._attn_implementation != "sdpa":
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return set(kinds) == {"full_attention"} and not windowed


@contextmanager
def without_mask(model: nn.Module) -> Iterator[None]:
    """Within this context a model that is plainly causal makes no mask; it has to be given none, and whole rows."""
    if not is_plainly_causal(model):
        yield
        return
    usual, model.config._attn_implementation = model.config._attn_implementation, CAUSAL
    try:
        yield
    finally:
        model.config._attn_implementation = usual
