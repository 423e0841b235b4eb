"""Files hashed while they are written: the digest is that of the disk, safetensors files equal the library's."""

import hashlib
import json
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file, save_model
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.common import files
from salaad.common.files import names_below, verify, write_checksums
from salaad.common.hashed_files import HashedFile, write_tensors
from salaad.model.hashed_saves import hashed_saves


def sha256(path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_was_written_is_what_was_hashed(tmp_path):
    parts = [b"", b"head", bytes(range(256)) * 5000, memoryview(b"x" * 2**18), b"end"]
    with HashedFile(tmp_path / "file") as file:
        assert [file.write(part) for part in parts] == [len(part) for part in parts]
    assert (tmp_path / "file").read_bytes() == b"".join(parts)
    assert file.digest == sha256(tmp_path / "file")


def test_a_state_of_torch_is_read_back(tmp_path):
    state = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(300, 400)}}, "param_groups": [{"lr": 1}]}
    with HashedFile(tmp_path / "file") as file:
        torch.save(state, file)
    assert file.digest == sha256(tmp_path / "file")
    found = torch.load(tmp_path / "file", weights_only=True, mmap=True)
    assert torch.equal(found["state"][0]["exp_avg"], state["state"][0]["exp_avg"])


def test_tensors_are_written_as_the_library_writes_them(tmp_path):
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(4, 4).mT,
        "scalar": torch.tensor(2.0),
        "none": torch.empty(0, 7),
        "large": torch.randn(300, 300),
    }
    assert write_tensors(tensors, tmp_path / "ours") == sha256(tmp_path / "ours")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "theirs")
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_saved_as_the_libraries_save_them(tmp_path, tied):
    model = llama(tied)
    folders = {name: tmp_path / name for name in ("ours", "theirs")}
    with hashed_saves(folders["ours"]) as hashed:
        save(model, folders["ours"])
    save(model, folders["theirs"])
    names = {str(path.relative_to(folders["theirs"])) for path in folders["theirs"].rglob("*.safetensors")}
    assert len(names) > 3 and hashed.keys() == names
    for name in names_below(folders["theirs"]):
        assert (folders["ours"] / name).read_bytes() == (folders["theirs"] / name).read_bytes()
        assert hashed.get(name) in (None, sha256(folders["theirs"] / name))


def llama(tied: bool) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, tie_word_embeddings=tied))


def save(model: LlamaForCausalLM, folder: Path) -> None:
    """Save a model in the two ways that a checkpoint uses, the first in several files."""
    model.save_pretrained(folder / "model", max_shard_size="20KB")
    save_model(model, str(folder / "weights.safetensors"))


def test_every_dtype_comes_back(tmp_path):
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
    tensors = {str(kind): torch.arange(7).to(kind) for kind in [*kinds, torch.int8, torch.uint8, torch.bool]}
    write_tensors(tensors, tmp_path / "file")
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


def test_files_whose_checksum_is_known_are_not_read_again(tmp_path, monkeypatch):
    with HashedFile(tmp_path / "known") as file:
        file.write(b"content")
    (tmp_path / "other").write_bytes(b"more")
    read, digest = [], files._digest
    monkeypatch.setattr(files, "_digest", lambda path: read.append(path.name) or digest(path))
    write_checksums(tmp_path, {"known": file.digest})
    assert read == ["other"]
    assert json.loads((tmp_path / "checksums.json").read_text())["known"] == sha256(tmp_path / "known")
    verify(tmp_path)


def test_a_file_that_could_not_be_written_is_an_error_of_the_disk(tmp_path):
    with pytest.raises(OSError, match="No space left"), HashedFile(tmp_path / "file") as file:
        file._file.close()
        file._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, PTH123
        file.write(b"x" * 2**19)


@pytest.mark.parametrize("limit", [100_000, 600_000])
def test_a_state_of_torch_that_could_not_be_written_is_an_error_of_the_disk(tmp_path, limit):
    """The limit is the system's own for the size of a file."""
    state, before = {i: torch.randn(300, 400) for i in range(3)}, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"), HashedFile(tmp_path / "file") as file:
            torch.save(state, file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "file").stat().st_size <= limit
