"""Predictions of a step's time by hand-made sums, and what --device prints."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from salaad.common.errors import UserError
from salaad.common.gpus import GPUS, Gpu
from salaad.config.command_line import read_command_line
from salaad.methods.registry import method_of
from salaad.model.build import describe_model
from salaad.training.fitting import changes_that_fit
from salaad.training.plan import activation_bytes, flops_of_passes, plan_table, rebuilt_outline
from salaad.training.prediction import memory_of, predict, prediction_table, short_patience, unused_cores


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
    # 24 layers of four 1024² and three 1024×2736 blocks, a tenth of them updated in every step, shared by eight ranks.
    # By products alone: 62 of 1024×1024 matrices, two with the whole block, 97 with 64 columns for the rank; and 5 µs
    # for each of 446 calls.
    each = 62 * 1024**3 + 97 * 64 * 1024**2
    square, tall = (2 * (each + 2 * long * 1024**2) / (0.4 * 67e12) + 446 * 5e-6 for long in (1024, 2736))
    assert parts["periodic work"] == pytest.approx(24 * (4 * square + 3 * tall) / 10 / 8, rel=0.02)
    begun_later = predict(*setup("--salaad.onset=0.25"), GPUS["h100"], 8)["periodic work"]
    assert begun_later == pytest.approx(0.75 * parts["periodic work"])


def test_more_gpus_share_the_products_and_exchange_more():
    config, description = setup("--train.precision=bf16-mixed")
    slow = replace(GPUS["4090"], network=1e8)
    one, many = (predict(config, description, slow, ranks) for ranks in (1, 128))
    assert many["products"] == pytest.approx(one["products"] / 128) and one["exchange"] == 0
    sent = 2 * 127 / 128 * 4 * 367.97e6 / 1e8
    assert many["exchange"] == pytest.approx(sent - (many["products"] + many["activations"]) * 2 / 3, rel=1e-3)


def test_gradients_are_exchanged_beside_the_backward_of_the_last_micro_batch_alone():
    config, description = setup("--train.precision=bf16-mixed", "--train.micro_batch=3")
    slow = replace(GPUS["4090"], link=1e9)
    parts = predict(config, description, slow, 8)
    sent, each = 2 * 7 / 8 * 4 * 367.97e6 / 1e9, (parts["products"] + parts["activations"]) / 22  # 64 rows by 3
    assert parts["exchange"] == pytest.approx(sent - each * 2 / 3, rel=1e-3)


def test_recomputing_takes_a_forward_pass_more_of_everything_and_hides_more_of_the_exchange():
    slow = replace(GPUS["4090"], link=1e9)
    plain, again = (
        predict(*setup("--train.precision=bf16-mixed", "--train.micro_batch=64", *words), slow, 8)
        for words in ((), ("--train.gradient_checkpointing=true",))
    )
    assert again["products"] == pytest.approx(4 / 3 * plain["products"])
    assert again["activations"] == pytest.approx(4 / 3 * plain["activations"])
    model = plain["products"] + plain["activations"]
    assert plain["exchange"] - again["exchange"] == pytest.approx(model * (4 / 3 * 3 / 4 - 2 / 3))
    # 34 values of 1024 for each of 131,072 tokens and 24 layers, in two bytes, three times.
    assert plain["activations"] == pytest.approx(3 * 34 * 1024 * 512 * 256 / 8 * 24 * 2 / slow.bandwidth)


def test_memory_where_activations_are_recomputed_is_what_layers_pass_on_and_one_layer():
    config, description = setup("--train.gradient_checkpointing=true")
    found = memory_of(config, description, 1)
    assert found["activations (estimate)"] == 32 * 256 * 1024 * (24 + 34) * 4


def test_memory_in_mixed_precision_has_copies_of_all_matrices_and_the_logits_of_a_chunk():
    plain, mixed = (memory_of(*setup(*words), 1) for words in ((), ("--train.precision=bf16-mixed",)))
    matrices = 24 * (4 * 1024**2 + 3 * 1024 * 2736) + 32000 * 1024  # with the head, without the embedding
    assert mixed["copies in bfloat16"] == 2 * matrices and "copies in bfloat16" not in plain
    tokens, logits = 32 * 256, 2**27 // 32000 * 32000
    assert plain["logits and their gradients"] == 4 * (logits + tokens * 1024 + 32000 * 1024)
    assert mixed["logits and their gradients"] == 2 * (logits + tokens * 1024) + (4 + 2) * 32000 * 1024


def test_a_tied_head_is_copied_too_in_mixed_precision():
    config, description = setup("--train.precision=bf16-mixed")
    apart = memory_of(config, description, 1)["copies in bfloat16"]
    description.tie_word_embeddings = True
    assert memory_of(config, description, 1)["copies in bfloat16"] == apart  # embedding and head are one weight


def test_a_solver_that_is_named_is_the_one_that_is_counted():
    device = GPUS["h100"]
    found = {
        name: predict(*setup(f"--salaad.method={name}"), device, 1)["periodic work"]
        for name in ("exact", "gram", "products")
    }

    def block(n, m):
        """Seconds by one eigensolver and three products, and by one SVD, which takes every column twice.

        Each column is four calls; after the wait for the eigensolver the host makes twenty calls more.
        """
        gram = 6 * n * n * m / (0.4 * 67e12) + 9 * n**3 / (0.03 * 67e12) + (n * 4 + 20) * 5e-6
        return gram, (6 * n * n * m + 20 * n**3) / (0.03 * 67e12) + 2 * n * 4 * 5e-6

    gram, exact = (24 * (4 * a + 3 * b) / 10 for a, b in zip(block(1024, 1024), block(1024, 2736), strict=True))
    assert found["gram"] == pytest.approx(gram) and found["exact"] == pytest.approx(exact)
    assert found["products"] < found["gram"]


@pytest.mark.parametrize(("schedule", "pieces"), [("synchronous", 1), ("staggered", 10)])
def test_a_round_beside_a_forward_pass_costs_what_is_longer(schedule, pieces):
    fast = replace(GPUS["h100"], peaks=dict.fromkeys(GPUS["h100"].peaks, 1e15))
    for device in (GPUS["h100"], fast):
        plain, beside = (
            predict(*setup(f"--salaad.schedule={schedule}", f"--salaad.overlap={value}"), device, 1)
            for value in ("false", "true")
        )
        forward = (plain["products"] + plain["activations"]) / 16 / 3  # micro-batches of 32 rows
        once = 10 * plain["periodic work"] / pieces
        assert beside["periodic work"] == pytest.approx(max(0.0, once - forward) * pieces / 10)
    assert "the most that it saves" in prediction_table(*setup("--salaad.overlap=true"), "h100")


def test_matformer_takes_four_passes_or_one_of_a_mean_width():
    whole, step = 367.97e6, 512 * 256 * 12 * 24 * 1024 * 256
    sizes = [whole - 24 * 3 * 1024 * (2736 - (2736 >> i)) for i in range(4)]

    def products(how):
        words = ("--method=matformer", f"--matformer.train={how}")
        return predict(*setup(*words), GPUS["h100"], 1)["products"] * 0.4 * 67e12

    assert products("summed") == pytest.approx(512 * 256 * 6 * sum(sizes) + 4 * step, rel=1e-3)
    assert products("sampled") == pytest.approx(512 * 256 * 6 * sum(sizes) / 4 + step, rel=1e-3)


def test_the_plan_counts_the_operations_of_all_passes_of_a_step():
    positions = 65000 * 512 * 256
    each = [367.97e6 - 24 * 3 * 1024 * (2736 - (2736 >> i)) for i in range(4)]  # parameters at each of four widths
    passes = {"summed": each, "sampled": [sum(each) / 4]}
    for how, sizes in passes.items():
        table = plan_table(*setup("--method=matformer", f"--matformer.train={how}"), 1)
        [row] = [line for line in table.splitlines() if "floating-point operations" in line]
        operations = positions * sum(6 * size + 12 * 24 * 1024 * 256 for size in sizes)
        assert float(row.split("|")[2]) == pytest.approx(operations, rel=5e-3)


@pytest.mark.parametrize("method", ["sltrain", "lora", "relora"])
@pytest.mark.parametrize(("rows", "ranks"), [("2", 1), ("8", 4)])  # of 8 rows each of four ranks has 2
def test_products_that_a_method_adds_or_leaves_out_are_counted(method, rows, ranks):
    """SLTrain multiplies by the dense weight, and its factors once per micro-batch; W₀ of LoRA has no gradient."""
    words = ["--config", "nano", f"--method={method}", f"--train.micro_batch={rows}", "--train.batch=8"]
    config, _ = read_command_line(words)
    model = rebuilt_outline(config, describe_model(config.model, config.data.sequence_length))
    predicted = flops_of_passes(model, method_of(config).work(model, config, ranks, GPUS["h100"].rates), config)
    if method != "sltrain":  # whose positions need values elsewhere; LoRA's dropout needs a device that is one
        model = copy.deepcopy(model).to_empty(device="cpu")
        model.set_attn_implementation("eager")  # whose products are counted on a CPU
    tokens = torch.zeros(2, config.data.sequence_length, dtype=torch.long, device=model.device)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, labels=tokens).loss.backward()
    looked_up = 6 * model.get_input_embeddings().weight.numel()  # predictions count the embedding as a product
    # Two parts in a hundred are for how the backward pass of attention is counted.
    assert (predicted - looked_up) * tokens.numel() == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_a_model_trained_in_bfloat16_is_stored_in_half_the_bytes():
    found = {}
    for precision in ("fp32", "bf16"):
        table = plan_table(*setup("--method=cola", f"--train.precision={precision}"), 1)
        [row] = [line for line in table.splitlines() if "stored after training" in line]
        found[precision] = float(row.split(",")[1].split()[0])
    assert found["bf16"] == pytest.approx(found["fp32"] / 2, rel=1e-3)


def test_other_methods_have_their_own_periodic_work():
    device, rates = GPUS["h100"], GPUS["h100"].rates
    waits = 4 * 5e-6  # per column
    galore = predict(*setup("--method=galore", "--galore.every=50"), device, 8)["periodic work"]
    square, tall = (
        6 * 1024**2 * m / (0.4 * rates.peak) + 9 * 1024**3 / (0.03 * rates.peak) + 1024 * waits for m in (1024, 2736)
    )
    assert galore == pytest.approx(24 * (4 * square + 3 * tall) / 50 / 8, rel=0.05)
    loro = predict(*setup("--method=loro", "--loro.rank=64", "--loro.every=100"), device, 1)["periodic work"]
    core = 26 * 128**3 / (0.03 * rates.peak) + 2 * 128 * waits
    sides = 24 * (4 * 2 * 1024 + 3 * (1024 + 2736))  # each decomposed twice
    factors = 8 * sides * 64**2 / (0.03 * rates.peak) + 24 * 7 * 4 * 64 * waits
    assert loro == pytest.approx((168 * core + factors) / 100)


def test_a_tiny_model_waits_for_its_launches():
    config, _ = read_command_line(["--config", "nano"])
    description = describe_model(config.model, 256)
    found = predict(config, description, GPUS["h100"], 1)
    assert found["products"] == pytest.approx(4 * 60 * 5e-6)  # layers, kernels, seconds


def test_other_methods_have_no_admm_and_half_the_evaluation():
    config, description = setup()
    plain, _ = setup("--method=full_rank")
    mine, other = (predict(one, description, GPUS["a100"], 8) for one in (config, plain))
    assert other["periodic work"] == 0 and other["evaluation"] == pytest.approx(mine["evaluation"] / 2)


def test_the_table_says_what_does_not_fit_and_what_is_left_unused():
    config, description = setup()
    text = prediction_table(config, description, "4090")
    assert "too much" in text and "leaves the tensor cores unused" in text
    mixed, _ = setup("--train.precision=bf16-mixed")
    assert "unused" not in prediction_table(mixed, description, "h100")
    odd, _ = setup("--train.batch=8")
    assert "32 GPUs" not in prediction_table(odd, description, "h100")


def test_what_would_fit_fits_and_nothing_cheaper_does():
    config, description = setup("--train.gradient_checkpointing=false")
    for memory, ranks, expected in (
        (80e9, 1, ""),
        (24e9, 1, "--train.micro_batch 16"),
        (6e9, 8, "--train.micro_batch 2 --train.shard optimizer"),
        (1e9, 8, None),
    ):
        words, changed = changes_that_fit(config, description, memory, ranks)
        needs = sum(memory_of(changed, description, ranks).values())
        assert words == expected and (needs < memory) == (expected is not None)
        if words:
            assert read_command_line(["--config", "350m", *words.split()])[0].train == changed.train
            bigger = replace(changed, train=replace(changed.train, micro_batch=2 * changed.train.micro_batch))
            assert sum(memory_of(bigger, description, ranks).values()) >= memory
    table = prediction_table(config, description, "4090")
    assert "On 1 GPU it does not fit; --train.micro_batch" in table


def test_a_tiny_model_is_told_no_hours_that_nobody_would_notice():
    config, _ = read_command_line(["--config", "nano"])
    text = prediction_table(config, describe_model(config.model, 256), "h100")
    assert "in place of" not in text and "| hours of the run" in text


def test_another_precision_is_told_with_what_it_costs():
    [said] = unused_cores(*setup(), GPUS["h100"])
    assert "GB in place of" in said and "copies of the weights" in said and "was not measured" in said


def test_a_device_only_predicts():
    with pytest.raises(UserError, match="--device h100 only predicts; add --dry-run"):
        read_command_line(["--config", "nano", "--device", "h100"])
    assert read_command_line(["--config", "nano", "--device", "h100", "--dry-run"])[1].device == "h100"


def test_every_device_has_all_precisions():
    assert all(set(device.peaks) == {"fp32", "tf32", "bf16-mixed", "bf16"} for device in GPUS.values())
    assert all(isinstance(device, Gpu) for device in GPUS.values())


def test_an_update_takes_memory_in_place_of_activations_or_beside_them():
    """350m on one GPU: the largest stacks have 64 blocks of 1024×1024 in float32, and take 16 times their size."""
    stack = 16 * 4 * 64 * 1024 * 1024
    config, description = setup("--train.micro_batch=1")
    beside, _ = setup("--train.micro_batch=1", "--salaad.overlap=true")
    exact, _ = setup("--train.micro_batch=1", "--salaad.method=exact")
    kept = activation_bytes(config, description, 1) + memory_of(config, description, 1)["logits and their gradients"]
    assert kept < stack
    usual, beside, alone = (sum(memory_of(one, description, 1).values()) for one in (config, beside, exact))
    states = 8 * 24 * (4 * 1024 * 1024 + 3 * 1024 * 2736)  # R and T as they were before the update
    assert beside - usual == kept + states
    assert usual - alone == stack - max(kept, 9 * 4 * 1024 * 2736)
    assert sum(memory_of(config, description, 8).values()) < usual
    shown = " ".join(plan_table(config, description, 1, on_gpu=True).split())
    assert f"periodic work, beyond activations | {(stack - kept) / 2**20:,.1f} MiB" in shown
    assert "periodic work" not in plan_table(config, description, 1)


# ---- how long a stop takes


@pytest.fixture
def a100(monkeypatch):
    """Imitate a process of torch's launcher on a machine with an A100."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA A100-SXM4-80GB")


def test_a_run_says_that_its_launcher_has_too_little_patience_for_its_steps_and_its_checkpoint(a100, monkeypatch):
    config, _ = read_command_line(["--config", "1b"])
    description = describe_model(config.model, 256)
    step = sum(predict(config, description, GPUS["a100"], 8).values())
    said = short_patience(config, description, 8)
    assert f"about {3 * step + 28.15:.0f} s (3 steps of {step:.1f} s and a checkpoint of 28.1 GB at 1 GB/s)" in said
    assert "kills it after 30 s; start it with TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in said
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", said.split("TIMEOUT=")[1].split()[0])
    assert short_patience(config, description, 8) is None  # no warning with the timeout that it gives


def test_a_run_that_stops_in_time_or_that_no_such_launcher_kills_says_nothing(a100, monkeypatch):
    config, description = setup("--train.precision=bf16-mixed")
    assert short_patience(config, description, 8) is None
    large, _ = read_command_line(["--config", "1b"])
    description = describe_model(large.model, 256)
    assert short_patience(large, description, 8)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert short_patience(large, description, 8) is None


def test_the_table_counts_the_steps_before_a_save():
    config, description = setup()
    [row] = [line for line in prediction_table(config, description, "h100").splitlines() if line.startswith("| a stop")]
    shown = [float(cell) for cell in row.split("|")[2:-1]]
    step = sum(predict(config, description, GPUS["h100"], 1).values())
    assert shown[0] == round(3 * step + 367.97e6 * 12 / 1e9 + 24 * (4 * 1024**2 + 3 * 1024 * 2736) * 10 / 1e9)
