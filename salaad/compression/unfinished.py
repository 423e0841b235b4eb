"""Files in a model's cache in which a command keeps unfinished work, until the folder that it is for is written."""

from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from salaad.compression.cut import REFINED, shapes
from salaad.compression.split import Make, Parts, cached_parts


@dataclass
class Unfinished:
    """The files of one command, which no other command shares or deletes.

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
        """Delete the files: the command has ended."""
        for path in self._paths:
            path.unlink(missing_ok=True)
