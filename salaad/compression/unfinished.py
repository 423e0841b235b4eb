"""Files in a model's cache in which a command keeps unfinished work, until the folder that it is for is written."""

import time
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from salaad.compression.cut import REFINED, shapes
from salaad.compression.split import Make, Parts, cached_parts

_KEPT = 30 * 24 * 3600  # seconds for which work stays whose command is never given again


@dataclass
class Unfinished:
    """The files of one command. Commands with other options neither read them nor delete them within 30 days.

    The same command given twice at once, for two places, shares them: they are the same up to roundings, and if the
    first to end deletes what the second would go on from, an interruption of the second costs it that work.

    Args:
        folder: where they are.
        command: the options of the command, apart from where it reads and writes, and a key of the text that it reads.
    """

    folder: Path
    command: str
    _paths: list[Path] = field(default_factory=list)

    def path(self, of: str) -> Path:
        """Return the path of a file; `of` is a key of all that its content depends on, except for the command."""
        key = sha256(f"{self.command} {of}".encode()).hexdigest()[:16]
        self._paths.append(self.folder / key)
        return self._paths[-1]

    def collect(self, of: str, begin: Parts, make: Make) -> Parts:
        """Return the blocks that `make` refines from `begin`, those of an interrupted command from the disk.

        Raises:
            UserError: a stop was requested; the blocks that were refined are saved.
        """
        content = sha256()
        for name, slr in begin.items():
            content.update(name.encode())
            for tensor in slr.tensors().values():
                content.update(memoryview(tensor.numpy()).cast("B") if tensor.numel() else b"nothing")
        return cached_parts(self.path(f"{of} {content.hexdigest()}"), shapes(begin), make, REFINED)

    def remove(self) -> None:
        """Delete the files, as the command has ended, and those that no command has written to for 30 days.

        Those in the folder `tuning` beside this one were left by an older version.
        """
        for path in self._paths:
            with suppress(OSError):  # what stays is deleted after 30 days, and the folder is there all the same
                path.unlink()
        now = time.time()
        for path in (*self.folder.glob("*"), *self.folder.with_name("tuning").glob("*.pt")):
            with suppress(OSError):
                if now - path.stat().st_mtime > _KEPT:
                    path.unlink()
