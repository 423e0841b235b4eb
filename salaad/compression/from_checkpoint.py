"""The deployment of a checkpoint, or of a dense model split after the fact: every size is cut anew from L + S."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from hashlib import sha256

import torch
from torch import Tensor
from transformers import PreTrainedModel

from salaad.common.budgets import format_count, require_floor
from salaad.common.errors import UserError
from salaad.compression.calibration import CalibrationText, kept_moments, second_moments_of_text
from salaad.compression.cut import Collect, Whole, all_sizes, cut, parameters_of, sizes, without_saving
from salaad.compression.deployment import (
    Deployment,
    FittedOnText,
    OpenedVariant,
    SizedModel,
    TuningCost,
    as_dense,
    best_device,
    own_text,
    take_over,
)
from salaad.compression.sensitivity import ErrorWeights, weights_from
from salaad.compression.split import (
    Parts,
    PostHoc,
    beside_trained,
    cached_parts,
    free_heads,
    post_hoc_parts,
    split_names,
)
from salaad.compression.trained_blocks import TrainedFactors, TrainedSurrogates
from salaad.compression.tuning.distillation import sizes_in_turn
from salaad.compression.tuning.tune import Fitted, Tuning
from salaad.compression.unfinished import Unfinished
from salaad.compression.variants import ALGORITHMS, Variant
from salaad.config.commands import CompressOptions
from salaad.config.run import DataConfig
from salaad.energy_allocation import implied_kappa
from salaad.factored.elastic_file import SizeRange
from salaad.factored.fixed_size import factor
from salaad.factored.slr import Slr
from salaad.factored.smaller_form import disk_bytes
from salaad.model.folder_formats import is_any_size, is_fixed_size
from salaad.model.loss import SummedLoss
from salaad.model.parameters import count_parameters, restored
from salaad.model.roles import role_of
from salaad.model.second_moments import Moments, read_second_moments
from salaad.model.weights import tied_modules, weights_of
from salaad.runs.model_on_disk import ModelOnDisk

_WHERE_L_AND_S_ARE = (
    "give a checkpoint whose method trains them, such as salaad, sltrain or loro, or make them with compress.py --rpca"
)
_WHOLE = "use it whole, as X"
_WITHOUT_TEXT = "leave --calibrate out"


class CheckpointDeployment(Deployment):
    """The deployment of a checkpoint, or of a dense model that is split after the fact.

    Args:
        source: the model on disk.
        post_hoc: how to split X after the fact, in place of the trained L + S or, with `beside`, in addition to it.
        command: the options of a command that keeps refined blocks in the cache, to go on from after an interruption;
            without it they are held in memory alone.

    Attributes:
        shapes: block → (n, m).
        in_parts: names of the blocks that the folder already stores as U·V + S; such a folder holds one size.

    Raises:
        UserError: the model is to be split but is stored in parts, or is to be split beside L + S and has none.
    """

    def __init__(self, source: ModelOnDisk, post_hoc: PostHoc | None = None, command: str | None = None) -> None:
        self.source, self.post_hoc = source, post_hoc
        self.unfinished = Unfinished(source.cache / "unfinished", command or "")
        self._collect: Collect = without_saving if command is None else self.unfinished.collect
        self.tuning: Tuning | None = None
        model = source.folder.outline
        self.dense = count_parameters(model)
        entry = getattr(model.config, "quantization_config", None)
        self.in_parts = list(entry["blocks"]) if is_fixed_size(entry) else []
        self.activation = entry.get("activation") if self.in_parts else None
        if post_hoc is not None and self.activation is not None:
            raise UserError(f"{source.name} {self._between_factors}, so there is no weight to be split; {_WHOLE}")
        if post_hoc is not None and entry:
            how = "stored in parts" if is_fixed_size(entry) or is_any_size(entry) else "quantized"
            raise UserError(f"{source.name} is {how} already; give the dense model it was made of")
        takes_trained = post_hoc is None or post_hoc.beside
        trained_kind = TrainedFactors if source.surrogate is None else TrainedSurrogates
        self._trained = trained_kind(source) if takes_trained else None
        trained = self._trained.shapes if takes_trained else {}
        if post_hoc is not None and post_hoc.beside and not trained:
            raise UserError(
                f"{source.name} holds no L and S beside which other weights could be split; add --rpca, which splits "
                "all of them"
            )
        self._split = [] if post_hoc is None else split_names(model, post_hoc, trained, source.name)
        self.shapes = trained | {name: tuple(X.shape) for name, X in weights_of(model, self._split).items()}
        # A method that trains its factors computes the same with X as with L + S.
        self.default_variants = "X,L+S" if source.surrogate and takes_trained else "X"
        self._names = names = list(self.shapes)
        self.fixed = self.dense - sum(n * m for n, m in self.shapes.values())
        self.kind = "stored" if self.in_parts else "trained" if source.surrogate else "factors"
        if self._split:
            how = f"{post_hoc.blocks.gamma} {post_hoc.blocks.energy} {names} {(post_hoc.rank_ratio, post_hoc.density)}"
            source_of_parts = self.kind if post_hoc.beside else post_hoc.method
            self.kind = f"{source_of_parts}-{sha256(how.encode()).hexdigest()[:8]}"
        self._last_cut: dict[str, Parts] = {}
        self._models: dict[torch.dtype, PreTrainedModel] = {}

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError for a variant that lacks its L and S, is a stored size, or has a budget below the floor."""
        for variant in variants:
            if variant.head and self._names:
                self._with_head.check([replace(variant, head=False)])
                continue
            if variant.name != "X" and not self._names:
                lacks, cure = "holds no L and S", _WHERE_L_AND_S_ARE
                if self.activation is not None:
                    lacks, cure = f"{self._between_factors} and no L and S", _WHOLE
                elif self.in_parts:
                    lacks, cure = "holds one size in parts", "give the checkpoint or dense model it was made of"
                elif self.source.parameters is not None:
                    cure = (
                        "give the checkpoint that this one size was cut from, or split it anew with compress.py --rpca"
                    )
                raise UserError(f"{self.source.name} {lacks}, so {variant.name} cannot be made of it; {cure}")
            if variant.stored:
                raise UserError(
                    f"{self.source.name} was not written with --elastic, so it keeps no order of its own to cut "
                    f"{variant.name} by; give {variant.name}@energy, or {variant.name}@0.6 for HPA"
                )
            if variant.budget is not None and variant.budget < self.fixed:
                whole = free_heads(self.source.folder.outline) - self.shapes.keys()
                cure = (
                    ", or split the head too (compress.py --lm-head true, evaluate.py BUDGET@energy+head)"
                    if whole and self._names
                    else ""
                )
                require_floor(self.fixed, variant.budget, cure)

    def of(self, variant: Variant) -> "CheckpointDeployment":  # noqa: D102
        if not variant.head:
            return self
        self._with_head.calibration, self._with_head._models = self.calibration, self._models
        return self._with_head

    @cached_property
    def _with_head(self) -> "CheckpointDeployment":
        """This deployment with head and embedding split too: beside the trained L + S, or by `post_hoc` as the rest."""
        split = beside_trained(self.source.folder.outline, self.shapes)
        if self.post_hoc is not None:
            embedding = self.post_hoc.blocks.embedding or split.blocks.embedding
            split = replace(self.post_hoc, blocks=replace(self.post_hoc.blocks, lm_head=True, embedding=embedding))
        return CheckpointDeployment(self.source, split)

    def calibrate(self, data: DataConfig, sequences: int) -> None:  # noqa: D102
        SummedLoss(self.source.folder.outline, _WITHOUT_TEXT)
        vocab_size = self.source.folder.config.vocab_size
        self.calibration = CalibrationText(own_text(self.source, data), vocab_size, sequences)
        self.calibration.check()

    def tune(self, data: DataConfig, how: FittedOnText) -> None:  # noqa: D102
        self.tuning = Tuning(self.source, own_text(self.source, data), how, self.unfinished)
        self.tuning.check()
        self.unfinished.command += f" {self.tuning.reads}"

    def tuning_cost(self, ranges: int | None) -> TuningCost | None:  # noqa: D102
        return self.tuning and TuningCost(self.tuning.tokens, self.tuning.operations(ranges))

    def written(self) -> None:  # noqa: D102
        self.unfinished.remove()

    def variant_for(self, options: CompressOptions, budget: int | None) -> Variant:
        """Return the variant that the options ask for; `settled` finds HPA's κ where that is not given."""
        if self.activation is not None and (options.match or options.distill):
            raise UserError(
                f"{self.source.name} {self._between_factors} and no L and S, so nothing is cut that --match and "
                "--distill could fit; leave both out"
            )
        if self.in_parts and (options.match or options.distill):
            raise UserError(
                f"{self.source.name} holds no dense original that --match and --distill could learn from; give the "
                "checkpoint, or the dense model, that it was made of"
            )
        if options.elastic and self.shapes and self.shapes.keys() <= tied_modules(self.source.folder.outline):
            raise UserError(
                f"all blocks of {self.source.name} are tied weights, dense at every size; leave --elastic out"
            )
        refine, calibrated = options.alternations, options.calibrate > 0
        if self.in_parts and budget is None and not (refine or calibrated or options.elastic):
            return Variant("X")  # the folder as it is, dense again or in another dtype
        if self.in_parts and self.source.surrogate:
            raise UserError(
                f"{self.source.name} was trained from a folder with blocks in parts, beside which no others can be "
                "cut; train from the dense model, such as that folder after dequantize() and save_pretrained()"
            )
        if budget is None:
            return Variant("L+S", refine=refine, calibrated=calibrated, capped=options.by_energy)
        kappa = None if options.by_energy else options.kappa or 0.0  # if it is not given, until it is settled
        return Variant(self._cut_to(options.budget, kappa), budget, kappa, refine, calibrated)

    def settled(self, variant: Variant, options: CompressOptions) -> Variant:
        """Return the variant with its κ; as L + S, which nothing refines or weighs, if the budget is at or above that.

        The default κ takes the same fraction of L and of S.
        """
        if variant.budget is None:
            return variant
        if variant.budget >= self.whole.parameters(variant):
            return replace(variant, refine=0) if options.elastic else Variant("L+S", capped=options.by_energy)
        if options.kappa is not None or options.by_energy:
            return variant
        # Rounded, so that the name holds all digits of κ, and asking for the name gives the same cut.
        kappa = round(self.whole.share, 3)
        return replace(variant, name=self._cut_to(options.budget, kappa), kappa=kappa)

    def _cut_to(self, budget: str, kappa: float | None) -> str:
        """Return the name by which evaluate.py makes the cut to a budget of the checkpoint, by HPA if κ is given."""
        head = any(role_of(name) == "lm_head" for name in self._split)
        return f"{budget}@{'energy' if kappa is None else f'{kappa:g}'}{'+head' * head}"

    @property
    def _between_factors(self) -> str:
        return f"has a {self.activation} between the factors of its layers"

    @cached_property
    def parts(self) -> Parts:
        """Block → L + S as trained (or as a split finds it), computed once and kept in the source's cache.

        Those of GoDec have room for one budget, so a command deletes them when it has ended.
        """
        path = self.source.cache / f"{self.kind}-{ALGORITHMS}.safetensors"
        if self.unfinished.command and self.post_hoc is not None and self.post_hoc.method == "godec":
            path = self.unfinished.path(self.kind)
        return cached_parts(path, self.shapes, self._make_parts)

    def _make_parts(self, names: Collection[str]) -> Iterator[tuple[str, Slr]]:
        if trained := [name for name in names if name not in self._split]:
            yield from self._trained.parts(trained)
        if split := [name for name in names if name in self._split]:
            X = {name: self._dense_weights[name] for name in split}
            yield from post_hoc_parts(self.post_hoc, X, best_device())

    @cached_property
    def trained_weights(self) -> dict[str, ErrorWeights]:
        """Block → weights of its errors, from the mean squared gradients of the training; empty if it left none."""
        path = self.source.second_moments
        return {} if path is None else weights_from(read_second_moments(path, self.shapes), self.parts)

    @cached_property
    def calibrated_weights(self) -> dict[str, ErrorWeights]:
        """Block → weights of its errors, from the mean squared gradients on the calibration text, which are kept."""
        key = sha256(f"{self.calibration.digest} {self._names}".encode()).hexdigest()[:16]
        path = self.source.cache / f"calibration-{key}.safetensors"
        return weights_from(kept_moments(path, self.shapes, self._calibrated_moments), self.parts)

    def _calibrated_moments(self) -> Moments:
        device = best_device()
        model = self.source.folder.load(torch.float32, device)
        return second_moments_of_text(SummedLoss(model, _WITHOUT_TEXT), self._names, self.calibration.batches(), device)

    @property
    def whole(self) -> Whole:
        """L + S of the model, with errors in all entries weighed alike."""
        return self._whole({})

    def cut(self, variant: Variant) -> Parts:
        """Return L + S cut to the variant's budget: all of it for `L+S`, no parts for `X`. The last cut is cached."""
        if variant.name == "X":
            return {}
        of = self._name_of(variant)
        if of not in self._last_cut:
            self._last_cut = {of: cut(self._whole(self.weights(variant)), variant, self._collect)}
        return self._last_cut[of]

    def all_sizes(self, variants: Sequence[Variant]) -> list[SizeRange]:  # noqa: D102
        first = variants[0].budget
        if self.tuning is not None and len(variants) > 1 and first > self.dense:
            most = format_count(self.dense, up=False)
            raise UserError(
                f"a range of sizes from {format_count(first)} would be above the {most} parameters of X, and what is "
                f"fitted ends there; give budgets of {most} or less"
            )
        belows = [None, *(variant.budget for variant in variants[:-1])]
        return [self._range(variant, below) for variant, below in zip(variants, belows, strict=True)]

    def _range(self, variant: Variant, below: int | None) -> SizeRange:
        """Return the sizes from the variant's up: less than `below` and, if fitted on text, at most the size of X."""
        whole, first = self._whole(self.weights(variant)), None
        if self.tuning is not None:
            begin = cut(whole, variant, self._collect)
            self._free_dense_weights()
            first = self.tuning.matched(begin, self._name_of(variant))
        parts, queue = all_sizes(whole, variant, first.parts if first else None, self._collect)
        self._free_dense_weights()
        if below is not None:
            queue = queue.first(below - 1 - self.fixed)
        if first is not None:  # with more numbers than X has, X is better, so only matched ones are kept beyond
            matched = sum(slr.parameters for slr in first.parts.values())
            queue = queue.first_stored(max(self.dense - self.fixed, matched))
        parts = {name: parts[name].cut(*kept) for name, kept in queue.units().items()}
        if first is None:
            return SizeRange(parts, queue, below=below)
        in_turn = sizes_in_turn(min(variant.budget - self.fixed, queue.parameters), queue.parameters, queue.keep)
        name = f"{self._name_of(variant)} elastic of {queue.parameters} below {below}"
        fitted = self.tuning.distilled(Fitted(parts, first.vectors), name, in_turn)
        return SizeRange(fitted.parts, queue, fitted.vectors, below)

    def kappa(self, parts: Parts) -> float | None:
        """Return the κ that a cut amounts to; None if nothing was removed."""
        return implied_kappa(sizes(self.parts), {name: (s.rank, s.nnz) for name, s in parts.items()}) if parts else None

    def parameters(self, parts: Parts, variant: Variant) -> int:
        """Return the parameters of the model with the variant's `parts` as its blocks; those of X without parts."""
        if not parts:
            return self.source.parameters or self.dense - (self._trained.spared if self._trained else 0)
        return self.fixed + parameters_of(parts, variant)

    def disk_bytes(self, parts: Parts, element: int) -> int:
        """Return the bytes on disk with `parts` as blocks and `element` bytes per number; dense without parts."""
        blocks = sum(disk_bytes(slr, element) for slr in parts.values())
        return element * self.fixed + blocks if parts else element * self.dense

    @contextmanager
    def opened(self, variant: Variant, dtype: torch.dtype) -> Iterator[OpenedVariant]:
        """Context manager that gives the dense model with the variant's L + S as blocks, on the GPU if there is one."""
        if dtype not in self._models:
            self._models[dtype] = self.source.folder.load(dtype, best_device())
        model, parts = self._models[dtype], self.cut(variant)
        with deployed(model, parts):
            yield OpenedVariant(model, self.parameters(parts, variant), self.kappa(parts))

    def sized(self, variant: Variant, dtype: torch.dtype, factored: bool) -> SizedModel:
        """Return the variant cut from L + S, and fitted on text if `tune` was called, as a model to store."""
        load = self.source.folder.load
        if self.in_parts:  # a folder of one size, which has passed `check` as X alone
            model = load(dtype) if factored else as_dense(load(torch.float32), dtype)
            return SizedModel(model, self.parameters({}, variant), len(self.in_parts), None)
        parts, vectors = self.cut(variant), {}
        self._free_dense_weights()
        if self.tuning is not None:
            of = self._name_of(variant)
            parts, vectors = self.tuning.distilled(self.tuning.matched(parts, of), of)
        model = load(dtype)
        take_over(model, vectors)
        if factored:
            factor(model, parts)
        else:
            for name, X in weights_of(model, parts).items():
                X.copy_(parts[name].dense())
        return SizedModel(model, self.parameters(parts, variant), len(parts), self.kappa(parts))

    def weights(self, variant: Variant) -> dict[str, ErrorWeights]:
        """Return the weights of errors for a cut: from text if calibrated, else from training; none for plain HPA."""
        if variant.calibrated:
            return self.calibrated_weights
        return self.trained_weights if variant.kappa is None else {}

    def _name_of(self, variant: Variant) -> str:
        """Return a key of all that a cut depends on, except for the model and the text that the cut is fitted on."""
        calibration = self.calibration.digest if variant.calibrated else ""
        return f"{self.kind} {variant} {calibration}"

    def _whole(self, weights: dict[str, ErrorWeights]) -> Whole:
        return Whole(self.parts, self.fixed, self._target, weights, best_device())

    def _target(self, name: str) -> Tensor:
        """Return what refinement approximates: X if it was split after the fact, else the trained L + S.

        L + S as trained is what a deployed model computes with before anything is cut.
        """
        return self._dense_weights[name] if name in self._split else self.parts[name].dense()

    @cached_property
    def _dense_weights(self) -> dict[str, Tensor]:
        model = self.source.folder.load(torch.float32)
        return dict(weights_of(model, self._split))

    def _free_dense_weights(self) -> None:
        """Free what only splitting and cutting need, as tuning, loading and saving need the memory."""
        self.__dict__.pop("_dense_weights", None)


@contextmanager
@torch.no_grad()
def deployed(model: PreTrainedModel, parts: Mapping[str, Slr]) -> Iterator[None]:
    """Context manager in which the blocks of the dense `model`, on any device and in any dtype, hold L + S."""
    weights = weights_of(model, parts)
    with restored(weights):
        for name, X in weights.items():
            X.copy_(parts[name].dense())
        torch.clear_autocast_cache()
        yield
