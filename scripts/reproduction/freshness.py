"""Whether the code behind a recorded figure is still what it was: from git, comments and docstrings left out."""

import ast
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from scripts.reproduction.grid import ROOT

# What a figure comes out of: its training, the cut, the evaluation, and what makes an item's numbers of them.
BEHIND = (
    *("train.py", "configs", "scripts/elastic_ways.py"),
    *(f"salaad/{one}.py" for one in ("prox", "rpca", "hpa", "energy_allocation")),
    *(
        f"salaad/{one}"
        for one in ("spectral", "methods", "model", "data", "training", "compression", "factored", "evaluation")
    ),
    *(f"scripts/reproduction/{one}.py" for one in ("records", "tables", "deployments", "experiments", "curves")),
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
MARK = "†"
LEGEND = f"{MARK}: measured before some of the code behind it changed, or with changes that were not committed."


def is_fresh(commits: Iterable[str]) -> bool:
    """Whether all that was measured at these commits was committed, and would be measured by the same code today."""
    return not any(commit.endswith("-dirty") or changed_since(commit) for commit in commits)


def commits_of(result: Mapping[str, Any]) -> list[str]:
    """Those of an item's result and of its trainings."""
    return [result["commit"], *(one["commit"] for one in result["trainings"])]


@cache
def changed_since(commit: str) -> list[str]:
    """Which of the places that figures depend on say something else now; none where git does not know the commit."""
    clean = commit.removesuffix("-dirty")
    try:
        names = _git("diff", "--name-only", clean, "HEAD", "--", *BEHIND).split()
        changed = [name for name in names if _meaning(clean, name) != _meaning("HEAD", name)]
    except (OSError, subprocess.SubprocessError):
        return []
    return [place for place in BEHIND if any(name == place or name.startswith(f"{place}/") for name in changed)]


@cache
def _meaning(commit: str, name: str) -> str | None:
    """What a file says to the interpreter; the text itself of what is no Python, None where it was not there."""
    if not _git("ls-tree", commit, "--", name):
        return None
    text = _git("show", f"{commit}:{name}")
    if not name.endswith(".py"):
        return text
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node):
            del node.body[0]
    return ast.dump(tree)


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout
