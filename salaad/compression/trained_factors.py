"""U·V + S of a checkpoint whose method trains the factors themselves, such as sltrain."""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from salaad.common.errors import UserError
from salaad.common.validation import section
from salaad.config.methods import SETTINGS
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.registry import method_of
from salaad.model.build import outline
from salaad.model.weights import tied_modules
from salaad.runs.model_on_disk import ModelOnDisk


class TrainedFactors:
    """The blocks of a checkpoint as U·V + S, if its method trained U, V and S themselves.

    Args:
        source: the model on disk.

    Attributes:
        outlines: block → U·V + S with shapes but without numbers; empty for a method that trains no such factors.
    """

    def __init__(self, source: ModelOnDisk) -> None:
        self.source, self.outlines, self._model = source, {}, None
        config = config_of(source)
        if source.weights is None or config is None:
            return
        self._method, self._model = method_of(config), outline(source.folder.config)
        if getattr(source.folder.config, "quantization_config", None) is None:
            self._method.check(self._model, config)
            self._method.rebuild(self._model, config)
            self.outlines = self._method.slr_parts(self._model)

    def parts(self) -> Iterator[tuple[str, Slr]]:
        """Yield name and U·V + S of every block, with singular values and entries in descending order.

        Raises:
            UserError: the file of weights does not fit the configuration, or holds numbers that are not finite.
        """
        path = self.source.weights
        try:
            missing, unknown = self._model.load_state_dict(load_file(path), assign=True, strict=False)
            tied = {f"{name}.weight" for name in tied_modules(self._model)}  # the file has it under one name alone
            if unknown or set(missing) - tied:
                raise ValueError(f"it has no {min(set(missing) - tied, default='')}, or {unknown[:1]} too many")
            self._model.tie_weights()
        except (RuntimeError, ValueError, SafetensorError, OSError) as error:
            why = " ".join(str(error).split())[:200]
            raise UserError(f"{path} does not fit its configuration ({why}); give a whole checkpoint") from None
        for name, slr in self._method.slr_parts(self._model).items():
            if not all(part.isfinite().all() for part in (slr.U, slr.V, slr.values)):
                raise UserError(f"{name} in {path} is not finite; give an earlier checkpoint")
            Q, R = torch.linalg.qr(slr.U)
            yield name, Slr.from_factors(Q, R @ slr.V, slr.sparse())


def config_of(source: ModelOnDisk) -> RunConfig | None:
    """Return the method of a checkpoint's run and its settings, all else by default; None if the method is not known.

    It is not known for a folder that is no checkpoint, nor if another program registered it: `model/` is all there is.
    """
    method: Any = source.run.get("method", "salaad")
    if not source.is_checkpoint or not isinstance(method, str) or method not in SETTINGS:
        return None
    settings = section(SETTINGS[method], source.run.get(method, {}), source.folder.path)
    return RunConfig(method=method, sections={method: settings})
