"""What --dry-run says of a checkpoint: against counts by hand, and against the time of a save on a slow disk."""

import io
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from importlib import import_module
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from salaad.common import distributed, files
from salaad.common.errors import NotSavedError
from salaad.common.files import verify
from salaad.common.hashed_files import HashedFile
from salaad.config.command_line import read_command_line
from salaad.methods.registry import method_of
from salaad.model.build import describe_model, model_source, outline
from salaad.model.loss import SummedLoss
from salaad.runs.checkpoints import Checkpoints, RunState
from salaad.training.plan import plan_table, rebuilt_outline
from salaad.training.saving import plan_saving
from salaad.training.sharding import shard
from salaad.training.state import TrainingParts
from tests.helpers.ranks import run_ranks

PARAMETERS, BLOCKS, LARGEST = 1_339_082_752, 1_207_910_400, 32_000 * 2048  # of 1b; the largest is the embedding


def setup(*words: str):
    config, _ = read_command_line(["--config", "1b", *words])
    return config, outline(describe_model(config.model, config.data.sequence_length))


def test_the_parts_of_1b_by_hand():
    saving = plan_saving(*setup(), 8)
    assert saving.parts["weights"] == 4 * PARAMETERS
    assert saving.parts["optimizer state"] == 8 * PARAMETERS
    assert saving.parts["L, S and dual"] == 10 * BLOCKS
    assert saving.whole == sum(saving.parts.values())


@pytest.mark.parametrize("ranks", [8, 32])
def test_who_writes_most_writes_the_weights_and_none_or_its_own_part_of_the_state(ranks):
    config, model = setup()
    admm = 10 * BLOCKS / ranks
    plain = plan_saving(config, model, ranks)
    assert plain.most == pytest.approx(4 * PARAMETERS + admm, rel=0.05)
    assert plain.alone == pytest.approx(12 * PARAMETERS + admm, rel=0.02)
    sharded = plan_saving(replace(config, train=replace(config.train, shard="optimizer")), model, ranks)
    assert plain.most < sharded.most <= plain.most + 8 * max(PARAMETERS / ranks * 1.02, LARGEST)
    assert sharded.whole == plain.whole


def test_alone_a_process_writes_all():
    saving = plan_saving(*setup(), 1)
    assert saving.most == saving.alone == pytest.approx(saving.whole)


def test_weights_in_another_form_are_saved_twice():
    plain = plan_saving(*setup("--method=full_rank"), 1)
    config, model = setup("--method=cola")
    method_of(config).rebuild(model, config)
    weights = method_of(config).memory(model, config, 1)["weights"]
    saving = plan_saving(config, model, 1)
    assert saving.parts["weights"] == saving.parts["other tensors of cola"] == weights
    assert plain.parts == {"weights": 4 * PARAMETERS, "optimizer state": 8 * PARAMETERS}


@pytest.mark.parametrize("method", ["full_rank", "lora", "galore", "loro", "sltrain", "lost", "cola"])
def test_the_plan_counts_all_tensors_of_a_checkpoint(tmp_path, tiny_tokenizer_dir, method):
    words = [f"--method={method}", *([] if method == "full_rank" else [f"--{method}.rank=16"])]
    parts, recorder = small_run(tiny_tokenizer_dir, words=words)
    saved = Checkpoints(tmp_path).save(1, parts.writer(RunState(), recorder))
    files = [path for path in saved.rglob("*") if path.suffix in (".safetensors", ".pt")]
    size = sum(path.stat().st_size for path in files if not path.name.startswith("random"))
    config, _ = read_command_line([*SMALL, *words])
    plan = plan_saving(config, rebuilt_outline(config, describe_model(config.model, config.data.sequence_length)), 1)
    # Headers, names and step counts of the optimizer come on top.
    assert size == pytest.approx(plan.whole, rel=0.04)
    assert plan.most == plan.alone == pytest.approx(plan.whole, rel=1e-5)


def test_the_plan_says_how_long_a_save_takes_and_a_launcher_waits():
    config, _ = setup()
    text = plan_table(config, describe_model(config.model, 256), 8)
    assert "28.15 GB (weights 5.36, optimizer state 10.71, L, S and dual 12.08), 6.87 by the fullest process" in text
    assert "6.9 where a process writes 1 GB/s, 28.1 where all together do" in text
    assert "up to 3 steps, then a save; a launcher waits 30 s unless TORCH_ELASTIC_SHUTDOWN_TIMEOUT says more" in text


# ---- on a slow disk

SMALL = ["--config=nano", "--model.hidden_size=64", "--model.intermediate_size=128", "--model.num_attention_heads=2"]
SMALL += ["--model.num_hidden_layers=2", "--model.vocab_size=512", "--salaad.embedding=false", "--salaad.roles=[v,o]"]
ALONE = 8.0  # seconds that the slow disk would take if the first of two ranks wrote the weights and all moments


def small_run(
    tokenizer: str, sharded: bool = False, words: Sequence[str] = ()
) -> tuple[TrainingParts, SimpleNamespace]:
    """Return the parts of a small run after one step, and a stand-in for its recorder."""
    config, _ = read_command_line([*SMALL, *words])
    model = model_source(config.model, config.data.sequence_length).build(config.seed, None, None)
    method_of(config).rebuild(model, config)
    method = method_of(config)(model, config)
    optimizer, schedule = method.build_optimizer()
    if sharded:
        shard(optimizer)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    SummedLoss(model)(ids, ids).backward()
    optimizer.step()
    parts = TrainingParts({}, model, AutoTokenizer.from_pretrained(tokenizer), method, optimizer, schedule, sharded)
    return parts, SimpleNamespace(secure=lambda: None)


def seconds_of_a_save(folder: Path, tokenizer: str, rate: float) -> float:
    """Return the seconds of one save, where each rank has a disk of its own that takes `rate` bytes a second."""
    parts, recorder = small_run(tokenizer)
    write = HashedFile.write

    def write_slowly(self: HashedFile, data: bytes | memoryview) -> int:
        time.sleep(len(data) / rate)
        return write(self, data)

    def seconds_of(step: int) -> float:
        distributed.barrier()
        begun = time.monotonic()
        Checkpoints(folder).save(step, parts.writer(RunState(), recorder))
        return time.monotonic() - begun

    seconds_of(1)  # imports what is imported late
    HashedFile.write = write_slowly
    return seconds_of(2)


def test_a_save_takes_as_long_as_the_fullest_of_two_ranks_writes(tmp_path, tiny_tokenizer_dir):
    config, _ = read_command_line(SMALL)
    plan = plan_saving(config, outline(describe_model(config.model, config.data.sequence_length)), 2)
    rate = plan.alone / ALONE
    assert plan.most / rate < 0.6 * ALONE
    for seconds in run_ranks(seconds_of_a_save, 2, tmp_path, tmp_path / "checkpoints", tiny_tokenizer_dir, rate):
        # The plan counts singular vectors too, which these blocks do not have yet.
        assert 0.9 * plan.most / rate < seconds < 0.5 * (plan.most / rate + ALONE)


def slow_save(folder: Path, tokenizer: str, rate: float) -> tuple[float, float, str]:
    """Return the seconds of a save where only rank 1's disk is slow, a sum over devices after it, and the stderr."""
    distributed.TOLD_AFTER = 1
    with redirect_stderr(io.StringIO()) as said:
        seconds = seconds_of_a_save(folder, tokenizer, rate if distributed.rank() else inf)
    return seconds, float(distributed.all_sum(torch.ones(1))), said.getvalue()


def test_a_save_that_takes_longer_than_devices_may_is_waited_for_and_whole(tmp_path, tiny_tokenizer_dir):
    config, _ = read_command_line(SMALL)
    plan = plan_saving(config, outline(describe_model(config.model, config.data.sequence_length)), 2)
    limit, order = 5, (tmp_path / "checkpoints", tiny_tokenizer_dir, plan.most / 9)
    found = run_ranks(slow_save, 2, tmp_path, *order, timeout=limit)
    assert all(seconds > limit and total == 2 for seconds, total, _ in found)
    assert "rank 0 has waited 5 s for rank 1" in found[0][2]
    newest = Checkpoints(tmp_path / "checkpoints").newest_whole()
    assert newest == (tmp_path / "checkpoints" / "step-0000002", [])


def test_no_large_file_of_a_checkpoint_is_read_again_for_its_checksum(tmp_path, tiny_tokenizer_dir, monkeypatch):
    read, digest = set(), files._digest
    monkeypatch.setattr(files, "_digest", lambda path: read.add(path.name) or digest(path))
    parts, recorder = small_run(tiny_tokenizer_dir)
    saved = Checkpoints(tmp_path).save(1, parts.writer(RunState(), recorder))
    sizes = {path.name: path.stat().st_size for path in saved.rglob("*") if path.is_file()}
    largest = {"model.safetensors", "optimizer.pt", "shard-00000-of-00001.safetensors"}
    assert largest == {name for name, size in sizes.items() if size > 50_000}
    assert read == sizes.keys() - largest - {"checksums.json"}


# ---- a rank that has no memory left


def saves_of_which_one_fails(folder: Path, tokenizer: str, sharded: bool, place: tuple[str, str]) -> list[str]:
    """Return how three saves end, where rank 1 runs out of memory at the function `place` in the second save."""
    parts, recorder = small_run(tokenizer, sharded)
    module, ended = import_module(place[0]), []
    whole = getattr(module, place[1])

    def fails(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    for step in (1, 2, 3):
        if distributed.rank() == 1:
            setattr(module, place[1], fails if step == 2 else whole)
        try:
            Checkpoints(folder).save(step, parts.writer(RunState(), recorder))
            ended.append("saved")
        except NotSavedError as error:
            ended.append(str(error))
    assert float(distributed.all_sum(torch.ones(1))) == 2
    return ended


@pytest.mark.parametrize(
    ("sharded", "place"),
    [
        (False, ("salaad.methods.salaad.storage", "norm_of")),
        (False, ("salaad.methods.salaad.storage", "write_tensors")),
        (True, ("salaad.training.state", "second_moments")),
        (True, ("salaad.training.state", "save_optimizer")),
    ],
)
def test_a_rank_without_memory_costs_a_checkpoint_and_no_rank_waits_for_it(
    tmp_path, tiny_tokenizer_dir, sharded, place
):
    folder = tmp_path / "checkpoints"
    order = (folder, tiny_tokenizer_dir, sharded, place)
    assert run_ranks(saves_of_which_one_fails, 2, tmp_path, *order) == [["saved", "out of memory", "saved"]] * 2
    assert sorted(path.name for path in folder.iterdir()) == ["latest", "step-0000001", "step-0000003"]
    verify(folder / "step-0000003", alone=True)
