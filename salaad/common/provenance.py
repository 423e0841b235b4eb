"""The provenance of a result."""

import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

import torch

from salaad.common.files import CHECKOUT


def provenance() -> dict[str, str]:
    """Versions, commit and machine that produced a result."""
    packages = ("salaad", "torch", "transformers", "datasets", "accelerate")
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "versions": ", ".join(f"{name} {_version(name)}" for name in packages)
        + f", python {platform.python_version()}",
        "commit": _commit(),
        "machine": f"{device}, {torch.get_num_threads()} threads, {platform.system()}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "from source"


def _commit() -> str:
    """The commit, with `-dirty` if files outside results/, where runs write their records, have changed since."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(CHECKOUT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != CHECKOUT:  # a repository around the installed wheel
            return "unknown"
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return git("rev-parse", "--short=12", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
