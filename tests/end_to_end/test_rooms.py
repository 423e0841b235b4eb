"""The structure of the package: imports run downwards, `salaad/` has few entries, subpackages describe themselves."""

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "salaad"
MATHEMATICS = ("prox", "spectral", "hpa", "energy_allocation", "rpca")
# Layers of subpackages (rooms), the upper first; subpackages of one layer import nothing from each other.
STOREYS = (
    ("evaluation",),
    ("training", "compression"),
    ("runs", "methods", "data"),
    ("factored",),
    ("model",),
    ("config",),
    ("common",),
    MATHEMATICS,
)
ROOMS = [room for storey in STOREYS[:-1] for room in storey]
MOST_NAMES = 16


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module) of everything that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relative to itself; name the module in full"
            module = node.module or ""
            # `from salaad.common import files` names a module behind the import, `from salaad.prox import svt` does not
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def room_of(module: str) -> str | None:
    """Return the subpackage or mathematical module that a dotted name lies in; None if it is not in `salaad`."""
    parts = module.split(".")
    return parts[1] if parts[0] == "salaad" and len(parts) > 1 else None


def storey_of(room: str) -> int:
    return next(i for i, storey in enumerate(STOREYS) if room in storey)


FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_imports_only_from_storeys_below_its_own_and_from_its_own_room(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for line, module in imports(path):
        room = room_of(module)
        if room is None:
            continue
        assert room in {*ROOMS, *MATHEMATICS}, f"{path}:{line} imports {module}, which is no room"
        inside = room == own or (own in MATHEMATICS and room in MATHEMATICS)
        assert inside or storey_of(room) > storey_of(own), f"{path}:{line}: {own} imports {module}, which is not below"


def test_no_modules_import_each_other_in_a_circle():
    modules = {".".join(("salaad", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    modules = {name.removesuffix(".__init__"): path for name, path in modules.items()}
    arrows: dict[str, set[str]] = {}
    for name, path in modules.items():
        named = {module if module in modules else module.rpartition(".")[0] for _, module in imports(path)}
        arrows[name] = {module for module in named if module in modules and module != name}
        if path.name == "__init__.py":
            arrows[name] = {module for module in arrows[name] if module != name}
    finished: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, " → ".join((*way[way.index(name) :], name))
        if name not in finished:
            for following in arrows[name]:
                visit(following, (*way, name))
            finished.add(name)

    for name in modules:
        visit(name, ())


def test_a_reader_who_opens_the_package_sees_few_names():
    shown = [path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"]
    assert len(shown) <= MOST_NAMES, sorted(shown)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_says_in_a_few_lines_what_it_is_and_where_to_begin(room):
    said = importlib.import_module(f"salaad.{room}").__doc__
    assert len(said.strip().splitlines()) <= 3
    begin = said.lower().partition("begin with")[2]
    assert begin, f"salaad/{room}/__init__.py does not say where to begin"
    named = begin.split("`")[1::2]
    below = PACKAGE / room
    assert any((below / f"{word}.py").exists() or (PACKAGE.parent / word).exists() for word in named), named


@pytest.mark.parametrize("name", MATHEMATICS)
def test_the_mathematics_needs_nothing_but_torch(name):
    allowed = {"torch", "salaad", *__import__("sys").stdlib_module_names}
    files = [path for path in FILES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") == name]
    assert files
    outside = {module.split(".")[0] for path in files for _, module in imports(path)} - allowed
    assert not outside
