"""The headers of a folder's weight files, compared with its config.json before any memory is allocated.

Only names, shapes and dtypes of the tensors are read. The files must contain all of the model that config.json
describes, so opening a folder takes no more memory than its files have numbers, and no more time than they have
tensors, whatever its config.json says about layers, widths, ranks and entries.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedConfig

from salaad.common.errors import UserError
from salaad.common.files import inside, is_file, read_object
from salaad.model.weights import place_of

FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32")
BYTES = ("U8",)
TYPES = {torch.float32: FLOATS, torch.float16: FLOATS, torch.bfloat16: FLOATS, torch.float64: FLOATS} | {
    torch.uint8: BYTES,
    torch.int8: ("I8",),
}

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_WHOLE = "give a whole copy of the folder"
_LAYERS = re.compile(r"^(num|n)_(\w+_)?layers?$|coder_layers$")
_MOST_LABELS = 100_000
_WIDEST = 2**20  # limit for a block with rank 0 and no entries, whose width no tensor in the files confirms


class Header(NamedTuple):
    """Shape and dtype of a tensor in a file; the dtype by its name in safetensors, such as BF16."""

    shape: tuple[int, ...]
    dtype: str


Headers = Mapping[str, Header]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder.

    Raises:
        UserError: there are none, one is missing or outside the folder, or they are not those of one plain model.
    """
    for name in sorted(path.name for path in folder.iterdir()):
        if name == "adapter_config.json" or re.match(r"shard-\d+-model-", name):
            raise UserError(f"{folder} holds {name}, so it is no plain model; merge and save it with save_pretrained")
    names, index = [_SINGLE], folder / _INDEX
    if not is_file(folder / names[0]):
        if not is_file(index):
            raise UserError(
                f"{folder} holds no {_SINGLE}, and weights in other formats can run code when they are read; "
                "give a folder that was saved as safetensors"
            )
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise UserError(f"{index} does not say which file holds which weight; {_WHOLE}")
        names = sorted(set(listed.values()))
    files = [inside(folder, name) for name in names]
    for path in files:
        if not is_file(path):
            raise UserError(f"{path} is missing; {_WHOLE}")
    return files


def read_headers(files: Iterable[str | Path]) -> dict[str, Header]:
    """Return name → shape and dtype of every tensor in the files, of which only the headers are read.

    Raises:
        UserError: a file is no safetensors file, or is cut off.
    """
    headers = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    tensor = file.get_slice(name)
                    headers[name] = Header(tuple(tensor.get_shape()), tensor.get_dtype())
        except (SafetensorError, OSError, ValueError, OverflowError) as error:
            raise UserError(f"{path} is no whole safetensors file ({error}); {_WHOLE}") from None
    return headers


def headers_for(model: nn.Module, files: Iterable[str] | None) -> dict[str, Header]:
    """Return the headers of the files that transformers is about to read; a UserError if one is outside the folder."""
    folder, files = Path(model.config.name_or_path), list(files or ())
    if folder.is_dir():  # not a name on the hub, whose files are in its cache
        for path in map(Path, files):
            inside(folder, str(path.relative_to(folder) if path.is_relative_to(folder) else path))
    return read_headers(files)


def check_layers(config: PreTrainedConfig) -> None:
    """Apply `check_counts` to the folder that plain `from_pretrained` is about to open."""
    folder = Path(config.name_or_path)
    if any(is_file(folder / name) for name in (_SINGLE, _INDEX)):
        check_counts(config.to_dict(), len(read_headers(weight_files(folder))), folder / "config.json")


def check_counts(config: Mapping[str, Any], tensors: int, place: Path) -> None:
    """Raise a UserError if config.json names more layers than the files have tensors, before any layer is built.

    The error is raised for more than `_MOST_LABELS` labels, too.
    """
    for key, value in config.items():
        if isinstance(value, dict) and key != "quantization_config":
            check_counts(value, tensors, place)
        if isinstance(value, int) and (
            (_LAYERS.search(key) and value > tensors) or (key == "num_labels" and value > _MOST_LABELS)
        ):
            most = _MOST_LABELS if key == "num_labels" else tensors
            raise UserError(f"{place} says {key} {_shown(value)}, but the files have room for {most:,}; {_WHOLE}")


@contextmanager
def few_parameters(tensors: int) -> Iterator[None]:
    """Context manager in which building a model with more weights than `tensors` tensors can fill raises ValueError."""
    most = 8 * tensors + 64  # one tensor may hold three weights, and tied weights are created before they are tied
    count = 0

    def counted(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal count
        count += 1
        if count > most:
            raise ValueError(f"its config.json describes more than {most:,} weights, its files hold {tensors:,}")

    hook = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        hook.remove()


def check_room(model: nn.Module, headers: Headers, per_element: int = 1, beside: int = 0) -> None:
    """Raise a UserError if the model has more numbers than the files hold.

    Args:
        model: the model on the meta device.
        headers: the headers of the files.
        per_element: numbers that one element of a file may hold, if a quantization packs them.
        beside: numbers that no file holds, as they are computed from others when the folder is opened.
    """
    stored = numbers(headers)
    tied = set(getattr(model, "all_tied_weights_keys", ()))
    weights = sum(p.numel() for name, p in model.named_parameters() if name not in tied)
    # Buffers computed from sizes alone, such as causal masks and tables of sines, are in no file.
    tables = sum(buffer.numel() for buffer in model.buffers())
    for what, count, most in (
        ("weights", weights, stored * per_element + beside),
        ("tables", tables, stored * per_element + 2**26),
    ):
        if count > most:
            raise UserError(f"config.json describes {what} of {count:,} numbers, its files hold {stored:,}; {_WHOLE}")


def numbers(headers: Headers) -> int:
    """The number of elements of all tensors together."""
    return sum(prod(header.shape) for header in headers.values())


def check_block(model: nn.Module, name: str, rank: int, nnz: int, stored: int | None = None) -> tuple[int, int]:
    """Return the shape (n, m) of the named block's weight, after checking that `rank` and `nnz` fit.

    Args:
        model: the model, which may be on the meta device.
        name: name of the block.
        rank: its rank in config.json.
        nnz: its number of entries in config.json.
        stored: `numbers` of the files that shall fill it, if there are files.

    Raises:
        UserError: there is no such matrix, it cannot have this rank or so many entries, or the files cannot fill it.
    """
    place = place_of(model, name)
    if place is None or place.weight.dim() != 2:
        raise UserError(f"{name} is named as a block, but the model has no such matrix; {_WHOLE}")
    n, m = place.weight.shape
    if rank > min(n, m) or nnz > n * m:
        raise UserError(
            f"{name}, a matrix of {n}×{m}, is given rank {rank:,} and {nnz:,} entries, more than it can have; {_WHOLE}"
        )
    widest = max(stored or 0, _WIDEST)
    if stored is not None and max(n, m) > widest:
        raise UserError(f"config.json makes {name} {max(n, m):,} wide, the files have room for {widest:,}; {_WHOLE}")
    return n, m


def check_tensors(expected: Mapping[str, tuple[tuple[int, ...], tuple[str, ...]]], headers: Headers) -> None:
    """Raise a UserError if a tensor of `expected` (name → shape and possible dtypes) is missing or differs."""
    for name, (shape, dtypes) in expected.items():
        if name not in headers:
            raise UserError(f"the files lack {name}, which config.json speaks of; {_WHOLE}")
        found = headers[name]
        if found.shape != shape or found.dtype not in dtypes:
            raise UserError(
                f"{name} is {_matrix(found.shape)} of {found.dtype}, where config.json wants {_matrix(shape)} of "
                f"{' or '.join(dtypes)}; {_WHOLE}"
            )


def shape_and_types(tensor: Tensor) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the shape, and the possible dtypes, that a stored tensor must have to be loaded into `tensor`."""
    return tuple(tensor.shape), TYPES[tensor.dtype]


def check_entry(blocks: Any, count: int) -> dict[str, list[int]]:
    """Return config.json's list of blocks; UserError unless it is name → `count` whole numbers from 0."""
    sound = isinstance(blocks, dict) and all(
        isinstance(sizes, list | tuple) and len(sizes) == count and all(is_count(size) for size in sizes)
        for sizes in blocks.values()
    )
    if not sound:
        raise UserError(f"config.json does not list its blocks as a name and {count} whole numbers each; {_WHOLE}")
    return blocks


def is_count(value: Any) -> bool:
    """Whether `value` is a whole number from 0 below 2^53."""
    return type(value) is int and 0 <= value < 2**53


def _matrix(shape: tuple[int, ...]) -> str:
    return "×".join(map(str, shape)) or "a number"


def _shown(value: int) -> str:
    return f"{value:,}" if abs(value) < 2**63 else "over 2^63"
