"""Models whose head is their embedding, and the smallest sizes, of which all L and S are gone."""

import gc
import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from salaad.common.errors import UserError
from salaad.compression import from_checkpoint
from salaad.compression.card import not_smaller
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.from_nested import NestedDeployment
from salaad.compression.split import PostHoc
from salaad.compression.tuning.distillation import sizes_in_turn
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.factored.fixed_size import slr_modules
from salaad.model.nested_widths import Widths
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, refused, text_options
from tests.helpers.models import logits, open_folder, save_gpt2
from tests.helpers.tiny_llama import llama

pytestmark = pytest.mark.usefixtures("own_caches")

WTE, DENSE = 512 * 32, 42880  # parameters of the small GPT-2
FIXED = DENSE - WTE - 2 * 12 * 32 * 32  # biases, norms and positions


@pytest.fixture
def gpt2(tmp_path) -> Path:
    """A GPT-2, whose head is its embedding."""
    return save_gpt2(tmp_path / "gpt2")


def test_a_tied_embedding_is_cut_to_one_weight_that_is_counted_once_in_every_kind_of_folder(gpt2, tmp_path):
    words, opened = {"rpca": True, "embedding": True, "dtype": "float32"}, {}
    for form in ("dense", "factored"):
        compress(gpt2, tmp_path / form, budget=24000, refine=0, format=form, **words)
        opened[form] = open_folder(tmp_path / form)
    compress(gpt2, tmp_path / "elastic", elastic=True, **words)
    opened["elastic"] = open_folder(tmp_path / "elastic", budget=24000)
    for model in opened.values():
        assert model.lm_head.weight is model.transformer.wte.weight
        # Sums in another order than the dense products.
        torch.testing.assert_close(logits(model), logits(opened["dense"]), rtol=1e-4, atol=1e-5)
    assert not torch.equal(opened["dense"].lm_head.weight, AutoModelForCausalLM.from_pretrained(gpt2).lm_head.weight)
    entry = json.loads((tmp_path / "elastic" / "config.json").read_text())["quantization_config"]
    assert (entry["fixed"], entry["dense"]) == (FIXED, DENSE)


def test_the_memory_of_an_elastic_folder_counts_a_tied_embedding_as_the_dense_weight_that_it_stays(tmp_path):
    """GoDec of low rank makes all blocks smaller in parts, which the tied embedding does not become."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=200, tie_word_embeddings=True, **sizes)).save_pretrained(tmp_path / "tied")
    words = {"godec": True, "rank_ratio": 0.1, "density": 0.05, "embedding": True, "dtype": "float32"}
    compress(tmp_path / "tied", tmp_path / "made", elastic=True, **words)
    opened = open_folder(tmp_path / "made")
    assert len(slr_modules(opened)) == 7 and opened.lm_head.weight is opened.model.embed_tokens.weight
    stored = [*opened.parameters(), *(part for name, part in opened.named_buffers() if "inv_freq" not in name)]
    said = json.loads((tmp_path / "made" / "compression.json").read_text())["bytes_in_memory"][1]
    assert said == sum(part.nbytes for part in stored)


def test_a_tied_head_as_a_block_of_an_elastic_folder_is_the_embedding_in_every_class(gpt2, tmp_path):
    """GoDec with full rank and all entries leaves blocks as they are, so the folder holds the model itself."""
    words = {"godec": True, "rank_ratio": 1, "density": 1, "roles": "q,lm_head", "dtype": "float32"}
    compress(gpt2, tmp_path / "elastic", elastic=True, **words)
    dense = AutoModelForCausalLM.from_pretrained(gpt2)
    found = open_folder(tmp_path / "elastic")
    assert found.lm_head.weight is found.transformer.wte.weight
    torch.testing.assert_close(logits(found), logits(dense), rtol=1e-4, atol=1e-5)
    for of_base in (AutoModel.from_pretrained(tmp_path / "elastic"), found.transformer):
        torch.testing.assert_close(of_base.wte.weight, dense.lm_head.weight, rtol=1e-4, atol=1e-5)
    compress(tmp_path / "elastic", tmp_path / "small", budget=0.9)
    assert logits(open_folder(tmp_path / "small")).isfinite().all()


@pytest.mark.parametrize("fit", [{}, {"match": 8, "distill": "256"}])
def test_at_the_floor_blocks_are_zero_in_a_folder_of_one_size_and_of_all(
    gpt2, tmp_path, text_files, tiny_tokenizer_dir, fit
):
    words = {"rpca": True, "embedding": True, "dtype": "float32", **fit}
    words |= text_options(text_files, tiny_tokenizer_dir) if fit else {}
    compress(gpt2, tmp_path / "one", budget=FIXED, **words)
    compress(gpt2, tmp_path / "all", "--elastic", budget=f"{FIXED + 1},{FIXED}", **words)
    for model in (open_folder(tmp_path / "one"), open_folder(tmp_path / "all", budget=FIXED)):
        assert logits(model).abs().max() == 0  # the head is the embedding, of which nothing is left
    with pytest.raises(UserError, match=r"below the floor of 1\.92K"):
        open_folder(tmp_path / "all", budget=FIXED - 1)
    floor = f"budget {FIXED / 1000}K is below the floor of {(FIXED + WTE) / 1000}K"
    assert floor in refused("compress.py", f"--checkpoint={gpt2}", "--output=o", "--rpca", f"--budget={FIXED}")


def test_text_and_ties_are_checked_before_anything_is_split(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr(from_checkpoint, "post_hoc_parts", lambda *_: pytest.fail("weights were split"))
    arguments = ("compress.py", "--checkpoint", gpt2, "--output", tmp_path / "made", "--rpca")
    said = refused(*arguments, "--budget=0.9", "--allocation=hpa", "--match=4")
    assert "data.sequence_length is 256, but gpt2 has 32 positions" in said
    said = refused(*arguments, "--roles=embedding", "--elastic")
    assert "all blocks of gpt2 are tied weights, dense at every size; leave --elastic out" in said


def test_the_dense_weights_are_freed_before_the_model_to_store_is_filled(gpt2, monkeypatch):
    deployment, alive = CheckpointDeployment(ModelOnDisk.open(gpt2), PostHoc(SalaadConfig())), []
    held = [weakref.ref(weight) for weight in deployment._dense_weights.values()]

    def note(*_):
        gc.collect()
        alive.append(sum(weight() is not None for weight in held))

    monkeypatch.setattr(from_checkpoint, "take_over", note)
    deployment.sized(Variant("0.9@energy", DENSE * 9 // 10, refine=1), torch.float32, factored=True)
    assert len(held) == 8 and alive == [0]


def test_where_the_smallest_size_keeps_nothing_other_sizes_are_trained_all_the_same():
    at = sizes_in_turn(0, 4000, lambda size: size)
    steps = [at(step) for step in range(50)]
    assert {smallest for _, smallest in steps} == {0}
    others = [one for one, _ in steps]
    assert min(others) < 10 and max(others) > 2000 and len(set(others)) > 30
    assert sizes_in_turn(0, 0, lambda size: size)(3) == [0, 0]


def test_of_narrower_models_the_widest_is_said_to_be_why_a_folder_is_no_smaller():
    for words, cure in (({}, "a --budget"), ({"budget": "0.99"}, "a smaller --budget")):
        [said] = not_smaller(CompressOptions(checkpoint="nested", output="made", **words), "nested", 2, 2, 100, 120)
        assert said.endswith(f", since it holds the widest of the models inside; give {cure}.")


def test_narrower_models_are_not_stored_in_int8():
    model = llama()
    source = SimpleNamespace(name="nested", folder=SimpleNamespace(outline=model))
    nested = NestedDeployment(source, lambda model: Widths(model, 1))
    options = {"checkpoint": "nested", "output": "made"}
    with pytest.raises(
        UserError, match=r"nested holds .* and --dtype int8 stores U, V and S; give bfloat16 or float32"
    ):
        nested.variant_for(CompressOptions(**options, dtype="int8"), None)
    assert nested.variant_for(CompressOptions(**options), None).name == "X"
