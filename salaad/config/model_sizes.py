"""A LLaMA of a wanted number of parameters with the proportions of a known one, to train instead of cutting one."""

from dataclasses import replace

from salaad.common.errors import UserError
from salaad.common.formats import millions
from salaad.config.run import ModelConfig


def parameters(model: ModelConfig) -> int:
    """Parameters of an untied LLaMA with SwiGLU and RMSNorm: 2V·h + L(4h² + 3h·i + 2h) + h."""
    h, layers = model.hidden_size, model.num_hidden_layers
    return 2 * model.vocab_size * h + layers * (4 * h * h + 3 * h * model.intermediate_size + 2 * h) + h


def scaled_to(model: ModelConfig, count: int) -> ModelConfig:
    """Return a model of `count` parameters with the depth, the heads and nearly the proportions of `model`.

    The width h is a multiple of twice the heads, so that a head's width is even. To every h that fits belongs a SwiGLU
    width i that makes up the count; the h is taken whose ratio i/h is nearest to that of `model`. One unit of i is 3h·L
    parameters, so the count is met to within half of 3h·L.

    Raises:
        UserError: the count is below that of the smallest such model.
    """
    unit, layers = 2 * model.num_attention_heads, model.num_hidden_layers
    ratio = model.intermediate_size / model.hidden_size
    found = []
    for h in range(unit, 64 * model.hidden_size, unit):
        thinnest = replace(model, hidden_size=h, intermediate_size=1)
        left = count - parameters(thinnest)
        if left < 0:
            break
        found.append(replace(thinnest, intermediate_size=1 + round(left / (3 * h * layers))))
    if not found:
        least = parameters(replace(model, hidden_size=unit, intermediate_size=1))
        raise UserError(
            f"a model of {layers} layers, {model.num_attention_heads} heads and {model.vocab_size:,} tokens has at "
            f"least {millions(least)} parameters, more than {millions(count)}; give model.parameters {least} or more"
        )
    return min(found, key=lambda one: abs(one.intermediate_size / one.hidden_size - ratio))
