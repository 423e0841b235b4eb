"""A method from outside the package: the loop, the plan, the checkpoint and the report need not know it by name."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from salaad.common.errors import UserError
from salaad.methods.full_rank import FullRank
from salaad.methods.registry import register
from tests.helpers.deploying import ok, refused, rows_of
from tests.helpers.training import last_checkpoint, lines, moments, run_training, train_on_ranks
from tests.helpers.two_factors import TwoFactors

RANK, HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 4, 32, 48, 2, 512
STEPS = 12  # with a restart at 5 and at 10


@pytest.fixture
def options(toy):
    return lambda **more: toy(method="two_factors", optimizer__lr=0.01, **more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, text_files, tiny_tokenizer_dir) -> Path:
    from scripts.reliability.toy_run import toy_arguments

    folder = tmp_path_factory.mktemp("two_factors") / "run"
    arguments = toy_arguments(text_files, tiny_tokenizer_dir, method="two_factors", optimizer__lr=0.01)
    run_training(arguments, folder)
    return folder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return a checkpoint's state without the export: trained weights, the method's tensor, the optimizer's moments."""
    state = last_checkpoint(folder) / "state"
    buffers = {f"momentum {index}": entry["momentum_buffer"] for index, entry in moments(state.parent).items()}
    return {**load_file(state / "weights.safetensors"), **load_file(state / "method.safetensors"), **buffers}


def test_it_trains_and_leaves_its_own_columns_in_the_records(trained):
    rows = lines(trained)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[-1]["loss"] < rows[0]["loss"]
    # A line is written before the method acts after its step.
    assert [row["restarts"] for row in rows] == [(step - 1) // 5 for step in range(1, STEPS + 1)]
    blocks = lines(trained, "blocks.jsonl")
    assert {row["step"] for row in blocks} == {5, 10}
    assert {row["block"] for row in blocks if row["step"] == 5} >= {"model.layers.0.self_attn.q_proj"}
    # The first group's rate, by the method's own schedule: 10 · 0.01 · 0.9^step.
    assert rows[3]["lr"] == pytest.approx(0.1 * 0.9**3)


@pytest.mark.parametrize("stops", [(4, 9), (5, 10)], ids=["before a restart", "right after a restart"])
def test_two_interruptions_leave_no_trace(options, trained, tmp_path, monkeypatch, stops):
    original, pending = TwoFactors.after_step, set(stops)

    def after_step(self, optimizer, step, discarded):
        original(self, optimizer, step, discarded)
        if step in pending:
            pending.discard(step)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(TwoFactors, "after_step", after_step)
    for _ in range(3):
        run_training(options(), tmp_path / "run")
    assert not pending
    assert lines(tmp_path / "run") == lines(trained)
    assert lines(tmp_path / "run", "blocks.jsonl") == lines(trained, "blocks.jsonl")
    assert lines(tmp_path / "run", "evaluations.jsonl") == lines(trained, "evaluations.jsonl")
    for file in ("config.json", "generation_config.json", "model.safetensors"):
        first, second = (last_checkpoint(run) / "model" / file for run in (trained, tmp_path / "run"))
        assert first.read_bytes() == second.read_bytes(), file
    whole, pieces = state_of(trained), state_of(tmp_path / "run")
    assert whole.keys() == pieces.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, pieces[name]), name


def test_two_processes_train_like_one(options, trained, tmp_path):
    train_on_ranks([(options(), tmp_path / "run")], 2, tmp_path, importing="tests.helpers.two_factors")
    # Gradients summed in another order differ by rounding, 1e-7 of them; plain momentum does not amplify it.
    for mine, theirs in zip(lines(trained), lines(tmp_path / "run"), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=1e-5)
        assert theirs["tokens"] == mine["tokens"]
    whole, split = state_of(trained), state_of(tmp_path / "run")
    for name, tensor in whole.items():
        torch.testing.assert_close(split[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


def test_a_dry_run_counts_the_rebuilt_model(options, tmp_path, capsys):
    run_training([*options(), "--dry-run"], tmp_path / "run")
    table = capsys.readouterr().out
    factors = RANK * (4 * 2 * HIDDEN + 3 * (HIDDEN + INTERMEDIATE)) * LAYERS
    others = 2 * VOCABULARY * HIDDEN + (2 * LAYERS + 1) * HIDDEN
    cells = dict(re.findall(r"^\| (.+?) +\| +(.+?) \|$", table, re.MULTILINE))
    assert cells["parameters"] == f"{(factors + others) / 1e6:.2f} M"
    assert cells["memory per rank: weights"] == f"{4 * (factors + others) / 2**20:.1f} MiB"
    assert cells["products"] == str(7 * LAYERS)
    assert not (tmp_path / "run").exists()


def test_the_export_opens_in_plain_transformers_and_is_the_model_that_was_trained(trained, own_caches, tmp_path):
    checkpoint = last_checkpoint(trained)
    plain = AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    weights = load_file(checkpoint / "state" / "weights.safetensors")
    name = "model.layers.1.mlp.down_proj"
    product = weights[f"{name}.B"].double() @ weights[f"{name}.A"].double()
    # A weight is a sum of four products in float32.
    torch.testing.assert_close(plain.get_submodule(name).weight.double(), product, rtol=1e-5, atol=1e-6)
    at_the_end = lines(trained, "evaluations.jsonl")[-1]
    ok("evaluate.py", "perplexity", "--checkpoint", trained, "--dtype", "float32", "--output", tmp_path / "out")
    [row] = rows_of(tmp_path / "out", "perplexity")
    # The same text; here B·A is multiplied out first, while training multiplies x by A and then by B.
    assert row["perplexity"] == pytest.approx(at_the_end["perplexity"], rel=1e-4)


def test_what_the_method_has_no_form_for_is_refused_in_a_sentence(trained, own_caches, tmp_path):
    said = refused("compress.py", "--checkpoint", trained, "--budget", "0.5", "--output", tmp_path / "small")
    assert "holds no L and S" in said and "--rpca" in said


def test_a_method_without_an_export_saves_and_goes_on_all_the_same(options, own_caches, tmp_path, monkeypatch, capsys):
    def export(self, folder):
        raise UserError("two factors have no dense form; use them as they are")

    monkeypatch.setattr(TwoFactors, "export", export)
    run_training(options(train__steps=6, train__save_every=3), tmp_path / "run")
    assert "model/ of this checkpoint holds no weights (two factors have no dense form" in capsys.readouterr().out
    further = [*options(train__steps=8), f"--resume={tmp_path / 'run/checkpoints/step-0000003'}"]
    run_training(further, tmp_path / "further")
    again = lines(tmp_path / "further")
    assert [row["step"] for row in again] == [4, 5, 6, 7, 8]
    assert [row["loss"] for row in again[:3]] == [row["loss"] for row in lines(tmp_path / "run")[3:]]
    assert "holds no model.safetensors" in refused("evaluate.py", "perplexity", "--checkpoint", tmp_path / "run")


def test_a_model_that_is_changed_without_new_modules_is_changed_after_a_resume_too(toy, tmp_path):
    chosen = {"method": "frozen_head", "train__save_every": 2}
    run_training(toy(train__steps=4, **chosen), tmp_path / "whole")
    further = [*toy(train__steps=4, **chosen), f"--resume={tmp_path / 'whole/checkpoints/step-0000002'}"]
    run_training(further, tmp_path / "further")
    newest = "model/model.safetensors"
    whole, further = (load_file(last_checkpoint(tmp_path / run) / newest) for run in ("whole", "further"))
    before = load_file(tmp_path / "whole/checkpoints/step-0000002" / newest)
    assert torch.equal(whole["lm_head.weight"], before["lm_head.weight"])
    assert not torch.equal(whole["model.norm.weight"], before["model.norm.weight"])
    assert all(torch.equal(further[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"two_factors__rank": 33}, "two_factors.rank is 33, above the shorter side of .*; give 32 or less"),
        ({"two_factors__rank": 0}, "two_factors.rank is 0, but the least is 1"),
        ({"two_factors__rnk": 3}, "there is no option --two_factors.rnk; did you mean --two_factors.rank?"),
    ],
)
def test_its_settings_are_checked_before_the_first_step(options, tmp_path, more, sentence):
    with pytest.raises(UserError, match=sentence):
        run_training(options(**more), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_goes_on_with_its_own_method_and_settings_only(options, toy, trained, tmp_path):
    with pytest.raises(UserError, match="begun with method two_factors, but salaad is asked for"):
        run_training(toy(method="salaad"), trained)
    with pytest.raises(UserError, match=r"begun with two_factors\.rank 4, but 3 is asked for"):
        run_training(options(two_factors__rank=3), trained)
    # A new folder may change what the method calls tunable.
    changed = [*options(two_factors__restart_every=6, train__steps=14), f"--resume={last_checkpoint(trained)}"]
    run_training(changed, tmp_path / "further")
    assert lines(tmp_path / "further")[-1]["step"] == 14


@pytest.mark.parametrize("name", ["salaad", "train", "settings", "output", "config", "two factors"])
def test_a_name_that_is_taken_or_no_name_is_refused(name):
    with pytest.raises(ValueError, match="cannot be called"):
        register(name, FullRank)
