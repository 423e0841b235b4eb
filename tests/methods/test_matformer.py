"""MatFormer's widths against dense models cut out by hand."""

import copy
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from salaad.common.errors import UserError
from salaad.methods.matformer import Matformer
from salaad.model.nested_widths import Widths
from tests.helpers.families import model_of
from tests.helpers.tiny_llama import IDS, config_of, llama


def narrowed(model: LlamaForCausalLM, width: int) -> LlamaForCausalLM:
    """A plain model whose feed-forward layers have the first `width` features of `model`'s."""
    config = copy.deepcopy(model.config)
    config.intermediate_size = width
    small, state = LlamaForCausalLM(config), model.state_dict()
    for name, tensor in state.items():
        if "gate_proj" in name or "up_proj" in name:
            state[name] = tensor[:width]
        elif "down_proj" in name:
            state[name] = tensor[:, :width]
    small.load_state_dict(state)
    return small


def matformer(*words):
    model = llama()
    config = config_of("matformer", "--matformer.halvings", "2", *words)
    Matformer.check(llama(), config)
    Matformer.rebuild(model, config)
    return model, Matformer(model, config)


def test_every_width_is_the_dense_model_of_that_width():
    model, method = matformer()
    assert method.widths.uniform == [24, 12, 6]
    for width in method.widths.uniform:
        small = narrowed(llama(), width)
        with method.widths.of([width, width]):
            torch.testing.assert_close(model(input_ids=IDS).logits, small(input_ids=IDS).logits)
        assert method.widths.parameters([width, width]) == sum(p.numel() for p in small.parameters())
    assert model.state_dict().keys() == llama().state_dict().keys()


def test_a_mixed_model_has_its_layers_from_two_widths():
    model, method = matformer()
    wide, narrow = narrowed(llama(), 12), narrowed(llama(), 6)
    wide.model.layers[0] = narrow.model.layers[0]
    widths = method.widths.mixed(1, 1)
    assert widths == [6, 12]
    with method.widths.of(widths):
        torch.testing.assert_close(model(input_ids=IDS).logits, wide(input_ids=IDS).logits)
    assert method.widths.parameters(widths) == sum(p.numel() for p in wide.parameters())


def test_summed_trains_on_the_mean_of_all_widths_gradients():
    model, method = matformer("--matformer.train", "summed")
    passes = method.passes()
    for context in passes:
        with context:
            (model(input_ids=IDS, labels=IDS).loss / len(passes)).backward()
    mean = {name: torch.zeros_like(p) for name, p in llama().named_parameters()}
    for width in (24, 12, 6):
        small = narrowed(llama(), width)
        small(input_ids=IDS, labels=IDS).loss.backward()
        for name, p in small.named_parameters():
            place = mean[name][:, : p.shape[1]] if "down_proj" in name else mean[name][: len(p)]
            place += p.grad / 3
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, mean[name], rtol=1e-4, atol=1e-6, msg=name)


def test_sampled_draws_every_width_alike_and_the_same_after_a_resume():
    _, method = matformer()
    drawn = []
    for step in range(1, 400):
        method.after_step(None, step, torch.zeros(()))
        drawn.append(method.widths.layers[0].width)
    shares = [drawn.count(width) / len(drawn) for width in (24, 12, 6)]
    assert min(shares) > 0.24  # a third, less four standard deviations of 399 draws
    _, other = matformer()
    other.load_state_dict({"step": 137})
    assert other.widths.layers[0].width == drawn[136]
    assert len(method.passes()) == 1


@pytest.mark.parametrize("share", [1.0, 0.97, 0.9, 0.8, 0.7])
def test_a_budget_gives_the_largest_choice_within_it(share):
    _, method = matformer()
    widths = method.widths
    choices = [[24, 24], [12, 24], [12, 12], [6, 12], [6, 6]]
    sizes = {widths.parameters(choice): choice for choice in choices}
    least, most = min(sizes), max(sizes)
    budget = round(least + share * (most - least))
    assert widths.within(budget) == sizes[max(size for size in sizes if size <= budget)]
    with pytest.raises(UserError, match=f"below the {least:,} of the smallest width; give {least} or more"):
        widths.within(least - 1)


def test_variants_leave_the_width_of_training_as_it_was():
    _, method = matformer()
    method.widths.set([6, 6])
    found = {}
    with ExitStack() as stack:
        for name, context, figures in method.variants():
            stack.enter_context(context)
            found[name] = ([layer.width for layer in method.widths.layers], figures["parameters"])
    assert [layer.width for layer in method.widths.layers] == [6, 6]
    expected = {"X": [24, 24], "X+X/2": [12, 24], "X/2": [12, 12], "X/2+X/4": [6, 12], "X/4": [6, 6]}
    assert found == {name: (widths, method.widths.parameters(widths)) for name, widths in expected.items()}


def test_widths_that_do_not_divide_are_refused_with_the_next_that_does():
    config = config_of("matformer")
    with pytest.raises(
        UserError, match=r"width 21 cannot be halved 3 times; give --model.intermediate_size 24, or other"
    ):
        Matformer.check(llama(intermediate_size=21), config)
    with pytest.raises(UserError, match=r"width 20 .* 3 times; give --matformer.halvings 2, or --model.intermediate_s"):
        Matformer.check(llama(intermediate_size=20), config)
    from_folder = replace(config, model=replace(config.model, path="some"))  # whose width cannot be given
    with pytest.raises(UserError, match=r"width 21 cannot be halved 3 times; give another model$"):
        Matformer.check(llama(intermediate_size=21), from_folder)
    model = llama()
    model.model.layers[1].mlp = llama(intermediate_size=32).model.layers[1].mlp
    with pytest.raises(UserError, match="widths 24, 32 of this model differ"):
        Matformer.check(model, config)


def test_a_model_whose_only_swiglu_layers_are_beside_experts_is_refused():
    with pytest.raises(UserError, match=r"nests \d SwiGLU layers of width \d+ here, but .* as with experts; give a"):
        Matformer.check(model_of("qwen2_moe"), config_of("matformer", "--matformer.halvings", "1"))


@pytest.mark.parametrize(
    ("family", "other", "words"),
    [
        ("bitnet", {}, "mlp has ffn_sub_norm besides"),
        ("falcon_h1", {"mlp_multipliers": [0.5, 0.25]}, "feed_forward computes something else"),
        ("seed_oss", {"head_dim": 8, "residual_dropout": 0.1}, "mlp computes something else"),
        ("llama4_text", {}, "has activation_fn besides"),
    ],
)
def test_a_layer_that_computes_more_than_a_narrowed_one_is_refused_on_the_meta_device_too(family, other, words):
    model, config = model_of(family, **other), config_of("matformer", "--matformer.halvings", "1")
    with pytest.raises(UserError, match=rf"method matformer narrows layers .* alone, but .*{words}.*; give a LLaMA-li"):
        Matformer.check(copy.deepcopy(model).to("meta"), config)
    with pytest.raises(UserError, match=words):
        Matformer.rebuild(model, config)


@pytest.mark.parametrize("limit", [7.0, 1000.0])
def test_a_layer_with_a_limit_is_refused(limit):
    class Limited(LlamaMLP):
        def forward(self, x):
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(-limit, limit))

    model = llama()
    model.model.layers[1].mlp = Limited(model.config)
    with pytest.raises(UserError, match=r"layers.1.mlp computes something else, such as with a multiplier or limit"):
        Matformer.check(model, config_of("matformer"))


@pytest.mark.parametrize("family", ["gemma", "qwen2", "falcon_h1", "olmo2"])
def test_the_full_width_of_a_plain_layer_is_the_model_itself(family):
    model, config = model_of(family), config_of("matformer", "--matformer.halvings", "1")
    plain, state = model(input_ids=IDS).logits, torch.get_rng_state()
    Matformer.check(copy.deepcopy(model).to("meta"), config)
    Matformer.rebuild(model, config)
    torch.testing.assert_close(model(input_ids=IDS).logits, plain)
    assert torch.equal(torch.get_rng_state(), state)  # the comparison draws no numbers of the run's


def test_widths_are_found_once():
    model = llama()
    assert len(Widths(model, 2).layers) == len(Widths(model, 2).layers) == 2
