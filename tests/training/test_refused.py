"""A model that cannot be trained as asked is refused in a sentence before the run has a folder."""

import pytest
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from salaad.common.errors import UserError
from tests.helpers.training import run_training


def test_rows_that_are_longer_than_the_positions_of_a_model_are_refused(toy, tmp_path, tiny_tokenizer_dir):
    folder = tmp_path / "gpt2"
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=512, n_positions=16, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
    with pytest.raises(UserError, match=r"data.sequence_length is 32, but .*gpt2 has 16 positions; give .* 16 or less"):
        run_training(toy(train__steps=1, model__path=folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run_training(toy(train__steps=1, model__path=folder, data__sequence_length=16), tmp_path / "run")
