"""The trainer end to end: resume, several processes, the launch command, precisions, bad input."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

import train
from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.data.documents import expand
from salaad.data.tokenizer import load_tokenizer
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.salaad.storage import read_surrogates
from salaad.model.folders import local_folder
from salaad.runs.run import open_run
from tests.helpers.training import (
    assert_same_records,
    last_checkpoint,
    launch,
    lines,
    run_training,
    start,
    start_alone,
    train_on_ranks,
    wait_for_steps,
    weights,
)


def assert_same_tensors(first: dict, second: dict) -> None:
    assert first.keys() == second.keys()
    for name in first:
        if isinstance(first[name], dict):
            assert_same_tensors(first[name], second[name])
        else:
            assert torch.equal(first[name], second[name]), name


def assert_same_up_to_rounding(first: list[dict], second: list[dict]) -> None:
    """Assert that two runs differ by rounding only, which Adam may enlarge in single weights but hardly in the loss."""
    for one, other in zip(first, second, strict=True):
        assert (other["step"], other["tokens"]) == (one["step"], one["tokens"])
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert other["penalty"] == pytest.approx(one["penalty"], rel=1e-3, abs=1e-9)


def interrupt_at(monkeypatch, steps: set[int]) -> None:
    """Let this process receive SIGTERM during each of these steps, once."""
    original, pending = SalaadMethod.after_step, set(steps)

    def after_step(self, *given):
        original(self, *given)
        if self.salaad.steps in pending:
            pending.discard(self.salaad.steps)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SalaadMethod, "after_step", after_step)


RESUMED = [
    {},
    {"data__packing": "true", "train__log_every": 5, "salaad__inner": 2},
    {"data__workers": 1, "train__eval_every": 5, "salaad__schedule": "staggered"},
]


@pytest.mark.parametrize("options", RESUMED)
def test_two_interruptions_leave_no_trace(toy, tmp_path, monkeypatch, options):
    run_training(toy(**options), tmp_path / "whole")
    interrupt_at(monkeypatch, {4, 8})
    reached = []
    for _ in range(3):
        run_training(toy(**options), tmp_path / "parts")
        reached.append(int(last_checkpoint(tmp_path / "parts").name.split("-")[1]))
    assert reached[0] < reached[1] < reached[2] == 12

    whole, parts = last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "parts")
    assert_same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert_same_tensors(read_surrogates(whole / "surrogate"), read_surrogates(parts / "surrogate"))
    for file in ("optimizer.pt", "random-00000.pt"):
        first, second = (torch.load(folder / "state" / file, weights_only=True) for folder in (whole, parts))
        first, second = (json.dumps(value, default=lambda tensor: tensor.tolist()) for value in (first, second))
        assert first == second
    assert_same_records(tmp_path / "whole", tmp_path / "parts")
    first, second = (json.loads((folder / "state" / "trainer.json").read_text()) for folder in (whole, parts))
    assert first.pop("seconds").keys() == second.pop("seconds").keys()
    assert first == second


def test_two_processes_train_like_one(toy, tmp_path):
    """Records, L and S agree up to the order in which gradients are summed.

    Adam divides a gradient by its own size plus eps. With the usual 1e-8 a gradient that is itself nothing but rounding
    (of q_proj at first, whose scores are near 0) becomes a whole step, so how far two runs are apart depends on the
    processor. With 1e-3 a difference of gradients moves a weight by at most lr/eps = 3 times itself, and rounding stays
    rounding: at most 4e-6 of the largest entry has been seen, without vector instructions and with AVX2 and AVX-512.
    """
    arguments = toy(train__steps=30, salaad__embedding="true", optimizer__eps=1e-3)
    run_training(arguments, tmp_path / "one")
    train_on_ranks([(arguments, tmp_path / "two")], 2, tmp_path)
    assert_same_up_to_rounding(lines(tmp_path / "one"), lines(tmp_path / "two"))
    checkpoints = [last_checkpoint(tmp_path / name) / "surrogate" for name in ("one", "two")]
    assert len(list(checkpoints[1].glob("*.safetensors"))) == 2
    first, second = map(read_surrogates, checkpoints)
    assert first.keys() == second.keys()
    for name in first:
        for key, tensor in first[name].items():
            scale = float(tensor.abs().max())
            torch.testing.assert_close(second[name][key], tensor, rtol=0, atol=2e-5 * scale, msg=f"{name} {key}")


def test_a_run_of_one_process_goes_on_with_two(toy, tmp_path, monkeypatch):
    run_training(toy(train__micro_batch=1), tmp_path / "whole")
    interrupt_at(monkeypatch, {5})
    run_training(toy(train__micro_batch=1), tmp_path / "parts")
    train_on_ranks([(toy(train__micro_batch=1), tmp_path / "parts")], 2, tmp_path)
    assert len(lines(tmp_path / "whole")) == 12
    assert_same_up_to_rounding(lines(tmp_path / "whole"), lines(tmp_path / "parts"))


def test_sigterm_to_two_processes_saves_and_the_rest_follows(toy, tmp_path):
    arguments = toy(train__steps=100000)
    process = start(arguments, tmp_path / "run", processes=2)
    wait_for_steps(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "--resume auto" in out + err
    assert (last_checkpoint(tmp_path / "run") / "state" / "trainer.json").exists()


def test_a_diverged_run_goes_on_elsewhere_with_another_learning_rate(toy, tmp_path):
    run_training(toy(train__steps=6, train__save_every=3), tmp_path / "first")
    arguments = [*toy(train__steps=6, optimizer__lr=1e-4), f"--resume={tmp_path}/first/checkpoints/step-0000003"]
    run_training(arguments, tmp_path / "second")
    first, second = lines(tmp_path / "first"), lines(tmp_path / "second")
    assert [row["step"] for row in second] == [4, 5, 6]
    assert second[-1]["lr"] == pytest.approx(first[-1]["lr"] * 1e-4 / 3e-3)
    assert second[-1]["tokens"] == first[-1]["tokens"]


def test_gpt2_is_trained_further_with_its_own_tokenizer(toy, tmp_path, tiny_tokenizer_dir):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    tokenizer.save_pretrained(tmp_path / "gpt2")
    config = GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=512, n_positions=32, bos_token_id=1, eos_token_id=1)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    arguments = [word for word in toy(train__steps=4, model__path=tmp_path / "gpt2") if "data.tokenizer" not in word]
    run_training(arguments, tmp_path / "run")
    folder = last_checkpoint(tmp_path / "run")
    assert AutoTokenizer.from_pretrained(folder / "model").get_vocab() == tokenizer.get_vocab()
    assert len(read_surrogates(folder / "surrogate")) == 4


def test_the_launch_command_of_the_readme_trains_350m_on_local_c4_files(toy, tmp_path):
    arguments = toy(train__steps=2, data__packing="false")
    done = launch(["--config", "350m.yaml", *arguments], tmp_path / "run")
    assert done.returncode == 0, done.stderr
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["optimizer"]["lr"] == 0.002
    assert lines(tmp_path / "run")[-1]["step"] == 2


def test_the_checkpoint_is_a_hugging_face_folder(toy, tmp_path):
    run_training(toy(train__steps=2), tmp_path / "run")
    folder = last_checkpoint(tmp_path / "run") / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.config.model_type == "llama"
    text = "matrix rank sparse"
    tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens[0]) == text
    assert model(tokens).logits.shape == (1, tokens.shape[1], 512)


def test_a_run_goes_on_from_an_existing_model(toy, tmp_path):
    run_training(toy(train__steps=3), tmp_path / "first")
    folder = last_checkpoint(tmp_path / "first") / "model"
    run_training(toy(train__steps=1, model__path=folder, optimizer__lr=0), tmp_path / "second")
    assert_same_tensors(weights(tmp_path / "first"), weights(tmp_path / "second"))


def test_without_a_penalty_salaad_trains_exactly_like_full_rank(toy, tmp_path):
    run_training(toy(train__steps=5, salaad__rho_constant=0), tmp_path / "salaad")
    run_training(toy(train__steps=5, method="full_rank"), tmp_path / "vanilla")
    assert_same_tensors(weights(tmp_path / "salaad"), weights(tmp_path / "vanilla"))
    assert not list((last_checkpoint(tmp_path / "vanilla") / "surrogate").iterdir())


@pytest.mark.parametrize("options", [{"train__micro_batch": 1}, {"train__gradient_checkpointing": "true"}])
def test_what_only_saves_memory_does_not_change_the_losses(toy, tmp_path, options):
    run_training(toy(train__steps=4), tmp_path / "plain")
    run_training(toy(train__steps=4, **options), tmp_path / "saving")
    assert_same_up_to_rounding(lines(tmp_path / "plain"), lines(tmp_path / "saving"))


@pytest.mark.parametrize("precision", ["tf32", "bf16-mixed", "bf16"])
def test_every_precision_trains_near_fp32_and_resumes_bit_for_bit(toy, tmp_path, monkeypatch, precision):
    run_training(toy(train__steps=8), tmp_path / "fp32")
    run_training(toy(train__steps=8, train__precision=precision), tmp_path / "whole")
    for first, second in zip(lines(tmp_path / "fp32"), lines(tmp_path / "whole"), strict=True):
        assert second["loss"] == pytest.approx(first["loss"], rel=0.02)
    interrupt_at(monkeypatch, {3})
    for _ in range(2):
        run_training(toy(train__steps=8, train__precision=precision), tmp_path / "parts")
    assert_same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGTERM, 0), (signal.SIGUSR1, 1), (signal.SIGHUP, 1)])
def test_a_signal_saves_says_how_to_go_on_and_exits_0(toy, tmp_path, number, workers):
    process = start_alone(toy(train__steps=100000, data__workers=workers), tmp_path / "run")
    wait_for_steps(process, tmp_path / "run")
    for each in [process, *psutil.Process(process.pid).children()]:  # as a scheduler sends it
        each.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert "--resume auto" in out + err
    assert (last_checkpoint(tmp_path / "run") / "state" / "trainer.json").exists()


def test_the_end_of_a_launcher_of_one_process_is_a_request_to_stop(toy, tmp_path):
    """With one process `accelerate launch` passes no signal on, so by itself the training would go on alone."""
    process = start(toy(train__steps=100000), tmp_path / "run")
    wait_for_steps(process, tmp_path / "run")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)  # until the trainer too has closed its end of the pipe
    assert "stopped after step" in out and "--resume auto" in out
    assert (last_checkpoint(tmp_path / "run") / "state" / "trainer.json").exists()


def test_a_second_signal_ends_the_process_at_once(toy, tmp_path):
    # A step takes minutes, and the first signal would let it finish.
    process = start_alone(toy(train__batch=8_000, train__micro_batch=1), tmp_path / "run")
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        time.sleep(0.05)
    begun = psutil.Process(process.pid).cpu_times().user
    while psutil.Process(process.pid).cpu_times().user < begun + 8:  # seconds of CPU time, until its text is there
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=5) == 128 + signal.SIGTERM
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_ends_the_wait_for_text(toy, tmp_path, text_files, workers):
    """While missing files are waited for with back-off, the step whose batch is ready is still taken and saved."""
    files, run = [shutil.copy(file, tmp_path) for file in text_files["train"]], tmp_path / "run"
    options = {"data__workers": workers, "data__files": json.dumps(files), "data__shuffle_window": 5}
    process = start_alone(toy(train__steps=100000, **options), run)
    wait_for_steps(process, run)
    for file in files:
        Path(file).rename(f"{file}.away")
    while "trying again" not in process.stderr.readline():
        pass
    time.sleep(1.5)  # into the second pause, of two seconds
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=45)  # the pauses before the last try add up to a minute
    assert process.returncode == 0
    assert "stopped after step" in out
    step = json.loads((last_checkpoint(run) / "state" / "trainer.json").read_text())["step"]
    assert step == lines(run)[-1]["step"]


def test_a_signal_ends_an_evaluation_which_is_done_when_the_run_goes_on(toy, tmp_path, monkeypatch):
    options = {"train__eval_every": 4, "train__micro_batch": 1}
    run_training(toy(**options), tmp_path / "whole")
    original, calls = train.evaluate, []

    def interrupted(loss, batches, device, stopped):
        calls.append(1)
        if len(calls) == 4:  # the second evaluation, and of it the second variant
            batches = iter(batches)
            first = next(batches)
            os.kill(os.getpid(), signal.SIGTERM)
            batches = [first, *batches]
        return original(loss, batches, device, stopped)

    monkeypatch.setattr(train, "evaluate", interrupted)
    run_training(toy(**options), tmp_path / "parts")
    assert last_checkpoint(tmp_path / "parts").name == "step-0000008"
    assert {row["step"] for row in lines(tmp_path / "parts", "evaluations.jsonl")} == {4}
    run_training(toy(**options), tmp_path / "parts")
    assert_same_records(tmp_path / "whole", tmp_path / "parts")
    assert_same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_signal_during_the_last_evaluation_leaves_a_run_that_can_be_finished(toy, tmp_path, monkeypatch):
    run_training(toy(), tmp_path / "whole")
    monkeypatch.setattr(train, "evaluate", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    run_training(toy(), tmp_path / "parts")
    assert not (tmp_path / "parts" / "summary.json").exists()
    monkeypatch.undo()
    run_training(toy(), tmp_path / "parts")
    assert_same_records(tmp_path / "whole", tmp_path / "parts")
    assert (tmp_path / "parts" / "summary.json").exists()


def test_signals_do_after_a_run_what_they_did_before_it(toy, tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    run_training(toy(train__steps=1), tmp_path / "run")
    assert [signal.getsignal(number) for number in numbers] == before


def test_checkpoints_come_on_schedule_and_old_ones_go(toy, tmp_path):
    run_training(toy(train__steps=10, train__save_every=3, train__keep_last=2), tmp_path / "run")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step-0000009", "step-0000010"]


def test_a_home_folder_in_a_file_is_the_one_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    text = "output: ~/run\nmodel: {path: ~/model}\ndata: {source: files, files: ~/a.txt, validation_files: ~/b.txt}\n"
    (tmp_path / "my.yaml").write_text(text)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    config, options = read_command_line([f"--config={tmp_path}/my.yaml"])
    assert open_run(config, options) == (tmp_path / "run", None)
    assert local_folder(config.model.path, "model.path") == tmp_path / "model"
    assert expand(config.data.files) == (str(tmp_path / "a.txt"),)
    with pytest.raises(UserError, match=r"~no-such-user/a\.txt matches no file"):
        expand(["~no-such-user/a.txt"])
    with pytest.raises(UserError, match=r"tokenizer ~no-such-user/mine\.model does not exist"):
        load_tokenizer("~no-such-user/mine.model")


def test_a_finished_run_is_left_as_it_is(toy, tmp_path):
    run_training(toy(train__steps=3), tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    run_training(toy(train__steps=3), tmp_path / "run")
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before


def test_the_records_say_what_happened(toy, tmp_path):
    run_training(toy(train__steps=6, train__eval_every=3), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["step"] == 6
    assert row["positions"] == 6 * 4 * 32
    assert 0 < row["tokens"] < row["positions"]
    assert set(row["seconds"]) == {"train", "admm", "sync", "save", "evaluate"}
    blocks = lines(tmp_path / "run", "blocks.jsonl")
    assert [row["step"] for row in blocks] == [3] * 14 + [6] * 14
    assert set(blocks[0]) == {
        "step", "block", "rank_ratio", "density", "alpha", "beta", "delta", "error", "bound", "method",
    }  # fmt: skip
    evaluations = lines(tmp_path / "run", "evaluations.jsonl")
    assert [(row["step"], row["variant"]) for row in evaluations] == [(3, "X"), (3, "L+S"), (6, "X"), (6, "L+S")]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["variants"].keys() == {"X", "L+S"}
    assert summary["final_loss"] == lines(tmp_path / "run", "metrics.jsonl")[-1]["loss"]  # mean of the last line alone
    assert summary["blocks"].keys() == {row["block"] for row in blocks}
    for name, row in summary["blocks"].items():
        assert {"block": name, **row} == [other for other in blocks if other["block"] == name][-1]


def test_broken_lines_are_skipped_and_told_once_though_the_run_is_interrupted(
    toy, tmp_path, text_files, capsys, monkeypatch
):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "cut off\n' + Path(text_files["train"][0]).read_text() + '{"text": ""}\n')
    interrupt_at(monkeypatch, {45, 50})
    for _ in range(3):
        run_training(toy(data__files=json.dumps([str(broken)]), train__steps=60), tmp_path / "run")
    # 240 rows of 150 documents: every line is met once, some twice
    out = capsys.readouterr().out
    said = re.findall(r"documents skipped so far: [12] broken, [12] without text", out)
    assert said and len(said) == len(set(said))
    assert re.findall(r"the training text repeats; pass (\d) over it has begun", out) == ["2"]


def test_the_reported_perplexity_is_that_of_the_saved_model(toy, tmp_path, text_files):
    run_training(toy(train__steps=4), tmp_path / "run")
    folder = last_checkpoint(tmp_path / "run") / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).double(), AutoTokenizer.from_pretrained(folder)
    total = count = 0
    for line in Path(text_files["validation"][0]).read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"]
        ids = [*ids[:31], tokenizer.eos_token_id]
        log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        total -= log_p[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].sum().item()
        count += len(ids) - 1
    [row] = [row for row in lines(tmp_path / "run", "evaluations.jsonl") if row["variant"] == "X"]
    assert row["tokens"] == count
    assert row["loss"] == pytest.approx(total / count, rel=1e-5)


def test_wandb_offline_continues_the_same_run(toy, tmp_path, monkeypatch):
    interrupt_at(monkeypatch, {2})
    for _ in range(2):
        run_training(toy(train__steps=4, wandb__mode="offline"), tmp_path / "run")
    identity = (tmp_path / "run" / "wandb_id").read_text()
    runs = [path.name for path in (tmp_path / "run" / "wandb").glob("offline-run-*")]
    assert len(runs) == 2
    assert all(name.endswith(identity) for name in runs)


def test_numbers_that_are_not_finite_stop_the_run_with_a_diagnosis(toy, tmp_path, monkeypatch):
    original = SalaadMethod.after_step

    def after_step(self, *given):
        original(self, *given)
        if self.salaad.steps == 4:
            self.salaad.weights["model.layers.1.mlp.up_proj"].data[3, 5] = float("nan")

    monkeypatch.setattr(SalaadMethod, "after_step", after_step)
    with pytest.raises(
        UserError, match=r"not finite at step 4, first in .*step-0000002 --output NEW and a lower --optimizer.lr"
    ):
        run_training(toy(train__save_every=2, train__log_every=100), tmp_path / "run")
    diagnosis = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    assert diagnosis["step"] == 4
    assert diagnosis["block"] == "model.layers.1.mlp.up_proj.weight"
    assert diagnosis["last_good_checkpoint"].endswith("step-0000002")
    assert not (tmp_path / "run" / "checkpoints" / "step-0000004").exists()
    monkeypatch.setattr(SalaadMethod, "after_step", original)
    run_training(toy(train__save_every=2, train__log_every=100), tmp_path / "run")
    assert not (tmp_path / "run" / "diagnosis.json").exists()  # of a time before the run went on


def test_dry_run_prints_the_plan_looks_at_the_text_and_leaves_nothing(toy, tmp_path, capsys):
    run_training([*toy(), "--dry-run"], tmp_path / "run")
    said = capsys.readouterr().out
    for word in ("blocks per owner", "memory per rank: ADMM", "floating-point operations"):
        assert word in said
    assert "training text" in said and "512 pieces" in said
    assert not (tmp_path / "run").exists()


def test_dry_run_prints_the_plan_of_a_cluster_and_says_that_its_text_is_out_of_reach(tmp_path, capsys):
    with pytest.raises(UserError, match=r"hub|network|offline"):
        run_training(["--config", "1b.yaml", "--dry-run"], tmp_path / "run")
    said = capsys.readouterr().out
    for word in ("1339.08 M", "blocks per owner", "memory per rank: ADMM", "130,000"):
        assert word in said


def test_a_prediction_asks_for_no_text(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train, "text_table", lambda *_: pytest.fail("C4 is asked for"))
    run_training(["--config", "60m.yaml", "--dry-run", "--device", "h100"], tmp_path / "run")
    said = capsys.readouterr().out
    assert said.index("blocks per owner") < said.index("predicted on h100")


def test_without_a_terminal_a_line_is_printed_at_every_logged_step(toy, tmp_path, capsys):
    run_training(toy(train__steps=4, train__log_every=2), tmp_path / "run")
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ") and "loss" in line]
    rows = lines(tmp_path / "run")
    assert [line.split(":")[0] for line in said] == ["step 2 of 4", "step 4 of 4"]
    for line, row in zip(said, rows, strict=True):
        assert f"loss {row['loss']:.3f}" in line
        assert "tokens/s" in line and "left" in line


BAD_INPUT = [
    ({"model__hidden_siz": 3}, r"no option --model.hidden_siz; did you mean --model.hidden_size\?"),
    ({"train__steps": "many"}, "--train.steps is many, but has to be a whole number"),
    ({"salaad__every": 0}, "salaad.every is 0, but the least is 1; give 1 or more"),
    ({"salaad__rank_ratio": 1.5}, r"salaad.rank_ratio is 1.5, outside \(0, 1\]"),
    ({"salaad__roles": "gat"}, r"there is no role 'gat'; give any of q, k, v"),
    ({"salaad__roles": "re:nothing"}, r"matches no 2-D weight"),
    ({"data__files": "missing/*.jsonl"}, r"missing/\*.jsonl"),
    ({"model__vocab_size": 100}, r"512.*100|100.*512"),
    ({"model__path": "nowhere"}, r"model.path nowhere is no folder.*hf download nowhere"),
    ({"model__path": "./no/where"}, r"model.path ./no/where holds no config.json"),
    ({"optimizer__name": "Adma"}, r"optimizer.name is 'Adma'.*AdamW"),
    ({"data__tokenizer": "nobody/nothing"}, r"nobody/nothing"),
]


@pytest.mark.parametrize(("overrides", "sentence"), BAD_INPUT)
def test_bad_input_is_one_sentence_and_leaves_no_run(toy, tmp_path, overrides, sentence):
    with pytest.raises(UserError, match=sentence) as caught:
        run_training(toy(**overrides), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_another_configuration_does_not_touch_an_existing_run(toy, tmp_path):
    run_training(toy(train__steps=2), tmp_path / "run")
    with pytest.raises(UserError, match=r"begun with optimizer.lr 0.003, but 0.1 is asked for") as error:
        run_training(toy(train__steps=2, optimizer__lr=0.1), tmp_path / "run")
    cure = re.search(r"--resume (\S+) --output NEW", str(error.value))[1]  # which works as it is printed
    with pytest.raises(UserError, match=r"after step 2, and train.steps is 2, so nothing is left to train; give more"):
        run_training([*toy(train__steps=2, optimizer__lr=0.1), f"--resume={cure}"], tmp_path / "new")
    run_training([*toy(train__steps=3, optimizer__lr=0.1), f"--resume={cure}"], tmp_path / "new")
    with pytest.raises(UserError, match=r"begun with model.hidden_size .*begin a new run with another --output"):
        run_training(toy(train__steps=2, model__hidden_size=48), tmp_path / "run")
    with pytest.raises(UserError, match="already holds a run"):
        run_training([*toy(train__steps=2), "--resume=none"], tmp_path / "run")
    (tmp_path / "run" / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"without a readable config\.yaml"):
        run_training(toy(train__steps=2), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is no run of this program"):
        run_training(toy(train__steps=2), tmp_path / "other")


def test_a_run_goes_on_with_its_text_in_another_place_but_with_no_other_text(
    toy, tmp_path, monkeypatch, text_files, tiny_tokenizer_dir
):
    run_training(toy(), tmp_path / "whole")
    interrupt_at(monkeypatch, {5})
    run_training(toy(), tmp_path / "parts")
    place = tmp_path / "elsewhere"
    shutil.copytree(tiny_tokenizer_dir, place / "tokenizer")
    moved = {key: [shutil.copy(path, place) for path in paths] for key, paths in text_files.items()}
    options = {
        "data__files": json.dumps(moved["train"]),
        "data__validation_files": json.dumps(moved["validation"]),
        "data__tokenizer": place / "tokenizer",
    }
    file = place / "tokenizer" / "tokenizer.json"
    told = file.read_text()
    about = json.loads(told)
    ids = about["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]  # two letters change places
    file.write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"made with another tokenizer than data\.tokenizer names now"):
        run_training(toy(**options), tmp_path / "parts")
    file.write_text(told)
    longer = {**options, "data__validation_files": json.dumps([*moved["validation"], moved["train"].pop()])}
    longer["data__files"] = json.dumps(text_files["train"])
    with pytest.raises(UserError, match=r"made with other validation files than data\.validation_files names now"):
        run_training(toy(**longer), tmp_path / "parts")
    run_training(toy(**options), tmp_path / "parts")
    assert_same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))
    assert_same_records(tmp_path / "whole", tmp_path / "parts")


def test_an_overlap_of_updates_and_steps_may_begin_or_end_while_a_run_goes_on(toy, tmp_path, monkeypatch):
    run_training(toy(), tmp_path / "whole")
    interrupt_at(monkeypatch, {5})
    run_training(toy(salaad__overlap="true"), tmp_path / "parts")
    run_training(toy(salaad__overlap="false"), tmp_path / "parts")
    assert_same_tensors(weights(tmp_path / "whole"), weights(tmp_path / "parts"))


def test_a_run_without_a_checkpoint_yet_does_not_propose_to_go_on_from_one(toy, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(train.Trainer, "save", lambda self, last=False: None)
        run_training(toy(train__steps=2), tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink(missing_ok=True)
    with pytest.raises(UserError, match=r"but 0\.1 is asked for; keep it, or begin a new run with another --output$"):
        run_training(toy(train__steps=2, optimizer__lr=0.1), tmp_path / "run")


def test_the_last_line_of_a_launch_that_fails_is_our_sentence(tmp_path):
    done = launch(["--config", "nano.yaml", "--lr", "3"], tmp_path / "run", processes=1)
    assert done.returncode != 0
    assert done.stderr.rstrip().splitlines()[-1] == "error: there is no option --lr; did you mean --optimizer.lr?"
