"""Factored models (U·V + S) against dense models, and their files as safetensors alone reads them."""

import copy
import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    pipeline,
)
from transformers.utils import logging

import salaad  # noqa: F401
from salaad.common.errors import UserError
from salaad.factored.fixed_size import SlrEmbedding, SlrLinear, factor, slr_modules
from salaad.factored.slr import Slr
from salaad.model.build import load_model
from salaad.model.folder_formats import FIXED_SIZE
from tests.helpers.families import model_of
from tests.helpers.models import IDS, logits, open_folder
from tests.helpers.slr_weights import assert_opened_as, dense, distance, parts, whole_numbers

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
Q = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module", autouse=True)
def quiet():
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error(), logging.disable_progress_bar()
    yield
    logging.set_verbosity(verbosity)
    if bars:
        logging.enable_progress_bar()


# ---- models


def llama(**changes) -> LlamaForCausalLM:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 2}
    sizes |= {"vocab_size": 512, "max_position_embeddings": 64, "initializer_range": 0.2, "attention_bias": True}
    torch.manual_seed(0)
    return with_biases(LlamaForCausalLM(LlamaConfig(**sizes | changes)))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 512, "n_positions": 64}
    return with_biases(GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2)))


def with_biases(model: PreTrainedModel) -> PreTrainedModel:
    """Draw the biases at random, as transformers makes them 0; return the model in evaluation mode."""
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p, std=0.1)
    return model.eval()


def blocks_of(model: PreTrainedModel) -> dict[str, Slr]:
    """Return random U, V and S of every projection, embedding and untied head; one lacks L, one S, and one both.

    Some have so many entries that the layer makes its dense weight for a whole text, but not for a single token.
    """
    names = [
        name
        for name, module in model.named_modules()
        if getattr(module, "weight", None) is not None and module.weight.ndim == 2 and "wpe" not in name
    ]
    if model.config.tie_word_embeddings:
        names.remove("lm_head")
    rank_and_density = {2: (0, 0.0), 3: (0, 0.1), 4: (3, 0.0)}
    found = {}
    for k, name in enumerate(names):
        n, m = model.get_submodule(name).weight.shape
        rank, density = rank_and_density.get(k, (3, 0.3 if k % 2 and k > 4 else 0.1))
        found[name] = parts(n, m, rank, int(density * n * m), seed=k)
    return found


def with_dense(model: PreTrainedModel, blocks: dict[str, Slr]) -> PreTrainedModel:
    """Return a dense copy of the model whose blocks are L + S."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, slr in blocks.items():
            model.get_submodule(name).weight.copy_(dense(slr))
    return model


def tied_llama() -> LlamaForCausalLM:
    return llama(tie_word_embeddings=True)


ARCHITECTURES = {"llama": llama, "gpt2": gpt2, "tied llama": tied_llama}


class Case:
    """A dense model whose blocks are L + S, the same model factored, and the folder of the factored model."""

    def __init__(self, make, folder: Path) -> None:
        original = make()
        self.blocks = blocks_of(original)
        self.dense = with_dense(original, self.blocks)
        self.model = factor(original, self.blocks)
        self.folder = folder
        self.model.save_pretrained(folder)


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    return {name: Case(make, tmp_path_factory.mktemp("model")) for name, make in ARCHITECTURES.items()}


@pytest.fixture(params=ARCHITECTURES)
def case(request, cases):
    return cases[request.param]


@pytest.fixture
def one(cases):
    """The case of the LLaMA whose embedding is not tied."""
    return cases["llama"]


def assert_same_tensors(first: nn.Module, second: nn.Module) -> None:
    mine, theirs = first.state_dict(), second.state_dict()
    assert mine.keys() == theirs.keys()
    for key, tensor in mine.items():
        assert tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]), key


def test_logits_are_those_of_the_dense_model(case):
    assert len(slr_modules(case.model)) >= 8
    assert distance(logits(case.model), logits(case.dense)) < 1e-5


def test_every_block_is_replaced_by_the_layer_of_its_kind(cases):
    replaced = {name: set(slr_modules(case.model)) for name, case in cases.items()}
    assert replaced["llama"] == set(cases["llama"].blocks) > {"model.embed_tokens", "lm_head"}
    assert isinstance(cases["llama"].model.get_input_embeddings(), SlrEmbedding)
    assert isinstance(cases["llama"].model.get_output_embeddings(), SlrLinear)
    assert replaced["gpt2"] == {name for name in cases["gpt2"].blocks if name.startswith("transformer.h.")}
    assert replaced["tied llama"] == set(cases["tied llama"].blocks) - {"model.embed_tokens"}


@pytest.mark.parametrize(("name", "embedding"), [("gpt2", "transformer.wte"), ("tied llama", "model.embed_tokens")])
def test_a_tied_embedding_stays_one_dense_weight(cases, name, embedding):
    case = cases[name]
    for model in (case.model, open_folder(case.folder)):
        weight = model.get_submodule(embedding).weight
        assert weight is model.lm_head.weight
        assert isinstance(model.lm_head, nn.Linear)
        torch.testing.assert_close(weight.detach(), dense(case.blocks[embedding]).float())


def test_an_opened_folder_computes_to_the_bit_what_was_saved(case):
    opened, report = open_folder(case.folder, output_loading_info=True)
    assert not any(report.values())
    assert type(opened) is type(case.model)
    assert_same_tensors(opened, case.model)
    assert torch.equal(logits(opened), logits(case.model))
    assert torch.equal(logits(load_model(case.folder, torch.float32)), logits(case.model))


def test_the_configuration_of_an_opened_model_opens_the_folder_again(one):
    opened = open_folder(one.folder)
    assert torch.equal(logits(open_folder(one.folder, config=opened.config)), logits(opened))


# In transformers' own files GPT-NeoX has its head as embed_out, and HRM its gate and up projections in one weight.
@pytest.mark.parametrize(("family", "changes"), [("gpt_neox", {}), ("hrm_text", {"head_dim": 8})])
def test_blocks_that_transformers_renames_on_saving_are_stored_by_the_names_in_the_model(family, changes, tmp_path):
    model = model_of(family, vocab_size=512, tie_word_embeddings=False, **changes)
    blocks = blocks_of(model)
    del blocks[[*blocks][6]]  # in HRM a gate projection, whose up projection is in parts
    original = with_dense(model, blocks)
    model = factor(model, blocks)
    assert slr_modules(model).keys() == blocks.keys() > {"lm_head"}
    assert distance(logits(model), logits(original)) < 1e-5
    folder = tmp_path / "first"
    model.save_pretrained(folder)
    for again in (tmp_path / "second", tmp_path / "third"):
        opened, report = open_folder(folder, output_loading_info=True)
        assert not any(report.values())
        assert_same_tensors(opened, model)
        assert torch.equal(logits(opened), logits(model))
        folder = again
        opened.save_pretrained(folder)
    opened.dequantize().save_pretrained(tmp_path / "dense")
    assert distance(logits(open_folder(tmp_path / "dense")), logits(original)) < 1e-5


def test_a_saved_model_whose_activation_has_a_dtype_becomes_dense(tmp_path):
    """Apertus makes its activation in the dtype of its configuration, which is a text once the model was saved."""
    model = model_of("apertus", vocab_size=512)
    blocks = blocks_of(model)
    original = with_dense(model, blocks)
    factor(model, blocks).save_pretrained(tmp_path / "first")
    opened = open_folder(tmp_path / "first")
    opened.save_pretrained(tmp_path / "second")
    for each in (model, opened):
        assert slr_modules(each)
        each.dequantize()
        assert not slr_modules(each) and distance(logits(each), logits(original)) < 1e-5


def test_saving_again_gives_the_same_bytes(case, tmp_path):
    open_folder(case.folder).save_pretrained(tmp_path)
    files = sorted(path.name for path in case.folder.iterdir())
    assert files == sorted(path.name for path in tmp_path.iterdir())
    for name in files:
        assert (tmp_path / name).read_bytes() == (case.folder / name).read_bytes(), name


def test_config_json_is_that_of_the_dense_model_but_for_one_entry(case, tmp_path):
    case.dense.save_pretrained(tmp_path)
    plain, factored = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path, case.folder))
    shapes = {name: case.dense.get_submodule(name).weight.shape for name in case.blocks}
    parameters = sum(parameter.numel() for parameter in case.dense.parameters()) + sum(
        slr.rank * sum(shapes[name]) + slr.nnz - shapes[name].numel() for name, slr in case.blocks.items()
    )
    assert factored.pop("quantization_config") == {
        "quant_method": FIXED_SIZE,
        "numbers": "float",
        "format": 1,
        "blocks": {name: [case.blocks[name].rank, case.blocks[name].nnz] for name in slr_modules(case.model)},
        "parameters": parameters,
    }
    assert factored == plain


def test_a_model_without_blocks_in_parts_is_an_ordinary_folder(tmp_path):
    factor(llama(), {}).save_pretrained(tmp_path / "ours")
    llama().save_pretrained(tmp_path / "plain")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()


def test_a_fresh_process_opens_a_folder_after_importing_salaad(one, tmp_path):
    script = (
        "import sys, salaad, torch\n"
        "from safetensors.torch import save_file\n"
        "from transformers import AutoModelForCausalLM\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "ids = torch.tensor([[int(word) for word in row.split()] for row in sys.argv[3:]])\n"
        "save_file({'logits': model(input_ids=ids).logits.detach()}, sys.argv[2])\n"
    )
    rows = [" ".join(map(str, row)) for row in IDS.tolist()]
    threads = str(torch.get_num_threads())
    subprocess.run(
        [sys.executable, "-c", script, one.folder, tmp_path / "logits.safetensors", *rows],
        check=True,
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": threads},
    )
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], logits(one.model))


# ---- dtypes and devices


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_opening_in_a_short_dtype_rounds_the_floats_and_nothing_else(case, dtype):
    opened = open_folder(case.folder, dtype=dtype)
    assert opened.dtype == dtype
    rounded = copy.deepcopy(case.model)
    for tensor in (*rounded.parameters(), *rounded.buffers()):
        tensor.data = tensor.to(dtype) if tensor.is_floating_point() else tensor
    assert assert_opened_as(opened, rounded) > 0
    # Rounding the factored model changes the logits at most twice as much as rounding the dense model.
    exact = logits(case.dense)
    allowed = 2 * distance(logits(copy.deepcopy(case.dense).to(dtype)), exact)
    assert 0 < distance(logits(opened), exact) < allowed < 0.03


def test_a_model_moves_between_dtypes_and_to_the_device_it_is_on(case):
    model = copy.deepcopy(case.model)
    before = logits(model)
    assert model.to("cpu") is model
    assert torch.equal(logits(model), before)
    double = copy.deepcopy(model).to(torch.float64)
    assert distance(logits(double), logits(copy.deepcopy(case.dense).to(torch.float64))) < 1e-6
    short = copy.deepcopy(model).to(torch.bfloat16)
    assert_opened_as(open_folder(case.folder, dtype=torch.bfloat16), short)
    assert {buffer.dtype for module in slr_modules(short).values() for buffer in module.buffers()} == {torch.int32}


def test_a_model_saved_in_bfloat16_opens_in_it_to_the_bit(one, tmp_path):
    short = copy.deepcopy(one.model).to(torch.bfloat16)
    short.save_pretrained(tmp_path)
    opened = open_folder(tmp_path)
    assert_opened_as(opened, short)
    assert (tmp_path / "model.safetensors").stat().st_size < (one.folder / "model.safetensors").stat().st_size


def test_factoring_in_bfloat16_gives_bfloat16_layers(one):
    model = factor(llama().to(torch.bfloat16), one.blocks)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, module in slr_modules(model).items():
        assert torch.equal(module.U, one.blocks[name].U.bfloat16())
    # Against the dense float32 model: what differs is the rounding to bfloat16.
    assert distance(logits(model), logits(one.dense)) < 0.03


@pytest.mark.parametrize("device_map", ["cpu", "auto"])
def test_a_device_map_changes_nothing(one, device_map):
    opened = open_folder(one.folder, device_map=device_map)
    assert_same_tensors(opened, one.model)
    assert torch.equal(logits(opened), logits(one.model))


# ---- modes


def test_gradients_flow_through_and_are_those_of_the_dense_model(case):
    for model in (copy.deepcopy(case.model), open_folder(case.folder)):
        model, twin = model.to(torch.float64), copy.deepcopy(case.dense).to(torch.float64)
        for each in (model, twin):
            each(input_ids=IDS, labels=IDS).loss.backward()
        mine, theirs = ({name: p.grad for name, p in each.named_parameters()} for each in (model, twin))
        shared = [name for name in theirs if mine.get(name) is not None]
        assert any("norm" in name or "ln_" in name for name in shared)
        mine, theirs = (torch.cat([gradients[name].flatten() for name in shared]) for gradients in (mine, theirs))
        assert distance(mine, theirs) < 1e-5


def test_layers_made_of_parts_are_trained_like_any_others(one):
    assert all(p.requires_grad for p in open_folder(one.folder).parameters() if p.numel())


def test_train_and_eval_reach_every_layer_and_change_no_logits(one):
    model = copy.deepcopy(one.model)
    expected = logits(model)
    for mode in (True, False):
        model.train(mode)
        assert all(module.training == mode for module in model.modules())
        assert torch.equal(logits(model), expected)


def test_a_deep_copy_is_equal_and_its_own(case, tmp_path):
    copied = copy.deepcopy(case.model)
    assert_same_tensors(copied, case.model)
    copied.save_pretrained(tmp_path)
    saved = tmp_path / "model.safetensors"
    assert saved.read_bytes() == (case.folder / "model.safetensors").read_bytes()
    before = logits(case.model)
    with torch.no_grad():
        for tensor in copied.state_dict().values():
            tensor.zero_()
    assert torch.equal(logits(case.model), before)


# ---- text


def generate(model: PreTrainedModel, **options) -> Tensor:
    return model.generate(IDS, do_sample=False, max_new_tokens=12, pad_token_id=0, eos_token_id=None, **options)


def test_generation_is_that_of_the_dense_model_with_and_without_a_cache(case):
    expected = generate(case.dense, use_cache=False)
    assert expected.shape == (2, 29)
    for model in (case.model, open_folder(case.folder)):
        for cached in (True, False):
            assert torch.equal(generate(model, use_cache=cached), expected)


def test_beam_search_is_that_of_the_dense_model(one):
    assert torch.equal(generate(one.model, num_beams=3), generate(one.dense, num_beams=3))


def test_a_pipeline_writes_what_the_dense_model_writes(one, tiny_tokenizer_dir, tmp_path):
    folders = [tmp_path / "factored", tmp_path / "dense"]
    texts = []
    for model, folder in zip((one.model, one.dense), folders, strict=True):
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(tiny_tokenizer_dir).save_pretrained(folder)
        write = pipeline("text-generation", model=str(folder))
        texts.append([write(text, max_new_tokens=10, do_sample=False)[0]["generated_text"] for text in ("the", "rank")])
    assert texts[0] == texts[1]
    assert texts[0][0].startswith("the") and len(texts[0][0]) > 6


def test_the_harness_scores_it_as_plain_torch_does(one, tiny_tokenizer_dir):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    pairs = [("the matrix is", " low rank"), ("sparse", " and small"), ("a text of many words", " end")]
    opened = open_folder(one.folder)
    scorer = HFLM(pretrained=opened, tokenizer=tokenizer, batch_size=2)
    requests = [Instance("loglikelihood", {}, pair, k) for k, pair in enumerate(pairs)]
    found = scorer.loglikelihood(requests, disable_tqdm=True)
    for (prompt, continuation), (score, greedy) in zip(pairs, found, strict=True):
        start, ids = (tokenizer(text).input_ids for text in (prompt, prompt + continuation))
        for model in (opened, one.dense):
            with torch.no_grad():
                chances = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(start) - 1, len(ids) - 1)
            assert score == pytest.approx(sum(chances[k, ids[k + 1]].item() for k in places), rel=1e-5)
            assert greedy == all(chances[k].argmax().item() == ids[k + 1] for k in places)


# ---- files


def read_positions(packed: Tensor, count: int, universe: int) -> list[int]:
    """Decode Elias–Fano by definition: the k-th 1 of the high part stands at the k-th integer's high bits plus k."""
    if not count:
        return []
    low = max(0, math.floor(math.log2(universe // count)))
    bits = "".join(f"{byte:08b}"[::-1] for byte in packed.tolist())
    split = 8 * math.ceil((count + (universe >> low) + 1) / 8)
    ones = [place for place, bit in enumerate(bits[:split]) if bit == "1"]
    rest = [bits[split + k * low : split + (k + 1) * low] for k in range(count)]
    return [((one - k) << low) + int("0" + tail[::-1], 2) for k, (one, tail) in enumerate(zip(ones, rest, strict=True))]


def test_a_file_alone_holds_the_parts_of_every_block_and_all_else_dense(case):
    tensors = load_file(case.folder / "model.safetensors")
    for name in slr_modules(case.model):
        slr = case.blocks[name]
        # Conv1D keeps its weight as in×out; the file holds out×in for every layer.
        turned = name.startswith("transformer.h.")
        U, V, values, packed = (tensors.pop(f"{name}.{key}") for key in ("U", "V", "S_values", "S_packed"))
        # The dense weight that transformers looks for must be one that it cannot load, so it is empty.
        assert tensors.pop(f"{name}.weight").numel() == 0
        n, m = slr.shape[::-1] if turned else slr.shape
        assert (U.shape, V.shape, values.shape) == ((n, slr.rank), (slr.rank, m), (slr.nnz,))
        assert (U.dtype, V.dtype, values.dtype, packed.dtype) == (*[torch.float32] * 3, torch.uint8)
        W = U.double() @ V.double()
        places = read_positions(packed, slr.nnz, n * m)
        assert len(places) == len(values)
        for place, value in zip(places, values.tolist(), strict=True):
            W[divmod(place, m)] += value
        torch.testing.assert_close(W, dense(slr).mT if turned else dense(slr), rtol=1e-12, atol=1e-12)
    rest = {key: value for key, value in case.dense.state_dict().items() if key.rpartition(".")[0] not in case.blocks}
    tied = {"lm_head.weight"} if case.dense.config.tie_word_embeddings else set()
    embedding = {f"{name}.weight" for name in case.blocks if name not in slr_modules(case.model)}
    assert tensors.keys() == (rest.keys() - tied) | embedding | {
        f"{name}.bias" for name in slr_modules(case.model) if f"{name}.bias" in case.dense.state_dict()
    }
    for key in tensors.keys() - embedding:
        assert torch.equal(tensors[key], case.dense.state_dict()[key]), key


def test_a_file_is_no_larger_than_arithmetic_says(one):
    file = one.folder / "model.safetensors"
    (header,) = struct.unpack("<Q", file.read_bytes()[:8])
    others = sum(p.numel() for name, p in one.dense.named_parameters() if name.rpartition(".")[0] not in one.blocks)
    others += sum(p.numel() for name, p in one.dense.named_parameters() if "_proj.bias" in name)
    allowed = 4 * others
    for slr in one.blocks.values():
        n, m = slr.shape
        # Elias–Fano takes at most 2 + log2(n·m/nnz) bits an entry; its two parts end at whole bytes.
        bits = slr.nnz * (2 + math.log2(n * m / slr.nnz)) if slr.nnz else 0
        allowed += 4 * (slr.rank * (n + m) + slr.nnz) + bits / 8 + 3
    assert 0.99 * allowed < file.stat().st_size - 8 - header <= allowed
    assert header < 200 * (4 * len(one.blocks) + len(list(one.dense.parameters())))


def test_in_memory_a_block_takes_its_floats_and_32_bit_indices(case):
    for name, module in slr_modules(open_folder(case.folder)).items():
        n, m = module.shape
        assert (module.S_columns.dtype, module.S_starts.dtype) == (torch.int32, torch.int32)
        slr = case.blocks[name]
        held = [*module.parameters(), *module.buffers()]
        bias = 0 if getattr(module, "bias", None) is None else 4 * n
        expected = 4 * (slr.rank * (n + m) + slr.nnz) + 4 * (slr.nnz + n + 1) + bias
        assert sum(tensor.numel() * tensor.element_size() for tensor in held) == expected
        assert expected < 4 * n * m + bias


# A factored 32×32 block of rank 3 takes 3·64 floats, a float and an int32 for every entry, and 33 int32 for the rows.
@pytest.mark.parametrize(
    ("dtype", "nnz", "in_parts"),
    [
        (torch.float32, 399, True),
        (torch.float32, 400, False),
        (torch.bfloat16, 255, True),
        (torch.bfloat16, 256, False),
    ],
)
def test_a_block_is_held_and_saved_in_the_form_that_takes_less_memory(dtype, nnz, in_parts, tmp_path):
    slr = whole_numbers(nnz)
    model = factor(llama().to(dtype), {Q: slr, "lm_head": parts(512, 32, 3, 500)})
    model.save_pretrained(tmp_path)
    opened = open_folder(tmp_path)
    assert set(slr_modules(opened)) == ({Q, "lm_head"} if in_parts else {"lm_head"})
    for each in (model, opened):
        assert isinstance(each.get_submodule(Q), SlrLinear if in_parts else nn.Linear)
        weight = each.get_submodule(Q).weight.detach()
        assert weight.dtype == dtype
        assert torch.equal(weight.double(), dense(slr))


def test_a_folder_in_several_files_holds_and_computes_the_same(case, tmp_path):
    case.model.save_pretrained(tmp_path, max_shard_size="30KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1 and not (tmp_path / "model.safetensors").exists()
    tensors = {key: value for shard in shards for key, value in load_file(shard).items()}
    whole = load_file(case.folder / "model.safetensors")
    assert tensors.keys() == whole.keys()
    assert all(torch.equal(tensors[key], whole[key]) for key in whole)
    assert torch.equal(logits(open_folder(tmp_path)), logits(case.model))


# ---- damaged folders


def change_config(change):
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config["quantization_config"])
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def change_tensors(change):
    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return apply


def truncate(kept: float):
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])

    return apply


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (
            change_config(lambda entry: entry.update(format=7)),
            "has format 7, this version reads 1 or 2; use the version",
        ),
        (
            change_config(lambda entry: entry["blocks"].update({Q: [4, 102]})),
            f"{Q}.U is 32×3 of F32, where config.json wants 32×4",
        ),
        (
            change_config(lambda entry: entry["blocks"].update({Q: [3, 103]})),
            f"{Q}.S_values is 102 of F32, where config.json wants 103",
        ),
        (change_config(lambda entry: entry["blocks"].pop(Q)), "does not fit its config.json"),
        (truncate(0.9), "is no whole safetensors file"),
        (truncate(0.01), "is no whole safetensors file"),
        (truncate(0), "is no whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
        (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
        (change_tensors(lambda tensors: tensors.pop(f"{Q}.U")), f"the files lack {Q}.U"),
        (change_tensors(lambda tensors: tensors.pop(f"{Q}.V")), f"the files lack {Q}.V"),
        (change_tensors(lambda tensors: tensors.pop(f"{Q}.S_values")), f"the files lack {Q}.S_values"),
        (change_tensors(lambda tensors: tensors.pop(f"{Q}.S_packed")), f"the files lack {Q}.S_packed"),
        (change_tensors(lambda tensors: tensors.pop("model.norm.weight")), "missing_keys: model.norm.weight"),
        (change_tensors(lambda tensors: tensors.update(other=torch.ones(2))), "unexpected_keys: other"),
        (change_tensors(lambda tensors: tensors[f"{Q}.S_packed"].zero_()), "the bytes hold 0 integers, not 102"),
        (change_tensors(lambda tensors: tensors[f"{Q}.S_packed"].fill_(255)), "the bytes hold"),
    ],
)
def test_a_damaged_folder_is_refused_in_a_sentence(one, tmp_path, damage, what):
    folder = tmp_path / "model"
    shutil.copytree(one.folder, folder)
    damage(folder)
    with pytest.raises(UserError, match=what) as caught:
        load_model(folder, torch.float32)
    assert "\n" not in str(caught.value)
    assert re.search("; (give a|use the version)", str(caught.value))


def test_a_folder_that_lacks_one_of_its_files_is_refused_in_a_sentence(one, tmp_path):
    one.model.save_pretrained(tmp_path, max_shard_size="30KB")
    max(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"safetensors is missing; give a whole") as caught:
        load_model(tmp_path, torch.float32)
    assert "\n" not in str(caught.value)


def test_the_model_without_its_head_opens_too(one):
    ids = torch.randint(0, one.model.config.vocab_size, (2, 7))
    base = AutoModel.from_pretrained(one.folder)
    assert slr_modules(base)
    with torch.no_grad():
        assert torch.equal(base(ids).last_hidden_state, one.model.base_model(ids).last_hidden_state)
