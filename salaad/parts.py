"""L + S of every block of a model on disk: as it was trained, or split after the fact; kept once found."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from salaad.checkpoint import read_index, read_surrogates
from salaad.decomposition import PostHoc
from salaad.prox import soft_threshold
from salaad.slr import Slr
from salaad.surrogate import low_rank_of

Parts = dict[str, Slr]


def trained_parts(surrogate: Path, names: Sequence[str]) -> Iterator[tuple[str, Slr]]:
    """The named blocks of a checkpoint's surrogate folder, one after the other."""
    index = read_index(surrogate)
    for name in names:
        state = read_surrogates(surrogate, (name,))[name]
        T, R, tau = state["target"], state["residual"], state["thresholds"][2]
        yield name, Slr.from_parts(low_rank_of(T, R, tau), soft_threshold(R, tau), index[name]["rank"])


def post_hoc_parts(post_hoc: PostHoc, weights: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Slr]]:
    """The parts of finished weights, one after the other, computed on `device`."""
    for name, X in weights.items():
        yield name, post_hoc.split(X.to(device))


def cached_parts(path: Path, names: list[str], make: Callable[[], Iterator[tuple[str, Slr]]]) -> Parts:
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
