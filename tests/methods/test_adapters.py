"""LoRA, ReLoRA and SLTrain: against peft and against autograd of dense expressions; the settings of all methods."""

import copy

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.methods import (
    ColaConfig,
    GaloreConfig,
    LoraConfig,
    LoroConfig,
    LostConfig,
    MatformerConfig,
    ReloraConfig,
    SltrainConfig,
)
from salaad.methods.lora import LoraLinear
from salaad.methods.low_rank_layers import factored_layers, merged
from salaad.methods.registry import method_of
from salaad.methods.relora import Relora
from salaad.methods.sltrain import SltrainLinear
from tests.helpers.tiny_llama import IDS, config_of, llama

METHODS = ("lora", "relora", "galore", "loro", "cola", "sltrain", "lost")


# ---- settings


def test_a_method_brings_its_settings_for_the_size_and_an_option_overrides_each(tmp_path):
    config, _ = read_command_line(["--config", "350m", "--method", "relora"])
    assert (config.relora.rank, config.relora.every, config.relora.rewarmup) == (256, 5000, 200)
    assert (config.optimizer.lr, config.optimizer.clip, config.optimizer.betas) == (5e-4, 0.0, (0.9, 0.999))
    config, _ = read_command_line(
        ["--config", "350m", "--method", "relora", "--optimizer.lr", "2e-3", "--relora.rank", "8"]
    )
    assert (config.optimizer.lr, config.relora.rank, config.relora.every) == (2e-3, 8, 5000)
    # The settings in a file that names the method, such as a run's config.yaml, override the method's own.
    (tmp_path / "mine.yaml").write_text("method: sltrain\noptimizer: {lr: 0.007}\n")
    config, _ = read_command_line(["--config", str(tmp_path / "mine.yaml")])
    assert (config.optimizer.lr, config.sltrain.density) == (0.007, 0.03)
    # A file before it, written for another method, gives way to them all the same.
    (tmp_path / "mine.yaml").write_text("method: galore\noptimizer: {eps: 1.0e-7}\n")
    for words in (["--config", "60m"], ["--config", "60m", "--config", "fast"]):
        config, _ = read_command_line([*words, "--config", str(tmp_path / "mine.yaml"), "--galore.rank", "8"])
        assert (config.optimizer.lr, config.optimizer.clip, config.optimizer.eps) == (1e-2, 0.0, 1e-7)
        assert (config.galore.rank, config.model.hidden_size) == (8, 512)
    # What a file has in the method's own section stays, whatever method it names.
    (tmp_path / "own.yaml").write_text("galore: {rank: 64, every: 50}\n")
    config, _ = read_command_line(["--config", "60m", "--config", str(tmp_path / "own.yaml"), "--method", "galore"])
    assert (config.galore.rank, config.galore.every, config.optimizer.lr) == (64, 50, 1e-2)
    config, _ = read_command_line(["--config", "nano", "--method", "sltrain"])
    assert (config.sltrain.rank, config.optimizer.lr) == (32, 3e-3)  # a quarter of nano's width
    salaad, _ = read_command_line(["--config", "350m"])
    assert salaad.optimizer.lr == 2e-3  # the settings of other methods do not change it
    for word in ("--relora.rank=8", "--optimizer.lr=2e-3"):  # which the method's settings would silently replace
        with pytest.raises(UserError, match=f"{word} stands before --config, .* relora .*; give it after --config"):
            read_command_line([word, "--config", "350m", "--method", "relora"])
    config, _ = read_command_line(["--train.batch", "3", "--config", "fast", "--method", "relora"])
    assert config.train.batch == 3


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_above_the_short_side_is_refused_with_the_most_there_can_be(method):
    config = config_of(method, f"--{method}.rank", "17")
    with pytest.raises(UserError, match=rf"{method}.rank is 17, but .* has a shorter side of 16; give 16 or less"):
        method_of(config).check(llama(), config)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_whose_projections_are_tied_or_missing_is_refused(method):
    config, model = config_of(method, f"--{method}.rank", "4"), llama()
    first, second = (layer.self_attn for layer in model.model.layers)
    second.q_proj.weight = first.q_proj.weight
    model.all_tied_weights_keys = {f"model.layers.{i}.self_attn.q_proj.weight": "-" for i in range(2)}
    with pytest.raises(UserError, match=r"layers.0.self_attn.q_proj shares its weight with another module"):
        method_of(config).check(model, config)
    bare = GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=64, n_positions=32))
    unknown = nn.ModuleDict({"lm_head": nn.Linear(4, 4)})
    for other in (bare, unknown):
        with pytest.raises(UserError, match=r"works on linear projections, of which this model has 0; give a LLaMA-"):
            method_of(config).check(other, config)


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (LoraConfig, {"rank": 0}, "rank is 0, but the least is 1"),
        (LoraConfig, {"dropout": 1.0}, "lora.dropout is 1.0, outside"),
        (ReloraConfig, {"every": 50}, "relora.rewarmup is 100, as long as the 50 steps"),
        (ReloraConfig, {"prune": 1.5}, "relora.prune is 1.5, outside"),
        (SltrainConfig, {"density": -0.1}, "sltrain.density is -0.1, outside"),
        (SltrainConfig, {"rank": 2.5}, "rank"),
        (GaloreConfig, {"every": 0}, "galore.every is 0, but the least is 1"),
        (LoroConfig, {"every": 5}, "loro.rewarmup is 5, as long as the 5 steps"),
        (ColaConfig, {"rank": 0}, "cola.rank is 0, but the least is 1"),
        (LostConfig, {"gamma": 1.5}, "lost.gamma is 1.5, outside"),
        (MatformerConfig, {"halvings": 0}, "matformer.halvings is 0, but the least is 1"),
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
    for name, p in theirs.named_parameters():  # all but the projections is trained as usual
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


def steps_of(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, number: int) -> None:
    for _ in range(number):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_merge_leaves_the_function_and_prunes_the_moments_of_the_adapters_alone():
    model = llama()
    method = relora(model, "--relora.prune", "0.75", "--train.steps", "60")
    optimizer, _ = method.build_optimizer()
    steps_of(model, optimizer, 3)
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
    before = model(input_ids=IDS).logits
    method.after_step(optimizer, 60, torch.zeros(()))  # also at the last step, as the run may be made longer
    torch.testing.assert_close(model(input_ids=IDS).logits, before, rtol=1e-4, atol=1e-5)
    assert not any(layer.B.any() for layer in factored_layers(model).values())


ENTRYWISE = ("Adam", "NAdam", "RAdam", "Adamax", "RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD", "SGD")


@pytest.mark.parametrize("name", ENTRYWISE)
def test_all_that_an_optimizer_keeps_for_an_entry_begins_anew_or_nothing_does(name):
    model = llama()
    method = relora(model, "--relora.prune", "0.75", "--train.steps", "60", "--optimizer.name", name)
    method.check(llama(), method.config)
    optimizer, _ = method.build_optimizer()
    steps_of(model, optimizer, 2)
    rate = optimizer.param_groups[0]["lr"]
    begun = total = 0
    adapters = [p for layer in factored_layers(model).values() for p in (layer.A, layer.B)]
    states = [[value.fill_(7) for value in optimizer.state[p].values() if value.shape == p.shape] for p in adapters]
    method.after_step(optimizer, 20, torch.zeros(()))
    for p, state in zip(adapters, states, strict=True):
        fresh = [(value != 7) for value in state]
        assert all(torch.equal(one, fresh[0]) for one in fresh)
        for value, where in zip(state, fresh, strict=True):
            own_beginning = value is optimizer.state[p].get("step_size")
            assert (value[where] == (rate if own_beginning else 0)).all()
            begun, total = begun + int(where.sum()), total + where.numel()
    assert begun == 0 if name == "SGD" else begun / total == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "Adadelta", "Rprop"])  # which count no steps
def test_an_optimizer_pruned_whole_steps_as_a_new_one(name):
    model = llama()
    words = ("--relora.prune", "1", "--relora.dropout", "0", "--train.steps", "60", "--optimizer.name", name)
    method = relora(model, *words)
    optimizer, _ = method.build_optimizer()
    steps_of(model, optimizer, 3)
    method.after_step(optimizer, 20, torch.zeros(()))
    other = copy.deepcopy(model)
    fresh, _ = Relora(other, method.config).build_optimizer()
    for moved, stepping in ((model, optimizer), (other, fresh)):
        steps_of(moved, stepping, 1)
    for mine, theirs in zip(factored_layers(model).values(), factored_layers(other).values(), strict=True):
        assert mine.B.any() and torch.equal(mine.A, theirs.A) and torch.equal(mine.B, theirs.B)


def test_an_optimizer_without_a_state_of_single_entries_is_refused_where_they_would_be_pruned():
    words = ("--relora.rank", "4", "--optimizer.name", "Adafactor", "--relora.prune")
    with pytest.raises(UserError, match=r"relora.prune is 0.9, but Adafactor's moments are .*, or --relora.prune 0"):
        Relora.check(llama(), config_of("relora", *words, "0.9"))
    Relora.check(llama(), config_of("relora", *words, "0"))


def test_the_largest_seed_draws_at_every_merge_anew():
    method = relora(llama(), f"--seed={2**53 - 1}", "--train.steps", "60")
    optimizer, _ = method.build_optimizer()
    drawn = []
    for step in (20, 40):
        method.after_step(optimizer, step, torch.zeros(()))
        drawn.append(next(iter(factored_layers(method.model).values())).A.detach().clone())
    assert not torch.equal(*drawn)


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
