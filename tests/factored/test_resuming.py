"""A Trainer of transformers on an opened folder goes on from the weights of its checkpoint, also from int8."""

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from salaad.common.errors import UserError
from salaad.factored.fixed_size import factor, mark_factored
from salaad.factored.layers import SlrLinear
from tests.factored.test_fixed_size import IDS, blocks_of, llama, logits, open_folder
from tests.helpers.slr_weights import distance, parts


class Began(TrainerCallback):
    """Keeps the logits with which a training begins."""

    def on_train_begin(self, args, state, control, model=None, **_):
        self.logits = logits(model)
        model.train()


def trained(model, folder, steps: int, resumed: bool = False) -> Began:
    arguments = TrainingArguments(
        str(folder), max_steps=steps, learning_rate=1e-2, report_to="none", use_cpu=True, save_steps=2
    )
    rows, began = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)], Began()
    Trainer(model, arguments, train_dataset=rows, callbacks=[began]).train(resume_from_checkpoint=resumed)
    return began


@pytest.mark.parametrize("in_int8", [True, False])
def test_a_resumed_trainer_begins_with_the_weights_of_its_checkpoint(in_int8, tmp_path):
    model, folder = llama(), tmp_path / "model"
    factor(model, blocks_of(model))
    mark_factored(model, 1234, in_int8)
    model.save_pretrained(folder)
    trained(open_folder(folder), tmp_path / "trainer", 2)
    saved = logits(open_folder(tmp_path / "trainer" / "checkpoint-2"))
    assert distance(saved, logits(open_folder(folder))) > 0.05
    again = trained(open_folder(folder), tmp_path / "trainer", 3, resumed=True)
    assert torch.equal(again.logits, saved)


@pytest.mark.parametrize("in_int8", [True, False])
def test_a_layer_loads_the_tensors_of_a_file_positions_included(in_int8):
    first, second = (SlrLinear.from_slr(parts(24, 40, 3, 300, seed=seed)) for seed in (0, 1))
    first.load_state_dict(second.packed(in_int8))
    # A number in int8 is off by half a scale, which is the largest of its row over 127.
    assert distance(first.weight, second.weight) < (0.02 if in_int8 else 1e-12)
    assert torch.equal(first.S_columns, second.S_columns) and torch.equal(first.S_starts, second.S_starts)


def test_numbers_whose_scales_are_in_another_file_are_refused():
    layer = SlrLinear.from_slr(parts(24, 40, 3, 300))
    stored = layer.packed(in_int8=True)
    del stored["V_scales"]
    with pytest.raises(UserError, match=r"V_int8 and its scales are in two files.*larger max_shard_size"):
        layer.load_state_dict(stored, strict=False)
