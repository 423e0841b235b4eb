"""The corpus of a small tree of invented packages, against what was written into it."""

import importlib.metadata
import json
import multiprocessing
import shutil
from pathlib import Path

import pytest

from salaad.common.errors import UserError
from salaad.data import docstrings, python_docs
from salaad.data.tokenizer import load_tokenizer

SENTENCE = "The {} walks along the {} and looks at every {} it meets on the way home."
THINGS = ["matrix", "river", "window", "spider", "station", "garden", "letter", "carpet", "mountain", "kettle"]


def paragraph(seed: int, sentences: int = 3) -> str:
    """Return an English paragraph, a different one for every seed."""
    picks = [(seed // 10**k + 3 * k) % 10 for k in range(3 * sentences)]
    lines = [SENTENCE.format(*(THINGS[i] for i in picks[k::sentences])) for k in range(sentences)]
    return f"This is passage number {seed} of all. " + " ".join(lines)


def add_distribution(root: Path, name: str, modules: dict[str, str], requires: tuple[str, ...] = (), version="1.0"):
    info = root / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    head += "".join(f"Requires-Dist: {other}\n" for other in requires)
    (info / "METADATA").write_text(f"{head}\n{paragraph(sum(map(ord, name)))}\n")
    record = [f"{info.name}/METADATA,,"]
    for file, source in modules.items():
        path = root / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        record.append(f"{name}/{file},,")
    (info / "RECORD").write_text("\n".join(record))


def module(*seeds: int) -> str:
    first, *rest = (f'"""{paragraph(seed)}"""\n' for seed in seeds)
    return first + "".join(f"def f{k}():\n    {docstring}" for k, docstring in enumerate(rest))


def install(monkeypatch, site: Path):
    found = list(importlib.metadata.Distribution.discover(path=[str(site)]))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A stand-in machine: a required package, one that it requires, one for an extra, and a library of two files."""
    site, library = tmp_path / "site", tmp_path / "lib"
    many = {f"m{k}.py": module(1000 + k, 2000 + k) for k in range(300)}
    add_distribution(site, "wanted", many | {"again.py": module(1000, 5000)}, ["below>=1", 'extra_one; extra == "x"'])
    add_distribution(site, "below", {"tests/t.py": module(7000), "LICENSE.txt": paragraph(7001), "x.md": paragraph(3)})
    add_distribution(site, "extra_one", {"m.py": module(7002)})
    library.mkdir()
    (library / "abc.py").write_text(module(11, 12))
    (library / "broken.py").write_text('"""' + paragraph(7003) + '"""\ndef (')
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("# a comment\nWanted[all]==1.0  # another\nnot-installed==2\n")
    install(monkeypatch, site)
    monkeypatch.setattr(python_docs.sysconfig, "get_path", lambda name: str(library))
    monkeypatch.setattr(python_docs, "REQUIREMENTS", requirements)
    return tmp_path


def records(files):
    return [json.loads(line) for file in files for line in Path(file).open()]


def test_the_corpus_holds_each_passage_once(machine):
    corpus = python_docs.corpus(machine / "cache")
    train, validation = records(corpus.train_files), records(corpus.validation_files)
    passages = [passage for record in train + validation for passage in record["text"].split("\n")]
    numbers = [int(passage.split("number ")[1].split(" ")[0]) for passage in passages]
    names = [sum(map(ord, name)) for name in ("wanted", "below")]
    # `again.py` repeats passage 1000; tests, licences, extras and broken sources are left out.
    assert sorted(numbers) == sorted([11, 12, 3, 5000, *names, *range(1000, 1300), *range(2000, 2300)])
    assert len(corpus.train_files) == 8
    assert 0 < len(validation) < 0.06 * len(train)
    assert {record["source"] for record in train + validation} >= {"wanted/wanted/m0.py", "python/abc.py"}


def test_the_same_machine_gives_the_same_files(machine):
    first, second = (python_docs.corpus(machine / name) for name in ("one", "two"))
    assert first.hash == second.hash
    for a, b in zip(
        first.train_files + first.validation_files, second.train_files + second.validation_files, strict=True
    ):
        assert Path(a).read_bytes() == Path(b).read_bytes()


def test_copies_of_packages_that_a_program_imported_change_nothing(machine, monkeypatch):
    """Importing setuptools puts a folder of other versions, and of packages that nobody installed, on the path."""
    before = python_docs.corpus(machine / "cache")
    vendored, later = machine / "setuptools" / "_vendor", machine / "later"
    for folder in (vendored, later):
        add_distribution(folder, "wanted", {}, version="2.0")
    add_distribution(vendored, "not_installed", {"m.py": module(7004)})
    places = [str(folder) for folder in (machine / "site", later, vendored)]
    found = list(importlib.metadata.Distribution.discover(path=places))
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: found)
    monkeypatch.setattr(python_docs, "_documents", lambda sources: pytest.fail("read again"))
    assert python_docs.corpus(machine / "cache") == before


def test_what_is_cached_is_not_read_again_until_versions_change(machine, monkeypatch):
    before = python_docs.corpus(machine / "cache")
    monkeypatch.setattr(python_docs, "_documents", lambda sources: pytest.fail("read again"))
    assert python_docs.corpus(machine / "cache") == before
    add_distribution(machine / "other", "wanted", {}, version="2.0")
    install(monkeypatch, machine / "other")
    monkeypatch.setattr(python_docs, "_documents", lambda sources: iter([("x", "other text")]))
    assert python_docs.corpus(machine / "cache").hash != before.hash


def test_a_failure_leaves_nothing_that_looks_complete(machine, monkeypatch):
    cache = machine / "cache"
    with monkeypatch.context() as broken:
        broken.setattr(python_docs, "_write", lambda folder, documents: (folder / "part").touch() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            python_docs.corpus(cache)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    assert python_docs.corpus(cache).folder.exists()


def test_processes_that_start_together_make_it_once(machine, monkeypatch):
    context = multiprocessing.get_context("fork")
    calls = context.Value("i", 0)
    write = python_docs._write

    def counted(*args):
        with calls.get_lock():
            calls.value += 1
        write(*args)

    monkeypatch.setattr(python_docs, "_write", counted)
    processes = [context.Process(target=python_docs.corpus, args=(machine / "cache",)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert calls.value == 1


def test_requirements_come_from_the_installed_project_without_the_file(machine, monkeypatch):
    monkeypatch.setattr(python_docs, "REQUIREMENTS", machine / "gone.txt")
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ["below==1.0"] if name == "salaad" else None)
    sources = {record["source"].split("/")[0] for record in records(python_docs.corpus(machine / "c").train_files)}
    assert sources == {"below", "python"}


def test_its_tokenizer_is_made_once_and_loses_nothing(machine):
    corpus = python_docs.corpus(machine / "cache")
    path = python_docs.tokenizer(corpus, 440)
    written = path.read_bytes()
    tokenizer = load_tokenizer(str(path))
    assert (len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (440, 0, 1, None)
    for text in ("a matrix\n  walks \t home", "日本 é <0x41> </s>", paragraph(5)):
        assert tokenizer.decode(tokenizer(text, split_special_tokens=True).input_ids) == text
    shutil.rmtree(path.parent)
    assert python_docs.tokenizer(corpus, 440).read_bytes() == written


def test_a_vocabulary_that_cannot_be_is_refused(machine):
    corpus = python_docs.corpus(machine / "cache")
    with pytest.raises(UserError, match=r"vocab_size of 100 can be trained.*give another number"):
        python_docs.tokenizer(corpus, 100)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Walk along the river until the\n    bridge comes into view, then stop.\n",
            ["Walk along the river until the bridge comes into view, then stop."],
        ),
        ("Short.", []),
        (">>> run(1, 2)\n3\nthe words behind an example are not a sentence of prose here", None),
        ("| a | b | c | d | e | f | g |\n|---|---|---|\n| 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 |", []),
        ("x = f(y[0], z[1]) + g(a, b, c=3)[1:] * (q - 2) ** 5 - h(k[2]) / 7", []),
        (
            "See :func:`the river <river.Water>` and `the bridge <https://a.b>`_ for more about ``walking`` there.",
            ["See the river and the bridge for more about `walking` there."],
        ),
        (
            "Read [the long guide](https://a.b/c) before you **really** walk along any of the rivers.",
            ["Read the long guide before you really walk along any of the rivers."],
        ),
        (
            "It is called as follows when nobody looks at the river::\n\n    run(the, river, and, all, the, others)\n\n"
            "Afterwards everybody goes home and waits for the next morning.",
            [
                "It is called as follows when nobody looks at the river:",
                "Afterwards everybody goes home and waits for the next morning.",
            ],
        ),
        (
            "Parameters\n----------\nriver : int, optional\n    The number of the river to walk along on this day.",
            ["river: The number of the river to walk along on this day."],
        ),
        (
            "```python\nthe words of a program are not prose even if they read so\n```\n"
            "But the words that come after it certainly are prose.",
            ["But the words that come after it certainly are prose."],
        ),
        (
            "- the first item of a list that\n  goes over two lines\n- the second item of it",
            ["- the first item of a list that goes over two lines\n- the second item of it"],
        ),
    ],
)
def test_prose_is_taken_out_of_markup(text, expected):
    found = list(docstrings.english_paragraphs(text))
    assert found == expected if expected is not None else ">>>" not in "".join(found)
