"""Another checkout of this project: Python processes in it, and its commit."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from salaad.common.errors import UserError
from salaad.common.validation import check


def require_checkout(other: Path, *needed: str) -> None:
    """Raise a UserError unless the folder that --other names has these files and folders."""
    for name in needed:
        check((other / name).exists(), f"--other {other} has no {name}; give a checkout of this project")


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout; raise a UserError if git does not know it."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True)
    check(not done.returncode, f"{checkout} has no commit; make it with git worktree add --detach")
    return done.stdout.strip()


def python_in(checkout: Path, words: Sequence[str], *beside: Path) -> subprocess.CompletedProcess:
    """Run Python with these words in a checkout; what the checkout does not have is imported from `beside`."""
    paths = os.pathsep.join(str(folder.absolute()) for folder in (checkout, *beside))
    environment = os.environ | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *words], cwd=checkout, env=environment, capture_output=True, text=True)


def require_success(done: subprocess.CompletedProcess, what: str) -> None:
    """Raise a UserError with the last line that a process said if it failed; `what` names its work."""
    if done.returncode:
        [*_, said] = ["nothing", *done.stderr.strip().splitlines()]
        raise UserError(f"{what} ended with code {done.returncode} and said {said}; mend that")
