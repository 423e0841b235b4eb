"""The file in which an interrupted fit is kept."""

import errno
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZipFile

import torch
from torch import nn

from salaad.common.errors import UserError, is_lack_of_memory
from salaad.common.files import is_file, save_if_possible

T = TypeVar("T")

# What taking over the state of another version, of another cut or of another text raises.
_DOES_NOT_FIT = (UserError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class SavedTuning:
    """The saved state of a fit: one file of tensors and plain values, read without running code (`weights_only`).

    Args:
        path: the file.
    """

    path: Path

    def resumed(self, tuned: nn.Module, begin: Callable[[dict[str, Any] | None], T]) -> T:
        """Return `begin(state)` of the last saved state, or `begin(None)` if there is none that is whole and fits.

        A line on standard error says so if a state is passed over.

        Args:
            tuned: the module that `begin` changes, which is put back as it was if the state does not fit.
            begin: function that takes over a state, or begins without one; an exception tells that a state is unfit.

        Raises:
            MemoryError, RuntimeError: there is no memory for the state, which stays.
        """
        if not is_file(self.path):
            return begin(None)
        try:
            state = self._load()
        except Exception as error:  # damaged files raise too many kinds to list
            self._pass_over(error)
            return begin(None)
        # On the CPU, as a GPU may have no room for a second copy.
        before = {name: tensor.to("cpu", copy=True) for name, tensor in tuned.state_dict().items()}
        try:
            return begin(state)
        except _DOES_NOT_FIT as error:
            self._pass_over(error)
            tuned.load_state_dict(before)
        return begin(None)

    def _load(self) -> dict[str, Any]:
        with ZipFile(self.path) as file:
            if (broken := file.testzip()) is not None:  # torch does not compare the checksums that it writes
                raise ValueError(f"{broken} is damaged")
        state = torch.load(self.path, map_location="cpu", weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}")
        return state

    def _pass_over(self, error: Exception) -> None:
        """Print that the state is passed over; raise the error again if it is a lack of memory."""
        if is_lack_of_memory(error):
            raise error
        why = " ".join(str(error).split())[:200]
        print(
            f"warning: the state in {self.path} is broken or does not fit ({type(error).__name__}: {why}); "
            "the fit begins anew",
            file=sys.stderr,
        )

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
