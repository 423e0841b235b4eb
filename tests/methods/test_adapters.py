"""LoRA, ReLoRA and SLTrain: against peft, against autograd of dense expressions, against counts of the literature."""

import copy
import os
import signal

import peft
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.methods import LoraConfig, ReloraConfig, SltrainConfig
from salaad.methods.lora import LoraLinear
from salaad.methods.low_rank_layers import factored_layers, merged
from salaad.methods.registry import method_of
from salaad.methods.relora import Relora
from salaad.methods.sltrain import SltrainLinear
from salaad.model.build import describe_model, outline
from salaad.model.parameters import count_parameters
from tests.helpers.training import last_checkpoint, lines, run_training

METHODS = ("lora", "relora", "sltrain")
IDS = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(0))
# From the dense model of the size and the ranks of the papers: 2Vd + (2L + 1)d, and r(8d + 3(d + m)) a layer, in M.
TRAINING = {"lora": (68.07, 178.93, 487.61, 1817.22), "sltrain": (43.53, 96.55, 194.29, 645.55)}
STORED = {"lora": (58.07, 134.11, 367.97, 1339.08), "sltrain": TRAINING["sltrain"]}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=64, bos_token_id=None, eos_token_id=None))


def config_of(method: str, *words: str):
    return read_command_line(["--method", method, "--model.hidden_size", "16", *words])[0]


# ---- counts and settings


@pytest.mark.parametrize(("method", "like"), [("lora", "lora"), ("relora", "lora"), ("sltrain", "sltrain")])
@pytest.mark.parametrize("size", ["60m", "130m", "350m", "1b"])
def test_the_counts_are_those_of_the_literature(method, like, size):
    config, _ = read_command_line(["--config", size, "--method", method])
    model = outline(describe_model(config.model, 256))
    method_of(config).rebuild(model, config)
    place = ("60m", "130m", "350m", "1b").index(size)
    assert count_parameters(model) / 1e6 == pytest.approx(TRAINING[like][place], abs=0.01)
    assert method_of(config).stored(model)["parameters"] / 1e6 == pytest.approx(STORED[like][place], abs=0.01)


def test_a_method_brings_its_settings_for_the_size_and_an_option_overrides_each(tmp_path):
    config, _ = read_command_line(["--config", "350m", "--method", "relora"])
    assert (config.relora.rank, config.relora.every, config.relora.rewarmup) == (256, 5000, 200)
    assert (config.optimizer.lr, config.optimizer.clip, config.optimizer.betas) == (5e-4, 0.0, (0.9, 0.999))
    config, _ = read_command_line(
        ["--config", "350m", "--method", "relora", "--optimizer.lr", "2e-3", "--relora.rank", "8"]
    )
    assert (config.optimizer.lr, config.relora.rank, config.relora.every) == (2e-3, 8, 5000)
    # A file that names the method was written for it, as that of a run is.
    (tmp_path / "mine.yaml").write_text("method: sltrain\noptimizer: {lr: 0.007}\n")
    config, _ = read_command_line(["--config", str(tmp_path / "mine.yaml")])
    assert (config.optimizer.lr, config.sltrain.density) == (0.007, 0.03)
    config, _ = read_command_line(["--config", "nano", "--method", "sltrain"])
    assert (config.sltrain.rank, config.optimizer.lr) == (32, 3e-3)  # a quarter of nano's width
    salaad, _ = read_command_line(["--config", "350m"])
    assert salaad.optimizer.lr == 2e-3  # untouched by the tables of others


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_above_the_short_side_is_refused_with_the_most_there_can_be(method):
    config = config_of(method, f"--{method}.rank", "17")
    with pytest.raises(UserError, match=rf"{method}.rank is 17, but .* has a shorter side of 16; give 16 or less"):
        method_of(config).check(llama(), config)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (LoraConfig, {"rank": 0}, "rank is 0, but the least is 1"),
        (LoraConfig, {"dropout": 1.0}, "lora.dropout is 1.0, outside"),
        (ReloraConfig, {"every": 50}, "relora.rewarmup is 100, as long as the 50 steps"),
        (ReloraConfig, {"prune": 1.5}, "relora.prune is 1.5, outside"),
        (SltrainConfig, {"density": -0.1}, "sltrain.density is -0.1, outside"),
        (SltrainConfig, {"rank": 2.5}, "rank"),
    ],
)
def test_a_wrong_setting_is_refused(kind, values, words):
    with pytest.raises(UserError, match=words):
        kind(**values)


# ---- LoRA against peft


def test_lora_trains_step_by_step_as_peft_does():
    mine = llama()
    theirs = peft.get_peft_model(
        copy.deepcopy(mine),
        peft.LoraConfig(r=4, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear", exclude_modules=["lm_head"]),
    )
    config = config_of("lora", "--lora.rank", "4", "--lora.dropout", "0")
    method_of(config).rebuild(mine, config)
    layers, others = factored_layers(mine), dict(theirs.named_modules())
    assert len(layers) == 14
    for name, layer in layers.items():
        other = others[f"base_model.model.{name}"]
        with torch.no_grad():
            layer.A.copy_(other.lora_A["default"].weight)
    for name, p in theirs.named_parameters():  # what is no projection is trained as usual
        p.requires_grad_("lora_" in name or "base_layer" not in name)
    optimizers = [
        torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2) for model in (mine, theirs)
    ]
    for _ in range(5):
        losses = [model(input_ids=IDS, labels=IDS).loss for model in (mine, theirs)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    dense = theirs.merge_and_unload().state_dict()
    for name, tensor in merged(mine).items():
        torch.testing.assert_close(tensor, dense[name], rtol=1e-4, atol=1e-5, msg=name)


def test_an_adapter_begins_as_nothing_and_leaves_the_frozen_weight_alone():
    linear = nn.Linear(6, 5)
    layer, x = LoraLinear(linear, LoraConfig(rank=2, dropout=0.0)), torch.randn(3, 6)
    assert torch.equal(layer(x), linear(x))
    assert not layer.weight.requires_grad and layer.A.abs().max() <= 6**-0.5
    layer(x).sum().backward()
    assert layer.B.grad.abs().sum() > 0 and layer.weight.grad is None


# ---- ReLoRA


def relora(model: LlamaForCausalLM, *words: str) -> Relora:
    config = config_of("relora", "--relora.rank", "4", "--relora.every", "20", "--relora.rewarmup", "4", *words)
    Relora.rebuild(model, config)
    return Relora(model, config)


def test_a_merge_leaves_the_function_and_prunes_the_moments_of_the_adapters_alone():
    model = llama()
    method = relora(model, "--relora.prune", "0.75", "--train.steps", "60")
    optimizer, _ = method.build_optimizer()
    for _ in range(3):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    before = model(input_ids=IDS).logits
    moments = {id(p): state["exp_avg"].clone() for p, state in optimizer.state.items()}
    old = {name: layer.A.detach().clone() for name, layer in factored_layers(model).items()}
    method.after_step(optimizer, 20, torch.zeros(()))
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-4, atol=1e-5)
    adapters = [p for layer in factored_layers(model).values() for p in (layer.A, layer.B)]
    for name, layer in factored_layers(model).items():
        assert not layer.B.any() and not torch.equal(layer.A, old[name])
    zeros = total = 0
    for p, state in optimizer.state.items():
        if any(p is adapter for adapter in adapters):
            kept = state["exp_avg"] != 0
            assert torch.equal(state["exp_avg"][kept], moments[id(p)][kept])
            zeros, total = zeros + int((~kept).sum()), total + kept.numel()
        else:
            assert torch.equal(state["exp_avg"], moments[id(p)])
    assert zeros / total == pytest.approx(0.75, abs=0.08)
    with torch.no_grad():
        for layer in factored_layers(model).values():
            layer.B.fill_(0.1)
    kept_B = {name: layer.B.detach().clone() for name, layer in factored_layers(model).items()}
    method.after_step(optimizer, 60, torch.zeros(()))  # the last step merges nothing that would be trained no more
    assert all(torch.equal(layer.B, kept_B[name]) for name, layer in factored_layers(model).items())


def test_the_learning_rate_rises_again_after_a_merge_and_is_then_on_its_cosine():
    method = relora(llama(), "--train.steps", "60")
    _, schedule = method.build_optimizer()
    _, plain = super(Relora, method).build_optimizer()
    [rates], [cosine] = schedule.lr_lambdas, plain.lr_lambdas
    for step in range(60):
        share = {20: 0.25, 21: 0.5, 22: 0.75, 40: 0.25, 41: 0.5, 42: 0.75}.get(step, 1)
        assert rates(step) == pytest.approx(share * cosine(step))


# ---- SLTrain


def test_the_gradients_of_sltrain_are_those_of_the_dense_expression():
    torch.manual_seed(0)
    layer = SltrainLinear(nn.Linear(30, 20), SltrainConfig(rank=3, alpha=6.0, density=0.2)).double()
    with torch.no_grad():
        layer.B.normal_()
    x, weights = torch.randn(7, 30).double().requires_grad_(), torch.randn(7, 20).double()
    (layer(x) * weights).sum().backward()
    W = layer.dense_weight().detach()
    G = weights.T @ x.detach()
    torch.testing.assert_close(x.grad, weights @ W)
    torch.testing.assert_close(layer.B.grad, 2 * G @ layer.A.T)
    torch.testing.assert_close(layer.A.grad, 2 * layer.B.T @ G)
    torch.testing.assert_close(layer.S_values.grad, G.flatten()[layer.S_positions.long()])
    S = W - 2 * (layer.B @ layer.A).detach()
    assert int((S.abs() > 1e-12).sum()) == int(0.2 * 20 * 30) == len(set(layer.S_positions.tolist()))
    assert S.abs().max() <= 30**-0.5 + 1e-9
    torch.testing.assert_close(layer(x), F.linear(x, W, layer.bias))


# ---- in the trainer


def state_of(folder) -> dict:
    """Everything but the export: weights as they are trained, and the optimizer's moments."""
    state = last_checkpoint(folder) / "state"
    moments = torch.load(state / "optimizer.pt", weights_only=True)["state"]
    flat = {f"{index} {key}": value for index, entry in moments.items() for key, value in entry.items()}
    return {**load_file(state / "weights.safetensors"), **flat}


def words_of(method: str) -> dict:
    """Options of a toy run; ReLoRA merges after steps 4 and 8 of 12."""
    more = {"relora__every": 4, "relora__rewarmup": 2} if method == "relora" else {}
    return {"method": method, f"{method}__rank": 4, **more}


@pytest.mark.parametrize("method", METHODS)
def test_two_interruptions_leave_no_trace_and_the_export_opens_in_plain_transformers(
    toy, tmp_path, monkeypatch, method
):
    options, pending = toy(**words_of(method)), {4, 9}  # the first right after a merge
    run_training(options, tmp_path / "whole")
    kind = method_of(config_of(method))
    original = kind.after_step

    def after_step(self, optimizer, step, discarded):
        original(self, optimizer, step, discarded)
        if step in pending:
            pending.discard(step)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(kind, "after_step", after_step)
    for _ in range(3):
        run_training(options, tmp_path / "pieces")
    assert not pending
    whole, pieces = tmp_path / "whole", tmp_path / "pieces"
    assert lines(whole) == lines(pieces)
    assert lines(whole)[-1]["loss"] < lines(whole)[0]["loss"]
    first, second = state_of(whole), state_of(pieces)
    assert first.keys() == second.keys()
    assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(second[name])) for name, value in first.items())
    plain = AutoModelForCausalLM.from_pretrained(last_checkpoint(whole) / "model")
    assert type(plain.model.layers[0].mlp.up_proj) is nn.Linear
    [row] = [row for row in lines(whole, "evaluations.jsonl") if row["step"] == 12]
    assert row["parameters"] <= count_parameters(plain) and row["trained"] > 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16"])
@pytest.mark.parametrize("method", METHODS)
def test_it_trains_in_short_floats(toy, tmp_path, method, precision):
    run_training(toy(**words_of(method), train__precision=precision), tmp_path / "run")
    losses = [row["loss"] for row in lines(tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_micro_batches_train_like_one_batch(toy, tmp_path, method):
    options = {**words_of(method), **({} if method == "sltrain" else {f"{method}__dropout": 0})}
    for name, more in (("whole", {}), ("parts", {"train__micro_batch": 1})):
        run_training(toy(**options, **more), tmp_path / name)
    for one, other in zip(lines(tmp_path / "whole"), lines(tmp_path / "parts"), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-4)
