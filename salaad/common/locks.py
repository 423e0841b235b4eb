"""Who uses a folder: one run writes into it, and what an evaluation reads is not deleted beneath it.

The locks are the operating system's and end with the process, however it ends. They are taken here and not by a library
of locks for two reasons: the one that a trainer holds must not be inherited by its data workers, which may outlive it,
and any number of readers share the one of a checkpoint's folder.
"""

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from salaad.common.errors import UserError

_claimed: dict[Path, int] = {}  # descriptors by lock file
_kept: list[int] = []  # and those of checkpoints that are read


def claim(folder: Path) -> None:
    """Make this process the one that writes into the run's `folder`, which exists.

    Raises:
        UserError: another process does.
    """
    path = folder / ".lock"
    if path in _claimed:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return  # whoever cannot write here disturbs nobody
    try:
        # Unlike flock's, this kind of lock is not inherited by data workers, which may outlive a killed trainer.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UserError(f"--output {folder} is being written by {owner}; wait for its end, or give another") from None
    except OSError:
        pass  # a file system without locks
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _claimed[path] = descriptor


def release() -> None:
    """Give back what this process has claimed."""
    while _claimed:
        os.close(_claimed.popitem()[1])


def keep_from_deletion(folder: Path) -> bool:
    """Let no training delete the checkpoint `folder` as long as this process lives; False if it is gone."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        _kept.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a deletion that has begun
    return folder.is_dir()


def delete_unless_kept(folder: Path) -> None:
    """Delete a checkpoint, unless a process asked for it to be kept. What cannot be deleted stays, and does no harm."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    return
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
