"""Uses of an opened factored model: dequantized, in 16 bits, trained, with adapters, compiled, exported, in int8.

Each use is compared with the dense model that holds U·V + S, computed in float64 where rounding matters.
"""

import copy
import shutil
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.utils import prune
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.pytorch_utils import Conv1D

from salaad.common.errors import UserError
from salaad.factored import int8
from salaad.factored.fixed_size import factor, mark_factored, slr_modules
from salaad.factored.layers import SlrEmbedding, SlrLinear
from salaad.model.folder_formats import FIXED_SIZE
from tests.factored.test_fixed_size import IDS, blocks_of, gpt2, llama, logits, open_folder, tied_llama, with_dense
from tests.helpers.slr_weights import assert_opened_as, dense, distance, gaussian, parts

MODELS = {"llama": llama, "gpt2": gpt2, "tied llama": tied_llama}


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    """The folder of a factored model, and its dense twin."""
    model = MODELS[request.param]()
    blocks = blocks_of(model)
    twin = with_dense(model, blocks)
    folder = tmp_path_factory.mktemp("onward") / "model"
    factor(model, blocks).save_pretrained(folder)
    return folder, twin


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A factored LLaMA on disk."""
    model, folder = llama(), tmp_path_factory.mktemp("one") / "model"
    factor(model, blocks_of(model)).save_pretrained(folder)
    return folder


# ---- dense again


def test_a_dequantized_model_is_the_dense_one_and_an_ordinary_folder(pair, tmp_path):
    folder, twin = pair
    found = open_folder(folder).dequantize()
    assert not slr_modules(found)
    for (name, mine), theirs in zip(found.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
        assert mine.requires_grad, name
    for name, module in twin.named_modules():
        assert type(found.get_submodule(name)) is type(module), name
    found.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in (tmp_path / "dense" / "config.json").read_text()


def test_a_dequantized_model_has_the_dtype_asked_for(folder):
    dense = open_folder(folder).dequantize(torch.bfloat16)
    assert {p.dtype for p in dense.parameters()} == {torch.bfloat16}


def test_a_dequantized_model_turns_positions_as_the_opened_dense_folder_does(folder, tmp_path):
    """Frequencies in bfloat16 would be off by up to 0.2 %, two radians at position 1,000."""
    dense = open_folder(folder).dequantize(torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16)
    found, exact = dict(dense.named_buffers()), dict(opened.named_buffers())
    assert exact and found.keys() == exact.keys()
    for name, buffer in exact.items():
        assert found[name].dtype == buffer.dtype and torch.equal(found[name], buffer), name


def test_a_model_that_was_saved_or_took_another_dtype_is_dequantized_in_the_dtype_that_it_has(folder, tmp_path):
    model = open_folder(folder).half()
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in model.dequantize().parameters()} == {torch.float16}


@pytest.mark.parametrize("to", ["half", "bfloat16", "double", "float"])
def test_a_model_takes_another_dtype_and_is_saved_and_opened_in_it(pair, tmp_path, to):
    folder, twin = pair
    model = getattr(open_folder(folder), to)()
    model.save_pretrained(tmp_path / "saved")
    found = open_folder(tmp_path / "saved", dtype=model.dtype)
    assert_opened_as(found, model)
    eps = torch.finfo(model.dtype).eps
    assert distance(found.double()(input_ids=IDS).logits, twin.double()(input_ids=IDS).logits) < max(1e-6, 20 * eps)
    twin.float()


# ---- training


def test_a_trainer_trains_u_v_and_the_entries_of_s_and_the_folder_keeps_them(folder, tmp_path):
    model = open_folder(folder)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    arguments = TrainingArguments(
        str(tmp_path / "trainer"), max_steps=3, learning_rate=1e-2, report_to="none", use_cpu=True, save_strategy="no"
    )
    rows = [{"input_ids": row, "labels": row} for row in IDS.repeat(8, 1)]
    first = model(input_ids=IDS, labels=IDS).loss.item()
    Trainer(model, arguments, train_dataset=rows).train()
    assert model(input_ids=IDS, labels=IDS).loss.item() < first
    for name, tensor in model.state_dict().items():
        fixed = name.endswith(("S_starts", "S_columns")) or not tensor.numel()
        assert torch.equal(tensor, before[name]) == fixed, name
    model.save_pretrained(tmp_path / "trained")
    assert torch.equal(logits(open_folder(tmp_path / "trained")), logits(model))


def test_a_training_step_is_that_of_the_dense_expression(pair):
    """The gradients of U, V and S_values follow by the chain rule from the gradient of the dense weight."""
    folder, twin = pair
    model, twin = open_folder(folder).double(), copy.deepcopy(twin).double()
    for each in (model, twin):
        each(input_ids=IDS, labels=IDS).loss.backward()
    for name, layer in slr_modules(model).items():
        module = twin.get_submodule(name)
        G = module.weight.grad.mT if isinstance(module, Conv1D) else module.weight.grad
        rows = torch.arange(layer.shape[0]).repeat_interleave(layer.S_starts.diff().long())
        expected = {"U": G @ layer.V.mT, "V": layer.U.mT @ G, "S_values": G[rows, layer.S_columns.long()]}
        for key, gradient in expected.items():
            if gradient.numel():
                # The twin holds U·V + S rounded to float32, which moves a gradient by some roundings of its size.
                size = gradient.abs().max().item()
                torch.testing.assert_close(getattr(layer, key).grad, gradient, rtol=0, atol=1e-5 * size + 1e-12)


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("biased", [True, False])
def test_the_compiled_product_has_the_gradients_of_plain_operations(rows, biased):
    slr = parts(24, 40, 3, 100)
    layer = SlrLinear.from_slr(slr, gaussian(24) if biased else None)
    twin, weights = copy.deepcopy(layer).double(), gaussian(rows, 24, seed=2)
    x, wide = gaussian(rows, 40).requires_grad_(), gaussian(rows, 40).double().requires_grad_()
    (layer(x) * weights).sum().backward()
    (twin(wide) * weights.double()).sum().backward()
    assert distance(x.grad.double(), wide.grad) < 1e-5
    for (name, mine), theirs in zip(layer.named_parameters(), twin.parameters(), strict=True):
        assert distance(mine.grad.double(), theirs.grad) < 1e-5, name


# ---- adapters


def test_an_adapter_of_peft_is_trained_on_top_and_moves_to_the_dense_model(folder, tmp_path):
    adapted = peft.get_peft_model(
        open_folder(folder), peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    adapted(input_ids=IDS, labels=IDS).loss.backward()
    trained = {name for name, p in adapted.named_parameters() if p.grad is not None}
    assert trained and all("lora_" in name for name in trained)
    assert len(trained) == 2 * 2 * adapted.config.num_hidden_layers
    expected = logits(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(open_folder(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"nothing can be written into it; call model\.dequantize\(\) first"):
        adapted.merge_and_unload()
    with pytest.raises(UserError, match=r"on the model as it is opened, and load the saved adapter on that"):
        adapted.dequantize()
    torch.testing.assert_close(logits(adapted), expected)  # as it was
    merged = peft.PeftModel.from_pretrained(open_folder(folder).dequantize(), tmp_path / "adapter").merge_and_unload()
    torch.testing.assert_close(logits(merged), expected, rtol=1e-3, atol=1e-4)
    assert all(type(m) is nn.Linear for name, m in merged.named_modules() if name.endswith("_proj"))


@pytest.mark.parametrize(
    "write",
    [
        lambda W: W.add_(1),
        lambda W: W.data.mul_(2),
        lambda W: W.__setitem__(0, 1),
        lambda W: setattr(W, "data", torch.zeros(6, 5)),
        lambda W: nn.init.normal_(W),
        lambda W: W.data[3].copy_(torch.zeros(5)),
        lambda W: nn.init.zeros_(W[:2]),
        lambda W: W[0].fill_(5),
        lambda W: W.view(-1).__setitem__(0, 5),
        lambda W: W.detach().mul_(2),
        lambda W: W.mT.chunk(2)[0].zero_(),
        lambda W: next(iter(W)).zero_(),
        lambda W: torch.add(W, 1, out=W.data),
        lambda W: torch.relu_(W.data),
        lambda W: nn.functional.relu(W.data, inplace=True),
    ],
)
def test_nothing_is_written_into_a_computed_weight(write):
    layer = SlrLinear.from_slr(parts(6, 5, 2, 9))
    with pytest.raises(UserError, match="computed from U, V and S"):
        write(layer.weight)
    weight = layer.weight
    for result in (weight + 1, weight @ weight.mT, weight.sum(), weight[torch.tensor([0, 2])], weight.clone()):
        assert type(result) is torch.Tensor and result.requires_grad  # computed, and no view
    assert type(weight.detach().as_subclass(torch.Tensor)) is torch.Tensor
    assert torch.equal(torch.stack(list(weight)), weight)
    copied = copy.deepcopy(weight.detach())
    assert type(copied) is torch.Tensor and torch.equal(copied, weight)
    assert nn.Parameter(weight.detach()).requires_grad
    compiled = torch.compile(lambda x: x @ layer.weight.T, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 5)), torch.ones(2, 5) @ weight.T)


@pytest.mark.parametrize(
    "replaced",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.zeros(6, 5))),
        lambda layer: setattr(layer, "weight", torch.zeros(6, 5)),
        lambda layer: layer.register_parameter("weight", None),
        lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    ],
)
def test_no_other_weight_takes_the_place_of_a_computed_one(replaced):
    layer = SlrLinear.from_slr(parts(6, 5, 2, 9))
    before = layer.weight
    with pytest.raises(UserError, match="computed from U, V and S"):
        replaced(layer)
    assert torch.equal(layer.weight, before) and {"U", "V", "S_values"} == {
        name for name, _ in layer.named_parameters()
    }
    assert "weight_orig" not in vars(layer)


# ---- torch.compile and torch.export


def test_a_compiled_model_is_one_graph_without_a_warning(folder):
    model = open_folder(folder).requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)  # torch's own
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        with torch.no_grad():
            found = compiled(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(found, logits(model), rtol=1e-5, atol=1e-5)


def test_a_compiled_model_is_trained(folder):
    eager, compiled = open_folder(folder), open_folder(folder)
    eager(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    torch.compile(compiled, backend="aot_eager")(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    for (name, mine), theirs in zip(compiled.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_a_model_is_exported_with_its_embedding_for_any_batch_and_length(folder):
    model = open_folder(folder)
    assert isinstance(model.get_input_embeddings(), SlrEmbedding)
    batch, length = torch.export.Dim("batch", max=64), torch.export.Dim("length", max=64)
    program = torch.export.export(
        model.requires_grad_(False),
        (),
        {"input_ids": IDS, "use_cache": False},
        dynamic_shapes={"input_ids": {0: batch, 1: length}, "use_cache": None},
        strict=False,
    )
    assert not any("salaad" in str(node.target) for node in program.graph.nodes)  # plain operations alone
    for ids in (IDS, IDS[:1].repeat(3, 2)):
        found = program.module()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(found, model(input_ids=ids).logits, rtol=1e-4, atol=1e-4)


# ---- int8


@pytest.mark.parametrize("rows", [gaussian(5, 9), gaussian(3, 1), torch.zeros(4, 6), torch.empty(0, 7), gaussian(2, 0)])
def test_numbers_in_a_byte_are_off_by_half_a_step_at_the_most(rows):
    numbers, scales = int8.encode(rows)
    assert (numbers.dtype, numbers.shape, scales.shape) == (torch.int8, rows.shape, (len(rows),))
    step = rows.abs().amax(1, keepdim=True) / 127 if rows.shape[1] else 0
    assert ((int8.decode(numbers, scales) - rows).abs() <= 0.5001 * step).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-3, 2e-4])
def test_numbers_that_were_in_a_byte_are_known_again_in_every_dtype(dtype, size):
    """The small ones have scales below the normal numbers of float16."""
    slr = parts(40, 300, 4, 500)
    layer = SlrLinear.from_slr(replace(slr, U=size * slr.U, V=size * slr.V, values=size * slr.values))
    stored = layer.packed(in_int8=True)
    opened = {name: part.to(dtype) for name, part in int8.decode_parts(stored).items()}
    assert int8.holds(layer.packed(True, opened), opened)
    trained = {name: part + 0.05 * part.abs().amax() for name, part in opened.items()}
    assert not int8.holds(layer.packed(True, opened), trained)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 500])
def test_entries_share_a_scale_in_groups(count):
    values = gaussian(count) * torch.arange(1, count + 1)
    numbers, scales = int8.encode_entries(values)
    assert (len(numbers), len(scales)) == (count, -(-count // 128))
    for i, found in enumerate(int8.decode_entries(numbers, scales)):
        group = values[i // 128 * 128 : i // 128 * 128 + 128]
        assert abs(found - values[i]) <= 0.5001 * group.abs().max() / 127


def test_an_int8_folder_is_the_model_within_its_steps_and_saves_again_to_the_same_numbers(pair, tmp_path):
    folder, twin = pair
    model = open_folder(folder)
    blocks = slr_modules(model)
    mark_factored(model, 1234, in_int8=True)
    model.save_pretrained(tmp_path / "int8")
    found = open_folder(tmp_path / "int8")
    assert found.dtype == torch.float32
    for name, layer in slr_modules(found).items():
        before = blocks[name]
        for key, dimension in (("U", 0), ("V", 1)):
            mine, theirs = getattr(layer, key), getattr(before, key)
            if theirs.numel():
                step = theirs.abs().amax(dimension, keepdim=True) / 127
                assert ((mine - theirs).abs() <= 0.501 * step).all()
        assert torch.equal(layer.S_columns, before.S_columns) and torch.equal(layer.S_starts, before.S_starts)
    assert distance(logits(found).double(), logits(twin).double()) < 0.05
    found.save_pretrained(tmp_path / "again")
    first, second = _tensors(tmp_path / "int8"), _tensors(tmp_path / "again")
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        if tensor.dtype == torch.int8:
            assert (tensor.int() - second[key].int()).abs().sum() == 0, key
        elif "scales" not in key:
            assert torch.equal(tensor, second[key]), key
    half = open_folder(tmp_path / "int8", dtype=torch.float16)
    assert {layer.U.dtype for layer in slr_modules(half).values()} == {torch.float16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_was_trained_since_an_int8_folder_was_opened_is_saved_in_floats(folder, tmp_path, dtype):
    model = open_folder(folder)
    mark_factored(model, 1234, in_int8=True)
    model.save_pretrained(tmp_path / "int8")
    model = open_folder(tmp_path / "int8", dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "untouched")
    assert any(key.endswith(".U_int8") for key in _tensors(tmp_path / "untouched"))
    name, layer = next((name, layer) for name, layer in slr_modules(model).items() if layer.rank)
    layer.V.data += 1e-4  # a fraction of a step of int8
    with pytest.warns(UserWarning, match=r"changed since they were read from int8.*saved as floats"):
        model.save_pretrained(tmp_path / "trained")
    stored = _tensors(tmp_path / "trained")
    assert torch.equal(stored[f"{name}.V"], layer.V) and not any(key.endswith("_int8") for key in stored)
    opened = open_folder(tmp_path / "trained", dtype=dtype)
    assert torch.equal(opened.get_submodule(name).V, layer.V)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.save_pretrained(tmp_path / "trained")


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_an_int8_folder_takes_a_byte_a_number(tmp_path):
    model = llama()
    slr = parts(*model.get_submodule("model.layers.0.mlp.up_proj").weight.shape, 3, 200)
    factor(model, {"model.layers.0.mlp.up_proj": slr})
    mark_factored(model, 1, in_int8=True)
    model.save_pretrained(tmp_path / "int8")
    stored = {key: t for key, t in _tensors(tmp_path / "int8").items() if ".up_proj." in key and "layers.0" in key}
    n, m = slr.shape
    packed = stored.pop("model.layers.0.mlp.up_proj.S_packed").numel()
    assert sum(t.numel() * t.element_size() for t in stored.values()) == 3 * (n + m) + 200 + 4 * (3 + 3 + 2)
    assert packed < 200 * 2
    found = open_folder(tmp_path / "int8").get_submodule("model.layers.0.mlp.up_proj").weight
    assert distance(found.double(), dense(slr)) < 0.02


# ---- without importing salaad


WITHOUT_SALAAD = """
import sys, torch
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    print(model(input_ids=torch.tensor(IDS)).logits.double().sum().item(), flush=True)
"""


def test_programs_without_our_import_open_dequantized_folders_and_are_told_what_others_take(folder, tmp_path):
    expected, dense = [], [tmp_path / name for name in MODELS]
    for path, make in zip(dense, MODELS.values(), strict=True):
        model = make()
        blocks = blocks_of(model)
        expected.append(logits(with_dense(model, blocks)).double().sum().item())
        factor(model, blocks).dequantize().save_pretrained(path)
    command = [sys.executable, "-c", WITHOUT_SALAAD.replace("IDS", str(IDS.tolist())), *dense, folder]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert [float(line) for line in done.stdout.splitlines()] == pytest.approx(expected, rel=1e-4)
    assert done.returncode != 0
    assert "write `import salaad` before from_pretrained" in done.stderr


def test_folders_of_earlier_versions_with_the_short_name_open(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "old")
    config = tmp_path / "old" / "config.json"
    text = config.read_text()
    assert FIXED_SIZE in text
    config.write_text(text.replace(FIXED_SIZE, "salaad"))
    assert torch.equal(logits(open_folder(tmp_path / "old")), logits(open_folder(folder)))
