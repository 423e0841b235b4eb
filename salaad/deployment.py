"""One checkpoint, any size: its L + S in order, cut to a budget, put into a model."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm import tqdm
from transformers import PreTrainedModel

from salaad import hpa
from salaad.checkpoint import read_index, read_surrogates
from salaad.config import ModelConfig, SalaadConfig
from salaad.energy import allocate_by_energy, implied_kappa
from salaad.errors import UserError
from salaad.models import count_parameters, describe_model, load_model, outline
from salaad.prox import effective_rank, soft_threshold
from salaad.roles import find_blocks
from salaad.rpca import rpca
from salaad.slr import Slr
from salaad.sources import Source
from salaad.variants import Variant

Parts = dict[str, Slr]


class Deployment:
    """The sizes a model on disk can be cut to, and the cuts.

    Args:
        source: the model.
        post_hoc: take L + S from robust PCA of X, over the blocks this configuration selects, instead of from training.

    `dense` are the model's parameters, `fixed` those of them that are never compressed, `vocab_size` and `positions`
    its vocabulary and longest row; `kind` names where L + S come from.

    Raises:
        UserError: robust PCA is asked of a model whose weights are stored in parts.
    """

    def __init__(self, source: Source, post_hoc: SalaadConfig | None = None) -> None:
        self.source, self.post_hoc = source, post_hoc
        model = outline(describe_model(ModelConfig(path=str(source.model)), 0))
        self.dense, self.vocab_size = count_parameters(model), model.config.vocab_size
        self.positions = getattr(model.config, "max_position_embeddings", None)
        if post_hoc is not None and getattr(model.config, "quantization_config", None):
            raise UserError(f"{source.name} is stored in parts already; give the dense model it was made of")
        if post_hoc is None and source.surrogate is None:
            names: list[str] = []
        elif post_hoc is None:
            names = list(read_index(source.surrogate))
        else:
            names = list(find_blocks(model, post_hoc))
        self._names = names
        self.fixed = self.dense - sum(model.get_submodule(name).weight.numel() for name in names)
        how = f"{post_hoc.gamma} {post_hoc.energy} {names}" if post_hoc else ""
        self.kind = f"rpca-{sha256(how.encode()).hexdigest()[:8]}" if post_hoc else "trained"
        self._parts: Parts | None = None

    def check(self, variants: list[Variant]) -> None:
        """Raise a UserError if a variant cannot be had, before anything is computed."""
        for variant in variants:
            if variant.name != "X" and not self._names:
                raise UserError(
                    f"{self.source.name} holds no L and S, so {variant.name} cannot be made of it; give a checkpoint "
                    "trained with method salaad, or make L + S with compress.py --rpca"
                )
            if variant.budget is not None and variant.budget < self.fixed:
                hpa.fit({}, fixed=self.fixed, budget=variant.budget, kappa=0)

    def parts(self) -> Parts:
        """L + S of every block as trained (or as robust PCA finds it), computed once and kept in the source's cache."""
        if self._parts is None:
            make = self._trained if self.post_hoc is None else self._robust_pca
            self._parts = _cached(self.source.cache / f"{self.kind}.safetensors", self._names, make)
        return self._parts

    def cut(self, variant: Variant) -> Parts:
        """L + S cut to the variant's budget, by HPA or by energy; all of it for `L+S`, nothing for `X`."""
        if variant.name == "X":
            return {}
        parts = self.parts()
        if variant.budget is None:
            return parts
        blocks = _sizes(parts)
        if variant.kappa is not None:
            kept = hpa.fit(blocks, fixed=self.fixed, budget=variant.budget, kappa=variant.kappa)
        else:
            spectra = {name: (*slr.shape, slr.sigma, slr.values.abs()) for name, slr in parts.items()}
            remove = hpa.to_remove(blocks, fixed=self.fixed, budget=variant.budget)
            kept = allocate_by_energy(spectra, remove=remove)
        return {name: slr.cut(*kept[name]) for name, slr in parts.items()}

    def kappa(self, parts: Mapping[str, Slr]) -> float | None:
        """κ of a cut: the part of what it lacks of L + S that its low-rank side gave; None of X and of L + S."""
        kept = {name: (slr.rank, slr.nnz) for name, slr in parts.items()}
        return implied_kappa(_sizes(self.parts()), kept) if parts else None

    def parameters(self, parts: Mapping[str, Slr]) -> int:
        """Parameters of the model with these parts in place of its blocks; of X for none."""
        if not parts:
            return self.source.parameters or self.dense
        return self.fixed + sum(slr.parameters for slr in parts.values())

    def _trained(self) -> Iterator[tuple[str, Slr]]:
        index = read_index(self.source.surrogate)
        for name in self._names:
            state = read_surrogates(self.source.surrogate, (name,))[name]
            S = soft_threshold(state["residual"], state["thresholds"][2])
            yield name, Slr.from_parts(state["low_rank"], S, index[name]["rank"])

    def _robust_pca(self) -> Iterator[tuple[str, Slr]]:
        model = load_model(self.source.model, torch.float32)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        for name in self._names:
            L, S = (part.cpu() for part in rpca(model.get_submodule(name).weight.to(device)))
            rank = effective_rank(torch.linalg.svdvals(L), self.post_hoc.gamma, self.post_hoc.energy)
            yield name, Slr.from_parts(L, S, rank)


def _sizes(parts: Mapping[str, Slr]) -> hpa.Blocks:
    return {name: (*slr.shape, slr.rank, slr.nnz) for name, slr in parts.items()}


def _cached(path: Path, names: list[str], make: Callable[[], Iterator[tuple[str, Slr]]]) -> Parts:
    """The parts in the file at `path`, or those that `make` yields, which are then kept there."""
    if path.is_file():
        with suppress(SafetensorError, OSError), safe_open(path, framework="pt") as file:
            read = {name: {key: file.get_tensor(f"{name}/{key}") for key in Slr.TENSORS} for name in names}
            return {name: Slr.from_tensors(tensors) for name, tensors in read.items()}
    what = "splitting blocks into L + S"
    parts = dict(tqdm(make(), total=len(names), desc=what, unit="block", leave=False, disable=None))
    tensors = {f"{name}/{key}": tensor for name, slr in parts.items() for key, tensor in slr.tensors().items()}
    with suppress(OSError):  # a place that cannot be written to costs time at the next call, nothing more
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        save_file(tensors, temporary)
        temporary.replace(path)
    return parts


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
