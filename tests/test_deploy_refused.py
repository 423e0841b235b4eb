"""What compress.py and evaluate.py refuse: one sentence, exit code 2, nothing left behind."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from deploying import ok, refused
from safetensors.torch import load_file, save_file
from training import ROOT, last_checkpoint
from transformers import logging

import salaad  # noqa: F401  so that from_pretrained opens factored folders

logging.set_verbosity_error()
logging.disable_progress_bar()
pytestmark = pytest.mark.usefixtures("own_caches")


def test_a_program_says_its_sentence_on_standard_error_and_exits_with_2(tmp_path):
    for program in (["compress.py", "--output", tmp_path / "made"], ["evaluate.py", "perplexity"]):
        command = [sys.executable, *map(str, program), "--checkpoint", str(tmp_path)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: --checkpoint ")
        assert len(done.stderr.splitlines()) == 1


def broken_copy(runs: Path, tmp_path: Path, change) -> Path:
    """A copy of the SALAAD run in which `change` was made to the checkpoint."""
    copy = tmp_path / "broken"
    shutil.copytree(runs / "salaad", copy, ignore=shutil.ignore_patterns("cache"))
    change(last_checkpoint(copy))
    return copy


def shard_of(checkpoint: Path) -> Path:
    return next((checkpoint / "surrogate").glob("*.safetensors"))


def truncate(checkpoint: Path) -> None:
    shard = shard_of(checkpoint)
    shard.write_bytes(shard.read_bytes()[:-100])


def alter(checkpoint: Path) -> None:
    tensors = load_file(shard_of(checkpoint))
    key = next(iter(tensors))
    save_file({**tensors, key: tensors[key] + 1}, shard_of(checkpoint))


def older_format(checkpoint: Path) -> None:
    from salaad.files import write_checksums

    path = checkpoint / "surrogate" / "index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 0}))
    write_checksums(checkpoint)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (truncate, ("shard-00000-of-00001.safetensors is not as it was written", "give a whole copy")),
        (alter, ("shard-00000-of-00001.safetensors is not as it was written", "give a whole copy")),
        (lambda checkpoint: shard_of(checkpoint).unlink(), ("safetensors is missing", "give a whole copy")),
        (older_format, ("has format 0, this version reads", "use the version that wrote it")),
    ],
)
def test_a_broken_checkpoint_is_named_and_nothing_is_left_behind(runs, tmp_path, change, words):
    copy = broken_copy(runs, tmp_path, change)
    sentence = refused("compress.py", "--checkpoint", copy, "--output", tmp_path / "made")
    assert all(word in sentence for word in words), sentence
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken"]


def compressed(runs: Path, tmp_path: Path) -> Path:
    """A factored folder of the SALAAD run."""
    ok("compress.py", "--checkpoint", runs / "salaad", "--budget", "0.7", "--output", tmp_path / "factored")
    return tmp_path / "factored"


def test_wrong_requests_are_one_sentence_with_the_cure(runs, tmp_path):
    salaad_run, vanilla = runs / "salaad", runs / "full_rank"
    made = tmp_path / "made"

    def compress(*arguments: object) -> str:
        return refused("compress.py", "--checkpoint", salaad_run, "--output", made, *arguments)

    assert "is below the floor of" in compress("--budget", "1K")
    assert "outside [0, 1]" in compress("--kappa", 1.5)
    assert "--checkpoint is not given; add it" in refused("compress.py", "--output", made)
    assert "did you mean kappa?" in compress("--kapa", 1)
    assert "format" in compress("--format", "gguf")
    assert "need --rpca" in compress("--embedding")
    made.mkdir()
    assert "exists, and nothing is overwritten" in compress()
    made.rmdir()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is no run, no checkpoint" in refused("compress.py", "--checkpoint", empty, "--output", made)
    assert "holds no L and S" in refused("compress.py", "--checkpoint", vanilla, "--output", made)
    assert not made.exists()
    assert "stored in parts already" in refused(
        "compress.py", "--checkpoint", compressed(runs, tmp_path), "--rpca", "--output", made
    )
    assert "energy finds its own" in compress("--budget", "0.9", "--allocation", "energy", "--kappa", 0.5)
    assert "give a --budget too" in compress("--kappa", 0.5)

    def evaluate(*arguments: object) -> str:
        return refused("evaluate.py", *arguments)

    assert "give one of perplexity, sweep, lm-eval" in evaluate("perplexty", "--checkpoint", salaad_run)
    assert "variant 'B7' is unknown" in evaluate("perplexity", "--checkpoint", salaad_run, "--variants", "B7")
    assert "was not written with --elastic" in evaluate("perplexity", "--checkpoint", salaad_run, "--variants", "7B")
    assert "holds no L and S" in evaluate("perplexity", "--checkpoint", vanilla, "--variants", "L+S")
    assert "is no number" in evaluate("perplexity", "--checkpoint", salaad_run, "--tokens", "many")
    a_file = tmp_path / "file"
    a_file.write_text("")
    assert "cannot be made" in evaluate("perplexity", "--checkpoint", salaad_run, "--output", a_file)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "perplexity.json").write_text("[]")
    assert "no table of ours" in evaluate("perplexity", "--checkpoint", salaad_run, "--output", foreign)
    assert "positions" in evaluate("perplexity", "--checkpoint", salaad_run, "--data.sequence_length", 64)
    assert "holds no L and S" in evaluate("sweep", "--checkpoint", vanilla, "--budgets", "0.9")
    assert "below the floor" in evaluate("sweep", "--checkpoint", salaad_run, "--budgets", "1K")
    assert "outside [0, 1]" in evaluate("sweep", "--checkpoint", salaad_run, "--budgets", "0.9", "--kappas", "0:2:1")
    assert "piqa" in evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqua")
    assert "names nothing" in evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqa,,copa")
    missing = evaluate("lm-eval", "--checkpoint", salaad_run, "--tasks", "piqa", "--task-data", empty)
    assert "piqa.validation.jsonl" in missing
