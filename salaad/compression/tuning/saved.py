"""Where an interrupted fit is kept until the folder it is for has been written."""

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
        """Replace what was saved; a full disk is an `OSError` that names the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self.path) as temporary:
            torch.save(state, temporary)

    def remove(self) -> None:
        """Nothing is kept any more."""
        self.path.unlink(missing_ok=True)
