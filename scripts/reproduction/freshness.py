"""Whether the code behind a recorded number has changed since, by git; comments and docstrings do not count."""

import ast
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import yaml

from scripts.reproduction.grid import ROOT

# Files and folders that a recorded number depends on: training, cut, evaluation, and the computation of items and rows.
BEHIND = (
    *("train.py", "configs", "salaad"),
    *(
        f"scripts/{one}.py"
        for one in (
            *("compare_elastic", "elastic_trainings", "elastic_ways", "in_context", "outlines", "shares"),
            *("compare_methods", "own_settings", "measured_text", "trainings"),
        )
    ),
    *(
        f"scripts/reproduction/{one}.py"
        for one in (
            *("grid", "trainings", "records", "tables", "deployments", "experiments", "curves", "appendix_c"),
            *("pictures", "diagrams"),  # the first also averages over blocks, the second is all of an item
        )
    ),
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
UNKNOWN = "not known, as git does not have this commit"
CHANGED, UNCOMMITTED, OTHERS = "†", "‡", "§"
LEGENDS = {
    CHANGED: "measured before some of the code behind it changed",
    UNCOMMITTED: "measured or trained with changes that were not committed",
    OTHERS: "measured on trainings with other settings than the item has now",
}
ALL_CHANGED = (
    "Some of the code behind every {} has changed since it was measured, whether or not that would change the numbers."
)


def mark_of(commits: Iterable[str]) -> str:
    """Return the marks of a number from these commits; none if, in all of BEHIND, each is the same as HEAD."""
    commits = [*commits]
    dirty = any(commit.endswith("-dirty") for commit in commits)
    return (CHANGED if any(map(changed_since, commits)) else "") + (UNCOMMITTED if dirty else "")


def with_legend(marks: Sequence[str], what: str) -> tuple[list[str], list[str]]:
    """Return the marks to print, each after a space, and sentences on them; `what` is that which has a mark, as a word.

    Where everything has it, `CHANGED` would tell nothing apart, and a sentence stands for it.
    """
    everywhere = bool(marks) and all(CHANGED in mark for mark in marks)
    kept = [mark.replace(CHANGED, "") if everywhere else mark for mark in marks]
    shown = [mark and f" {mark}" for mark in kept]
    told = [f"{mark}: {legend}." for mark, legend in LEGENDS.items() if any(mark in one for one in kept)]
    return shown, [*([ALL_CHANGED.format(what)] if everywhere else []), *told]


def commits_of(result: Mapping[str, Any]) -> list[str]:
    """Return the commits at which an item's result and its trainings were computed."""
    return [result["commit"], *(one["commit"] for one in result["trainings"])]


def is_older(commit: str, change: str) -> bool:
    """Return whether a commit does not have a change, given as the commit that made it; False where git cannot tell."""
    try:
        _git("merge-base", "--is-ancestor", commit.removesuffix("-dirty"), f"{change}~1")
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def changes_text(commits: Iterable[str]) -> str:
    """Return what has changed since any of these commits, as text: places grouped by folder; empty if nothing has."""
    changed = list(dict.fromkeys(place for commit in commits for place in changed_since(commit)))
    if {_entry(place) for place in changed} >= {*BEHIND}:
        return "all code behind it (training, cutting and evaluation)"
    groups: dict[str, list[str]] = {}
    for place in changed:
        folder, _, name = place.rpartition("/")
        groups.setdefault(folder, []).append(name)
    told = ((folder, ", ".join(sorted(names))) for folder, names in groups.items())
    return ", ".join(f"{folder} ({names})" if folder else names for folder, names in told)


@cache
def changed_since(commit: str) -> list[str]:
    """Return where in BEHIND the code differs between `commit` and HEAD; `UNKNOWN` where git cannot tell.

    A place is an entry of BEHIND; of the folder salaad, which is most of the code, the package or module in it.
    """
    clean = commit.removesuffix("-dirty")
    try:
        lines = _git("diff", "--raw", "--no-renames", "--no-abbrev", clean, "HEAD", "--", *BEHIND).splitlines()
        changed = [name for old, new, name in map(_difference, lines) if _meaning(old, name) != _meaning(new, name)]
    except (OSError, subprocess.SubprocessError):  # no git, or a clone without the commit
        return [UNKNOWN]
    places = {"/".join(name.split("/")[:2]) if name.startswith("salaad/") else _entry(name) for name in changed}
    return sorted(places, key=lambda place: (BEHIND.index(_entry(place)), place))


def _difference(line: str) -> tuple[str, str, str]:
    """Return the old object, the new object and the path of a line of `git diff --raw`."""
    about, name = line.split("\t", 1)
    _, _, old, new, _ = about.split()
    return old, new, name


def _entry(place: str) -> str:
    """Return the entry of BEHIND that holds a place; the place itself if none does."""
    return next((entry for entry in BEHIND if place == entry or place.startswith(f"{entry}/")), place)


@cache
def _meaning(blob: str, name: str) -> str | None:
    """Return a file without what has no effect, None if it is missing.

    Of Python it is the syntax tree without docstrings, of YAML the content; of any other file all of its text.
    """
    if not blob.strip("0"):  # how git names a file that is not there
        return None
    text = _git("cat-file", "blob", blob)
    if name.endswith(".yaml"):
        return repr(yaml.safe_load(text))
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
