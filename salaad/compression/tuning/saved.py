"""The file in which an interrupted fit is kept until the folder that it is for has been written."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from salaad.common.files import replacing


@dataclass(frozen=True)
class SavedTuning:
    """The saved state of a fit: one file of tensors and plain values, read without running code (`weights_only`).

    Args:
        path: the file, in the cache of the model that is cut, named by a hash of all that the result depends on.
    """

    path: Path

    def load(self) -> dict[str, Any] | None:
        """Return the state that was saved last; None if there is none, or it cannot be read."""
        try:
            return torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception:  # whatever is wrong with the file, the work is done once more
            return None

    def save(self, state: dict[str, Any]) -> None:
        """Save `state` in place of the last one.

        Raises:
            OSError: there is no room for the file, or no right to write it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # all that torch's own writer raises on a full disk
                if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
                    raise
                why = " ".join(str(error).split())
                raise OSError(errno.EIO, f"no room, or no right to write: {why}", str(self.path)) from None

    def remove(self) -> None:
        """Delete the file, if there is one."""
        self.path.unlink(missing_ok=True)
