"""Sizes of the paper's models, the summed loss against transformers' own, optimizers by name and their schedule."""

import io
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
)

from salaad.common.errors import UserError
from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.config.run import ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from salaad.methods.optimizer import build_optimizer, load_optimizer_state, projection_weights, require_optimizer
from salaad.methods.registry import method_of
from salaad.model.build import describe_model, model_source
from salaad.model.folder_formats import ANY_SIZE, FIXED_SIZE
from salaad.model.loss import IGNORED, SummedLoss, summed_cross_entropy
from salaad.model.parameters import count_parameters
from salaad.training.optimizer_files import load_optimizer, save_optimizer
from salaad.training.plan import check_run
from tests.helpers.families import IDS, model_of


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---- sizes


@pytest.mark.parametrize(
    ("hidden", "intermediate", "layers", "heads", "millions"),
    [
        (512, 1376, 8, 8, 58.07),
        (768, 2048, 12, 12, 134.11),
        (1024, 2736, 24, 16, 367.97),
        (2048, 5461, 24, 32, 1339.08),
    ],
    ids=["60m", "130m", "350m", "1b"],
)
def test_the_papers_models_have_the_papers_parameters(hidden, intermediate, layers, heads, millions):
    config = ModelConfig(hidden, intermediate, layers, heads, vocab_size=32_000)
    with torch.device("meta"):
        model = model_source(config, 256).build(seed=0)
    per_layer = 4 * hidden**2 + 3 * hidden * intermediate + 2 * hidden
    assert count_parameters(model) == 2 * 32_000 * hidden + layers * per_layer + hidden
    assert round(count_parameters(model) / 1e6, 2) == millions


def test_a_tied_weight_counts_once():
    model = gpt2()
    assert model.lm_head.weight is model.transformer.wte.weight
    assert count_parameters(model) == count_parameters(model.transformer)


def test_a_seed_fixes_the_weights_and_another_gives_others():
    config = ModelConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=40
    )
    weights = [model_source(config, 32).build(seed=seed).lm_head.weight for seed in (0, 0, 1)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("pad_id", [0, 1])
def test_the_end_token_in_a_packed_row_is_learned_also_where_it_pads(pad_id):
    """A tokenizer without a padding token, such as GPT-2's, pads with its end token, here 1."""
    model = model_source(ModelConfig(16, 24, 1, 2, vocab_size=40), 8).build(seed=0, pad_id=pad_id, eos_id=1)
    before = model.get_input_embeddings().weight
    row = torch.tensor([[5, 6, 1, 7, 8, 1, 9, 5]])
    SummedLoss(model)(row, row).backward()
    assert before[1].norm() > 0
    assert before.grad[1].norm() > 0


def test_a_path_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"model\.path .* holds no config\.json; give the folder"):
        describe_model(ModelConfig(path=str(tmp_path)), 256)


# ---- loss


def llama(hidden_size: int = 16) -> LlamaForCausalLM:
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=hidden_size, **sizes))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2)).eval()


def phi() -> PhiForCausalLM:
    """A model whose head has a bias."""
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = PhiForCausalLM(PhiConfig(vocab_size=40, hidden_size=16, **sizes)).eval()
    nn.init.normal_(model.lm_head.bias)
    return model


def tokens_and_labels(rows: int = 3, length: int = 10) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(40, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[0, 6:] = IGNORED
    labels[1, :3] = IGNORED
    return tokens, labels


def assert_same_gradients(mine: Tensor, theirs: Tensor, inputs: list[Tensor], rtol: float = 1e-5) -> None:
    for a, b in zip(torch.autograd.grad(mine, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        assert a.dtype == b.dtype
        assert (a - b).norm() <= rtol * b.norm()


@pytest.mark.parametrize("model", [llama, gpt2])
def test_the_summed_loss_is_transformers_mean_loss_times_its_tokens_with_the_same_gradient(model):
    torch.manual_seed(0)
    model: PreTrainedModel = model()
    tokens, labels = tokens_and_labels()
    expected = model(input_ids=tokens, labels=labels).loss * (labels[:, 1:] != IGNORED).sum()
    summed = SummedLoss(model)(tokens, labels)
    assert summed.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(summed, expected, list(model.parameters()))


def test_a_head_with_a_bias_is_counted_or_refused_but_never_passed_over():
    torch.manual_seed(0)
    model = phi()
    tokens, labels = tokens_and_labels()
    expected = model(input_ids=tokens, labels=labels).loss * (labels[:, 1:] != IGNORED).sum()
    try:
        summed = SummedLoss(model)(tokens, labels)
    except UserError:
        return
    assert summed.item() == pytest.approx(expected.item(), rel=1e-6)


class Sharper(LlamaForCausalLM):
    """A LLaMA whose logits are doubled, which no setting tells."""

    def forward(self, *inputs, **named):
        output = super().forward(*inputs, **named)
        output.logits = 2 * output.logits
        return output


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        ("recurrent_gemma", "logits_soft_cap"),
        ("falcon_h1", "lm_head_multiplier"),
        ("gemma2", "final_logit_softcapping"),
    ],
)
def test_a_family_that_changes_its_logits_is_refused_by_its_setting(family, setting):
    changed = AutoConfig.for_model(family, num_hidden_layers=1, **{setting: 0.5})
    with torch.device("meta"), pytest.raises(UserError, match=f"logits have {setting}"):
        SummedLoss(AutoModelForCausalLM.from_config(changed))


def test_logits_that_a_model_changes_without_a_setting_are_found_by_running_it():
    with pytest.raises(UserError, match="logits of a Sharper are not the product"):
        SummedLoss(Sharper(llama().config))


def test_looking_at_the_logits_changes_neither_the_mode_nor_what_is_drawn_next():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2))  # with dropout
    for mode in (True, False):
        state = torch.get_rng_state()
        assert SummedLoss(model.train(mode)).training == model.training == mode
        assert torch.equal(torch.get_rng_state(), state)


def test_ignored_labels_add_nothing_and_rows_add_up():
    torch.manual_seed(0)
    loss = SummedLoss(llama())
    tokens, labels = tokens_and_labels()
    nothing = loss(tokens, torch.full_like(labels, IGNORED))
    assert nothing.item() == 0
    nothing.backward()
    assert all(p.grad.count_nonzero() == 0 for p in loss.parameters())
    by_row = sum(loss(tokens[i : i + 1], labels[i : i + 1]) for i in range(3))
    assert loss(tokens, labels).item() == pytest.approx(by_row.item(), rel=1e-6)


# On a CPU a chunk holds at least 128 tokens and at most 2¹⁹ logits: the second and third case take several chunks.
@pytest.mark.parametrize(("tokens", "width", "vocabulary"), [(50, 16, 30), (300, 8, 8192), (257, 5, 5000), (7, 16, 50)])
@pytest.mark.parametrize("scale", [1.0, 1e-5])
def test_cross_entropy_and_its_gradients_are_those_of_all_logits_at_once(tokens, width, vocabulary, scale):
    hidden, head = randn(tokens, width).requires_grad_(), randn(vocabulary, width, seed=1).requires_grad_()
    targets = 7 * torch.arange(tokens) % vocabulary
    targets[::5] = IGNORED
    kept = targets != IGNORED
    logits = hidden.double() @ head.double().T
    expected = (logits.logsumexp(1)[kept] - logits[kept, targets[kept]]).sum()
    loss = summed_cross_entropy(hidden, head, targets)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_same_gradients(scale * loss, scale * expected, [hidden, head])


@pytest.mark.parametrize(("frozen", "share"), [("nothing", 1), ("head", 2 / 3), ("hidden", 2 / 3), ("both", 1 / 3)])
def test_cross_entropy_computes_no_gradient_that_is_not_asked_for(frozen, share):
    hidden, head, targets = randn(300, 16).double(), randn(50, 16, seed=1).double(), torch.arange(300) % 50
    hidden.requires_grad_(frozen not in ("hidden", "both")), head.requires_grad_(frozen not in ("head", "both"))
    learned = [part for part in (hidden, head) if part.requires_grad]
    expected = F.cross_entropy(hidden @ head.T, targets, reduction="sum")
    with FlopCounterMode(display=False) as counter:
        loss = summed_cross_entropy(hidden, head, targets)
    assert counter.get_total_flops() == pytest.approx(3 * 2 * 300 * 16 * 50 * share)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    if learned:
        assert_same_gradients(loss, expected, learned)


def test_a_second_derivative_of_the_loss_is_refused_instead_of_zero():
    hidden, head, targets = randn(30, 16).requires_grad_(), randn(50, 16, seed=1), torch.arange(30)
    with pytest.raises(RuntimeError, match="has no second derivatives"):
        torch.autograd.grad(summed_cross_entropy(hidden, head, targets), hidden, create_graph=True)


@pytest.mark.parametrize("how", ["autocast", "pure"])
def test_cross_entropy_in_bfloat16_keeps_its_sum_and_the_size_of_its_gradient(how):
    hidden, head = randn(300, 16), randn(4096, 16, seed=1)
    if how == "pure":
        hidden, head = hidden.bfloat16(), head.bfloat16()
    hidden.requires_grad_(), head.requires_grad_()
    targets = torch.arange(300)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        loss = summed_cross_entropy(hidden, head, targets)
    expected = F.cross_entropy(hidden.float() @ head.float().T, targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    # The divisor, a number of tokens, is no bfloat16 number: rounded to bfloat16 it would scale the whole gradient.
    for mine, theirs in zip(
        torch.autograd.grad(loss / 196.7, [hidden, head]),
        torch.autograd.grad(expected / 196.7, [hidden, head]),
        strict=True,
    ):
        assert mine.dtype == theirs.dtype
        mine, theirs = mine.double(), theirs.double()
        assert (mine - theirs).norm() < 1e-2 * theirs.norm()
        assert (mine * theirs).sum() / theirs.square().sum() == pytest.approx(1, abs=1e-3)


# ---- learning rate


@pytest.mark.parametrize(
    ("warmup", "final_lr", "steps"), [(0.1, 0.1, 50), (0.0, 0.0, 20), (0.5, 1.0, 20), (1.0, 0.1, 8)]
)
def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine_to_its_floor(warmup, final_lr, steps):
    config = OptimizerConfig(lr=0.02, warmup=warmup, final_lr=final_lr)
    optimizer, schedule = build_optimizer([nn.Parameter(torch.ones(3, 3))], config, steps)
    rising = round(warmup * steps)
    for step in range(steps + 3):
        cosine = (1 + math.cos(math.pi * min(1, (step - rising) / max(1, steps - rising)))) / 2
        factor = (step + 1) / rising if step < rising else final_lr + (1 - final_lr) * cosine
        assert schedule.get_last_lr() == [pytest.approx(0.02 * factor)]
        optimizer.step()
        schedule.step()
    if warmup < 1:
        assert schedule.get_last_lr() == [pytest.approx(0.02 * final_lr)]


# ---- optimizers


def one_step(name: str, lr: float = 0.01) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """Weights before and after one step of an optimizer on a matrix and a vector, and the optimizer."""
    parameters = [nn.Parameter(randn(6, 4)), nn.Parameter(randn(4, seed=1))]
    before = [p.detach().clone() for p in parameters]
    optimizer, schedule = build_optimizer(parameters, OptimizerConfig(name=name, lr=lr, warmup=0), 10)
    for seed, p in enumerate(parameters):
        p.grad = randn(*p.shape, seed=seed + 2)
    optimizer.step()
    schedule.step()
    return before, [p.detach() for p in parameters], optimizer


# Muon takes matrices only, SparseAdam sparse gradients only, LBFGS wants a closure; the rest of torch.optim fits.
@pytest.mark.parametrize(
    "name",
    "AdamW Adam SGD Adafactor NAdam RAdam Adamax Adagrad Adadelta RMSprop Rprop ASGD".split(),  # noqa: SIM905
)
def test_any_optimizer_of_torch_is_taken_by_name_and_moves_weights_against_their_gradients(name):
    before, after, optimizer = one_step(name)
    assert type(optimizer) is getattr(torch.optim, name)
    for seed, (old, new) in enumerate(zip(before, after, strict=True)):
        assert new.isfinite().all()
        moved = new - old
        assert (moved * randn(*old.shape, seed=seed + 2)).sum() < 0


def test_adamw_gets_every_setting_and_its_first_step_is_the_closed_form():
    config = OptimizerConfig(lr=0.1, betas=(0.8, 0.7), eps=1e-3, weight_decay=0.5, warmup=0)
    p, gradient = nn.Parameter(randn(5, 3)), randn(5, 3, seed=1)
    before = p.detach().clone()
    optimizer, _ = build_optimizer([p], config, 10)
    p.grad = gradient.clone()
    optimizer.step()
    expected = before * (1 - 0.1 * 0.5) - 0.1 * gradient / (gradient.abs() + 1e-3)
    torch.testing.assert_close(p.detach(), expected)


@pytest.mark.parametrize("name", ["adamw", "Lion", "Optimizer", "lr_scheduler"])
def test_an_unknown_optimizer_is_refused_with_those_that_exist(name):
    with pytest.raises(UserError, match=f"'{name}', which does not serve here; give one of .*AdamW"):
        one_step(name)


def test_a_weight_decay_that_an_optimizer_does_not_have_is_refused():
    with pytest.raises(UserError, match=r"optimizer.weight_decay is 0.1, but Rprop has none; give --optimizer.w"):
        require_optimizer(OptimizerConfig(name="Rprop", weight_decay=0.1))
    require_optimizer(OptimizerConfig(name="Rprop"))
    require_optimizer(OptimizerConfig(name="SGD", weight_decay=0.1))


def test_frozen_weights_are_left_to_nobody():
    frozen, free = nn.Parameter(torch.ones(2), requires_grad=False), nn.Parameter(torch.ones(2))
    optimizer, _ = build_optimizer([frozen, free], OptimizerConfig(), 10)
    assert [p for group in optimizer.param_groups for p in group["params"]] == [free]


# ---- float32 moments of bfloat16 weights


def bfloat16_model() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Two matrices in bfloat16, the first a block whose gradient is kept in float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4)).to(torch.bfloat16)
    model[0].weight.grad_dtype = torch.float32
    return model, build_optimizer(model.parameters(), OptimizerConfig(lr=0.01), 10)[0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    for seed in seeds:
        model(randn(5, 6, seed=seed, dtype=torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def moments(optimizer: torch.optim.Optimizer, p: Tensor) -> list[Tensor]:
    return [optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]


def test_float32_moments_of_bfloat16_weights_survive_saving_and_training_goes_on_bit_for_bit():
    model, optimizer = bfloat16_model()
    train(model, optimizer, range(3))
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    other, restored = bfloat16_model()
    saved.seek(0)
    state = torch.load(saved, weights_only=True)
    other.load_state_dict(state["model"])
    load_optimizer_state(restored, state["optimizer"])
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for mine, theirs in zip(moments(optimizer, p), moments(restored, q), strict=True):
            assert mine.dtype == theirs.dtype == (torch.float32 if p is model[0].weight else torch.bfloat16)
            assert torch.equal(mine, theirs)
    assert not torch.equal(
        moments(optimizer, model[0].weight)[0].bfloat16().float(), moments(optimizer, model[0].weight)[0]
    )


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adafactor"])
def test_an_optimizer_that_cannot_mix_dtypes_is_refused_in_pure_bfloat16(name):
    config = RunConfig(optimizer=OptimizerConfig(name=name), train=TrainConfig(precision="bf16"))
    description = describe_model(ModelConfig(num_hidden_layers=1), 32)
    with pytest.raises(UserError, match=f"optimizer.name is {name}.* float32 .*choose"):
        check_run(config, description)


@pytest.mark.parametrize("format", [FIXED_SIZE, ANY_SIZE])
def test_a_compressed_folder_is_refused_by_methods_that_take_dense_layers(format):
    description = describe_model(ModelConfig(num_hidden_layers=1), 32)
    description.quantization_config = {"quant_method": format, "blocks": {}}
    config = RunConfig(method="full_rank", model=ModelConfig(path="compressed"))
    check_run(config, description)
    for method in ("lora", "salaad", "galore", "matformer"):
        said = rf"model.path compressed is a compressed folder, but method {method} .* give a dense"
        with pytest.raises(UserError, match=said):
            check_run(replace(config, method=method), description)
    own = SalaadConfig(roles=("lm_head",), lm_head=True)
    check_run(replace(config, method="salaad", sections={"salaad": own}), description)


SIZES_OF_RATES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "vocab_size": 40}
SIZES_OF_RATES |= {"num_attention_heads": 2}
# The matrices of the blocks; all others are embeddings of tokens or positions.
MATRICES_OF_BLOCKS = {
    "llama": r"_proj\.weight",
    "gpt2": r"\.h\..*c_\w+\.weight",
    "opt": r"\.layers\..*(_proj|fc[12])\.weight",
}


@pytest.mark.parametrize("family", list(MATRICES_OF_BLOCKS))
def test_the_projections_learn_at_a_rate_of_their_own(family):
    """Embeddings, head and vectors keep `lr`, as the first group, whose rate the records show."""
    model = model_of(family)
    config = OptimizerConfig(lr=0.01, projection_lr=0.25, warmup=0)
    slower = projection_weights(model)
    names = {name for name, p in model.named_parameters() if any(p is other for other in slower)}
    assert names == {name for name, _ in model.named_parameters() if re.search(MATRICES_OF_BLOCKS[family], name)}
    optimizer, schedule = build_optimizer(model.parameters(), config, 10, slower)
    assert schedule.get_last_lr() == [0.01, 0.0025]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    for name, p in model.named_parameters():  # Adam's first step has the size of its learning rate
        moved = (before[name] - p).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 0.0025 if name in names else 0.01), rtol=1e-3, atol=0)
    assert len(build_optimizer(model.parameters(), OptimizerConfig(), 10, slower)[0].param_groups) == 1


def test_a_state_whose_projections_were_others_is_refused(tmp_path):
    """As of a version that counted GPT-2's table of positions among them."""
    model, config = model_of("gpt2"), OptimizerConfig(projection_lr=0.25)
    slower = projection_weights(model)
    for counted, name in ((slower, "same"), ([*slower, model.transformer.wpe.weight], "other")):
        optimizer, _ = build_optimizer(model.parameters(), config, 10, counted)
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        (tmp_path / name).mkdir()
        save_optimizer(optimizer, tmp_path / name, sharded=False, beside=0)
    optimizer, _ = build_optimizer(model.parameters(), config, 10, slower)
    load_optimizer(optimizer, tmp_path / "same", sharded=False)
    vectors = sum(p.ndim == 1 for p in model.parameters())
    said = f"groups of {vectors + 1} and 9 parameters, but this run has groups of {vectors + 2} and 8, .*; go on with"
    with pytest.raises(UserError, match=said):
        load_optimizer(optimizer, tmp_path / "other", sharded=False)


@pytest.mark.parametrize("method", ["galore", "loro"])
def test_a_method_with_a_rate_of_its_own_takes_no_other(method):
    words = ["--config", "nano", "--method", method, f"--{method}.rank", "4"]
    config, _ = read_command_line([*words, "--optimizer.projection_lr", "0.5"])
    with pytest.raises(UserError, match=f"but {method} has a rate of its own"):
        method_of(config).check(LlamaForCausalLM(LlamaConfig(**SIZES_OF_RATES)), config)
