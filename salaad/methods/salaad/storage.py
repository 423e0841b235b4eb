"""The surrogates of a model on disk: safetensors shards and an index, which any world size can open."""

import math
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from salaad.common import distributed
from salaad.common.errors import NotSavedError, UserError
from salaad.common.files import inside, read_object, require_new, write_checksums, write_json
from salaad.common.hashed_files import write_tensors
from salaad.methods.salaad import ownership
from salaad.methods.salaad.surrogate import Surrogate, target_of
from salaad.model.weight_headers import FLOATS, is_count

FORMAT, OLD_FORMAT = 2, 1  # the old one had L in place of T
_AT_ONCE = 2**20  # entries of a weight whose squares are summed at once


def index_of(
    surrogates: Mapping[str, Surrogate], weights: Mapping[str, Tensor] | None = None, **about: Any
) -> dict[str, Any]:
    """The index of the shards that all ranks are about to write, the same on every rank; collective.

    Args:
        surrogates: block → its state, of the blocks that this rank owns.
        weights: block → weight, which is then known again by its norm.
        about: what else the index is to say, the same on every rank.

    Raises:
        NotSavedError: a rank has no memory for it.
    """

    def mine() -> tuple[dict[str, Any], dict[str, float]]:
        entries = {
            name: {"file": _shard(), "shape": list(s.T.shape), "rho": s.rho, "rank": s.rank, "nnz": s.nnz}
            for name, s in surrogates.items()
        }
        return entries, {name: norm_of(weights[name]) for name in (surrogates if weights else ())}

    blocks, norms = map(ChainMap, *distributed.together(mine))
    return {"format": FORMAT, **about, "norms": dict(norms), "blocks": dict(blocks)}


def save_surrogates(surrogates: Mapping[str, Surrogate], folder: Path, index: Mapping[str, Any]) -> dict[str, str]:
    """Write this rank's surrogates as one shard, and on rank 0 the index of all; exchanges nothing.

    Args:
        surrogates: block → its state, of the blocks that this rank owns.
        folder: one that is there.
        index: from `index_of`.

    Returns:
        Name → SHA-256 of the shard.
    """
    tensors = {
        f"{name}/{key}": value
        for name, surrogate in surrogates.items()
        for key, value in surrogate.state_dict().items()
    }
    if distributed.rank() == 0 and index["blocks"]:
        write_json(index, folder / "index.json")
    return {_shard(): write_tensors(tensors, folder / _shard())} if tensors else {}


def _shard() -> str:
    return f"shard-{distributed.rank():05d}-of-{distributed.world_size():05d}.safetensors"


def save_folder(folder: Path, parts: Iterable[Any], writer: Callable[[], Callable[[Path], None]]) -> None:
    """A new folder, whole or not at all; collective.

    Args:
        folder: one that is not there yet.
        parts: a model and a tokenizer, of which rank 0 saves what has a `save_pretrained`.
        writer: collective; gives what writes this rank's share of `surrogate/` and exchanges nothing.

    Raises:
        UserError: the folder is there, or cannot be written.
    """
    partial = folder.with_name(f".partial-{folder.name}")

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "surrogate").mkdir(parents=True)

    def finish() -> None:
        for part in parts:
            if hasattr(part, "save_pretrained"):
                part.save_pretrained(partial)
        write_checksums(partial)
        partial.replace(folder)

    distributed.first_decides(lambda: require_new(folder))
    try:
        distributed.together(prepare, only=0)
        write = writer()
        distributed.together(lambda: write(partial / "surrogate"))
        distributed.together(finish, only=0)
    except NotSavedError as error:
        raise UserError(f"{folder} cannot be written ({error}); give a folder in a place with room") from None
    finally:
        if distributed.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def norm_of(X: Tensor) -> float:
    """‖X‖_F, by which a weight is known again; summed in float64, of which there is never a whole copy."""
    rows = X.detach().split(max(1, _AT_ONCE // X.shape[1]))
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.double()) for part in rows])))


def load_surrogates(
    surrogates: Mapping[str, Surrogate], folder: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Fill this rank's surrogates from the shards of any world size.

    Args:
        surrogates: block → what is filled.
        folder: of the shards.
        weights: block → weight, to be compared with that of the time, as far as its norm is known.

    Raises:
        UserError: as `stored_blocks`, or a block has another shape or another weight than in this model.
    """
    norms = read_about(folder).get("norms", {}) if weights else {}
    for name, _, state in stored_blocks(folder, surrogates):
        surrogates[name].require_fitting(state, name)
        # Sums of float64 differ in their last digits between machines.
        if name in norms and not math.isclose(norm_of(weights[name]), norms[name], rel_tol=1e-9):
            raise UserError(
                f"the model's weight in block {name} is not that which {folder} was saved beside; open the "
                "model from there first, such as by from_pretrained"
            )
        surrogates[name].load_state_dict(state)


def read_about(folder: Path) -> dict[str, Any]:
    """What the index of the surrogates in `folder` says beside its blocks: settings and step counts, if any."""
    return {key: value for key, value in read_object(folder / "index.json").items() if key not in ("format", "blocks")}


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """Block → file, shape, ρ, rank and entries, of the surrogates in `folder`.

    Raises:
        UserError: there is no index, it is of another format, or says what no matrix has.
    """
    index = read_object(folder / "index.json")
    if index.get("format") not in (FORMAT, OLD_FORMAT):
        raise UserError(
            f"{folder} has format {index.get('format')}, this version reads {FORMAT}; use the version that wrote it"
        )
    blocks = index.get("blocks")
    wrong = [name for name, entry in blocks.items() if not _is_entry(entry)] if isinstance(blocks, dict) else ["blocks"]
    if wrong:
        raise UserError(f"{folder / 'index.json'} has no sound entry for {wrong[0]}; give a whole checkpoint")
    # Not in the order of the ranks that wrote them: of units of equal value a cut keeps the first.
    order = ownership.dearest_first({name: ownership.update_cost(*entry["shape"]) for name, entry in blocks.items()})
    return {name: blocks[name] for name in order}


def _is_entry(entry: Any) -> bool:
    """Whether this is a matrix with its rank and entries."""
    shape, rank, nnz = (entry.get(key) for key in ("shape", "rank", "nnz")) if isinstance(entry, dict) else (None,) * 3
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(is_count, (*shape, rank, nnz))):
        return False
    return rank <= min(shape) and nnz <= shape[0] * shape[1] and type(entry.get("rho")) in (int, float)


def stored_blocks(
    folder: Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """(Block, its entry in the index, the tensors of `Surrogate.state_dict`), for the named blocks or for all.

    One block after the other is read, since those of a large model do not fit into memory at once.

    Raises:
        UserError: the folder has no index, is of another format, lacks a block, or a shard is not what the index says.
    """
    blocks = read_index(folder)
    for name in blocks if names is None else names:
        if name not in blocks:
            raise UserError(f"{folder} holds no block {name}; give the salaad.roles of the run that wrote it")
        state = _read_block(inside(folder, blocks[name].get("file")), name, *blocks[name]["shape"])
        if "low_rank" in state:
            state["target"] = target_of(state.pop("low_rank"), state["residual"], state["thresholds"][2])
        yield name, blocks[name], state


def read_surrogates(folder: Path, names: Iterable[str] | None = None) -> dict[str, dict[str, Tensor]]:
    """Block → tensors, of `stored_blocks`."""
    return {name: state for name, _, state in stored_blocks(folder, names)}


def _read_block(path: Path, name: str, n: int, m: int) -> dict[str, Tensor]:
    """The tensors of a block of n×m, whose shapes are compared before any of them is read."""
    matrix, short = (n, m), min(n, m)
    most = {"target": matrix, "low_rank": matrix, "residual": matrix, "thresholds": (3,)}
    most |= {"sigma": (short,), "ranks": (2,), "unfit": (1,), "basis": (short, short)}
    try:
        with safe_open(path, framework="pt") as shard:
            stored = set(shard.keys())
            present = [key for key in most if f"{name}/{key}" in stored]
            needed = ({"residual"}, {"thresholds"}, {"sigma", "ranks"}, {"target", "low_rank"})
            if any(not one_of & {*present} for one_of in needed):
                raise ValueError(f"a part of {name} is missing")
            for key in present:
                tensor = shard.get_slice(f"{name}/{key}")
                shape = tuple(tensor.get_shape())
                # Of singular values and vectors there are as many as the rank needs.
                fits = shape[:-1] == most[key][:-1] and len(shape) == len(most[key]) and shape[-1] <= most[key][-1]
                exact = key in ("sigma", "basis") or shape == most[key]
                if not fits or not exact or tensor.get_dtype() not in FLOATS:
                    raise ValueError(f"{name}/{key} is {shape} of {tensor.get_dtype()}, where {most[key]} is wanted")
            return {key: shard.get_tensor(f"{name}/{key}") for key in present}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a whole checkpoint") from None
