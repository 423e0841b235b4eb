"""Where an interrupted fit is kept until the folder it is for has been written."""

import errno
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from salaad.common.files import replacing


@dataclass(frozen=True)
class SavedTuning:
    """One file of tensors and plain values; it is read without running code (`weights_only`).

    Args:
        path: in the cache of the model that is cut, named by all that the result depends on.
    """

    path: Path

    def load(self) -> dict[str, Any] | None:
        """What was saved last; None if nothing was, or it cannot be read."""
        try:
            return torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception:  # whatever is wrong with the file, the work is done once more
            return None

    def save(self, state: dict[str, Any]) -> None:
        """Replace what was saved.

        Raises:
            OSError: there is no room for it, or no right to write it.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            try:
                torch.save(state, temporary)
            except RuntimeError as error:  # torch's own writer says no more of a full disk
                if "PytorchStreamWriter" not in str(error) and "inline_container" not in str(error):
                    raise
                why = " ".join(str(error).split())
                raise OSError(errno.EIO, f"no room, or no right to write: {why}", str(self.path)) from None

    def remove(self) -> None:
        """Nothing is kept any more."""
        self.path.unlink(missing_ok=True)
