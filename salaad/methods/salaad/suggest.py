"""Settings for a model and a number of steps, of which nothing has to be searched."""

from typing import Any

from torch import nn

from salaad.config.methods import SalaadConfig
from salaad.config.suggestion import settings_for
from salaad.model.parameters import count_parameters
from salaad.model.roles import role_of
from salaad.model.weights import Weights, matrices

_LARGE = 0.1  # share of the parameters from which an embedding is worth compressing


def suggest(model: nn.Module, steps: int, *, elastic: bool = False, **settings: Any) -> SalaadConfig:
    """Settings for training `model` over so many optimizer steps.

    K, c, Δα, Δβ and `release` follow the length of the run (`salaad.config.suggestion`). The embedding is among the
    blocks where it holds more than a tenth of the parameters and is not tied to the head; but not in a model that is to
    be cut, where it is split with the head: rows of rare tokens would be drawn far more often than they learn.

    Args:
        model: to be trained.
        steps: of the optimizer.
        elastic: for a model that is to be cut; give `Salaad` the steps as `total_steps` too, as the pull ends half way.
        settings: any of `SalaadConfig`, which hold instead of what would be suggested.

    Raises:
        UserError: steps are less than 1, or a setting is wrong.
    """
    split_later = elastic and not settings.get("lm_head")  # beside the head, which no training has split
    suggested = {**settings_for(steps, elastic=elastic), "embedding": not split_later and _has_large_embedding(model)}
    return SalaadConfig(**{**suggested, **settings})


def _has_large_embedding(model: nn.Module) -> bool:
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    tables = [X.numel() for name, X in Weights(matrices(model)).items() if role_of(name) == "embedding"]
    return bool(tables) and not tied and max(tables) > _LARGE * count_parameters(model)
