"""The parameters of any torch model: counting them, and restoring them after they were overwritten."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
@torch.no_grad()
def restored(weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Within this context the weights may be overwritten; at its end they are restored.

    What overwrites them must call `torch.clear_autocast_cache` before the model computes: within torch.autocast it
    computes with copies in a lower precision, which torch keeps until autocast ends, whatever becomes of the weights.
    """
    originals = {name: X.detach().clone() for name, X in weights.items()}
    try:
        yield
    finally:
        for name, X in weights.items():
            X.copy_(originals[name])
        torch.clear_autocast_cache()


@torch.no_grad()
def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Turn a model into `dtype` in place, except for the frequencies of rotary positions, as `from_pretrained` does.

    Rounded to bfloat16, they would turn position 4,095 by 1 to 5 radians too much or too little.
    """
    exact = [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq")
    ]
    model.to(dtype)
    for module, name, buffer in exact:
        module._buffers[name] = buffer
    return model


def count_parameters(model: nn.Module) -> int:
    """The number of parameters of a model; a tied weight counts once."""
    return sum(p.numel() for p in model.parameters())


def trained_parameters(model: nn.Module) -> int:
    """The number of trainable parameters of a model (`requires_grad`); a tied weight counts once."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
