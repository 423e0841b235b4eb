"""Suggested settings by the length of a run: trainings of three lengths, and the rules behind the settings."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import salaad
from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.suggestion import settings_for


def llama(vocab: int = 96, **options) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    tied = {"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, **options}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=vocab, **tied))


def text(steps: int) -> torch.Tensor:
    """Return rows of a language that can be learned: by a fixed table, one of three tokens follows every token."""
    generator = torch.Generator().manual_seed(1)
    following = torch.randint(96, (96, 3), generator=generator)
    rows = torch.empty(steps, 8, 32, dtype=torch.int64)
    rows[..., 0] = torch.randint(96, (steps, 8), generator=generator)
    for i in range(1, 32):
        choice = torch.randint(3, (steps, 8, 1), generator=generator)
        rows[..., i] = following[rows[..., i - 1]].gather(-1, choice).squeeze(-1)
    return rows


def trained(steps: int, **settings) -> salaad.Salaad:
    """Train a model for so many steps with the suggested settings, but for those given; return its Salaad."""
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plugin = salaad.Salaad(model, salaad.suggest(model, steps, **settings), total_steps=steps)
    for tokens in text(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plugin.step()
    plugin.close()
    return plugin


@torch.no_grad()
def held_out_loss(model: torch.nn.Module, steps: int) -> float:
    """Return the model's loss on the text that comes after the training's."""
    rows = text(steps + 8)[-8:].flatten(0, 1)
    return model(input_ids=rows, labels=rows).loss.item()


@pytest.mark.parametrize("steps", [60, 200, 500])
def test_a_run_of_any_length_ends_with_a_smaller_model_that_is_no_worse(steps):
    """L + S is smaller than X and within 1 % of its loss, with settings that nobody searched for this model."""
    plugin = trained(steps)
    X = held_out_loss(plugin.model, steps)
    with plugin.deployed():
        deployed = held_out_loss(plugin.model, steps)
    found = plugin.summary()
    assert math.log(96) - 0.5 > X  # it has learned something
    assert deployed < 1.01 * X
    assert found["block_parameters"] < found["block_parameters_dense"]
    assert found["rank_ratio"] < 0.35


def test_the_shipped_settings_of_nano_and_micro_are_those_of_their_lengths():
    nano, _ = read_command_line(["--config", "nano"])
    assert settings_for(nano.train.steps) == {
        key: getattr(nano.salaad, key) for key in ("every", "rho_constant", "delta_alpha", "delta_beta")
    }
    micro, _ = read_command_line(["--config", "micro"])
    found = settings_for(micro.train.steps)
    assert found["rho_constant"] == micro.salaad.rho_constant
    # The suggestion updates every tenth step instead of every fifth, and moves τ_L twice as far at each update.
    assert found["delta_alpha"] / found["every"] == pytest.approx(micro.salaad.delta_alpha / micro.salaad.every)


def test_what_the_demo_trains_with_is_what_is_suggested_for_a_model_to_be_cut():
    demo, _ = read_command_line(["--config", "demo"])
    assert settings_for(demo.train.steps, elastic=True) == {
        key: getattr(demo.salaad, key)
        for key in ("every", "rho_constant", "delta_alpha", "delta_beta", "onset", "release")
    }
    config, _ = read_command_line(["--preset", "elastic", "--train.steps", "18000"])
    assert (config.salaad.rho_constant, config.salaad.delta_alpha) == (0.00833, 0.32)
    assert (config.salaad.onset, config.salaad.release) == (0.25, 0.5)


def test_a_model_that_is_to_be_cut_keeps_nearly_the_loss_of_plain_training_and_is_cut_to_half():
    """Compared with the same model, trained without a penalty on the same text."""
    steps = 200
    plain = held_out_loss(trained(steps, elastic=True, rho_constant=0.0).model, steps)
    plugin = trained(steps, elastic=True)
    X = held_out_loss(plugin.model, steps)
    assert 1.01 * plain > X
    assert held_out_loss(plugin.compress(0.5), steps) < 1.01 * X


def test_the_pull_of_long_runs_is_no_weaker_than_the_papers():
    assert settings_for(20_000)["rho_constant"] == pytest.approx(0.03)
    assert settings_for(130_000)["rho_constant"] == 0.01
    for name in ("60m", "130m", "350m", "1b"):
        config, _ = read_command_line(["--config", name])
        assert config.salaad.rho_constant == 0.01


def test_what_is_given_holds_instead_of_what_is_suggested():
    model = llama()
    config = salaad.suggest(model, 1000, every=7, rank_ratio=0.3)
    assert (config.every, config.rank_ratio, config.rho_constant) == (7, 0.3, 0.3)
    with pytest.raises(UserError, match="steps is 0, but a run has at least 1"):
        salaad.suggest(model, 0)


def test_a_number_of_steps_may_be_any_whole_number():
    model = llama()
    assert salaad.suggest(model, 1000.0) == salaad.suggest(model, np.int64(1000)) == salaad.suggest(model, 1000)
    for steps in (1.5, "100", None):
        with pytest.raises(UserError, match=r"steps is .*, but a run has a whole number of them; give one such as"):
            salaad.suggest(model, steps)


def test_a_large_embedding_becomes_a_block_and_a_tied_or_small_one_does_not():
    assert salaad.suggest(llama(2000), 100).embedding
    assert not salaad.suggest(llama(2000), 100, elastic=True).embedding  # it is split when the model is cut
    assert not salaad.suggest(llama(16), 100).embedding
    assert not salaad.suggest(llama(2000, tie_word_embeddings=True), 100).embedding
    assert not salaad.suggest(torch.nn.Linear(2, 3), 100).embedding
    plain = torch.nn.ModuleDict({"embed_tokens": torch.nn.Embedding(50, 8), "lm_head": torch.nn.Linear(8, 50, False)})
    assert salaad.suggest(plain, 100).embedding
    plain["lm_head"].weight = plain["embed_tokens"].weight
    assert not salaad.suggest(plain, 100).embedding


def test_of_a_preset_and_what_is_given_the_later_holds(tmp_path):
    config, _ = read_command_line(["--preset", "auto", "--train.steps", "500", "--salaad.every", "3"])
    assert (config.salaad.every, config.salaad.rho_constant) == (3, 0.3)
    assert config.salaad.delta_alpha == settings_for(500)["delta_alpha"]
    suggested = settings_for(5000, elastic=True)
    for words in (["--preset", "elastic"], ["--preset=elastic"]):
        micro, _ = read_command_line(["--config", "micro", *words, "--salaad.delta_alpha", "1"])
        found = {key: getattr(micro.salaad, key) for key in suggested}
        assert found == suggested | {"delta_alpha": 1.0} and not micro.salaad.embedding
    (tmp_path / "own.yaml").write_text("preset: elastic\nsalaad: {rho_constant: 0.2, embedding: true}\n")
    own, _ = read_command_line(["--config", str(tmp_path / "own.yaml"), "--train.steps", "5000"])
    assert (
        own.salaad.delta_alpha == suggested["delta_alpha"] and own.salaad.rho_constant == 0.2 and own.salaad.embedding
    )


def test_a_preset_of_a_file_stands_where_the_file_does(tmp_path):
    path = tmp_path / "own.yaml"
    for text in ("preset: elastic\nsalaad.delta_alpha: 0.5\n", "preset: elastic\nsalaad: {delta_alpha: 0.5}\n"):
        path.write_text(text)
        assert read_command_line(["--config", str(path)])[0].salaad.delta_alpha == 0.5
    over, _ = read_command_line(["--config", "micro", "--config", str(path), "--salaad.every", "4"])
    typed, _ = read_command_line(["--config", "micro", "--preset", "elastic"])
    assert over.salaad == replace(typed.salaad, delta_alpha=0.5, every=4)
    under, _ = read_command_line(["--config", str(path), "--config", "micro"])
    micro, _ = read_command_line(["--config", "micro"])
    assert (under.salaad.rho_constant, under.salaad.onset) == (micro.salaad.rho_constant, typed.salaad.onset)
    with pytest.raises(UserError, match=r"--salaad.every.* stands before --config, whose preset is elastic, which"):
        read_command_line(["--salaad.every", "4", "--config", str(path)])
    other, _ = read_command_line(["--salaad.every", "4", "--config", str(path), "--method", "galore"])
    assert other.method == "galore"


def test_a_preset_leaves_no_other_pull_of_a_file_in_force(tmp_path):
    """A ρ given outright would silence the preset's c, and the demo is pulled in a quarter of its run alone."""
    (tmp_path / "own.yaml").write_text("salaad: {rho: 1.0e-6}\n")
    own, _ = read_command_line(["--config", str(tmp_path / "own.yaml"), "--preset", "elastic"])
    assert own.salaad.rho is None
    demo, _ = read_command_line(["--config", "demo", "--preset", "auto"])
    assert (demo.salaad.onset, demo.salaad.release) == (0, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--salaad.rho 1e-6 --preset elastic", "--salaad.rho stands before --preset elastic, which overrides it"),
        ("--preset auto --config micro", "--config stands after --preset and overrides parts of it; give it before"),
        (
            "--salaad.rho_constant 0.5 --preset auto",
            "--salaad.rho_constant stands before --preset auto, which overrides it; give it after",
        ),
        ("--method galore --preset auto", "--preset is of method salaad, but method is galore; leave it out"),
    ],
)
def test_a_preset_is_not_mixed_with_what_it_overrides_or_is_overridden_by(words, said):
    with pytest.raises(UserError) as error:
        read_command_line(words.split())
    assert said in str(error.value)
