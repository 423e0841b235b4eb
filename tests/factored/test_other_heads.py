"""Folders of causal LMs opened by classes without an LM head: the same base model, and a head of the class's own."""

import copy

import pytest
import torch
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from salaad.common.errors import UserError
from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.elastic_file import SizeRange
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.replacement import always_dense
from tests.factored.test_fixed_size import Q, blocks_of, change_config, gpt2, llama, open_folder, tied_llama
from tests.helpers.models import IDS
from tests.helpers.slr_weights import parts

CLASSIFIERS = (AutoModelForSequenceClassification, AutoModelForTokenClassification)


@pytest.fixture(scope="module", params=[llama, gpt2, tied_llama])
def folders(request, tmp_path_factory):
    """A folder of one size and an elastic one; the head of the first model is a block."""
    root, model = tmp_path_factory.mktemp("heads"), request.param()
    blocks = blocks_of(model)
    queue = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in blocks.items()})
    save_elastic(copy.deepcopy(model), [SizeRange(blocks, queue)], 1000, root / "elastic")
    factor(model, blocks).save_pretrained(root / "fixed")
    return root / "fixed", root / "elastic"


@pytest.mark.parametrize("kind", CLASSIFIERS)
def test_a_classifier_has_the_base_model_and_a_new_head(folders, kind, tmp_path):
    for k, folder in enumerate(folders):
        expected = open_folder(folder).base_model
        found, report = kind.from_pretrained(folder, num_labels=3, output_loading_info=True)
        outside = {name for name, _ in found.named_parameters() if not name.startswith(f"{found.base_model_prefix}.")}
        assert report["missing_keys"] == outside
        assert not any("lm_head" in name for name, _ in found.named_modules())
        heads = [found.get_parameter(name) for name in outside if name.endswith("weight")]
        # As the class draws it: `initializer_range` is 0.2, and 96 numbers tell the deviation to about 7 %.
        assert len(heads) == 1 and heads[0].shape == (3, 32) and 0.14 < heads[0].std() < 0.26
        with torch.no_grad():
            states = [each(IDS).last_hidden_state for each in (found.base_model, expected)]
        assert torch.equal(*states) and slr_modules(found)
        found(input_ids=IDS[:1]).logits.sum().backward()
        found.save_pretrained(tmp_path / str(k))
        again, report = kind.from_pretrained(tmp_path / str(k), output_loading_info=True)
        assert not report["missing_keys"]
        assert all(
            torch.equal(mine, theirs) for mine, theirs in zip(again.parameters(), found.parameters(), strict=True)
        )


def test_a_base_model_is_that_of_the_causal_model(folders):
    for folder in folders:
        with torch.no_grad():
            states = [
                each(IDS).last_hidden_state
                for each in (AutoModel.from_pretrained(folder), open_folder(folder).base_model)
            ]
        assert torch.equal(*states)


def test_a_new_head_needs_no_room_in_the_files(tmp_path):
    factor(tied_llama(), {Q: parts(32, 32, 2, 0)}).save_pretrained(tmp_path)
    found = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=900)
    assert found.score.weight.shape == (900, 32) and set(slr_modules(found)) == {Q}


def test_a_block_that_the_base_model_lacks_is_refused_still(tmp_path):
    factor(llama(), {Q: parts(32, 32, 2, 0)}).save_pretrained(tmp_path)
    change_config(lambda entry: entry["blocks"].update({"model.layers.7.mlp.up_proj": [2, 0]}))(tmp_path)
    for kind in (AutoModel, *CLASSIFIERS):
        with pytest.raises(UserError, match="named as a block, but the model has no such matrix"):
            kind.from_pretrained(tmp_path)


SAVERS = (AutoModel, AutoModelForSequenceClassification)


@pytest.mark.parametrize("kind", [*SAVERS, AutoModelForCausalLM, AutoModelForQuestionAnswering])
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("make", [llama, gpt2, tied_llama])
def test_what_another_class_has_saved_opens_as_a_dense_folder_does(tmp_path, make, saver, kind):
    if (make, kind, saver) in [(each, AutoModelForQuestionAnswering, SAVERS[1]) for each in (llama, tied_llama)]:
        pytest.skip("transformers finds none of the dense weights either")
    dense, model = make(), make()
    blocks = {name: slr for name, slr in blocks_of(model).items() if name not in always_dense(model)}
    factor(model, blocks).save_pretrained(tmp_path / "fixed")
    dense.save_pretrained(tmp_path / "dense")
    missing = {}
    for name in ("fixed", "dense"):
        saved = saver.from_pretrained(tmp_path / name)
        saved.save_pretrained(tmp_path / f"{name} again")
        opened, report = kind.from_pretrained(tmp_path / f"{name} again", output_loading_info=True)
        missing[name] = report["missing_keys"]
        with torch.no_grad():
            states = [each.base_model(IDS).last_hidden_state for each in (opened, saved)]
        assert torch.equal(*states) and bool(slr_modules(opened)) == (name == "fixed")
    assert missing["fixed"] == missing["dense"]


def test_a_class_with_another_name_for_the_base_model_is_refused_with_a_cure_that_works(tmp_path):
    factor(llama(), blocks_of(llama())).save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"calls the base model transformer.* AutoModel, save that"):
        AutoModelForQuestionAnswering.from_pretrained(tmp_path / "model")
    AutoModel.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "base")
    opened = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "base")
    states = [each(IDS).last_hidden_state for each in (opened.transformer, open_folder(tmp_path / "model").base_model)]
    assert torch.equal(*states)


def test_an_embedding_in_parts_is_refused_where_a_head_shares_it(folders, tmp_path):
    classifier = AutoModelForSequenceClassification.from_pretrained(folders[1])
    if not classifier.config.tie_word_embeddings:
        pytest.skip("its causal model has a head of its own")
    classifier.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"stored as U, V and S, and .* shares it with another module"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
