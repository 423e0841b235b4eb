"""Damage of all kinds to a model folder or a checkpoint: to JSON, headers, tensors, bytes and kinds of files.

`folder_cases` draws a case as plain data, so that it can be printed and repeated; `tamper` does the damage.
"""

import contextlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from salaad.common.files import CHECKSUMS
from salaad.runs.model_on_disk import RECORD

numbers = st.sampled_from([-1, 0, 1, 2, 3, 7, 16, 24, 40, 10**4, 10**7, 10**9, 2**31, 2**53, 2**63 - 1, 2**64, 10**18])
NAMES = ["", "x", "16", "../x", "../../../../etc/passwd", "/etc/passwd", "C:\\x", "..\\x", ".", "a\nb", "\x1b[2J", "\0"]
KNOWN = [
    "gpt2",
    "mistral",
    "bert",
    "mamba",
    "whisper",
    "t5",
    "qwen2_moe",
    "gptj",
    "bloom",
    "rag",
    "nonsense",
    "float32",
]
METHODS = ["salaad", "salaad-elastic", "gptq", "bitsandbytes", "fp8", "model.safetensors", "config.json", "{{ 1/0 }}"]
texts = st.sampled_from([*NAMES, *KNOWN, *METHODS])
plain = numbers | texts | st.sampled_from([None, True, False, 0.5, -0.5, 1e308, math.nan, math.inf, -math.inf])
wild = st.sampled_from([{"big": 30}, {"big": 400}, {"long": 10**5}, {"deep": 50}, {"deep": 10**5}, {"odd": 1}])
values = plain | wild | st.lists(plain, max_size=4) | st.dictionaries(texts, plain, max_size=3)
places = st.integers(0, 10**6)

JSON_FILES = [
    "config.json",
    "config.json",
    "config.json",
    "quantization_config",
    "quantization_config",
    "model.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    RECORD,
    "surrogate/index.json",
    "state/trainer.json",
    CHECKSUMS,
]
FILES = [*sorted({*JSON_FILES} - {"quantization_config"}), "*.safetensors", "*.safetensors", "surrogate/*.safetensors"]
FILES += ["state", "model", "surrogate", "../latest", "../../cache/*/*"]
HARMS = ["zero", "ones", "nan", "random", "shape", "dtype", "repeat", "reversed", "more", "wide"]
KINDS = ["gone", "folder", "empty", "pipe", "link-out", "link-up", "link-nowhere", "link-circle", "link-zero", "pickle"]

tampering = st.one_of(
    st.tuples(st.just("json"), st.sampled_from(JSON_FILES), places, st.just("replace"), values),
    st.tuples(st.just("json"), st.sampled_from(JSON_FILES), places, st.sampled_from(["drop", "rename", "add"]), values),
    st.tuples(st.just("json"), st.sampled_from(JSON_FILES), places, st.just("scale"), st.sampled_from([-1, 2, 10**6])),
    st.tuples(st.just("header"), places, st.sampled_from(["shape", "offsets"]), st.lists(numbers, max_size=3)),
    st.tuples(
        st.just("header"),
        places,
        st.just("dtype"),
        st.sampled_from(["F64", "F16", "I64", "U8", "BOOL", "C64", "F8_E4M3", "x"]),
    ),
    st.tuples(st.just("header"), places, st.sampled_from(["fold", "alike"]), places),
    st.tuples(st.just("header"), places, st.sampled_from(["name", "drop", "swap"]), texts),
    st.tuples(st.just("header"), places, st.just("length"), st.sampled_from([0, 1, 8, 10**6, 2**40, 2**64 - 1])),
    st.tuples(st.just("tensor"), places, st.sampled_from(HARMS)),
    st.tuples(st.just("tensor"), places, st.sampled_from(HARMS)),
    st.tuples(st.just("bytes"), st.sampled_from(FILES), places, st.sampled_from(["flip", "cut", "grow", "noise"])),
    st.tuples(st.just("file"), st.sampled_from(FILES), st.sampled_from(KINDS)),
)
FOLDERS = ["dense", "factored", "factored", "shards", "tied", "elastic", "elastic", "elastic-tied", "run", "run"]
SUMS = ["rewritten", "rewritten", "rewritten", "rewritten", "left", "removed"]
folder_cases = st.tuples(
    st.sampled_from(FOLDERS),
    st.lists(tampering, min_size=1, max_size=1) | st.lists(tampering, min_size=1, max_size=3),
    st.sampled_from(SUMS),
)


def built(value: Any) -> Any:
    """The value that the plain data of a case stands for."""
    match value:
        case {"big": digits}:
            return 10**digits
        case {"long": length}:
            return "x" * length
        case {"deep": _}:
            return value
        case {"odd": _}:
            return "\ud800"
    return value


def dumped(tree: Any) -> str:
    """Return the JSON of a tree, with `{"deep": n}` as n nested lists, which may be deeper than `json` can write."""
    marks: dict[str, str] = {}

    def marked(value: Any) -> Any:
        if isinstance(value, dict) and set(value) == {"deep"} and isinstance(value["deep"], int):
            mark = f"@deep{len(marks)}@"
            marks[json.dumps(mark)] = "[" * value["deep"] + "]" * value["deep"]
            return mark
        if isinstance(value, dict):
            return {key: marked(inner) for key, inner in value.items()}
        return [marked(inner) for inner in value] if isinstance(value, list) else value

    text = json.dumps(marked(tree))
    for mark, nested in marks.items():
        text = text.replace(mark, nested)
    return text


def tamper(folder: Path, steps: list) -> None:
    """Do the damage of each step to the files of a model folder or of a checkpoint; skip steps that do not apply."""
    for step in steps:
        kind, *rest = step
        with contextlib.suppress(Exception):  # a step that does not apply after those before it changes nothing
            {"json": _json, "header": _header, "tensor": _tensor, "bytes": _bytes, "file": _file}[kind](folder, *rest)


def _found(folder: Path, name: str) -> Path:
    for place in (folder, folder / "model"):
        hits = sorted(place.glob(name)) if "*" in name else [place / name]
        if hits and (hits[0].is_file() or hits[0].is_dir()):  # and no pipe of an earlier step
            return hits[len(name) % len(hits)]
    raise FileNotFoundError(name)


def _json(folder: Path, name: str, place: int, how: str, value: Any) -> None:
    path = _found(folder, "config.json" if name == "quantization_config" else name)
    tree = json.loads(path.read_text())
    start = tree["quantization_config"] if name == "quantization_config" else tree
    spots = list(_spots(start))
    parent, key = spots[place % len(spots)]
    value = built(value)
    if how == "replace":
        parent[key] = value
    elif how == "drop":
        del parent[key]
    elif how == "add":
        parent.append(value) if isinstance(parent, list) else parent.update({str(key) + "s": value})
    elif how == "rename":
        parent[str(value)[:100]] = parent.pop(key)
    elif how == "scale":
        parent[key] = parent[key] * value
    path.unlink() if path.is_symlink() else None
    path.write_text(dumped(tree), errors="surrogatepass")


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        yield tree, key
        if isinstance(value, dict | list):
            yield from _spots(value)


def _weights(folder: Path, place: int) -> Path:
    files = sorted(path for path in (*folder.glob("*.safetensors"), *folder.glob("*/*.safetensors")) if path.is_file())
    return files[place % len(files)]


def _header(folder: Path, place: int, how: str, value: Any) -> None:
    path = _weights(folder, place)
    content = path.read_bytes()
    [length] = struct.unpack("<Q", content[:8])
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    names = sorted(set(header) - {"__metadata__"})
    name = names[place // 7 % len(names)]
    entry = header[name]
    if how == "length":
        path.write_bytes(struct.pack("<Q", value) + content[8:])
        return
    if how == "shape":
        entry["shape"] = value
    elif how == "fold":
        n = math.prod(entry["shape"])
        entry["shape"] = [[n], [1, n], [n, 1], entry["shape"][::-1], [*entry["shape"], 1], [n // 2, 2]][value % 6]
    elif how == "alike":
        alike = {"F32": ["I32", "U32"], "BF16": ["F16", "I16"], "I32": ["F32", "U32"], "U8": ["I8", "BOOL", "F8_E4M3"]}
        entry["dtype"] = alike[entry["dtype"]][value % len(alike[entry["dtype"]])]
    elif how == "offsets":
        entry["data_offsets"] = value
    elif how == "dtype":
        entry["dtype"] = value
    elif how == "name":
        header[value] = header.pop(name)
    elif how == "swap":
        other = names[place // 11 % len(names)]
        header[name], header[other] = header[other], header[name]
    else:
        del header[name]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def _tensor(folder: Path, place: int, how: str) -> None:
    path = _weights(folder, place)
    tensors = load_file(path)
    name = sorted(tensors)[place // 7 % len(tensors)]
    tensor = tensors[name].clone()
    if how in ("zero", "ones", "nan"):
        tensor.fill_({"zero": 0, "ones": 255, "nan": math.nan if tensor.is_floating_point() else -1}[how])
    elif how == "random":
        raw = torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(place))
        tensor = raw.view(tensor.dtype).reshape(tensor.shape)
    elif how == "shape":
        tensor = tensor.flatten()[: max(0, tensor.numel() - 1 - place % 3)]
    elif how == "dtype":
        tensor = tensor.to((torch.float64, torch.int64, torch.bool, torch.uint8)[place % 4])
    elif how == "reversed":
        tensor = tensor.flip(0).contiguous()
    elif how == "more":
        tensor = torch.cat([tensor, tensor])
    elif how == "wide":
        tensor = tensor.new_zeros((10**12, 0) if place % 2 else (0, 10**12))
    else:
        tensor[1:] = tensor[:1]
    save_file({**tensors, name: tensor}, path, {"format": "pt"})


def _bytes(folder: Path, name: str, place: int, how: str) -> None:
    path = _found(folder, name)
    content = bytearray(path.read_bytes())
    spot = place % len(content)
    if how == "flip":
        content[spot] ^= 1 << place % 8
    elif how == "cut":
        del content[spot:]
    elif how == "grow":
        content += content[:spot] or b"\0"
    else:
        content[spot : spot + 16] = bytes((place * k) % 256 for k in range(16))
    path.write_bytes(content)


def _file(folder: Path, name: str, kind: str) -> None:
    path = _found(folder, name)
    content = path.read_bytes() if path.is_file() else b""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind in ("link-out", "link-up"):
        target = (folder.parent if kind == "link-out" else path.parent) / "elsewhere"
        target.write_bytes(content)
        path.symlink_to(target)
    elif kind == "link-nowhere":
        path.symlink_to("nowhere")
    elif kind == "link-circle":
        path.symlink_to(path.name)
    elif kind == "link-zero":
        path.symlink_to("/dev/zero")
    elif kind == "pickle":
        path.rename(path) if path.exists() else None
        torch.save({"a": torch.ones(1)}, path.with_name("pytorch_model.bin"))
