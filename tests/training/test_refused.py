"""A model that cannot be trained as asked is refused in a sentence before the run has a folder."""

import pytest
from transformers import (
    AutoConfig,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    XGLMConfig,
    XGLMForCausalLM,
)

from salaad.common.errors import UserError
from tests.helpers.training import last_checkpoint, run_training


def test_rows_that_are_longer_than_the_positions_of_a_model_are_refused(toy, tmp_path, tiny_tokenizer_dir):
    folder = tmp_path / "gpt2"
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=512, n_positions=16, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
    with pytest.raises(UserError, match=r"data.sequence_length is 32, but .*gpt2 has 16 positions; give .* 16 or less"):
        run_training(toy(train__steps=1, model__path=folder), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run_training(toy(train__steps=1, model__path=folder, data__sequence_length=16), tmp_path / "run")


def test_rotary_positions_take_longer_rows_and_the_saved_model_says_so(toy, tmp_path, tiny_tokenizer_dir):
    folder = tmp_path / "llama"
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=512, max_position_embeddings=16, bos_token_id=1, eos_token_id=1, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
    run_training(toy(train__steps=1, model__path=folder, method="full_rank"), tmp_path / "run")
    saved = last_checkpoint(tmp_path / "run") / "model"
    assert AutoConfig.from_pretrained(saved).max_position_embeddings == 32


def test_a_model_whose_table_of_positions_is_a_buffer_trains_in_bfloat16(toy, tmp_path, tiny_tokenizer_dir):
    folder = tmp_path / "xglm"
    config = XGLMConfig(vocab_size=512, d_model=32, ffn_dim=48, num_layers=1, attention_heads=2, bos_token_id=1)
    XGLMForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
    options = {"model__path": folder, "train__precision": "bf16", "method": "full_rank"}
    run_training(toy(train__steps=1, **options), tmp_path / "run")
    assert (tmp_path / "run" / "summary.json").exists()
