"""Predictions of a step's time by hand-made sums, and what --device prints."""

from dataclasses import replace

import pytest

from salaad.common.errors import UserError
from salaad.common.gpus import GPUS, Gpu
from salaad.config.command_line import read_command_line
from salaad.model.build import describe_model
from salaad.training.plan import activation_bytes, plan_table
from salaad.training.prediction import memory_of, predict, prediction_table


def setup(*words: str):
    config, _ = read_command_line(["--config", "350m", *words])
    return config, describe_model(config.model, config.data.sequence_length)


def test_a_step_by_hand():
    config, description = setup()
    parts = predict(config, description, GPUS["h100"], 8)
    parameters, tokens = 367.97e6, 512 * 256 / 8
    flops = (6 * parameters + 12 * 24 * 1024 * 256) * tokens
    assert parts["products"] == pytest.approx(flops / (0.4 * 67e12), rel=1e-3)
    assert parts["optimizer"] == pytest.approx(2 * 16 * parameters / 3.35e12, rel=1e-3)
    assert parts["saving"] > 12 * parameters / 1e9 / 1000  # weights and moments every thousand steps
    # 24 layers of four 1024² and three 1024×2736 matrices, a tenth of them in every step, shared by eight. Products
    # alone: 68 of 1024×1024 matrices, two of the whole, about six with and of the quarter that the rank needs; and 5 µs
    # for each of some 380 calls.
    square, tall = (2 * (74 * 1024**3 + 2 * long * 1024**2) / (0.4 * 67e12) + 380 * 5e-6 for long in (1024, 2736))
    assert parts["ADMM"] == pytest.approx(24 * (4 * square + 3 * tall) / 10 / 8, rel=0.1)


def test_more_gpus_share_the_products_and_exchange_more():
    config, description = setup("--train.precision=bf16-mixed")
    slow = replace(GPUS["4090"], network=1e8)
    one, many = (predict(config, description, slow, ranks) for ranks in (1, 128))
    assert many["products"] == pytest.approx(one["products"] / 128) and one["exchange"] == 0
    sent = 2 * 127 / 128 * 4 * 367.97e6 / 1e8
    assert many["exchange"] == pytest.approx(sent - (many["products"] + many["activations"]) * 2 / 3, rel=1e-3)


def test_a_tiny_model_waits_for_its_launches():
    config, _ = read_command_line(["--config", "nano"])
    description = describe_model(config.model, 256)
    found = predict(config, description, GPUS["h100"], 1)
    assert found["products"] == pytest.approx(4 * 60 * 5e-6)  # layers, kernels, seconds


def test_other_methods_have_no_admm_and_half_the_evaluation():
    config, description = setup()
    plain, _ = setup("--method=full_rank")
    mine, other = (predict(one, description, GPUS["a100"], 8) for one in (config, plain))
    assert other["ADMM"] == 0 and other["evaluation"] == pytest.approx(mine["evaluation"] / 2)


def test_the_table_says_what_does_not_fit_and_what_is_left_unused():
    config, description = setup()
    text = prediction_table(config, description, "4090")
    assert "too much" in text and "leaves the tensor cores unused" in text
    mixed, _ = setup("--train.precision=bf16-mixed")
    assert "unused" not in prediction_table(mixed, description, "h100")
    odd, _ = setup("--train.batch=8")
    assert "32 GPUs" not in prediction_table(odd, description, "h100")


def test_a_device_only_predicts():
    with pytest.raises(UserError, match="--device h100 only predicts; add --dry-run"):
        read_command_line(["--config", "nano", "--device", "h100"])
    assert read_command_line(["--config", "nano", "--device", "h100", "--dry-run"])[1].device == "h100"


def test_every_device_has_all_precisions():
    assert all(set(device.peaks) == {"fp32", "tf32", "bf16-mixed", "bf16"} for device in GPUS.values())
    assert all(isinstance(device, Gpu) for device in GPUS.values())


def test_an_update_takes_memory_in_place_of_activations_or_beside_them():
    """Of 350m on one GPU: stacks of 64 blocks of 1024×1024 in float32, at most nineteen times their size."""
    stack = 19 * 4 * 64 * 1024 * 1024
    config, description = setup("--train.micro_batch=1")
    beside, _ = setup("--train.micro_batch=1", "--salaad.overlap=true")
    exact, _ = setup("--train.micro_batch=1", "--salaad.method=exact")
    kept = activation_bytes(config, description, 1)
    assert kept < stack
    usual, beside, alone = (memory_of(one, description, 1) for one in (config, beside, exact))
    states = 8 * 24 * (4 * 1024 * 1024 + 3 * 1024 * 2736)  # R and T as they were before the update
    assert beside - usual == kept + states
    assert usual - alone == stack - max(kept, 9 * 4 * 1024 * 2736)
    assert memory_of(config, description, 8) < usual
    shown = plan_table(config, description, 1, on_gpu=True)
    assert f"ADMM, for a moment in place of activations | {stack / 2**20:,.1f} MiB" in " ".join(shown.split())
    assert "for a moment" not in plan_table(config, description, 1)
