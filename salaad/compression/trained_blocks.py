"""L + S of a checkpoint's blocks as they were trained: beside X by SALAAD, or in its place, as by sltrain."""

import math
from collections.abc import Collection, Iterator
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
from salaad.methods.salaad.storage import read_index, stored_blocks
from salaad.methods.salaad.surrogate import low_rank_of
from salaad.model.build import outline
from salaad.model.weight_headers import check_block
from salaad.model.weights import tied_modules
from salaad.prox import soft_threshold
from salaad.runs.model_on_disk import ModelOnDisk


class TrainedSurrogates:
    """The blocks of a checkpoint that has L + S beside X.

    Args:
        source: the model on disk.

    Attributes:
        shapes: block → (n, m).
        spared: by how many parameters X is smaller than the dense model: not at all.

    Raises:
        UserError: a block has another shape than the weight of its name.
    """

    spared = 0

    def __init__(self, source: ModelOnDisk) -> None:
        self._folder, self.shapes = source.surrogate, {}
        for name, entry in read_index(source.surrogate).items():
            shape = check_block(source.folder.outline, name, entry["rank"], entry["nnz"])
            if list(shape) != entry["shape"]:
                raise UserError(
                    f"{name} is {shape} in the model and {entry['shape']} in L + S; give a whole checkpoint"
                )
            self.shapes[name] = shape

    def parts(self, names: Collection[str]) -> Iterator[tuple[str, Slr]]:
        """Yield name and L + S of the named blocks, one after the other.

        Raises:
            UserError: a block holds numbers that are not finite, and so has no singular values.
        """
        for name, entry, state in stored_blocks(self._folder, names):
            T, R, tau = state["target"], state["residual"], state["thresholds"][2]
            L, S = low_rank_of(T, R, tau), soft_threshold(R, tau)
            if not (L.isfinite().all() and S.isfinite().all()):
                raise UserError(f"{name} in {self._folder} is not finite; give an earlier checkpoint")
            yield name, Slr.from_parts(L, S, entry["rank"])


class TrainedFactors:
    """The blocks of a checkpoint whose method trained U, V and S themselves.

    Args:
        source: the model on disk.

    Attributes:
        shapes: block → (n, m); empty for a method that trains no such factors.
        spared: by how many parameters the model is smaller than the dense one.
    """

    def __init__(self, source: ModelOnDisk) -> None:
        self.source, self.shapes, self.spared, self._model = source, {}, 0, None
        config = config_of(source)
        if source.weights is None or config is None:
            return
        self._method, self._model = method_of(config), outline(source.folder.config)
        if getattr(source.folder.config, "quantization_config", None) is None:
            self._method.check(self._model, config)
            self._method.rebuild(self._model, config)
            outlines = self._method.slr_parts(self._model)
            self.shapes = {name: slr.shape for name, slr in outlines.items()}
            self.spared = sum(math.prod(slr.shape) - slr.parameters for slr in outlines.values())

    def parts(self, names: Collection[str]) -> Iterator[tuple[str, Slr]]:
        """Yield name and U·V + S of the named blocks, with singular values and entries in descending order.

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
            if name not in names:
                continue
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
