"""Folders that commit af3164f wrote, before the package had subpackages, still open, resume and can be cut.

The archive holds a SALAAD run with checkpoints at steps 6 and 12, its text and its tokenizer, a factored and an elastic
folder cut from it, and what that commit computed with them. Other processors round differently: a sum in float32 moves
by a few units of 6e-8 per layer, so a figure of the same weights may move by 1e-5 of its size, while a weight read
wrongly moves it by far more than that.
"""

import json
import shutil
import tarfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.reliability.toy_run import toy_arguments
from tests.helpers.deploying import compress, evaluate, rows_of
from tests.helpers.training import lines, run_training

ARCHIVE = Path(__file__).resolve().parents[1] / "fixtures" / "written_by_af3164f.tar.xz"
RUN = Path("runs/salaad")
ROUNDING = 1e-5
pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture
def older(tmp_path, monkeypatch) -> Path:
    """The unpacked folder, which is made the current one: the paths in its configuration are relative."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path / "af3164f")
    return tmp_path / "af3164f"


def perplexities(folder: Path) -> dict[str, dict]:
    return {row["variant"]: row for row in rows_of(folder, "perplexity")}


def test_the_perplexity_of_every_variant_is_the_recorded_one(older):
    recorded = perplexities(older / "evaluation")
    evaluate("perplexity", RUN, "again", variants=",".join(recorded), dtype="float32", tokens=2000)
    found = perplexities(older / "again")
    assert found.keys() == recorded.keys()
    for variant, row in recorded.items():
        assert found[variant]["loss"] == pytest.approx(row["loss"], rel=ROUNDING)
        for exact in ("tokens", "parameters", "budget", "kappa", "dtype"):
            assert found[variant][exact] == row[exact], (variant, exact)


@pytest.mark.parametrize("asked", ["factored", "elastic", "elastic@0.6"])
def test_a_compressed_folder_gives_the_recorded_logits(older, asked):
    folder, _, budget = asked.partition("@")
    model = AutoModelForCausalLM.from_pretrained(folder, **({"budget": float(budget)} if budget else {}))
    with torch.no_grad():
        logits = model(torch.arange(2, 26).view(2, 12)).logits
    recorded = torch.tensor(json.loads(Path("logits.json").read_text())[asked], dtype=torch.float64)
    # A row's sum is the difference of large parts, so it is compared at the scale of what is summed.
    scale = float(logits.double().abs().sum(-1).max())
    torch.testing.assert_close(logits.double().sum(-1).flatten(), recorded, rtol=0, atol=ROUNDING * scale)


def test_the_run_goes_on_from_its_older_checkpoint_with_the_recorded_losses(older):
    recorded = lines(RUN)
    shutil.rmtree(RUN / "checkpoints" / "step-0000012")
    (RUN / "checkpoints" / "latest").write_text("step-0000006\n")
    (RUN / "summary.json").unlink()
    text = {"train": [f"text/{name}.jsonl" for name in "abc"], "validation": ["text/v.jsonl"]}
    settings = {"salaad__embedding": "true", "model__hidden_size": 16, "model__intermediate_size": 24}
    run_training(toy_arguments(text, "tokenizer", **settings, train__save_every=6, train__keep_last=0), RUN)
    assert lines(RUN)[:6] == recorded[:6]
    for found, row in zip(lines(RUN), recorded, strict=True):
        assert (found["step"], found["tokens"]) == (row["step"], row["tokens"])
        assert found["loss"] == pytest.approx(row["loss"], rel=ROUNDING)
    assert (RUN / "checkpoints" / "latest").read_text().strip() == "step-0000012"


def test_the_run_can_be_cut(older):
    compress(RUN, "made", budget="0.6", kappa=0.5, dtype="float32")
    made, recorded = (json.loads(Path(name, "compression.json").read_text()) for name in ("made", "factored"))
    assert made["parameters"] == recorded["parameters"]
    ids = torch.arange(2, 26).view(2, 12)
    with torch.no_grad():
        first, second = (AutoModelForCausalLM.from_pretrained(name)(ids).logits for name in ("made", "factored"))
    torch.testing.assert_close(first, second, rtol=0, atol=ROUNDING * float(second.abs().max()))
