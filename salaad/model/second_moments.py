"""The optimizer's second moments (mean squared gradients) of every matrix, kept as means over rows and columns.

Adam's second moment of a weight estimates E[g²], the diagonal of the empirical Fisher information. Its means over each
row and over each column of an n×m matrix take n + m numbers, and tell a later cut which rows and columns are sensitive.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from salaad.common.errors import UserError
from salaad.common.files import is_file
from salaad.model.weights import matrices

SECOND_MOMENTS = "second_moments.safetensors"  # in state/ of a checkpoint, in surrogate/ of another trainer's folder
Moments = Mapping[str, tuple[Tensor, Tensor]]  # matrix → means over each row (n) and over each column (m)

_KEYS = ("exp_avg_sq", "square_avg")  # of the Adam family; of RMSprop and Adadelta
_SIDES = ("rows", "columns")


@torch.no_grad()
def second_moments(model: nn.Module, *optimizers: Optimizer) -> Moments:
    """Return the moments of every matrix for which one of the optimizers keeps one per entry, float32 on the CPU."""
    found = {}
    for name, place in matrices(model).items():
        states = [optimizer.state.get(place.parameter, {}) for optimizer in optimizers]
        moment = next((state[key] for state in states for key in _KEYS if torch.is_tensor(state.get(key))), None)
        if moment is not None and moment.shape == place.parameter.shape:
            square = (moment if place.index is None else moment[place.index]).float()
            found[name] = (square.mean(1).cpu(), square.mean(0).cpu())
    return found


def save_second_moments(moments: Moments, folder: Path) -> None:
    """Write the moments into an existing folder; no file is written if there are none."""
    if moments:
        save_file(tensors_of(moments), folder / SECOND_MOMENTS)


def tensors_of(moments: Moments) -> dict[str, Tensor]:
    """Return the moments as `read_second_moments` finds them in a file of tensors."""
    return {f"{name}/{side}": part for name, pair in moments.items() for side, part in zip(_SIDES, pair, strict=True)}


def names_of_moments(path: Path) -> list[str]:
    """Return the names of the matrices whose second moments a file holds.

    Raises:
        UserError: the file cannot be read.
    """
    with _reading(path), safe_open(path, framework="pt") as file:
        keys = file.keys()
    return list(dict.fromkeys(key.rpartition("/")[0] for key in keys))


def read_second_moments(path: Path, shapes: Mapping[str, tuple[int, int]]) -> Moments:
    """Read the second moments of the matrices in `shapes`, as far as the file has them.

    Raises:
        UserError: the file cannot be read, or its numbers do not fit a shape, are negative or not finite.
    """
    with _reading(path):
        tensors = load_file(path)
    there = [name for name in shapes if all(f"{name}/{side}" in tensors for side in _SIDES)]
    found = {name: tuple(tensors[f"{name}/{side}"] for side in _SIDES) for name in there}
    for name, pair in found.items():
        fits = all(part.shape == (size,) for part, size in zip(pair, shapes[name], strict=True))
        if not fits or not all(part.isfinite().all() and (part >= 0).all() for part in pair):
            raise UserError(f"{path} holds no second moments of {name}; give a whole checkpoint")
    return found


def moments_in(folder: Path, model: nn.Module) -> Moments:
    """Read the second moments of a model from its folder, a checkpoint or another trainer's; empty if it has none.

    Raises:
        UserError: as `read_second_moments`.
    """
    shapes = {name: tuple(place.weight.shape) for name, place in matrices(model).items()}
    files = [path for part in ("state", "surrogate") if is_file(path := folder / part / SECOND_MOMENTS)]
    return read_second_moments(files[0], shapes) if files else {}


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}); give a whole checkpoint") from None
