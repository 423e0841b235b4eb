"""Whether the code behind a recorded number has changed since, by git; comments and docstrings do not count."""

import ast
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from scripts.reproduction.grid import ROOT

# Files and folders that a recorded number depends on: training, cut, evaluation, and the computation of items.
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
UNKNOWN = "not known, as git does not have this commit"
MARK = "†"
LEGEND = f"{MARK}: measured before some of the code behind it changed, or with changes that were not committed."


def is_fresh(commits: Iterable[str]) -> bool:
    """Return whether the code at each of these commits was committed and, in all of BEHIND, is the same at HEAD."""
    return not any(commit.endswith("-dirty") or changed_since(commit) for commit in commits)


def commits_of(result: Mapping[str, Any]) -> list[str]:
    """Return the commits at which an item's result and its trainings were computed."""
    return [result["commit"], *(one["commit"] for one in result["trainings"])]


@cache
def changed_since(commit: str) -> list[str]:
    """Return the entries of BEHIND whose code differs between `commit` and HEAD; `UNKNOWN` where git cannot tell."""
    clean = commit.removesuffix("-dirty")
    try:
        names = _git("diff", "--name-only", clean, "HEAD", "--", *BEHIND).split()
        changed = [name for name in names if _meaning(clean, name) != _meaning("HEAD", name)]
    except (OSError, subprocess.SubprocessError):  # no git, or a clone without the commit
        return [UNKNOWN]
    return [place for place in BEHIND if any(name == place or name.startswith(f"{place}/") for name in changed)]


@cache
def _meaning(commit: str, name: str) -> str | None:
    """Return the syntax tree of a Python file without docstrings, the text of any other file; None if it is missing."""
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
