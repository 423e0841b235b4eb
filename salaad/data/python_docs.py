"""A corpus that every machine has: the documentation of this project's dependencies and the standard library.

Docstrings and package texts are read from the installed files and reduced to English paragraphs without duplicates. A
hash of each document's text decides whether it is used for validation. The corpus depends on the installed packages, so
`Corpus.hash` has to be reported with every number measured on it.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from salaad.common.cache_folder import cache_folder, made_once
from salaad.common.files import CHECKOUT
from salaad.data import docstrings
from salaad.data.tokenizer import train_tokenizer

TRAIN_FILES = 8
VALIDATION_ONE_IN = 50
LEAST_DOCUMENT = 200  # characters
TOKENIZER_CHARACTERS = 12_000_000  # of training text for a tokenizer; more changes little and takes minutes
REQUIREMENTS = CHECKOUT / "requirements.txt"
# Folders left out: tests document little, and vendored packages repeat the documentation of others.
LEFT_OUT = {"test", "tests", "testing", "_vendor", "vendored", "site-packages", "__pycache__", "lib2to3", "idlelib"}


@dataclass(frozen=True)
class Corpus:
    """The corpus on disk.

    Args:
        folder: the folder of its files and tokenizers.
        train_files: paths of JSON lines with `text` and `source`.
        validation_files: paths of such files.
        hash: SHA-256 over all texts.
    """

    folder: Path
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    hash: str


def corpus(cache: Path | None = None) -> Corpus:
    """The corpus of this machine; it is created in under a minute at the first call and cached.

    Args:
        cache: folder of caches; `$SALAAD_CACHE` or `~/.cache/salaad` if not given.
    """
    distributions = dict(sorted(_closure(_required_names())))
    library = Path(sysconfig.get_path("stdlib"))
    folder = (cache or cache_folder()) / f"python-docs-{_fingerprint(distributions)}"
    with made_once(folder) as make:
        if make:
            sources = [*_standard_library(library), *_package_files(distributions)]
            _write(make, _documents(sources))
    facts = json.loads((folder / "corpus.json").read_text())
    return Corpus(folder, *(tuple(str(folder / n) for n in facts[s]) for s in ("train", "validation")), facts["hash"])


def tokenizer(corpus: Corpus, vocab_size: int) -> Path:
    """The path of a sentencepiece model of `vocab_size` pieces, trained once and cached.

    Raises:
        UserError: the corpus is too small for so many pieces.
    """
    folder = corpus.folder / f"tokenizer-{vocab_size}"
    with made_once(folder) as make:
        if make:
            model = train_tokenizer(_sentences(corpus.train_files), vocab_size)
            (make / "tokenizer.model").write_bytes(model)
    return folder / "tokenizer.model"


def _required_names() -> list[str]:
    """Names of the distributions this project requires."""
    if REQUIREMENTS.is_file():
        lines = [line.split("#")[0].strip() for line in REQUIREMENTS.read_text().splitlines()]
    else:
        lines = importlib.metadata.requires("salaad") or []
    return [_name(line) for line in lines if line]


def _name(requirement: str) -> str:
    """The normalised name in a requirement such as `lm-eval[x]==0.4; python_version < "4"`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement).group()).lower()


def _closure(names: Iterable[str]) -> Iterator[tuple[str, importlib.metadata.Distribution]]:
    """(name, distribution) of all installed distributions that are required, directly or indirectly."""
    installed: dict[str, importlib.metadata.Distribution] = {}
    for found in importlib.metadata.distributions():
        # Importing setuptools puts a folder of its own copies of packages at the end of Python's path.
        if found.metadata["Name"] and "_vendor" not in Path(found.locate_file("")).parts:
            installed.setdefault(_name(found.metadata["Name"]), found)  # the one that would be imported
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in installed:
            continue
        seen.add(name)
        yield name, installed[name]
        waiting += [_name(line) for line in installed[name].requires or [] if "extra ==" not in line]


def _fingerprint(distributions: dict[str, importlib.metadata.Distribution]) -> str:
    """A digest of the Python version, the installed packages and the source of the extraction."""
    parts = [sys.version, *(f"{name}=={distribution.version}" for name, distribution in distributions.items())]
    rules = [Path(__file__).read_text(), Path(docstrings.__file__).read_text()]
    return hashlib.sha256("\n".join(parts + rules).encode()).hexdigest()[:16]


def _standard_library(root: Path) -> list[tuple[str, Path]]:
    """(label, path) of the source files of the standard library."""
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    return [(f"python/{path.relative_to(root)}", path) for path in files]


def _package_files(distributions: dict[str, importlib.metadata.Distribution]) -> Iterator[tuple[str, Path]]:
    """(label, path) of the source files and texts of the distributions."""
    for name, distribution in distributions.items():
        for file in sorted(distribution.files or [], key=str):
            if file.parts[0] != ".." and not LEFT_OUT & set(file.parts) and docstrings.is_source(file.name):
                yield f"{name}/{file}", Path(distribution.locate_file(file))


def _documents(sources: list[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """(label, text) of every file with enough text; of equal paragraphs only the first is kept."""
    seen: set[bytes] = set()
    quiet = not sys.stdout.isatty()
    with ProcessPoolExecutor() as pool:
        passages = pool.map(docstrings.passages, [path for _, path in sources], chunksize=64)
        progress = tqdm(zip(sources, passages, strict=True), "python-docs", len(sources), disable=quiet, unit="file")
        for (label, _), found in progress:
            fresh = []
            for passage in found:
                digest = hashlib.blake2b(passage.encode(), digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    fresh.append(passage)
            text = "\n".join(fresh)
            if len(text) >= LEAST_DOCUMENT:
                yield label, text


def _write(folder: Path, documents: Iterable[tuple[str, str]]) -> None:
    total = hashlib.sha256()
    names = {
        "train": [f"train-{k}.jsonl" for k in range(TRAIN_FILES)],
        "validation": ["validation.jsonl"],
    }
    with contextlib.ExitStack() as stack:
        files = {n: stack.enter_context((folder / n).open("w")) for n in (*names["train"], *names["validation"])}
        for label, text in documents:
            digest = hashlib.sha256(text.encode()).digest()
            total.update(digest)
            place = int.from_bytes(digest[:8])
            validation, place = place % VALIDATION_ONE_IN == 0, place // VALIDATION_ONE_IN
            name = names["validation"][0] if validation else names["train"][place % TRAIN_FILES]
            files[name].write(json.dumps({"text": text, "source": label}, ensure_ascii=False) + "\n")
    (folder / "corpus.json").write_text(json.dumps({**names, "hash": total.hexdigest()}, indent=1))


def _sentences(files: Iterable[str]) -> Iterator[str]:
    """Lines of text to train a tokenizer on: the first ones of every file, a sample as files are ordered by hash."""
    room = TOKENIZER_CHARACTERS
    for file in files:
        share = room // len(files)
        with Path(file).open() as lines:
            for line in lines:
                text = json.loads(line)["text"]
                share -= len(text)
                if share < 0:
                    break
                yield from text.split("\n")
