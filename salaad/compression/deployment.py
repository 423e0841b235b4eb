"""One checkpoint, any size: its L + S in order, cut to a budget, refined, put into a model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from salaad import hpa
from salaad.common.errors import UserError
from salaad.compression.calibration import CalibrationText, output_weights
from salaad.compression.refinement import refine
from salaad.compression.split import Parts, PostHoc, cached_parts, post_hoc_parts, trained_parts
from salaad.compression.variants import Variant
from salaad.config.run import DataConfig, ModelConfig
from salaad.energy_allocation import Line, Spectra, allocate_by_energy, implied_kappa
from salaad.factored.slr import Slr
from salaad.methods.salaad.storage import read_index
from salaad.model.build import count_parameters, describe_model, load_model, outline
from salaad.model.loss import SummedLoss
from salaad.model.roles import find_blocks
from salaad.model.weight_headers import check_block
from salaad.runs.model_on_disk import Source


class Opened(NamedTuple):
    """A variant in a model: the model, its parameters by the paper's count, and κ of what was removed."""

    model: PreTrainedModel
    parameters: int
    kappa: float | None


class Deployment:
    """The sizes a model on disk can be cut to, and the cuts.

    Args:
        source: the model.
        post_hoc: split X after the fact instead of taking L + S from training.

    `dense` are the model's parameters, `fixed` those of them that are never compressed, `vocab_size` and `positions`
    its vocabulary and longest row; `kind` names where L + S come from.

    Raises:
        UserError: a split is asked of a model whose weights are stored in parts.
    """

    def __init__(self, source: Source, post_hoc: PostHoc | None = None) -> None:
        self.source, self.post_hoc = source, post_hoc
        self.calibration: CalibrationText | None = None
        model = outline(describe_model(ModelConfig(path=str(source.model)), 0))
        self.dense, self.vocab_size = count_parameters(model), model.config.vocab_size
        self.positions = getattr(model.config, "max_position_embeddings", None)
        if post_hoc is not None and getattr(model.config, "quantization_config", None):
            raise UserError(f"{source.name} is stored in parts already; give the dense model it was made of")
        if post_hoc is not None:
            names = list(find_blocks(model, post_hoc.blocks))
            self._shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in names}
        else:
            index = {} if source.surrogate is None else read_index(source.surrogate)
            self._shapes = {name: check_trained(model, name, entry) for name, entry in index.items()}
        self._names = names = list(self._shapes)
        self.fixed = self.dense - sum(n * m for n, m in self._shapes.values())
        self.kind = "trained"
        if post_hoc is not None:
            how = f"{post_hoc.blocks.gamma} {post_hoc.blocks.energy} {names} {astuple(post_hoc)[2:]}"
            self.kind = f"{post_hoc.method}-{sha256(how.encode()).hexdigest()[:8]}"
        self._models: dict[torch.dtype, PreTrainedModel] = {}

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError if a variant cannot be had, before anything is computed."""
        for variant in variants:
            if variant.stored and not self._names:
                raise UserError(
                    f"{self.source.name} was not written with --elastic and holds one size, so {variant.name} cannot "
                    "be cut from it; give the checkpoint it was made of"
                )
            if variant.stored:
                raise UserError(
                    f"{self.source.name} was not written with --elastic, so it keeps no order of its own to cut "
                    f"{variant.name} by; give {variant.name}@energy, or {variant.name}@0.6 for HPA"
                )
            if variant.name != "X" and not self._names:
                raise UserError(
                    f"{self.source.name} holds no L and S, so {variant.name} cannot be made of it; give a checkpoint "
                    "trained with method salaad, or make L + S with compress.py --rpca"
                )
            if variant.budget is not None and variant.budget < self.fixed:
                hpa.to_remove({}, fixed=self.fixed, budget=variant.budget)  # says what the floor is

    @cached_property
    def parts(self) -> Parts:
        """L + S of every block as trained (or as a split finds it), computed once and kept in the source's cache."""
        if self.post_hoc is None:
            make = partial(trained_parts, self.source.surrogate, self._names)
        else:
            make = partial(post_hoc_parts, self.post_hoc, self._dense_weights, best_device())
        return cached_parts(self.source.cache / f"{self.kind}.safetensors", self._shapes, make)

    @cached_property
    def whole(self) -> int:
        """Parameters of L + S with all else."""
        return self.parameters(self.parts)

    @property
    def share(self) -> float:
        """L's share of the parameters of L + S, which is the κ at which both sides lose the same fraction."""
        blocks = _sizes(self.parts)
        return implied_kappa(blocks, dict.fromkeys(blocks, (0, 0))) or 0.0

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """What the loss feels of each output of a block, from the calibration text."""
        device = best_device()
        model = load_model(self.source.model, torch.float32, device)
        return output_weights(SummedLoss(model), self._names, self.calibration.batches(), device)

    def calibrate(self, data: DataConfig, sequences: int) -> None:
        """Name the text that calibrated variants read: it is opened here, and read when the first is cut."""
        self.calibration = CalibrationText(own_text(self, data), self.vocab_size, sequences)
        self.calibration.check()
        self.__dict__.pop("weights", None)

    def cut(self, variant: Variant) -> Parts:
        """L + S cut to the variant's budget; all of it for `L+S`, nothing for `X`."""
        if variant.name == "X":
            return {}
        if variant.budget is None:
            return self.parts
        parts = self._weighted(variant)
        kept = self._kept(variant, parts)
        cut = {name: slr.cut(*kept[name]) for name, slr in parts.items()}
        if variant.refine and self.parameters(cut) < self.whole:
            bar = tqdm(cut.items(), desc="refining", unit="block", leave=False, disable=None)
            cut = {name: self._refined(variant, name, slr) for name, slr in bar}
        return self._unweighted(variant, cut)

    def elastic(self, variant: Variant) -> tuple[Parts, Line]:
        """All units in one order of worth, of which every size is a beginning, and their line.

        Without a refinement these are the units of L + S. With one, the first are those of the cut refined at the
        variant's budget, and behind them stand units that bring it up to the size of L + S again: whatever rank and
        entries the cut has not, fitted in the same way to what it lacks.
        """
        if not variant.refine or variant.budget >= self.whole:
            parts = self._weighted(variant)
            return self._unweighted(variant, parts), Line.of(_spectra(parts))
        whole = self._weighted(variant)
        kept = self._kept(variant, whole)
        first, second = {}, {}
        for name, slr in tqdm(whole.items(), desc="refining", unit="block", leave=False, disable=None):
            first[name] = self._refined(variant, name, slr.cut(*kept[name]))
            lacking = self._target(variant, name) - first[name].dense()
            second[name] = refine(
                lacking.to(best_device()),
                rank=slr.rank - first[name].rank,
                nnz=slr.nnz - first[name].nnz,
                iterations=variant.refine,
                taken=(first[name].sparse() != 0).to(best_device()),
            ).to("cpu")
        counts = [Line.of(_spectra(parts)) for parts in (first, second)]
        line = Line(counts[0].costs, torch.cat([line.counts for line in counts]))
        joined = {name: Slr.joined(first[name], second[name]) for name in whole}
        return self._unweighted(variant, joined), line

    def kappa(self, parts: Mapping[str, Slr]) -> float | None:
        """κ of a cut: the part of what it lacks of L + S that its low-rank side gave; None of X and of L + S."""
        kept = {name: (slr.rank, slr.nnz) for name, slr in parts.items()}
        return implied_kappa(_sizes(self.parts), kept) if parts else None

    def parameters(self, parts: Mapping[str, Slr]) -> int:
        """Parameters of the model with these parts in place of its blocks; of X for none."""
        if not parts:
            return self.source.parameters or self.dense
        return self.fixed + sum(slr.parameters for slr in parts.values())

    @contextmanager
    def opened(self, variant: Variant, dtype: torch.dtype) -> Iterator[Opened]:
        """Within this context the model with the variant's L + S in its blocks, dense, on the best device there is."""
        if dtype not in self._models:
            self._models[dtype] = load_model(self.source.model, dtype, best_device())
        model, parts = self._models[dtype], self.cut(variant)
        with deployed(model, parts):
            yield Opened(model, self.parameters(parts), self.kappa(parts))

    def _weighted(self, variant: Variant) -> Parts:
        """L + S in order of size, as the loss feels it for a calibrated variant."""
        if not variant.calibrated:
            return self.parts
        weights = self.weights
        return {
            name: slr.scaled(weights[name]).resorted() if name in weights else slr for name, slr in self.parts.items()
        }

    def _unweighted(self, variant: Variant, parts: Parts) -> Parts:
        if not variant.calibrated:
            return parts
        weights = self.weights
        return {name: slr.scaled(1 / weights[name]) if name in weights else slr for name, slr in parts.items()}

    def _kept(self, variant: Variant, parts: Parts) -> hpa.Kept:
        blocks = _sizes(parts)
        if variant.kappa is not None:
            return hpa.fit(blocks, fixed=self.fixed, budget=variant.budget, kappa=variant.kappa)
        remove = hpa.to_remove(blocks, fixed=self.fixed, budget=variant.budget)
        return allocate_by_energy(_spectra(parts), remove=remove)

    def _target(self, variant: Variant, name: str) -> Tensor:
        """What refinement comes near to: L + S as trained, which is what a whole deployed model computes with, or X."""
        T = self._dense_weights[name] if self.post_hoc is not None else self.parts[name].dense()
        return T * self.weights[name] if variant.calibrated and name in self.weights else T

    def _refined(self, variant: Variant, name: str, slr: Slr) -> Slr:
        T, S = (part.to(best_device()) for part in (self._target(variant, name), slr.sparse()))
        return refine(T, rank=slr.rank, nnz=slr.nnz, iterations=variant.refine, S=S).to("cpu")

    @cached_property
    def _dense_weights(self) -> dict[str, Tensor]:
        model = load_model(self.source.model, torch.float32)
        return {name: model.get_submodule(name).weight for name in self._names}


def check_trained(model: PreTrainedModel, name: str, entry: Mapping[str, Any]) -> tuple[int, int]:
    """Shape of a block that was trained, which is that of the weight of this name in the model's outline."""
    shape = check_block(model, name, entry["rank"], entry["nnz"])
    if list(shape) != entry["shape"]:
        raise UserError(f"{name} is {shape} in the model and {entry['shape']} in L + S; give a whole checkpoint")
    return shape


def own_text(deployment: "Deployment", data: DataConfig) -> DataConfig:
    """The text as this model reads it: with its own tokenizer unless another is named, in rows it has positions for.

    Raises:
        UserError: rows are longer than that.
    """
    if deployment.positions is not None and data.sequence_length > deployment.positions:
        raise UserError(
            f"data.sequence_length is {data.sequence_length}, but {deployment.source.name} has {deployment.positions} "
            f"positions; give --data.sequence_length {deployment.positions} or less"
        )
    return replace(data, tokenizer=data.tokenizer or str(deployment.source.model))


def best_device() -> torch.device:
    """The GPU if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _spectra(parts: Mapping[str, Slr]) -> Spectra:
    return {name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()}


def _sizes(parts: Mapping[str, Slr]) -> hpa.Blocks:
    return {name: (*slr.shape, slr.rank, slr.nnz) for name, slr in parts.items()}


@contextmanager
@torch.no_grad()
def deployed(model: PreTrainedModel, parts: Mapping[str, Slr]) -> Iterator[None]:
    """Within this context the blocks of the dense `model` hold L + S, on any device and in any dtype."""
    weights = {name: model.get_submodule(name).weight for name in parts}
    originals = {name: X.detach().clone() for name, X in weights.items()}
    try:
        for name, X in weights.items():
            X.copy_(parts[name].dense())
        yield
    finally:
        for name, X in weights.items():
            X.copy_(originals[name])
