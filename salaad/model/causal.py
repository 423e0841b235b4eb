"""Causal attention over whole rows by the kernels' own causal mask, without building a mask tensor.

In every forward pass the mask code of transformers asks whether several sequences are packed into one row, and waits
for the device to find out; under torch.compile it builds the mask, which rules out torch's fastest attention kernels. A
row of this package is one sequence with its padding at the end, so the kernels' own causal mask is enough. `CAUSAL` is
the name under which the same attention function is registered with transformers, without a function that makes masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

CAUSAL = "salaad_causal"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)

# Architectures that need no other mask than the kernels' causal one, as long as no layer has a sliding window.
_PLAIN = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt_neox")


def is_plainly_causal(model: nn.Module) -> bool:
    """Whether in every layer each token attends to all tokens before it, computed by torch's attention (SDPA)."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in _PLAIN or config._attn_implementation != "sdpa":
        return False
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    windowed = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    return set(kinds) == {"full_attention"} and not windowed


@contextmanager
def without_mask(model: nn.Module) -> Iterator[None]:
    """Context manager in which a plainly causal model builds no mask; it must get whole rows and no attention mask."""
    if not is_plainly_causal(model):
        yield
        return
    usual, model.config._attn_implementation = model.config._attn_implementation, CAUSAL
    try:
        yield
    finally:
        model.config._attn_implementation = usual
