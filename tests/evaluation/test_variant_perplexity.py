"""A row of results says which device computed it, with or without Triton; missing kernels on a GPU cause a warning."""

import warnings
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.common import native
from salaad.compression.opening import open_deployment
from salaad.compression.variants import Variant
from salaad.config.run import DataConfig
from salaad.data.tokenizer import load_tokenizer
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
