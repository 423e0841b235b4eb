"""The function that opens a model on disk as the kind of deployment that its files call for."""

from functools import partial

from salaad.compression.deployment import Deployment
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.from_elastic import ElasticDeployment
from salaad.compression.from_nested import NestedDeployment
from salaad.compression.split import PostHoc
from salaad.compression.trained_blocks import config_of
from salaad.methods.registry import method_of
from salaad.model.folder_formats import is_any_size
from salaad.runs.model_on_disk import ModelOnDisk


def open_deployment(source: ModelOnDisk, post_hoc: PostHoc | None = None, command: str | None = None) -> Deployment:
    """Return the deployment that cuts the model on disk; arguments as of `CheckpointDeployment`."""
    if post_hoc is not None and not post_hoc.beside:
        return CheckpointDeployment(source, post_hoc, command)
    if is_any_size(getattr(source.folder.config, "quantization_config", None) or {}):
        return ElasticDeployment(source)
    config = config_of(source)
    if config is not None:
        method = method_of(config)
        widths_in = partial(method.widths_of, settings=config.settings)
        if widths_in(source.folder.outline) is not None:
            method.check(source.folder.outline, config)
            return NestedDeployment(source, widths_in)
    return CheckpointDeployment(source, post_hoc, command)
