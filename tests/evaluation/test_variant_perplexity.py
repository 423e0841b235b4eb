"""A row of results knows its settings and its device, with or without Triton, and the cache knows them too."""

import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.common import native
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.opening import open_deployment
from salaad.compression.split import PostHoc
from salaad.compression.variants import Variant
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.data.tokenizer import load_tokenizer
from salaad.evaluation import variant_perplexity
from salaad.evaluation.tables import keep_rows
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.runs.model_on_disk import ModelOnDisk


@pytest.fixture
def evaluation(tmp_path: Path, tiny_tokenizer_dir, text_files, own_caches) -> VariantEvaluation:
    """The evaluation of a small dense model, without cached results."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512)).save_pretrained(tmp_path / "model")
    load_tokenizer(tiny_tokenizer_dir).save_pretrained(tmp_path / "model")
    data = DataConfig(
        source="files",
        files=tuple(text_files["train"]),
        validation_files=tuple(text_files["validation"]),
        sequence_length=32,
    )
    deployment = open_deployment(ModelOnDisk.open(tmp_path / "model"))
    return VariantEvaluation(deployment, data, tokens=500, dtype="float32", batch=4)


def test_a_row_says_what_computed_it_and_nothing_is_said_where_nothing_is_missing(evaluation):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = evaluation(Variant("X"))
    assert (row["device"], row["triton"]) == ("cpu", False)
    assert evaluation(Variant("X")) == row  # from the cache


def test_kernels_that_cannot_be_used_are_told_of_and_the_figure_is_torchs(evaluation, monkeypatch):
    """The CPU stands in for a GPU without Triton, as it does for a GPU with Triton's interpreter."""
    expected = evaluation(Variant("X"))["perplexity"]
    evaluation.cached.clear()
    monkeypatch.setattr(native, "INTERPRETED", True)
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    native.uses_triton.cache_clear()
    with pytest.warns(UserWarning, match="Triton is not installed .* so torch's operations are used on cpu") as said:
        row = evaluation(Variant("X"))
    native.uses_triton.cache_clear()
    assert len(said) == 1 and (row["device"], row["triton"]) == ("cpu", False)
    assert row["perplexity"] == expected


def test_a_legacy_figure_of_other_batches_is_not_taken_from_the_cache(evaluation):
    """exp(Σ of the batches' mean losses / (batches + 1)) falls with fewer batches; the perplexity stays as it is."""
    small = evaluation(Variant("X"))
    evaluation.batch = 8
    large = evaluation(Variant("X"))
    assert large["legacy_perplexity"] < 0.95 * small["legacy_perplexity"]
    assert large["perplexity"] == pytest.approx(small["perplexity"], rel=1e-5)


def anew(evaluation: VariantEvaluation, **changes) -> VariantEvaluation:
    """The same evaluation with other data settings, or of another number of tokens, begun anew."""
    tokens = changes.pop("tokens", evaluation.tokens)
    data = replace(evaluation.data, **changes)
    return VariantEvaluation(evaluation.deployment, data, tokens=tokens, dtype="float32", batch=4)


def renumber(folder: Path) -> None:
    """Give the pieces of several characters each other's ids in a tokenizer's file."""
    path = folder / "tokenizer.json"
    parts = json.loads(path.read_text())
    vocabulary = parts["model"]["vocab"]
    long = [piece for piece in vocabulary if len(piece) > 1 and "<" not in piece]
    parts["model"]["vocab"] = vocabulary | dict(zip(long, [vocabulary[piece] for piece in reversed(long)], strict=True))
    path.write_text(json.dumps(parts))


def test_the_cache_knows_a_tokenizer_by_what_it_does(evaluation, tmp_path, monkeypatch):
    expected = evaluation(Variant("X"))
    own = evaluation.deployment.source.folder.path
    shutil.copytree(own, tmp_path / "elsewhere")
    same = anew(evaluation, tokenizer=str(tmp_path / "elsewhere"))
    with monkeypatch.context() as patch:
        patch.setattr(same.deployment, "opened", None)  # nothing may be measured
        assert same(Variant("X")) == expected
    renumber(own)
    other = anew(evaluation)(Variant("X"))
    assert other["tokenizer"] != expected["tokenizer"]
    assert abs(other["perplexity"] / expected["perplexity"] - 1) > 1e-4


def test_what_an_older_algorithm_cut_is_measured_anew(evaluation, monkeypatch):
    expected, held = evaluation(Variant("X")), len(evaluation.path.read_text().splitlines())
    monkeypatch.setattr(variant_perplexity, "ALGORITHMS", variant_perplexity.ALGORITHMS + 1)
    for _ in range(2):
        assert anew(evaluation)(Variant("X")) == expected
        assert len(evaluation.path.read_text().splitlines()) > held
    [before, after] = [json.loads(line) for line in evaluation.path.read_text().splitlines() if line]
    assert after["of"].pop("algorithms") == before["of"].pop("algorithms") + 1 and before == after


def test_rows_measured_otherwise_stay_and_those_measured_alike_are_replaced(evaluation, tmp_path):
    path, settings = tmp_path / "rows" / "perplexity.json", ({}, {"sequence_length": 16}, {"tokens": 200})
    rows = [anew(evaluation, **changes)(Variant("X")) for changes in settings]
    assert [row["sequence_length"] for row in rows] == [32, 16, 32]
    assert [row["most_tokens"] for row in rows] == [500, 500, 200]
    renumber(evaluation.deployment.source.folder.path)
    rows.append(anew(evaluation)(Variant("X")))
    for row in rows:
        keep_rows([row], path)
    assert json.loads(path.read_text())["rows"] == rows
    keep_rows([row | {"perplexity": 7.0, "tokens": 499, "device": "another"} for row in rows], path)
    assert [row["perplexity"] for row in json.loads(path.read_text())["rows"]] == [7.0] * 4


def test_cuts_weighed_on_two_texts_are_two_rows(evaluation, tmp_path):
    split, rows = PostHoc(SalaadConfig(roles=("q",)), "godec", 1.0, 1.0), []
    for file in evaluation.data.files[:2]:
        data = replace(evaluation.data, files=(file,))
        deployment = CheckpointDeployment(evaluation.deployment.source, split)
        variant = Variant("q@energy", deployment.fixed + 100, calibrated=True)
        deployment.calibrate(data, 4)
        rows.append(VariantEvaluation(deployment, data, tokens=500, dtype="float32", batch=4)(variant))
        keep_rows(rows[-1:], tmp_path / "perplexity.json")
    assert rows[0]["perplexity"] != rows[1]["perplexity"]
    assert json.loads((tmp_path / "perplexity.json").read_text())["rows"] == rows


def test_a_row_of_an_older_version_is_replaced_where_it_agrees_in_all_that_it_tells(tmp_path):
    path, now = tmp_path / "perplexity.json", {"variant": "X", "dtype": "float32", "perplexity": 6.0, "packing": True}
    older = [{"variant": name, "dtype": "float32", "perplexity": 5.0} for name in ("L+S", "X", "9M")]
    keep_rows(older, path)
    keep_rows([now], path)
    assert json.loads(path.read_text())["rows"] == [older[0], now, older[2]]


def test_a_figure_that_is_not_finite_is_null_in_the_file(tmp_path):
    row = {"variant": "X", "perplexity": math.nan, "loss": math.inf, "others": {"f1": math.nan, "em": 0.5}}
    path = keep_rows([row], tmp_path / "perplexity.json")
    [kept] = json.loads(path.read_text(), parse_constant=pytest.fail)["rows"]
    assert kept == {"variant": "X", "perplexity": None, "loss": None, "others": {"f1": None, "em": 0.5}}


def test_a_score_measured_again_replaces_the_row_with_its_other_metrics(tmp_path):
    row = {"task": "cb", "variant": "X", "max_length": None, "acc": 0.5, "others": {"f1": 0.4}}
    for again in (row, row | {"acc": 0.6, "others": {"f1": 0.5}}, row | {"max_length": 64}):
        keep_rows([again], tmp_path / "lm-eval.json")
    found = json.loads((tmp_path / "lm-eval.json").read_text())["rows"]
    assert [(one["acc"], one["max_length"]) for one in found] == [(0.6, None), (0.5, 64)]
