"""A corpus that every machine has: the documentation inside this project's dependencies and the standard library.

Docstrings and package texts are read from the installed files, cleaned to prose, and kept once; a hash of each
document's text decides whether it is for validation. What is installed decides what the corpus is, so `Corpus.hash`
belongs beside every number measured on it.
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
TOKENIZER_CHARACTERS = 12_000_000  # training text of a tokenizer; more changes little and takes minutes
REQUIREMENTS = CHECKOUT / "requirements.txt"
# Tests explain little, and vendored packages are somebody else's documentation once more.
LEFT_OUT = {"test", "tests", "testing", "_vendor", "vendored", "site-packages", "__pycache__", "lib2to3", "idlelib"}


@dataclass(frozen=True)
class Corpus:
    """The corpus on disk.

    Args:
        folder: where its files and its tokenizers are.
        train_files: JSON lines with `text` and `source`.
        validation_files: the same.
        hash: SHA-256 over all texts.
    """

    folder: Path
    train_files: tuple[str, ...]
    validation_files: tuple[str, ...]
    hash: str


def corpus(cache: Path | None = None) -> Corpus:
    """The corpus of this machine, made in under a minute the first time and cached.

    Args:
        cache: folder of caches; `$SALAAD_CACHE` or `~/.cache/salaad` unless given.
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
    """A sentencepiece model of `vocab_size` pieces, trained once and cached.

    Raises:
        UserError: the corpus gives no such number of pieces.
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
    """Normalised name at the head of a requirement such as `lm-eval[x]==0.4; python_version < "4"`."""
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement).group()).lower()


def _closure(names: Iterable[str]) -> Iterator[tuple[str, importlib.metadata.Distribution]]:
    """(name, distribution) of all installed ones that are required, directly or not."""
    installed = {_name(d.metadata["Name"]): d for d in importlib.metadata.distributions() if d.metadata["Name"]}
    waiting, seen = list(names), set()
    while waiting:
        name = waiting.pop()
        if name in seen or name not in installed:
            continue
        seen.add(name)
        yield name, installed[name]
        waiting += [_name(line) for line in installed[name].requires or [] if "extra ==" not in line]


def _fingerprint(distributions: dict[str, importlib.metadata.Distribution]) -> str:
    """Changes with Python, with what is installed and with the rules of extraction."""
    parts = [sys.version, *(f"{name}=={distribution.version}" for name, distribution in distributions.items())]
    rules = [Path(__file__).read_text(), Path(docstrings.__file__).read_text()]
    return hashlib.sha256("\n".join(parts + rules).encode()).hexdigest()[:16]


def _standard_library(root: Path) -> list[tuple[str, Path]]:
    """(label, path) of the sources of the standard library."""
    files = sorted(path for path in root.rglob("*.py") if not LEFT_OUT & set(path.relative_to(root).parts))
    return [(f"python/{path.relative_to(root)}", path) for path in files]


def _package_files(distributions: dict[str, importlib.metadata.Distribution]) -> Iterator[tuple[str, Path]]:
    """(label, path) of sources and texts of the distributions."""
    for name, distribution in distributions.items():
        for file in sorted(distribution.files or [], key=str):
            if file.parts[0] != ".." and not LEFT_OUT & set(file.parts) and docstrings.is_source(file.name):
                yield f"{name}/{file}", Path(distribution.locate_file(file))


def _documents(sources: list[tuple[str, Path]]) -> Iterator[tuple[str, str]]:
    """(label, text) per file with enough prose; a passage that came before is left out wherever it comes again."""
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
    """Lines of text to train a tokenizer on; the training files are shuffled by hash, so a beginning is a sample."""
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
