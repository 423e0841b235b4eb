"""Mean squared gradients against autograd in float64; the text they are measured on against the files, by hand."""

import json
import re
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from salaad.common.errors import UserError
from salaad.compression.calibration import CalibrationText, second_moments_of_text
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.data.text import open_text, sample_rows
from salaad.model.loss import SummedLoss
from salaad.model.roles import find_blocks
from tests.helpers.families import FAMILIES, model_of

LENGTH = 24
HELD = 325  # documents in the training files
CPU = torch.device("cpu")


def llama() -> PreTrainedModel:
    sizes = {"intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, hidden_size=16, initializer_range=0.3, **sizes))


def gpt2() -> PreTrainedModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3))


LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")
BLOCKS = {
    llama: [f"model.layers.{k}.{name}" for k in (0, 1) for name in LAYERS],
    gpt2: [f"transformer.h.{k}.{name}" for k in (0, 1) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")],
}
HEAD = {llama: ["lm_head"], gpt2: []}  # GPT-2's head is tied to its embedding
EMBEDDING = {llama: "model.embed_tokens", gpt2: "transformer.wte"}
both = pytest.mark.parametrize("build", [llama, gpt2])


def built(build) -> PreTrainedModel:
    """Return the model as it is opened for inference: no parameter requires a gradient."""
    torch.manual_seed(0)
    return build().eval().requires_grad_(False)


def rows() -> dict[str, Tensor]:
    """Seven rows of ten tokens, some of them padded on the right."""
    tokens = torch.randint(3, 40, (7, 10), generator=torch.Generator().manual_seed(1))
    padding = torch.arange(10) >= torch.tensor([10, 10, 4, 7, 10, 2, 9])[:, None]
    return {"input_ids": tokens.masked_fill(padding, 0), "labels": tokens.masked_fill(padding, -100)}


Moments = dict[str, tuple[Tensor, Tensor]]


def moments(model: PreTrainedModel, blocks: list[str], *sizes: int) -> Moments:
    """Return the second moments of blocks, computed from `rows()` in batches of these sizes."""
    parts = {name: tensor.split(list(sizes)) for name, tensor in rows().items()}
    batches = [dict(zip(parts, few, strict=True)) for few in zip(*parts.values(), strict=True)]
    return second_moments_of_text(SummedLoss(model), blocks, batches, CPU)


def by_autograd(model: PreTrainedModel, blocks: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return block → E[g²] and E[x²] over real tokens, by autograd of torch's own loss at zeros added to outputs."""
    model, text, added, entering = deepcopy(model).double(), rows(), {}, {}
    model.config._experts_implementation = "eager"  # the grouped product of torch has no float64

    def add_zeros(name: str):
        def add(module: nn.Module, inputs: tuple, output: Tensor) -> Tensor:
            added[name], entering[name] = torch.zeros_like(output, requires_grad=True), inputs[0]
            return output + added[name]

        return add

    for name in blocks:
        model.get_submodule(name).register_forward_hook(add_zeros(name))
    logits = model(input_ids=text["input_ids"]).logits[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), text["labels"][:, 1:].flatten(), reduction="sum")
    gradients = torch.autograd.grad(loss, [added[name] for name in blocks])
    real = (text["labels"] != -100).flatten().numpy()
    outputs = [np.square(gradient.flatten(0, -2).numpy()[real]).mean(0) for gradient in gradients]
    inputs = [np.square(entering[name].detach().flatten(0, -2).numpy()[real]).mean(0) for name in blocks]
    return dict(zip(blocks, zip(outputs, inputs, strict=True), strict=True))


# ---- the moments


@both
def test_the_square_of_a_gradient_is_that_of_the_output_times_that_of_the_input(build):
    model, blocks = built(build), [*BLOCKS[build], *HEAD[build]]
    found, expected = moments(model, blocks, 3, 3, 1), by_autograd(model, blocks)
    assert sorted(found) == sorted(blocks)
    for name, (by_row, by_column) in found.items():
        outputs, inputs = expected[name]
        square = np.outer(outputs, inputs) if build is llama else np.outer(inputs, outputs)  # GPT-2 keeps in×out
        assert square.shape == model.get_submodule(name).weight.shape
        assert by_row.dtype == by_column.dtype == torch.float32
        np.testing.assert_allclose(by_row.numpy(), square.mean(1), rtol=1e-4)
        np.testing.assert_allclose(by_column.numpy(), square.mean(0), rtol=1e-4)


def test_a_router_which_gives_its_choice_as_well_has_none():
    name = "model.layers.1.self_attn.o_proj"
    assert moments(model_of("mixtral").requires_grad_(False), ["model.layers.1.mlp.gate", name], 3, 4).keys() == {name}


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"llama4_text"}))  # whose body transformers cannot name
def test_every_family_has_them_of_all_that_sees_every_token_once(family):
    model = model_of(family).requires_grad_(False)
    linear = {name: module for name, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D))}
    blocks = list(find_blocks(model, SalaadConfig(embedding=True, lm_head=True)))
    found = moments(model, blocks, 3, 4)
    assert {name for name in blocks if name not in found} == {name for name in blocks if ".experts." in name}
    expected = by_autograd(model, [name for name in blocks if name in linear])
    assert len(expected) >= 6
    for name, (outputs, inputs) in expected.items():
        square = np.outer(inputs, outputs) if isinstance(linear[name], Conv1D) else np.outer(outputs, inputs)
        np.testing.assert_allclose(found[name][0].numpy(), square.mean(1), rtol=1e-3)
        np.testing.assert_allclose(found[name][1].numpy(), square.mean(0), rtol=1e-3)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "opt", "falcon"])
def test_an_embedding_has_the_squares_of_its_weight_s_gradient_token_by_token_those_as_the_head_too_if_tied(family):
    """The weight is given to look-up and head as two tensors, so that autograd tells their gradients apart."""
    model = model_of(family).requires_grad_(False)
    embedding, head, text = model.get_input_embeddings(), model.get_output_embeddings(), rows()
    [name] = [name for name, module in model.named_modules() if module is embedding]
    tied = head.weight is embedding.weight
    found = moments(model, [name], 3, 4)[name]
    if tied:  # by whichever of its names the weight is a block
        [as_head] = [name for name, module in model.named_modules() if module is head]
        by_head = moments(model, [as_head], 3, 4)[as_head]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, by_head, strict=True))
    model, real = model.double(), text["labels"] != -100
    W, scale = embedding.weight.detach().clone(), float(getattr(embedding, "embed_scale", 1))
    square, of_head = torch.zeros_like(W), [torch.zeros(side, dtype=torch.float64) for side in W.shape]
    hidden = []
    catch = model.get_output_embeddings().register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    looked_up = (W[text["input_ids"]] * scale).requires_grad_()
    logits = model(inputs_embeds=looked_up).logits
    catch.remove()
    logits.retain_grad()
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), text["labels"][:, 1:].flatten(), reduction="sum")
    loss.backward()
    # One token's gradient of the rows is scale·∂ℓ/∂output in the row it looked up.
    for token, gradient in zip(text["input_ids"][real], looked_up.grad[real] * scale, strict=True):
        square[token] += gradient.square()
    if tied:
        of_head = [logits.grad[real].square().sum(0), hidden[0][real].detach().square().sum(0)]
    tokens = int(real.sum())
    outputs, inputs = (side / tokens for side in of_head)
    rows_expected = square.mean(1) / tokens + outputs * inputs.mean()
    columns_expected = square.mean(0) / tokens + inputs * outputs.mean()
    torch.testing.assert_close(found[0].double(), rows_expected, rtol=1e-3, atol=1e-12)
    torch.testing.assert_close(found[1].double(), columns_expected, rtol=1e-3, atol=1e-12)
    assert tied == (family != "llama")


def test_what_is_called_on_some_tokens_alone_has_none_though_one_batch_fits():
    model = built(llama)
    mlp, name, calls = model.model.layers[0].mlp, "model.layers.0.mlp.up_proj", []

    def now_and_then(x: Tensor) -> Tensor:
        calls.append(x)
        up = mlp.up_proj(x) if len(calls) <= 3 else F.pad(mlp.up_proj(x[:, :4]), (0, 0, 0, x.shape[1] - 4))
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * up)

    mlp.forward = now_and_then
    assert set(moments(model, [name, "model.layers.0.mlp.down_proj"], 3, 4)) == {"model.layers.0.mlp.down_proj"}
    assert len(calls) == 4  # the first two are the loss's, which looks at the logits


def test_a_model_whose_body_transformers_cannot_name_is_refused():
    with pytest.raises(UserError, match="does not know what of a Llama4ForCausalLM comes before its head"):
        SummedLoss(model_of("llama4_text"))


@both
@pytest.mark.parametrize("sizes", [(1,) * 7, (3, 4), (1, 5, 1)])
def test_moments_do_not_depend_on_how_rows_are_spread_over_batches(build, sizes):
    model, blocks = built(build), [EMBEDDING[build], *BLOCKS[build]]
    together = moments(model, blocks, 7)
    for name, pair in moments(model, blocks, *sizes).items():
        for side, other in zip(pair, together[name], strict=True):
            torch.testing.assert_close(side, other, rtol=1e-4, atol=1e-12)


@both
def test_a_text_without_labels_has_none_but_zeros(build):
    model, text = built(build), rows()
    text["labels"] = torch.full_like(text["labels"], -100)
    for pair in second_moments_of_text(SummedLoss(model), BLOCKS[build], [text], CPU).values():
        assert not any(side.any() for side in pair)


def forward_hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def assert_untouched(model: PreTrainedModel, logits: Tensor) -> None:
    assert forward_hooks(model) == 0
    assert all(parameter.grad is None and not parameter.requires_grad for parameter in model.parameters())
    after = model(input_ids=rows()["input_ids"]).logits
    assert torch.equal(after, logits)
    assert not after.requires_grad


@both
def test_the_model_is_left_without_gradients_and_hooks(build):
    model = built(build)
    logits = model(input_ids=rows()["input_ids"]).logits
    with torch.no_grad():
        moments(model, [EMBEDDING[build], *BLOCKS[build]], 4, 3)
    assert_untouched(model, logits)


@both
@pytest.mark.parametrize("where", ["text", "model"])
def test_the_model_is_left_so_after_an_error_too(build, where):
    model = built(build)
    logits = model(input_ids=rows()["input_ids"]).logits

    def breaking():
        yield rows()
        assert forward_hooks(model) > len(BLOCKS[build])
        if where == "text":
            raise UserError("the text ends here")
        yield {"input_ids": torch.full((1, 4), 40), "labels": torch.full((1, 4), 40)}

    with pytest.raises(UserError if where == "text" else IndexError):
        second_moments_of_text(SummedLoss(model), [EMBEDDING[build], *BLOCKS[build]], breaking(), CPU)
    assert_untouched(model, logits)


# ---- the text


@pytest.fixture(scope="module")
def config(text_files, tiny_tokenizer_dir):
    return DataConfig(
        source="files",
        files=tuple(text_files["train"]),
        validation_files=tuple(text_files["validation"]),
        tokenizer=tiny_tokenizer_dir,
        sequence_length=LENGTH,
        shuffle_window=10,
        streams=8,
    )


@pytest.fixture(scope="module")
def text(config):
    return open_text(config, vocab_size=512)


@pytest.fixture(scope="module")
def documents(text) -> list[tuple[int, ...]]:
    """The token ids of every document of the training files, computed by hand, with the end token."""
    texts = [json.loads(line)["text"] for file in text.train_files for line in Path(file).read_text().splitlines()]
    assert len(texts) == HELD
    eos = text.tokenizer.eos_token_id
    return [(*text.tokenizer(one, add_special_tokens=False).input_ids, eos) for one in texts]


@pytest.fixture(scope="module")
def cut(documents) -> set[tuple[int, ...]]:
    """The documents truncated to the length of a row, which are all different."""
    cut = {one if len(one) <= LENGTH else (*one[: LENGTH - 1], one[-1]) for one in documents}
    assert len(cut) == HELD
    return cut


def as_tuples(rows: list[np.ndarray]) -> list[tuple[int, ...]]:
    return [tuple(row.tolist()) for row in rows]


@settings(deadline=None, max_examples=25)
@given(st.integers(1, HELD), st.integers(1, 12), st.integers(1, 200), st.integers(0, 2**31))
def test_a_sample_is_so_many_rows_of_the_training_files_none_twice_and_the_same_for_a_seed(
    text, config, cut, count, streams, window, seed
):
    config = replace(config, streams=streams, shuffle_window=window)
    sample = as_tuples(sample_rows(text, config, count, seed))
    assert len(sample) == len(set(sample)) == count
    assert set(sample) <= cut
    assert as_tuples(sample_rows(text, config, count, seed)) == sample


def test_all_of_the_text_can_be_had(text, config, cut):
    assert set(as_tuples(sample_rows(text, config, HELD))) == cut


def test_another_seed_gives_other_rows(text, config):
    one, other = (set(as_tuples(sample_rows(text, config, 20, seed))) for seed in (0, 1))
    assert one != other


def test_a_sample_is_taken_from_all_over_the_text(text, config):
    files = Counter(text.tokenizer.decode(row)[:2] for row in sample_rows(text, config, 60))
    assert set(files) == {str(ord(name)) for name in "abc"}  # a document begins with the number of its file
    assert min(files.values()) > 5


@settings(deadline=None, max_examples=15)
@given(st.integers(1, 250), st.integers(1, 12), st.integers(0, 2**31))
def test_packed_rows_are_pieces_of_joined_training_documents_none_twice(text, config, documents, count, streams, seed):
    sample = sample_rows(text, replace(config, packing=True, streams=streams), count, seed)
    assert len(sample) == count
    assert all(len(row) == LENGTH for row in sample)
    whole, beginnings = [], []
    for number in range(min(streams, count)):
        tokens = np.concatenate(sample[number :: min(streams, count)])
        pieces = np.split(tokens, np.flatnonzero(tokens == text.tokenizer.eos_token_id) + 1)
        whole += as_tuples(pieces[:-1])
        beginnings += [piece for piece in as_tuples(pieces[-1:]) if piece]
    left = Counter(documents) - Counter(whole)
    assert left.total() == HELD - len(whole)
    assert all(any(one[: len(piece)] == piece for one in left) for piece in beginnings)


@pytest.mark.parametrize("count", [HELD + 1, 10**6])
def test_more_than_the_text_holds_is_one_sentence_with_the_number_it_holds(text, config, count):
    with pytest.raises(UserError) as error:
        sample_rows(text, config, count)
    assert str(error.value) == (
        f"the training text holds {HELD} sequences of {LENGTH} tokens, {count} are asked for; "
        f"give {HELD} or fewer, or more text"
    )


@pytest.mark.parametrize("streams", [1, 8])
def test_packed_text_holds_as_many_rows_as_its_tokens_fill_in_every_stream(text, config, documents, streams):
    config = replace(config, packing=True, streams=streams)
    with pytest.raises(UserError) as error:
        sample_rows(text, config, 10**6)
    held = int(re.search(r"holds (\d+) sequences of 24 tokens, 1000000 are asked for", str(error.value)).group(1))
    rows = sample_rows(text, config, held)
    assert sum(map(len, rows)) == sum(map(len, documents))
    assert sum(len(row) < LENGTH for row in rows) <= streams
    with pytest.raises(UserError, match=f"; give {held} or fewer, or more text$"):
        sample_rows(text, config, held + 1)


def test_the_check_says_so_before_anything_is_computed(config):
    CalibrationText(config, 512, HELD).check()
    with pytest.raises(
        UserError, match=f"holds {HELD} sequences .*, {HELD + 1} are asked for; give --calibrate {HELD} or fewer"
    ):
        CalibrationText(config, 512, HELD + 1).check()
    with pytest.raises(UserError, match=r"more than model\.vocab_size 100"):
        CalibrationText(config, 100, 1).check()
    with pytest.raises(UserError, match=r"data\.files is empty; give at least one path or glob"):
        CalibrationText(replace(config, files=()), 512, 1).check()
    CalibrationText(replace(config, validation_files=()), 512, HELD).check()  # they are not read


@pytest.mark.parametrize("count", [1, 7, 8, 20])
def test_the_batches_hold_the_sample_in_order_padded_on_the_right(text, config, count):
    made = list(CalibrationText(config, 512, count).batches())
    assert all(0 < len(batch["input_ids"]) <= 8 for batch in made)
    ids, labels = (torch.cat([batch[name] for batch in made]) for name in ("input_ids", "labels"))
    sample = sample_rows(text, config, count)
    assert ids.shape == labels.shape == (count, LENGTH)
    for row, row_ids, row_labels in zip(sample, ids.tolist(), labels.tolist(), strict=True):
        padding = LENGTH - len(row)
        assert row_ids == row.tolist() + [0] * padding
        assert row_labels == row.tolist() + [-100] * padding


def test_the_digest_changes_with_what_is_read_and_not_with_where_it_lies(config, tmp_path):
    def digest(sequences: int = 5, **changes) -> str:
        return CalibrationText(replace(config, **changes), 512, sequences).digest

    moved = [tmp_path / Path(file).name for file in config.files]
    for old, new in zip(config.files, moved, strict=True):
        new.write_text(Path(old).read_text())
    assert digest() == digest() == digest(files=tuple(map(str, moved)))
    others = [digest(6), digest(sequence_length=12), digest(packing=True), digest(files=config.files[:2])]
    assert len({digest(), *others}) == 5
    assert len({digest(), digest(streams=1), digest(shuffle_window=3)}) == 3
    for file in moved:
        file.write_text(file.read_text().replace("a", "e"))
    assert digest(files=tuple(map(str, moved))) != digest()
