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
from salaad.common.files import inside, read_object, require_new, tokenizer_errors, write_checksums, write_json
from salaad.common.hashed_files import write_tensors
from salaad.methods.salaad import ownership
from salaad.methods.salaad.surrogate import Surrogate, flaw_of, shapes_of, target_of
from salaad.model.weight_headers import FLOATS, is_count

FORMAT, OLD_FORMAT = 2, 1  # the old format had L in place of T
_AT_ONCE = 2**20  # entries of a weight whose squares are summed at once


def index_of(
    surrogates: Mapping[str, Surrogate], weights: Mapping[str, Tensor] | None = None, **about: Any
) -> dict[str, Any]:
    """Return the index of the shards that all ranks are about to write, the same on every rank; collective.

    Args:
        surrogates: block → surrogate, for the blocks that this rank owns.
        weights: block → weight, whose norm is stored so that loading can compare it.
        about: further entries of the index, the same on every rank.

    Raises:
        NotSavedError: on every rank, if any rank fails, such as for lack of memory.
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
    """Write this rank's surrogates as one shard, and on rank 0 the index of all shards; not collective.

    Args:
        surrogates: block → surrogate, for the blocks that this rank owns.
        folder: an existing folder.
        index: the index from `index_of`.

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
    """Write a new folder, complete or not at all; collective.

    Args:
        folder: a folder that does not exist yet.
        parts: a model and a tokenizer, of which rank 0 saves what has a `save_pretrained`.
        writer: collective; returns a function, not collective, that writes this rank's share of `surrogate/`.

    Raises:
        UserError: the folder exists, or cannot be written.
    """
    partial = folder.with_name(f".partial-{folder.name}")

    def finish() -> None:
        for part in parts:
            if hasattr(part, "save_pretrained"):
                with tokenizer_errors(partial):
                    part.save_pretrained(partial)
        write_checksums(partial)
        partial.replace(folder)

    distributed.first_decides(lambda: require_new(folder, option=""))
    try:
        write_whole(partial, partial / "surrogate", writer, finish)
    except NotSavedError as error:
        raise UserError(f"{folder} cannot be written ({error}); give a folder in a place with room") from None


def write_whole(
    partial: Path, surrogate: Path, writer: Callable[[], Callable[[Path], None]], finish: Callable[[], None]
) -> None:
    """Let every rank write into the new folder `surrogate`, and then rank 0 alone finish; collective.

    Args:
        partial: a folder that is deleted before, and afterwards unless `finish` has renamed it.
        surrogate: this folder or one in it.
        writer: as for `save_folder`.
        finish: gives `partial` its final name.

    Raises:
        NotSavedError: on every rank, if any rank fails.
    """

    def prepare() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        surrogate.mkdir(parents=True)

    try:
        distributed.together(prepare, only=0)
        write = writer()
        distributed.together(lambda: write(surrogate))
        distributed.together(finish, only=0)
    finally:
        if distributed.rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)


def norm_of(X: Tensor) -> float:
    """‖X‖_F, by which a saved weight is recognized; summed in float64, without a whole copy of X in float64."""
    rows = X.detach().split(max(1, _AT_ONCE // X.shape[1]))
    return float(torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(part.double()) for part in rows])))


def load_surrogates(
    surrogates: Mapping[str, Surrogate], folder: Path, weights: Mapping[str, Tensor] | None = None
) -> None:
    """Load this rank's surrogates from the shards of any world size.

    Args:
        surrogates: block → the surrogate to load into.
        folder: the folder of the shards.
        weights: block → weight, to be compared with the saved one where the index has its norm.

    Raises:
        UserError: as for `stored_blocks`, or a block has another shape or another weight than in this model.
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
    """Read the index of the surrogates in `folder` without its blocks: settings, step counts and norms, if any."""
    return {key: value for key, value in read_object(folder / "index.json").items() if key not in ("format", "blocks")}


def read_index(folder: Path) -> dict[str, dict[str, Any]]:
    """Read block → file, shape, ρ, rank and number of nonzero entries of the surrogates in `folder`.

    Raises:
        UserError: there is no index, its format is another, or an entry is impossible for a matrix.
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
    # In an order that does not depend on the ranks that wrote them: of units of equal value a cut keeps the first.
    order = ownership.dearest_first({name: ownership.update_cost(*entry["shape"]) for name, entry in blocks.items()})
    return {name: blocks[name] for name in order}


def _is_entry(entry: Any) -> bool:
    """Whether `entry` has a shape, ρ, and a rank and a number of nonzero entries that the shape allows."""
    shape, rank, nnz = (entry.get(key) for key in ("shape", "rank", "nnz")) if isinstance(entry, dict) else (None,) * 3
    if not isinstance(shape, list) or len(shape) != 2 or not all(map(is_count, (*shape, rank, nnz))):
        return False
    return rank <= min(shape) and nnz <= shape[0] * shape[1] and type(entry.get("rho")) in (int, float)


def stored_blocks(
    folder: Path, names: Iterable[str] | None = None
) -> Iterator[tuple[str, dict[str, Any], dict[str, Tensor]]]:
    """Yield (block, its entry in the index, the tensors of `Surrogate.state_dict`) for the named blocks or for all.

    Each block is read when it is yielded, since all blocks of a large model do not fit into memory at once.

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
    """Return block → the tensors that `stored_blocks` yields."""
    return {name: state for name, _, state in stored_blocks(folder, names)}


def _read_block(path: Path, name: str, n: int, m: int) -> dict[str, Tensor]:
    """Read the tensors of an n×m block, after the shapes of all of them were checked."""
    try:
        with safe_open(path, framework="pt") as shard:
            stored = set(shard.keys())
            present = [key for key in shapes_of(n, m) if f"{name}/{key}" in stored]
            slices = {key: shard.get_slice(f"{name}/{key}") for key in present}
            if flaw := flaw_of({key: tuple(tensor.get_shape()) for key, tensor in slices.items()}, n, m):
                raise ValueError(f"{name} {flaw}")
            for key, tensor in slices.items():
                if tensor.get_dtype() not in FLOATS:
                    raise ValueError(f"{name} has its {key} in {tensor.get_dtype()}, where real numbers are wanted")
            return {key: shard.get_tensor(f"{name}/{key}") for key in present}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a whole checkpoint") from None
