"""L + S of weights that are split after the fact, and the file in which L + S of all blocks are kept once computed."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm

from salaad.common.errors import Stopped, UserError
from salaad.common.files import save_if_possible
from salaad.common.hashed_files import write_tensors
from salaad.common.save_pace import SavePace
from salaad.common.signals import StopRequest
from salaad.compression.refinement import refine
from salaad.config.methods import SalaadConfig
from salaad.factored.slr import Slr
from salaad.model.roles import find_blocks, role_of
from salaad.model.weights import matrices, tied_modules
from salaad.prox import effective_rank
from salaad.rpca import not_a_finite_matrix, rpca

Parts = dict[str, Slr]
Shapes = Mapping[str, tuple[int, int]]
Make = Callable[[Collection[str]], Iterator[tuple[str, Slr]]]  # names → each name with its parts, one after the other
_ALTERNATIONS = 50  # of GoDec at the most; it ends at a plateau
_SECONDS = 300  # between two saves of the blocks that are done
_ROOM = 1.15  # parameters of GoDec's L + S over those a budget keeps, so that blocks may keep different shares


@dataclass(frozen=True)
class PostHoc:
    """A way to split trained weights X into L + S after the fact.

    Args:
        blocks: which weights to split.
        method: `rpca` (convex, finds rank and density itself, L + S = X) or `godec` (rank and count are given, and
            L + S is as near to X as alternating projections bring it).
        rank_ratio: of GoDec, the rank over min(n, m).
        density: of GoDec, the entries of S over n·m.
        beside: split only the blocks that training left whole; the others keep the L + S of the training.
    """

    blocks: SalaadConfig
    method: Literal["rpca", "godec"] = "rpca"
    rank_ratio: float = 0.25
    density: float = 0.25
    beside: bool = False

    def with_room(self, shapes: Collection[tuple[int, int]], parameters: int, raised: Collection[str]) -> "PostHoc":
        """Return this split by GoDec with room for `parameters` parameters in L + S, and some more to choose from.

        Args:
            shapes: (n, m) of all blocks.
            parameters: parameters that a budget leaves to the blocks.
            raised: which of `rank_ratio` and `density` may be raised, to one common value up to 1.
        """
        per_ratio = {
            "rank_ratio": sum(min(n, m) * (n + m) for n, m in shapes),
            "density": sum(n * m for n, m in shapes),
        }
        given = sum(getattr(self, name) * count for name, count in per_ratio.items() if name not in raised)
        free = sum(per_ratio[name] for name in raised)
        ratio = min(1.0, (_ROOM * parameters - given) / free) if free else 0.0
        return replace(self, **{name: max(ratio, getattr(self, name)) for name in raised})

    @property
    def label(self) -> str:
        """The name of the method in tables."""
        return {"rpca": "RPCA", "godec": "GoDec"}[self.method]

    def split(self, X: Tensor) -> Slr:
        """Return L + S of X (n×m, float32), on the CPU."""
        if self.method == "godec":
            rank, nnz = round(self.rank_ratio * min(X.shape)), round(self.density * X.numel())
            return refine(X, rank=rank, nnz=nnz, iterations=_ALTERNATIONS).to("cpu")
        L, S = rpca(X)
        rank = effective_rank(torch.linalg.svdvals(L), self.blocks.gamma, self.blocks.energy)
        return Slr.from_parts(L, S, rank).to("cpu")


def beside_trained(model: nn.Module, trained: Collection[str]) -> PostHoc:
    """Return the split of LM head and embedding beside the trained blocks.

    The embedding is left out if it is a trained block or cannot be split.
    """
    embedding = "embedding" in {role_of(name) for name in _free_outer(model).difference(trained)}
    return PostHoc(SalaadConfig(roles=("lm_head",), embedding=embedding), beside=True)


def split_names(model: nn.Module, post_hoc: PostHoc, trained: Collection[str], source: str) -> list[str]:
    """Return the names of the weights that are split after the fact.

    Raises:
        UserError: a weight to be split beside the trained L + S is tied to another weight, with which it stays dense.
    """
    names = list(find_blocks(model, post_hoc.blocks))
    if not post_hoc.beside:
        return names
    new = [name for name in names if name not in trained]
    for name in set(new) & tied_modules(model):
        option = {"lm_head": "--lm-head, or +head,"}.get(role_of(name), f"--{role_of(name)}")
        raise UserError(f"{name} of {source} is tied to another weight and stays dense; leave {option} out")
    return new


def free_heads(model: nn.Module) -> set[str]:
    """Return the names of the LM heads that are tied to no other weight, so that they can be split."""
    return {name for name in _free_outer(model) if role_of(name) == "lm_head"}


def _free_outer(model: nn.Module) -> set[str]:
    from salaad.factored.replacement import always_dense  # takes seconds to import, and training has no need of it

    free = matrices(model).keys() - always_dense(model)
    return {name for name in free if role_of(name) in ("embedding", "lm_head")}


def can_weigh_head(model: nn.Module, blocks: Collection[str], known: Collection[str]) -> bool:
    """Return whether `beside_trained` splits an LM head, and all that it splits can be weighed like the other blocks.

    Unweighed, as with an optimizer that keeps moments of embedding and head alone, energy takes too much of the head.

    Args:
        model: the model.
        blocks: the trained blocks.
        known: matrices whose mean squared gradients are known.
    """
    whole = _free_outer(model).difference(blocks)
    inner = [name for name in known if role_of(name) not in ("embedding", "lm_head")]
    return bool(whole & free_heads(model) and inner) and whole <= set(known)


def post_hoc_parts(post_hoc: PostHoc, weights: Mapping[str, Tensor], device: torch.device) -> Iterator[tuple[str, Slr]]:
    """Yield name and L + S of every weight, split after the fact on `device`, one after the other.

    Raises:
        UserError: a weight is no finite matrix.
    """
    for name, X in weights.items():
        if reason := not_a_finite_matrix(X):
            raise UserError(f"{name} {reason}")
        yield name, post_hoc.split(X.to(device))


def cached_parts(path: Path, shapes: Shapes, make: Make, done: str = "split") -> Parts:
    """Return the parts that the file at `path` holds, the rest from `make`; all are saved there, even if interrupted.

    What is done is also saved every few minutes, for a process that is killed.

    On SIGTERM, SIGUSR1, SIGHUP or Ctrl-C the block in work is given up, as it may take longer than a scheduler waits.

    Args:
        path: a safetensors file; it is ignored if it is broken, as are parts of another shape in it.
        shapes: name → (n, m) of every block.
        make: function of names that yields each name with its parts.
        done: what is done to the blocks, for the progress bar and the error.

    Raises:
        UserError: a stop was requested; the blocks that were done are saved.
    """
    parts = dict(_kept(path, shapes))
    left = [name for name in shapes if name not in parts]
    if not left:
        return {name: parts[name] for name in shapes}
    there = saved = len(parts)
    bar = with_bar(make(left), len(shapes), there, done)
    pace = SavePace(_SECONDS)

    def save() -> None:
        kept = {f"{name}/{key}": part for name, slr in parts.items() for key, part in slr.tensors().items()}
        save_if_possible(path, partial(write_tensors, kept))

    with StopRequest() as request:
        try:
            with suppress(Stopped), request.ends_waiting():
                for name, slr in bar:
                    # In the memory layout of the file, on which the last bits of products depend.
                    parts[name] = Slr.from_tensors(slr.tensors())
                    if pace.is_due():
                        with pace.save():
                            save()
                        saved = len(parts)
        finally:
            bar.close()
            if len(parts) > saved:
                save()
        if request.asked:  # during the save, too
            raise UserError(
                f"interrupted after {len(parts)} of {len(shapes)} blocks were {done}; the same command goes on from "
                "there"
            )
    return {name: parts[name] for name in shapes}


def with_bar(parts: Iterator[tuple[str, Slr]], total: int, there: int, done: str) -> tqdm:
    """Return `parts` with a progress bar over `total` blocks, of which some are `there` before."""
    return tqdm(parts, total=total, initial=there, desc=f"blocks {done}", unit="block", leave=False, disable=None)


def _kept(path: Path, shapes: Shapes) -> Iterator[tuple[str, Slr]]:
    if not path.is_file():
        return
    # Whatever is wrong with the file or with a block in it, that is split once more.
    with suppress(Exception), safe_open(path, framework="pt") as file:
        there = set(file.keys())
        for name in shapes:
            keys = {key: f"{name}/{key}" for key in Slr.TENSORS}
            if there.issuperset(keys.values()):
                with suppress(Exception):
                    slr = Slr.from_tensors({key: file.get_tensor(place) for key, place in keys.items()})
                    finite = all(part.isfinite().all() for part in (slr.U, slr.V, slr.values))
                    if slr.shape == shapes[name] and slr.is_sound() and finite:
                        yield name, slr
