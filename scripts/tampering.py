"""Small folders of every form that the programs open, and all kinds of harm done to them and to configurations.

What is done to a folder, or stands in a file, is drawn as plain data (`folder_cases`, `config_cases`), so that a case
can be printed and done again; `tamper` and `config_bytes` do it.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from salaad.common.errors import UserError
from salaad.common.files import CHECKSUMS, write_checksums, write_json
from salaad.compression.deployment import open_deployment
from salaad.config.methods import SalaadConfig
from salaad.config.run import RunConfig
from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.fixed_size import factor
from salaad.factored.slr import Slr
from salaad.methods.salaad.plugin import Salaad
from salaad.methods.salaad.storage import save_surrogates
from salaad.runs.model_on_disk import RECORD, ModelOnDisk

WORDS = ("a", "b", "c")

# ---- folders before anybody has tampered with them


def make_folders(root: Path) -> dict[str, Path]:
    """Kind → folder: small, of random weights, one of each form that the programs open."""
    makers = {
        "dense": lambda folder: llama().save_pretrained(folder),
        "factored": lambda folder: factor(llama(), parts_of(llama())).save_pretrained(folder),
        "shards": lambda folder: factor(llama(), parts_of(llama())).save_pretrained(folder, max_shard_size="6KB"),
        "tied": lambda folder: factor(gpt2(), parts_of(gpt2())).save_pretrained(folder),
        "elastic": lambda folder: make_elastic(llama(), folder),
        "elastic-tied": lambda folder: make_elastic(gpt2(), folder),
    }
    folders = {}
    for kind, make in makers.items():
        folders[kind] = root / kind
        make(folders[kind])
        tokenizer().save_pretrained(folders[kind])
        write_json({"parameters": [1000, 900], "run": RunConfig().to_dict()}, folders[kind] / RECORD)
        write_checksums(folders[kind])
    folders["run"] = root / "run"
    make_run(folders["run"])
    return folders


def llama() -> LlamaForCausalLM:
    """One layer, sixteen wide; the same weights every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=32, **sizes)).eval()


def gpt2() -> GPT2LMHeadModel:
    """One layer, whose head is its embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()


def parts_of(model: PreTrainedModel) -> dict[str, Slr]:
    """L + S of some of its matrices, small enough to be stored in parts."""
    ends = ("q_proj", "up_proj", "down_proj", "embed_tokens", "c_attn", "c_fc", "wte")
    chosen = {name: module.weight.detach() for name, module in model.named_modules() if name.endswith(ends)}
    largest = {name: W.abs() >= W.abs().flatten().sort(descending=True).values[12] for name, W in chosen.items()}
    return {name: Slr.from_parts(W, W * largest[name], 3) for name, W in chosen.items()}


def make_elastic(model: PreTrainedModel, folder: Path) -> None:
    """As compress.py --elastic does."""
    parts = parts_of(model)
    line = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()})
    blocks = sum(slr.shape[0] * slr.shape[1] for slr in parts.values())
    save_elastic(model, parts, line, sum(p.numel() for p in model.parameters()) - blocks, folder)


def make_run(folder: Path) -> None:
    """A run with one checkpoint, of which L + S have been read before, so that they are in the cache."""
    checkpoint, model = folder / "checkpoints" / "step-0000001", llama()
    for part in ("model", "surrogate", "state"):
        (checkpoint / part).mkdir(parents=True)
    model.save_pretrained(checkpoint / "model")
    tokenizer().save_pretrained(checkpoint / "model")
    salaad = Salaad(model, SalaadConfig(rank_ratio=0.2))
    save_surrogates(salaad.surrogates, checkpoint / "surrogate")
    trainer = {"step": 1, "config": RunConfig(sections={"salaad": SalaadConfig(rank_ratio=0.2)}).to_dict()}
    write_json(trainer, checkpoint / "state" / "trainer.json")
    write_checksums(checkpoint)
    (folder / "checkpoints" / "latest").write_text(f"{checkpoint.name}\n")
    assert open_deployment(ModelOnDisk.open(folder)).parts


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """A word each."""
    ids = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


# ---- tampering: plain data says what is done, so that a case can be printed and done again

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
    """JSON, in which some values are nested deeper than the library writes."""
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
    """Do what the steps say to the files of a model folder, or of a checkpoint; what is not there stays so."""
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


# ---- configurations


def known_keys() -> list[tuple[str, ...]]:
    """Every key a configuration has, as a path."""
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
    """Values of the type that a key has."""
    return st.sampled_from(fitting[kind_of(path)])


def kind_of(path: tuple[str, ...]) -> type:
    """The type of a key's default."""
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
    """The YAML file of a case."""
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


# ---- cases that somebody typed


def read_case(text: str) -> list:
    """The case of a folder (three parts) or of a configuration (two) that was printed as `text`.

    Raises:
        UserError: it is none.
    """
    try:
        case = json.loads(text)
    except (ValueError, RecursionError):
        case = None
    match case:
        case [str(kind), list(steps), str(sums)] if kind in FOLDERS and sums in SUMS:
            sound = all(isinstance(step, list) and step for step in steps)
        case ["keys", list(drawn)]:
            sound = all(_is_line(line) for line in drawn)
        case ["odd", str(name)]:
            sound = name in ODD_FILES
        case ["text" | "path", str()]:
            sound = True
        case _:
            sound = False
    if not sound:
        raise UserError(f"--replay {text} is no case; give one as the line FAILED prints it")
    return case


def _is_line(line: Any) -> bool:
    match line:
        case [[str(), *rest], str()]:
            return len(rest) < 2 and all(isinstance(part, str) for part in rest)
    return False
