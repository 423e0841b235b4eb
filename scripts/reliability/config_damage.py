"""Damaged configurations: `config_cases` draws plain data that describes one, `config_bytes` makes its YAML file."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from salaad.config.run import RunConfig
from scripts.reliability.folder_damage import plain, texts


def known_keys() -> list[tuple[str, ...]]:
    """Return every key that a configuration has, as a path: ("train",), ("train", "steps")."""
    keys: list[tuple[str, ...]] = []
    for name in [field.name for field in dataclasses.fields(RunConfig) if field.name != "sections"] + ["salaad"]:
        inner = getattr(RunConfig(), name)
        keys.append((name,))
        if dataclasses.is_dataclass(inner):
            keys += [(name, f.name) for f in dataclasses.fields(inner)]
    return keys


ODD_NUMBERS = [
    str(10**400),
    "0x" + "f" * 5000,
    "1" * 5000,
    "1e400",
    "-.inf",
    ".nan",
    "2024-01-01",
    "!!binary aGk=",
    "~",
]
OBJECTS = ["yes", "!!python/object/apply:os.system ['touch hacked']", "!!python/name:os.system", "!!python/tuple [1]"]
ODD_TREES = [
    "!x y",
    "&a [*a]",
    "{a: &b 1, c: *b}",
    "{<<: {a: 1}}",
    "[[[[[[[[[[1]]]]]]]]]]",
    "{a: 1, a: 2}",
    "{? [1] : 2}",
]
ODD_TEXTS = ["|\n  x", "[", "]", "'", '"\\x00"', '"\\ud800"', "\x07", "\ufeff", "- 1", "{class_path: os.system}"]
ODD_TEXTS += ["x" * 5000, "[1,2,3]"]
yaml_values = st.one_of(
    plain.map(lambda value: yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()),
    st.lists(plain, max_size=3).map(lambda value: yaml.safe_dump(value, default_flow_style=True).strip()),
    st.sampled_from([*ODD_NUMBERS, *OBJECTS, *ODD_TREES, *ODD_TEXTS]),
)
CHOICES = ["x", "AdamW", "SGD", "Muon", "LBFGS", "files", "c4", "python-docs", "bf16", "fp32", "full_rank", "squared"]
fitting = {
    bool: ["true", "false"],
    int: ["-1", "0", "1", "2", "3", "7", "64", "1000", str(10**6), str(2**31), str(2**53), str(2**53 + 1), str(10**18)],
    float: ["-1.0", "0.0", "1e-300", "0.05", "0.5", "1", "1.5", "1e300", ".nan", ".inf", "-.inf", "1e400", "7"],
    str: [*CHOICES, "'../../etc/passwd'", "'*'", "''", "subspace", "staggered", "re:(", "re:.*", "online", "stop"],
    tuple: [
        "[]",
        "[x]",
        "x",
        "[q, v]",
        "[lm_head]",
        "['re:((']",
        "[0.9, 0.95]",
        "[0.9]",
        "[1, 2, 3]",
        "[.nan, 0]",
        "'/'",
    ],
}


def fitting_values(path: tuple[str, ...]) -> st.SearchStrategy:
    """Return the strategy that draws YAML values of the type that a key has."""
    return st.sampled_from(fitting[kind_of(path)])


def kind_of(path: tuple[str, ...]) -> type:
    """Return the type of a key's default; `str` if the default is None."""
    value: Any = RunConfig()
    for name in path:
        value = getattr(value, name)
    return str if value is None else type(value)


known = st.sampled_from([path for path in known_keys() if len(path) > 1 or path in (("method",), ("seed",))])
lines = st.one_of(
    known.flatmap(lambda path: st.tuples(st.just(path), fitting_values(path))),
    known.flatmap(lambda path: st.tuples(st.just(path), fitting_values(path))),
    known.flatmap(lambda path: st.tuples(st.just(path), fitting_values(path))),
    st.tuples(st.sampled_from(known_keys()), yaml_values),
    st.tuples(st.tuples(texts, texts), yaml_values),
)
ODD_FILES = ["bomb", "deep", "deep-flow", "large", "binary", "utf-16", "nul", "empty", "list", "scalar"]
odd_files = st.sampled_from(ODD_FILES)
config_cases = st.one_of(
    st.lists(lines, min_size=1, max_size=1).map(lambda drawn: ["keys", drawn]),
    st.lists(lines, min_size=1, max_size=3).map(lambda drawn: ["keys", drawn]),
    st.lists(lines, min_size=1, max_size=5).map(lambda drawn: ["keys", drawn]),
    st.text(st.sampled_from("abm:-?{}[],&*!|>'\"%@`#\n \t01.modeltrain"), max_size=60).map(lambda text: ["text", text]),
    odd_files.map(lambda name: ["odd", name]),
    st.tuples(st.just("path"), st.sampled_from(["dense", "factored", "elastic", "tied", "run", "", "\0", "x" * 5000])),
)


def config_bytes(case: list, folders: dict[str, Path]) -> bytes:
    """Return the content of the YAML file of a case; `folders` is kind → folder of a model."""
    kind, drawn = case
    if kind == "keys":
        tree: dict[str, Any] = {}
        loose = []
        for path, value in drawn:
            if len(path) == 1 or not isinstance(tree.get(path[0], {}), dict):
                loose.append(f"{path[0]}: {value}")
            else:
                tree.setdefault(path[0], {})[path[1]] = value
        blocks = [
            f"{name}:\n" + "".join(f"  {key}: {value}\n" for key, value in inner.items())
            for name, inner in tree.items()
        ]
        return "\n".join([*blocks, *loose]).encode(errors="surrogatepass")
    if kind == "path":
        return yaml.safe_dump({"model": {"path": str(folders.get(drawn, drawn))}, "method": "full_rank"}).encode()
    odd = {
        "bomb": "a: &a [x,x,x,x,x,x,x,x,x]\n"
        + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefghi", "bcdefghij", strict=True)),
        "deep": "\n".join(" " * k + "a:" for k in range(300)),
        "deep-flow": "a: " + "[" * 20_000,
        "large": "seed: 1\n" * 1_300_000,
        "nul": "seed: 1\n\0",
        "empty": "",
        "list": "- seed\n- 1\n",
        "scalar": "seed",
        "utf-16": "seed: 1\n",
        "binary": "",
    }
    if (kind, drawn) == ("odd", "binary"):
        return bytes(range(256)) * 4
    text, encoding = (drawn, "utf-8") if kind == "text" else (odd[drawn], "utf-16" if drawn == "utf-16" else "utf-8")
    return text.encode(encoding, errors="surrogatepass")
