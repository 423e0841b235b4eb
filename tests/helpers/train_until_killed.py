"""train.py on a disk that stops taking bytes in the middle of one checkpoint: `train_until_killed.py STEP OPTIONS`."""

import sys
import time
from pathlib import Path

from salaad.common.hashed_files import HashedFile


def main() -> None:
    """Train, but stop for 600 s within writing the optimizer's state to the checkpoint after step STEP."""
    step, write = sys.argv.pop(1), HashedFile.write

    def write_some(self: HashedFile, data: bytes | memoryview) -> int:
        path = Path(self._file.name)
        if f"step-{int(step):07d}" in str(path) and path.name.startswith("optimizer") and self._file.tell() > 1000:
            self._file.flush()
            time.sleep(600)
        return write(self, data)

    HashedFile.write = write_some
    import train
    from salaad.config.command_line import read_command_line

    train.main(*read_command_line())


if __name__ == "__main__":
    main()
