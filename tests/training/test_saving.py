"""What --dry-run says of a checkpoint: against counts by hand, and against the files of a run."""

from dataclasses import replace

import pytest

from salaad.config.command_line import read_command_line
from salaad.methods.registry import method_of
from salaad.model.build import describe_model, outline
from salaad.training.plan import plan_table
from salaad.training.saving import plan_saving

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
    assert plan_saving(config, model, 1).parts["weights"] == 2 * weights
    assert plain.parts == {"weights": 4 * PARAMETERS, "optimizer state": 8 * PARAMETERS}


def test_the_plan_says_how_long_a_save_takes_and_a_launcher_waits():
    config, _ = setup()
    text = plan_table(config, describe_model(config.model, 256), 8)
    assert "28.15 GB (weights 5.36, optimizer state 10.71, L, S and dual 12.08), 6.87 by the fullest process" in text
    assert "6.9 where a process writes 1 GB/s, 28.1 where all together do" in text
    assert "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" in text
