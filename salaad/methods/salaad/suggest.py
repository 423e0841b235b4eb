"""Suggested settings for a model and a number of steps, of which none has to be searched for."""

from typing import Any

from torch import nn

from salaad.config.methods import SalaadConfig
from salaad.config.suggestion import settings_for
from salaad.model.parameters import count_parameters
from salaad.model.roles import role_of
from salaad.model.weights import Weights, matrices, tied_modules

_LARGE = 0.1  # share of the parameters from which an embedding is worth compressing


def suggest(model: nn.Module, steps: int, *, elastic: bool = False, **settings: Any) -> SalaadConfig:
    """Suggest settings for training `model` over `steps` optimizer steps.

    K, c, Δα, Δβ, `onset` and `release` follow the length of the run (`salaad.config.suggestion`). The embedding becomes
    a block if it holds more than a tenth of the parameters and is not tied to the LM head; but not with `elastic`
    unless the LM head is a block, as a cut splits both later: in training, rows of rare tokens would be pulled far more
    often than they learn.

    Args:
        model: the model to be trained.
        steps: number of optimizer steps.
        elastic: for a model that is to be cut; give `Salaad` the steps as `total_steps` too, as it pulls in a part of
            the run alone.
        settings: fields of `SalaadConfig` that replace the suggested ones.

    Raises:
        UserError: steps are less than 1, or a setting is wrong.
    """
    split_later = elastic and not settings.get("lm_head")  # together with the LM head, which training does not split
    suggested = {**settings_for(steps, elastic=elastic), "embedding": not split_later and _has_large_embedding(model)}
    return SalaadConfig(**{**suggested, **settings})


def _has_large_embedding(model: nn.Module) -> bool:
    tied = tied_modules(model)
    tables = {name: X.numel() for name, X in Weights(matrices(model)).items() if role_of(name) == "embedding"}
    free = [size for name, size in tables.items() if name not in tied]
    return max(free, default=0) > _LARGE * count_parameters(model)
