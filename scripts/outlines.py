"""The model of a configuration, without weights."""

from transformers import PretrainedConfig, PreTrainedModel

from salaad.config.run import RunConfig
from salaad.model.build import describe_model, outline


def description_of(config: RunConfig) -> PretrainedConfig:
    """Return the architecture as transformers describes it."""
    return describe_model(config.model, config.data.sequence_length)


def outline_of(config: RunConfig) -> PreTrainedModel:
    """Return the model on the meta device: names and shapes without values."""
    return outline(description_of(config))
