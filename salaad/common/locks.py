"""Locks on folders: one process writes into a run, and a checkpoint that is being read is not deleted.

They are the operating system's locks and end with the process, however it ends. No library of locks is used: the
lock of a trainer must not be inherited by its data workers, which may outlive it, and any number of readers share the
lock of a checkpoint.
"""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from salaad.common.errors import UserError

_claimed: dict[Path, int] = {}  # descriptors by lock file
_kept: list[int] = []  # descriptors of checkpoints that are being read


def claim(folder: Path) -> None:
    """Lock the existing `folder` of a run for writing by this process.

    Raises:
        UserError: another process holds the lock.
    """
    path = folder / ".lock"
    if path in _claimed:
        return
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        return  # a process that cannot write here needs no lock
    try:
        # Unlike those of flock, locks of lockf are not inherited by data workers, which may outlive a killed trainer.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        owner = os.read(descriptor, 200).decode(errors="replace").strip() or "another process"
        os.close(descriptor)
        raise UserError(
            f"--output {folder} is being written by {owner}; wait for its end, or give another; if that machine is "
            f"gone for good, delete {path} and start again"
        ) from None
    except OSError:
        pass  # a file system without locks
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    _claimed[path] = descriptor


def release() -> None:
    """Release the locks of `claim`."""
    while _claimed:
        os.close(_claimed.popitem()[1])


@contextmanager
def held(folder: Path) -> Iterator[bool]:
    """Lock an existing folder while the context lasts; yield False if another process, or context, holds the lock."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        alone = True
        with suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                alone = False
        yield alone
    finally:
        os.close(descriptor)


def keep_from_deletion(folder: Path) -> bool:
    """Protect a checkpoint from deletion until `allow_deletion` or this process's end; False if it does not exist."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        _kept.append(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # waits for a deletion that has begun
    return folder.is_dir()


def allow_deletion(folder: Path) -> None:
    """Give up the protection of the checkpoint `folder` by `keep_from_deletion`."""
    with suppress(OSError):
        for descriptor in [one for one in _kept if os.path.samestat(os.fstat(one), folder.stat())]:
            _kept.remove(descriptor)
            os.close(descriptor)


def delete_unless_kept(folder: Path) -> None:
    """Delete a checkpoint unless a process protects it; files that cannot be deleted stay, without an error."""
    with suppress(OSError), held(folder) as alone:
        if alone:
            shutil.rmtree(folder, ignore_errors=True)
