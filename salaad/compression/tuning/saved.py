"""The file in which an interrupted fit is kept."""

import errno
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

import torch
from torch import nn

from salaad.common.files import save_if_possible

T = TypeVar("T")


@dataclass(frozen=True)
class SavedTuning:
    """The saved state of a fit: one file of tensors and plain values, read without running code (`weights_only`).

    Args:
        path: the file.
    """

    path: Path

    def resumed(self, tuned: nn.Module, begin: Callable[[dict[str, Any] | None], T]) -> T:
        """Return `begin(state)` of the last saved state, or `begin(None)` if there is none that is whole and fits.

        Args:
            tuned: the module that `begin` changes, which is put back as it was if the state does not fit.
            begin: function that takes over a state, or begins without one; an exception tells that a state is unfit.
        """
        state = self._load()
        if isinstance(state, dict):
            before = {name: tensor.clone() for name, tensor in tuned.state_dict().items()}
            try:
                return begin(state)
            except Exception:  # another version or another cut: whatever it is, the work is done once more
                tuned.load_state_dict(before)
        return begin(None)

    def _load(self) -> Any:
        try:
            with ZipFile(self.path) as file:
                if file.testzip() is not None:  # torch does not compare the checksums that it writes
                    return None
            return torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception:  # no file, or whatever is wrong with it
            return None

    def save(self, state: dict[str, Any]) -> None:
        """Save `state` in place of the last one; print a warning where that is not possible."""
        save_if_possible(self.path, partial(_write, state))


def _write(state: dict[str, Any], path: Path) -> None:
    try:
        torch.save(state, path)
    except RuntimeError as error:  # all that torch's own writer raises on a full disk
        if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
            raise
        why = " ".join(str(error).split())
        raise OSError(errno.EIO, f"no room, or no right to write: {why}", str(path)) from None
