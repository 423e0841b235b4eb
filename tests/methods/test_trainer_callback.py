"""SALAAD in transformers' Trainer: to the bit over interruptions, on two ranks as on one, its logs and checkpoints."""

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations import INTEGRATION_TO_CALLBACK

from salaad import Salaad, SalaadCallback, SalaadConfig
from salaad.common.errors import UserError
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad import storage
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers import deploying
from tests.helpers.ranks import run_ranks
from tests.methods.test_own_loop import llama

CONFIG = SalaadConfig(rho=0.05, rank_ratio=0.2, density=0.2, delta_alpha=0.1, delta_beta=0.05, every=2)
ROWS = torch.randint(3, 64, (96, 12), generator=torch.Generator().manual_seed(3))


class StopAt(TrainerCallback):
    """A callback that interrupts the training after a step, with a checkpoint."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = control.should_save = True


class BreakOnce(TrainerCallback):
    """A callback that ends a training before a step by an error, the first time."""

    def __init__(self, step: int, words: str) -> None:
        self.step, self.words = step, words

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            raise RuntimeError(self.words)


class Reporter(TrainerCallback):
    """A stand-in for the callback of a reporting integration, which keeps the logs that are reported."""

    lines: ClassVar[list[dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.lines.append(dict(logs))


def trainer_in(folder: Path, **options: Any) -> tuple[Trainer, LlamaForCausalLM]:
    arguments = TrainingArguments(
        output_dir=str(folder),
        **{
            "max_steps": 12,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
            "learning_rate": 1e-2,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 1,
            **options,
        },
    )
    model = llama()
    rows = [{"input_ids": row, "labels": row} for row in ROWS]
    return Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4]), model


def numbers(salaad: Salaad) -> dict[str, Tensor]:
    blocks = {f"{name}/{key}": t for name, s in salaad.surrogates.items() for key, t in s.state_dict().items()}
    return {**{name: value.clone() for name, value in salaad.model.state_dict().items()}, **blocks}


def train(folder: Path, stops: tuple[int, ...] = (), **options: Any) -> SalaadCallback:
    """Train to the end, interrupted and resumed after each of the `stops`; return the last start's callback."""
    for i, stop in enumerate((*stops, None)):
        trainer, _ = trainer_in(folder, **options)
        callback = SalaadCallback(trainer, CONFIG)
        if stop is not None:
            trainer.add_callback(StopAt(stop))
        trainer.train(resume_from_checkpoint=True if i else None)
    return callback


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> SalaadCallback:
    return train(tmp_path_factory.mktemp("trainer") / "whole", save_strategy="steps", save_steps=4)


def test_twelve_steps_are_five_and_four_and_three_to_the_bit(whole, tmp_path):
    parts = train(tmp_path, stops=(5, 9))
    assert_equal(numbers(parts.salaad), numbers(whole.salaad))
    assert parts.salaad.counts() == whole.salaad.counts()
    assert parts.salaad.steps == 12


def test_the_penalty_is_what_makes_the_difference(whole, tmp_path):
    trainer, model = trainer_in(tmp_path)
    trainer.train()
    trained = whole.salaad.model.state_dict()
    assert any(not torch.equal(value, trained[name]) for name, value in model.state_dict().items())


def test_the_trainer_does_what_a_loop_by_hand_does(whole):
    """The loop takes the same batches in the same order through plain torch, with torch's own AdamW and clipping."""
    model = llama()
    trainer, _ = trainer_in(Path("unused"))
    batches = list(trainer.get_train_dataloader())
    salaad = Salaad(model, CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(12):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (12 - step) / 12
        for batch in batches[2 * step : 2 * step + 2]:
            (model(**batch).loss / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        salaad.step()
    mine, theirs = numbers(salaad), numbers(whole.salaad)
    for name in model.state_dict():
        # The Trainer weighs micro-batches by their tokens, which rounds differently; in twelve steps the error grows.
        assert (mine[name] - theirs[name]).norm() <= 2e-2 * theirs[name].norm(), name


def on_two_ranks(folder: str, stops: tuple[int, ...]) -> dict[str, Tensor]:
    rank = str(dist.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}  # as torchrun does
    callback = train(Path(folder), stops, per_device_train_batch_size=1, ddp_backend="gloo")
    assert len(callback.salaad.surrogates) == len(callback.salaad.blocks) / 2
    return {name: value.clone() for name, value in callback.salaad.model.state_dict().items()}


def test_two_ranks_are_to_the_bit_over_interruptions_too_and_train_as_one(whole, tmp_path):
    through, _ = run_ranks(on_two_ranks, 2, tmp_path, str(tmp_path / "through"), ())
    parts, other = run_ranks(on_two_ranks, 2, tmp_path, str(tmp_path / "parts"), (5, 9))
    assert_equal(through, parts)
    assert_equal(parts, other)
    trained = whole.salaad.model.state_dict()
    for name, value in parts.items():
        # Each rank's batches are half of one rank's, so gradients are summed in another order.
        assert (value - trained[name]).norm() <= 2e-2 * trained[name].norm(), name


def test_what_is_reported_has_rank_density_and_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Reporter, "lines", [])
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "tensorboard", Reporter)
    trainer, _ = trainer_in(tmp_path, report_to=["tensorboard"])
    callback = SalaadCallback(trainer, CONFIG)
    trainer.train()
    keys = {f"salaad/{key}" for key in ("rank_ratio", "density", "error", "penalty")}
    steps = [line for line in Reporter.lines if "loss" in line]
    assert len(steps) == 6
    assert all(keys <= set(line) for line in steps)
    assert [line["salaad/density"] for line in trainer.state.log_history if "loss" in line] == [
        line["salaad/density"] for line in steps
    ]
    summary = callback.salaad.summary()
    assert steps[-1]["salaad/rank_ratio"] == pytest.approx(summary["rank_ratio"])
    assert steps[-1]["salaad/density"] == pytest.approx(summary["density"])


def test_an_overlapped_update_goes_on_while_a_step_is_logged(whole, tmp_path, monkeypatch):
    """With a log a step, as many updates end after the next forward pass has begun as without one."""
    events: list[str] = []
    begin, end = admm_round.Round.__init__, admm_round.Round.end
    monkeypatch.setattr(admm_round.Round, "__init__", lambda self, *args: events.append("begin") or begin(self, *args))
    monkeypatch.setattr(admm_round.Round, "end", lambda self: events.append("end") or end(self))
    trainer, model = trainer_in(tmp_path, logging_steps=1)
    model.register_forward_hook(lambda *_: events.append("forward"))
    callback = SalaadCallback(trainer, replace(CONFIG, overlap=True))
    trainer.train()
    assert_equal(numbers(callback.salaad), numbers(whole.salaad))
    after = [events[i + 1] for i, event in enumerate(events) if event == "begin"]
    assert after == ["forward"] * 5 + ["end"]  # after the last step there is no forward pass
    mine, theirs = (
        {line["step"]: line["salaad/error"] for line in one.state.log_history if "salaad/error" in line}
        for one in (trainer, whole._trainer)
    )
    # Every update is in the log of the step that follows it, and that of the last step in its own.
    assert mine == {step + (step < 12): error for step, error in theirs.items()}
    assert sorted(mine) == [3, 5, 7, 9, 11, 12]


def test_a_checkpoint_of_the_trainer_opens_with_our_commands_and_in_a_loop(whole, tmp_path, tiny_tokenizer_dir):
    checkpoint = Path(whole._trainer.args.output_dir) / "checkpoint-8"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, local_files_only=True)
    assert Salaad.load(model, checkpoint).steps == 8
    AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(checkpoint)
    assert "0.5@energy+head" in deploying.compress(checkpoint, tmp_path / "small", budget=0.5)


def test_after_training_the_model_is_free_and_compresses(whole):
    small = whole.salaad.compress(0.5)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in whole.salaad.model.parameters())
    Salaad(whole.salaad.model, CONFIG).close()


def test_a_training_that_stops_early_leaves_l_and_s_of_its_last_weights(tmp_path):
    trainer, model = trainer_in(tmp_path)
    callback = SalaadCallback(trainer, CONFIG)
    trainer.add_callback(StopAt(5))  # an update is due in every second step
    trainer.train()
    assert set(callback.salaad.counts()["updated_at"].values()) == {5}
    saved = Salaad.load(model, tmp_path / "checkpoint-5", CONFIG)
    assert set(saved.counts()["updated_at"].values()) == {4}  # so that a resumed training is the uninterrupted one


def trainer_for_the_best(folder: Path, *losses: float) -> tuple[Trainer, LlamaForCausalLM]:
    """Return a Trainer that saves every four steps and ends with the best; its evaluations find these `losses`."""
    trainer, model = trainer_in(
        folder,
        save_strategy="steps",
        save_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
    )
    scores, evaluate = iter(losses), trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: {**evaluate(*args, **kwargs), "eval_loss": next(scores)}
    return trainer, model


def test_the_best_model_at_the_end_comes_with_its_own_l_and_s(tmp_path):
    trainer, model = trainer_for_the_best(tmp_path, 1.0, 3.0, 2.0)
    callback = SalaadCallback(trainer, CONFIG)
    trainer.train()
    assert callback.salaad.steps == 4
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", local_files_only=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in best.state_dict().items())


def test_the_commands_take_the_best_checkpoint_if_the_output_folder_has_its_model(tmp_path):
    trainer, _ = trainer_for_the_best(tmp_path, 2.0, 1.0, 3.0)
    SalaadCallback(trainer, CONFIG)
    trainer.train()
    assert ModelOnDisk.open(tmp_path).folder.path.name == "checkpoint-12"  # the newest, as there is no model beside
    trainer.save_model()
    assert ModelOnDisk.open(tmp_path).folder.path.name == "checkpoint-8"
    (tmp_path / "checkpoint-12" / "trainer_state.json").write_text("damaged")
    assert ModelOnDisk.open(tmp_path).folder.path.name == "checkpoint-12"


def test_a_trainer_that_saves_nothing_says_that_l_and_s_are_not_saved(tmp_path):
    trainer, _ = trainer_in(tmp_path, max_steps=1, save_strategy="no")
    callback = SalaadCallback(trainer, CONFIG)
    with pytest.warns(UserWarning, match=r"saves no checkpoints .*; call callback\.salaad\.save"):
        trainer.train()
    assert not [*tmp_path.glob("checkpoint-*")]
    callback.salaad.save(tmp_path / "saved")  # as the warning advises
    assert ModelOnDisk.open(tmp_path / "saved").surrogate is not None


def test_a_second_training_into_the_folder_of_a_first_replaces_its_l_and_s(tmp_path):
    train(tmp_path, max_steps=4, save_strategy="steps", save_steps=4)
    surrogate = tmp_path / "checkpoint-4" / "surrogate"
    for leftover in (surrogate, surrogate.with_name(".partial-surrogate")):  # of a save on more ranks, or a killed one
        leftover.mkdir(exist_ok=True)
        (leftover / "shard-00001-of-00002.safetensors").write_bytes(b"")
    second = train(tmp_path, max_steps=4, save_strategy="steps", save_steps=4, seed=2)
    assert not (surrogate / "shard-00001-of-00002.safetensors").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-4", local_files_only=True)
    assert_equal(numbers(Salaad.load(model, tmp_path / "checkpoint-4")), numbers(second.salaad))


def test_a_checkpoint_without_l_and_s_is_not_gone_on_from_silently(tmp_path):
    trainer, _ = trainer_in(tmp_path)
    trainer.add_callback(StopAt(4))
    trainer.train()
    trainer, _ = trainer_in(tmp_path)
    SalaadCallback(trainer, CONFIG)
    with pytest.raises(UserError, match=r"goes on at step 4, but .*checkpoint-4 holds no L and S; name the checkpoint"):
        trainer.train(resume_from_checkpoint=True)


def test_a_checkpoint_outside_the_output_folder_is_named_to_the_callback(whole, tmp_path):
    first = tmp_path / "first"
    train(first, stops=(5,))
    trainer, _ = trainer_in(tmp_path / "second")
    callback = SalaadCallback(trainer, CONFIG, resume_from_checkpoint=first / "checkpoint-5")
    trainer.train(resume_from_checkpoint=str(first / "checkpoint-5"))
    assert_equal(numbers(callback.salaad), numbers(whole.salaad))


def test_a_training_that_an_error_ended_is_gone_on_with_by_the_same_trainer(whole, tmp_path):
    trainer, _ = trainer_in(tmp_path, save_strategy="steps", save_steps=4)
    callback = SalaadCallback(trainer, CONFIG)
    trainer.add_callback(BreakOnce(6, "the network was gone"))
    with pytest.raises(RuntimeError, match="the network was gone"):
        trainer.train()
    trainer.train(resume_from_checkpoint=True)
    assert_equal(numbers(callback.salaad), numbers(whole.salaad))


def test_the_trainer_may_begin_anew_with_smaller_batches(tmp_path):
    trainer, _ = trainer_in(tmp_path, auto_find_batch_size=True)
    callback = SalaadCallback(trainer, CONFIG)
    trainer.add_callback(BreakOnce(3, "CUDA out of memory."))
    trainer.train()
    assert (callback.salaad.steps, trainer._train_batch_size) == (12, 1)


def test_a_callback_that_is_added_twice_is_refused(tmp_path):
    trainer, _ = trainer_in(tmp_path)
    trainer.add_callback(SalaadCallback(trainer, CONFIG))
    with pytest.raises(UserError, match=r"leave out trainer\.add_callback, as the callback adds itself"):
        trainer.train()


def test_a_full_disk_is_said_in_a_sentence_and_costs_no_older_checkpoint(whole, tmp_path, monkeypatch):
    write = storage.write_tensors

    def write_until_full(tensors: dict[str, Tensor], path: Path) -> str:
        if (tmp_path / "checkpoint-4").is_dir():
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(tensors, path)

    monkeypatch.setattr(storage, "write_tensors", write_until_full)
    limit = {"save_strategy": "steps", "save_steps": 4, "save_total_limit": 1}
    with pytest.raises(UserError, match=r"of step 8 cannot be written into .* \(.*No space left.*\); make room there"):
        train(tmp_path, **limit)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]

    monkeypatch.setattr(storage, "write_tensors", write)
    trainer, _ = trainer_in(tmp_path, **limit)
    callback = SalaadCallback(trainer, CONFIG)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(numbers(callback.salaad), numbers(whole.salaad))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-12"]


def test_a_start_killed_between_the_trainers_save_and_ours_leaves_a_checkpoint_to_go_on_from(whole, tmp_path):
    class Killed(SalaadCallback):
        def on_save(self, *given: Any, **named: Any) -> None:
            raise KeyboardInterrupt

    trainer, _ = trainer_in(tmp_path, save_strategy="steps", save_steps=4)
    Killed(trainer, CONFIG)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not (tmp_path / "checkpoint-4" / "surrogate").exists()
    trainer, _ = trainer_in(tmp_path)
    callback = SalaadCallback(trainer, CONFIG)
    trainer.train(resume_from_checkpoint=True)
    assert_equal(numbers(callback.salaad), numbers(whole.salaad))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def test_a_model_saved_at_the_end_beside_the_checkpoints_does_not_hide_l_and_s(
    tmp_path, tiny_tokenizer_dir, own_caches
):
    trainer, _ = trainer_in(tmp_path, save_strategy="steps", save_steps=6)
    SalaadCallback(trainer, CONFIG)
    trainer.train()
    trainer.save_model()
    shutil.rmtree(tmp_path / "checkpoint-12" / "surrogate")  # as if its saving had been cut off
    found = ModelOnDisk.open(tmp_path)
    assert found.surrogate == tmp_path / "checkpoint-6" / "surrogate"
    before = found.digest
    (tmp_path / "checkpoint-6" / "optimizer.pt").unlink()
    assert ModelOnDisk.open(tmp_path).digest == before  # what is derived from the model does not need it
    shutil.rmtree(tmp_path / "checkpoint-6" / "surrogate")
    assert ModelOnDisk.open(tmp_path).folder.path == tmp_path


def test_a_trainer_with_deepspeed_is_refused(tmp_path):
    trainer, _ = trainer_in(tmp_path)
    SalaadCallback(trainer, CONFIG)
    trainer.is_deepspeed_enabled = True  # as the Trainer notes it, where the package is installed
    with pytest.raises(UserError, match=r"the Trainer uses DeepSpeed, .*; leave out the deepspeed argument"):
        trainer.callback_handler.on_train_begin(trainer.args, trainer.state, trainer.control)
