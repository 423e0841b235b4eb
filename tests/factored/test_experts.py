"""Experts in 3-D parameters as blocks, from the penalty to a deployed layer, against dense computations."""

import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from salaad import Salaad, SalaadConfig
from salaad.common.errors import UserError
from salaad.factored.experts import ExpertStack, close_stacks, open_stacks, stacks
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.layers import SlrLinear
from salaad.factored.replacement import outline_of
from salaad.factored.slr import Slr
from salaad.factored.smaller_form import form_for_file
from salaad.methods.salaad.storage import read_index
from salaad.model.roles import find_blocks
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, evaluate, rows_of
from tests.helpers.families import EXPERTS, IDS, model_of
from tests.helpers.models import open_folder
from tests.helpers.slr_weights import distance, gaussian

pytestmark = pytest.mark.usefixtures("own_caches")
FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "llama4_text")
SETTINGS = {"every": 1, "rank_ratio": 0.2, "density": 0.05, "gamma": 0.9}


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def parts_of(model: PreTrainedModel, some: slice = slice(None), density: float = 0.05) -> dict[str, Slr]:
    """Return L + S of the blocks: the best approximation of rank 3, and the largest entries of the residual."""
    found = {}
    for name, X in list(find_blocks(model, SalaadConfig()).items())[some]:
        U, sigma, V = torch.linalg.svd(X.detach(), full_matrices=False)
        L = U[:, :3] * sigma[:3] @ V[:3]
        R = X.detach() - L
        found[name] = Slr.from_parts(L, torch.where(R.abs() > R.abs().quantile(1 - density), R, 0.0), 3)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_the_penalty_joins_the_gradient_of_every_expert(family):
    model = model_of(family).train()
    twin = copy.deepcopy(model)
    salaad = Salaad(model, SalaadConfig(**SETTINGS, rho=0.1))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01)
        for p, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            theirs.copy_(p)
    model(input_ids=IDS, labels=IDS).loss.backward()
    # The loss with the penalty, by autograd.
    loss = twin(input_ids=IDS, labels=IDS).loss
    theirs = dict(twin.named_parameters())
    for name, surrogate in salaad.surrogates.items():
        holder, _, index = name.rpartition(".")
        X = theirs[holder][int(index)] if holder in theirs else theirs[f"{name}.weight"]
        loss = loss + 0.05 * (X - surrogate.T).square().sum()
    loss.backward()
    assert any(p.ndim == 3 for p in model.parameters())
    for (name, p), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_taken_apart_computes_as_before_and_is_put_together_again(family):
    model = model_of(family)
    before, expected = {name: p.detach().clone() for name, p in model.named_parameters()}, logits(model)
    open_stacks(model, find_blocks(model, SalaadConfig()))
    assert len(stacks(model)) == sum(p.ndim == 3 for p in before.values())
    assert not any(p.ndim == 3 for p in model.parameters())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    close_stacks(model)
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], p) for name, p in before.items())


@pytest.mark.parametrize("some", [slice(None), slice(None, None, 3)], ids=["all blocks", "every third"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_with_experts_in_parts_is_written_opened_written_again_and_made_dense(family, some, tmp_path):
    model = model_of(family)
    blocks, twin = parts_of(model, some), copy.deepcopy(model)
    with torch.no_grad():
        for name, X in find_blocks(twin, SalaadConfig()).items():
            if name in blocks:
                X.copy_(blocks[name].dense())
    expected = logits(twin)
    factor(model, blocks)
    in_parts = [name for name in slr_modules(model) if "experts." in name]
    assert in_parts
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-5)
    folder = tmp_path / "first"
    model.save_pretrained(folder)
    for again in (tmp_path / "second", tmp_path / "third"):
        opened = open_folder(folder)
        assert slr_modules(opened).keys() == slr_modules(model).keys()
        assert torch.equal(logits(opened), logits(model))
        folder = again
        opened.save_pretrained(folder)
    dense = open_folder(folder).dequantize()
    assert {n: p.shape for n, p in dense.named_parameters()} == {n: p.shape for n, p in twin.named_parameters()}
    dense.save_pretrained(tmp_path / "dense")
    torch.testing.assert_close(logits(open_folder(tmp_path / "dense")), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", ["experts", "down_proj", "experts.1"])
@pytest.mark.parametrize("family", FAMILIES)
def test_experts_that_open_dense_are_the_weights_of_an_ordinary_model(family, which, tmp_path):
    """Experts with many entries are stored factored and opened dense: all, a projection's, or one of every stack."""
    model = model_of(family)
    blocks = parts_of(model) | {k: slr for k, slr in parts_of(model, density=0.55).items() if _is_of(k, which)}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, X in find_blocks(twin, SalaadConfig()).items():
            X.copy_(blocks[name].dense())
    expected = logits(twin)
    with form_for_file("float"):
        factor(model, blocks)
    assert slr_modules(model).keys() == blocks.keys()
    folder = tmp_path / "first"
    model.save_pretrained(folder)
    for again in (tmp_path / "second", tmp_path / "third"):
        opened = open_folder(folder)
        in_parts = slr_modules(opened).keys()
        assert {name for name in blocks if "experts" in name and _is_of(name, which)}.isdisjoint(in_parts)
        if which != "experts.1":  # a stack whose experts are all dense is a parameter again
            assert all(_stack_of(name) not in stacks(opened) for name in blocks if _is_of(name, which))
        computing = "eager" if stacks(opened) else twin.config._experts_implementation
        assert opened.config._experts_implementation == computing
        torch.testing.assert_close(logits(opened), expected, rtol=1e-4, atol=1e-5)
        folder = again
        opened.save_pretrained(folder)
    dense = open_folder(folder).dequantize()
    assert {n: p.shape for n, p in dense.named_parameters()} == {n: p.shape for n, p in twin.named_parameters()}
    torch.testing.assert_close(logits(dense), expected, rtol=1e-4, atol=1e-5)
    assert dense.config._experts_implementation == twin.config._experts_implementation


def _is_of(name: str, which: str) -> bool:
    """Return whether a block is an expert that `which` names: any, those of a projection, or those of a number."""
    *_, kind, index = ("", *name.split("."))
    return "experts." in name and index.isdigit() and which in ("experts", kind, f"experts.{index}")


def _stack_of(name: str) -> str:
    return name.rpartition(".")[0]


@pytest.mark.parametrize("dtype", ["int8", "float32", "dense"])
def test_a_folder_of_experts_that_opens_dense_is_stored_anew_in_any_form(tiny_tokenizer_dir, tmp_path, dtype):
    source = model_of("mixtral", vocab_size=512)
    shutil.copytree(tiny_tokenizer_dir, tmp_path / "source")
    source.save_pretrained(tmp_path / "source")
    compress(tmp_path / "source", tmp_path / "made", rpca=True, budget="0.8", dtype="float32")
    compress(tmp_path / "source", tmp_path / "sizes", rpca=True, elastic=True, dtype="float32")
    how = {"format": "dense", "dtype": "float32"} if dtype == "dense" else {"dtype": dtype}
    compress(tmp_path / "made", tmp_path / "anew", **how)
    compress(tmp_path / "sizes", tmp_path / "of_size", budget="0.8", **how)
    for before, after in (
        (open_folder(tmp_path / "made"), open_folder(tmp_path / "anew", dtype=torch.float32)),
        (open_folder(tmp_path / "sizes", budget="0.8"), open_folder(tmp_path / "of_size", dtype=torch.float32)),
    ):
        allowed = 0.05 if dtype == "int8" else 1e-5
        assert distance(logits(after), logits(before)) < allowed


def test_a_checkpoint_with_experts_is_cut_at_every_size_and_measured(tiny_tokenizer_dir, text_files, tmp_path):
    from salaad.data.tokenizer import load_tokenizer

    torch.manual_seed(0)
    model = model_of("mixtral", vocab_size=512).train()
    tokenizer = load_tokenizer(str(tiny_tokenizer_dir))
    with Salaad(model, SalaadConfig(**SETTINGS)) as salaad:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            model(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            salaad.step()
        salaad.save(tmp_path / "saved", tokenizer)
    saved = ModelOnDisk.open(tmp_path / "saved")
    assert sum("experts" in name for name in read_index(saved.surrogate)) == 2 * 4 * 2
    small, sizes = tmp_path / "small", tmp_path / "sizes"
    compress(tmp_path / "saved", small, budget="0.6", dtype="float32")
    opened = open_folder(small)
    assert any("experts" in name for name in slr_modules(opened))
    with safe_open(small / "model.safetensors", framework="pt") as file:
        assert any(".experts.down_proj.2.U" in key for key in file.keys())  # noqa: SIM118
    compress(tmp_path / "saved", sizes, elastic=True, dtype="float32")
    whole, part = open_folder(sizes), open_folder(sizes, budget="0.6")
    assert sum(p.numel() for p in part.parameters()) < sum(p.numel() for p in whole.parameters())
    data = (f"--data.validation_files={text_files['validation']}", f"--data.files={text_files['train'][0]}")
    common = ("--data.source=files", *data, "--data.sequence_length=16", "--tokens=1K", "--dtype=float32")
    evaluate("perplexity", tmp_path / "saved", tmp_path / "e", *common, "--variants=X,L+S,0.6@energy,0.6@0.5")
    perplexities = {row["variant"]: row["perplexity"] for row in rows_of(tmp_path / "e", "perplexity")}
    assert len(perplexities) == 4 and all(value > 1 for value in perplexities.values())


def test_experts_that_a_model_uses_by_methods_of_tensors_compute_in_parts(tmp_path):
    model = model_of("inkling_text", **{"head_dim": 8, "num_experts": 4, "n_routed_experts": 4, **EXPERTS})
    blocks = {name: slr for name, slr in parts_of(model).items() if "shared_experts" in name}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, X in find_blocks(twin, SalaadConfig()).items():
            if name in blocks:
                X.copy_(blocks[name].dense())
    factor(model, blocks).save_pretrained(tmp_path)
    opened = open_folder(tmp_path)
    assert len(stacks(opened)) and slr_modules(opened).keys() == blocks.keys()
    for each in (model, opened):
        torch.testing.assert_close(logits(each), logits(twin), rtol=1e-4, atol=1e-5)


# ---- the stack itself


def test_a_stack_multiplies_by_the_layer_and_is_dense_for_all_else():
    weights = nn.Parameter(gaussian(3, 5, 4))
    stack, x = ExpertStack(weights), gaussian(2, 4)
    layer = SlrLinear.from_slr(Slr.from_parts(*(weights.detach()[1] * k for k in (1, 0)), 2))
    stack.set_submodule("1", layer)
    assert stack.shape == (3, 5, 4) and len(stack) == 3
    assert torch.equal(F.linear(x, stack[torch.tensor(1)]), layer(x))
    expected = torch.stack([weights[0], layer.weight + 0, weights[2]])
    torch.testing.assert_close(F.linear(x, stack[1], gaussian(5)), x @ expected[1].mT + gaussian(5))
    assert stack[1].shape == (5, 4)
    assert torch.equal(F.linear(x, stack[-2]), layer(x)) and len([*stack]) == 3
    with pytest.raises(IndexError):
        stack[3]
    torch.testing.assert_close(torch.bmm(gaussian(3, 2, 5), stack), torch.bmm(gaussian(3, 2, 5), expected))
    torch.testing.assert_close(x @ stack[2].mT, x @ expected[2].mT)
    torch.testing.assert_close(torch.matmul(gaussian(2, 5), stack[1]), gaussian(2, 5) @ expected[1])
    assert distance(stack.dense().double(), expected.double()) < 1e-6
    torch.testing.assert_close(gaussian(3, 2, 4) @ stack.transpose(1, 2), gaussian(3, 2, 4) @ expected.mT)
    assert stack.ndim == 3 and stack.dtype == torch.float32 and not hasattr(stack, "weight")
    assert type(copy.deepcopy(stack)) is ExpertStack


def test_a_router_that_a_pattern_names_is_a_block_that_stays_dense(tmp_path):
    """Mixtral's has another name in transformers' files, where experts are not split."""
    model = model_of("mixtral")
    with Salaad(model, SalaadConfig(**SETTINGS, roles=("q", "re:mlp.gate$"))) as salaad:
        salaad.step()
        salaad.save(tmp_path / "saved")
        parts = {name: Slr.from_parts(s.low_rank(), s.sparse(), s.rank) for name, s in salaad.surrogates.items()}
    for name, slr in parts.items():
        model.get_submodule(name).weight.data.copy_(slr.dense())
    compress(tmp_path / "saved", tmp_path / "made", elastic=True, dtype="float32")
    opened = open_folder(tmp_path / "made")
    torch.testing.assert_close(logits(opened), logits(model), rtol=1e-4, atol=1e-5)
    router = opened.model.layers[0].mlp.gate
    assert len(parts) == 4 and not isinstance(router, SlrLinear)
    with pytest.raises(UserError, match="MixtralTopKRouter is more than a linear layer or a table, and stays dense"):
        outline_of(router, 1, 1)
