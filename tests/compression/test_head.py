"""Embedding and LM head split in addition to trained L + S, or together with all blocks, against dense weights."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from salaad import Salaad
from salaad.common.errors import UserError
from salaad.common.files import write_checksums
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.split import PostHoc, beside_trained, can_weigh_head, split_names
from salaad.compression.variants import Variant
from salaad.compression.what_to_split import split_of
from salaad.config.commands import CompressOptions
from salaad.config.methods import SalaadConfig
from salaad.factored import SlrEmbedding, SlrLinear
from salaad.model.roles import role_of
from salaad.model.second_moments import SECOND_MOMENTS
from salaad.runs.model_on_disk import ModelOnDisk
from tests.helpers.deploying import compress, evaluate, refused, rows_of
from tests.helpers.models import logits, open_folder
from tests.helpers.training import last_checkpoint

HEAD = "lm_head.weight"
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_hidden_layers": 2}
FIT = {"refine": 3, "dtype": "float32"}
pytestmark = pytest.mark.usefixtures("own_caches")


@pytest.fixture(scope="module")
def sweep(runs, tmp_path_factory) -> tuple[str, list[dict]]:
    """What a sweep over the SALAAD and the full-rank run with --lm_head prints, and the rows that it writes."""
    folder = tmp_path_factory.mktemp("sweep")
    options = {"vanilla": runs / "full_rank", "budgets": "0.5", "kappas": "0.5", "lm_head": True, **FIT}
    return evaluate("sweep", runs / "salaad", folder, **options), rows_of(folder, "sweep")


def test_beside_l_and_s_the_head_is_split_into_parts_that_add_up_to_it(runs, tmp_path):
    for name, options in (("without", {}), ("with", {"lm_head": True})):
        compress(runs / "salaad", tmp_path / name, format="dense", dtype="float32", **options)
    without, beside = (load_file(tmp_path / name / "model.safetensors") for name in ("without", "with"))
    X = load_file(last_checkpoint(runs / "salaad") / "model" / "model.safetensors")[HEAD]
    assert torch.equal(without.pop(HEAD), X)
    torch.testing.assert_close(beside.pop(HEAD), X, rtol=0, atol=2e-3 * float(X.norm()))
    assert all(torch.equal(without[key], beside[key]) for key in without)  # L + S as trained


def test_a_budget_below_the_head_and_all_else_that_is_dense_can_be_had(runs, tmp_path):
    source = ModelOnDisk.open(runs / "salaad")
    sizes = {name: tensor.numel() for name, tensor in source.folder.load(torch.float32).named_parameters()}
    floor = sum(size for name, size in sizes.items() if "norm" in name or name == HEAD)
    arguments = ("compress.py", "--checkpoint", runs / "salaad", "--output", tmp_path / "refused", "--lm_head=false")
    said = refused(*arguments, "--budget", floor - 1)
    assert "is below the floor of" in said and said.endswith(
        " or more, or split the head too (compress.py --lm-head true, evaluate.py BUDGET@energy+head)"
    )
    compress(runs / "salaad", tmp_path / "made", budget=floor // 2, dtype="float32")
    model = open_folder(tmp_path / "made")
    assert isinstance(model.lm_head, SlrLinear)
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    assert floor // 2 - 600 < record["parameters"][1] <= floor // 2  # a unit of the largest block is 544
    dense = model.dequantize(torch.float32)
    torch.testing.assert_close(logits(open_folder(tmp_path / "made")), logits(dense), rtol=1e-4, atol=1e-4)


def test_one_that_is_a_block_already_is_not_split_again(runs, tmp_path):
    for name, options in (("without", {}), ("with", {"embedding": True})):  # the embedding is a block of the run
        compress(runs / "salaad", tmp_path / name, budget="0.7", dtype="float32", **options)
    without, beside = (load_file(tmp_path / name / "model.safetensors") for name in ("without", "with"))
    assert without.keys() == beside.keys()
    assert all(torch.equal(without[key], beside[key]) for key in without)


@pytest.mark.parametrize(
    ("run", "options", "split"),
    [
        ("salaad", {"budget": "0.5"}, True),
        ("salaad", {"budget": "0.5", "lm_head": "false"}, False),
        ("salaad", {"budget": "0.5", "kappa": 0.5}, False),  # the paper's cut leaves the head whole
        ("salaad", {}, False),
        ("salaad", {"budget": "100M"}, False),  # all of L + S fits
        ("full_rank", {"budget": "0.5", "rpca": True}, True),
        ("full_rank", {"budget": "0.5", "godec": True}, False),
        ("full_rank", {"budget": "0.95", "rpca": True, "roles": "q,k"}, False),
        ("without_moments", {"budget": "0.5"}, False),
        ("without_moments", {"budget": "0.5", "calibrate": 4}, True),
    ],
)
def test_unless_told_the_head_is_split_where_energy_can_weigh_it(runs, tmp_path, run, options, split):
    source = runs / run
    if run == "without_moments":
        source = tmp_path / run
        shutil.copytree(last_checkpoint(runs / "salaad"), source)
        (source / "state" / SECOND_MOMENTS).unlink()
        write_checksums(source)
    compress(source, tmp_path / "made", dtype="float32", **({"refine": 0} if "budget" in options else {}), **options)
    record = json.loads((tmp_path / "made" / "compression.json").read_text())
    without = 4 if "roles" in options else 15  # projections of two layers, and the embedding
    assert record["blocks"] == without + split
    assert record["variant"].endswith("@energy+head") == split


def test_an_elastic_folder_with_the_head_opens_at_sizes_that_need_it_cut(runs, tmp_path):
    source = ModelOnDisk.open(runs / "salaad")
    head = source.folder.load(torch.float32).lm_head.weight.numel()
    compress(runs / "salaad", tmp_path / "made", elastic=True, dtype="float32")
    compress(runs / "salaad", tmp_path / "other", elastic=True, lm_head="false", dtype="float32")
    floors = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]["fixed"]
        for name in ("made", "other")
    ]
    assert floors[1] - floors[0] == head
    size = (floors[0] + floors[1]) // 2
    assert isinstance(open_folder(tmp_path / "made", budget=size).lm_head, SlrLinear)


def test_with_rpca_the_head_joins_the_blocks_of_the_run_and_is_fitted_on_text(runs, tmp_path):
    options = {"rpca": True, "budget": "0.12", "dtype": "float32"}
    compress(runs / "full_rank", tmp_path / "cut", **options)
    compress(runs / "full_rank", tmp_path / "fitted", distill="4K", **options)
    models = [open_folder(tmp_path / name) for name in ("cut", "fitted")]
    assert all(isinstance(model.lm_head, SlrLinear) for model in models)
    cut, fitted = (model.dequantize(torch.float32).lm_head.weight for model in models)
    assert not torch.equal(cut, fitted)
    evaluate("perplexity", tmp_path / "fitted", tmp_path, dtype="float32", tokens="2K")
    [row] = rows_of(tmp_path, "perplexity")
    assert 1 < row["perplexity"] < 1e4


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("full_rank", "holds no L and S beside which other weights could be split; add --rpca"),
        ("factored", "is stored in parts already; give the dense model it was made of"),
        ("elastic", "cut as it is, without --lm-head; leave that out"),
    ],
)
def test_nothing_is_split_beside_what_holds_no_l_and_s_of_its_own(runs, tmp_path, kind, words):
    folder = runs / kind
    if kind != "full_rank":
        folder = tmp_path / kind
        compress(runs / "salaad", folder, **({"elastic": True} if kind == "elastic" else {"budget": "0.7"}))
    arguments = ("--checkpoint", folder, "--output", tmp_path / "made", "--budget", "0.7", "--lm_head")
    assert words in refused("compress.py", *arguments)
    assert not (tmp_path / "made").exists()


def test_a_head_that_is_tied_to_the_embedding_is_not_split_beside():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **SIZES))
    with pytest.raises(UserError, match="lm_head of m is tied to another weight and stays dense; leave --lm-head, or"):
        split_names(model, beside_trained(model, {}), {}, "m")


def test_a_tied_head_of_a_model_in_training_is_refused_by_the_name_of_the_argument():
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **SIZES))
    said = "lm_head is True, but LlamaForCausalLM has no LM head, or one that is tied to another weight and stays dense"
    with Salaad(model, SalaadConfig()) as salaad, pytest.raises(UserError, match=f"^{said}; leave it out$"):
        salaad.compress(0.9, lm_head=True)


def test_a_tied_head_is_not_split_with_all_else_either(tmp_path):
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=True, **SIZES))
    model.save_pretrained(tmp_path / "tied")
    arguments = ("--checkpoint", tmp_path / "tied", "--output", tmp_path / "made", "--budget", "0.9", "--rpca")
    said = refused("compress.py", *arguments, "--lm-head")
    assert "has no LM head, or one that is tied to another weight and stays dense; leave --lm-head out" in said
    compress(tmp_path / "tied", tmp_path / "made", "--rpca", budget="0.9")


@pytest.mark.parametrize(
    ("label", "run", "split"), [("SALAAD", "salaad", {}), ("vanilla + RPCA", "full_rank", {"rpca": True})]
)
def test_a_sweep_with_the_head_measures_the_folder_that_compress_writes(sweep, runs, tmp_path, label, run, split):
    compress(runs / run, tmp_path / "made", lm_head=True, budget="0.5", allocation="energy", **FIT, **split)
    evaluate("perplexity", tmp_path / "made", tmp_path, dtype="float32")
    [folder] = rows_of(tmp_path, "perplexity")
    said, rows = sweep
    mine = [row for row in rows if row["label"] == label and row["variant"].endswith("@energy+head")]
    assert [row["perplexity"] for row in mine] == pytest.approx([folder["perplexity"]], rel=1e-5)
    assert [row["parameters"] for row in mine] == [folder["parameters"]]
    assert "energy, refined, head too" in said


def test_perplexity_takes_the_head_too_where_a_variant_says_so(sweep, runs, tmp_path):
    evaluate("perplexity", runs / "salaad", tmp_path, variants="X,0.5@energy,0.5@energy+head", **FIT)
    X, without, beside = rows_of(tmp_path, "perplexity")
    of = {row["variant"]: row["perplexity"] for row in sweep[1] if row["label"] == "SALAAD" and row["refine"]}
    assert beside["perplexity"] == min(of[name] for name in of if name.endswith("+head"))
    assert without["perplexity"] == min(of[name] for name in of if name.endswith("@energy"))
    assert len({row["perplexity"] for row in (X, without, beside)}) == 3


@pytest.mark.parametrize("kappa", [{"kappa": 0.3}, {"allocation": "hpa"}])
def test_by_hpa_too_the_folder_is_the_variant_that_it_names(runs, tmp_path, kappa):
    compress(runs / "salaad", tmp_path / "made", budget="0.5", lm_head=True, dtype="float32", **kappa)
    name = json.loads((tmp_path / "made" / "compression.json").read_text())["variant"]
    evaluate("perplexity", tmp_path / "made", tmp_path / "folder", dtype="float32")
    evaluate("perplexity", runs / "salaad", tmp_path / "cut", dtype="float32", variants=f"{name},{name.split('+')[0]}")
    [[folder], [beside, without]] = [rows_of(tmp_path / place, "perplexity") for place in ("folder", "cut")]
    assert beside["parameters"] == folder["parameters"] != without["parameters"]
    assert beside["perplexity"] == pytest.approx(folder["perplexity"], rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("full_rank", "holds no L and S, so 0.5@energy+head cannot be made of it"),
        ("elastic", "keeps its units in one order, so 0.5@energy+head cannot be cut from it"),
    ],
)
def test_a_variant_with_the_head_needs_l_and_s(runs, tmp_path, kind, words):
    folder = runs / kind
    if kind == "elastic":
        folder = tmp_path / kind
        compress(runs / "salaad", folder, elastic=True)
    arguments = ("perplexity", "--checkpoint", folder, "--output", tmp_path / "made", "--variants", "0.5@energy+head")
    assert words in refused("evaluate.py", *arguments)


def test_energy_weighs_a_head_only_beside_other_matrices_whose_gradients_are_known():
    model, tied = (LlamaForCausalLM(LlamaConfig(vocab_size=40, tie_word_embeddings=t, **SIZES)) for t in (False, True))
    inner = "model.layers.0.mlp.up_proj"
    outer = ["lm_head", "model.embed_tokens"]
    assert can_weigh_head(model, [inner], [inner, *outer])
    assert can_weigh_head(model, [inner, "model.embed_tokens"], [inner, "lm_head"])  # the embedding is a block
    assert not can_weigh_head(model, [inner], [inner, "lm_head"])  # would split an embedding that is not weighed
    assert not can_weigh_head(model, [inner], [inner, "model.embed_tokens"])
    assert not can_weigh_head(model, [inner], outer)  # as after training with galore
    assert not can_weigh_head(model, [inner, "lm_head"], [inner, *outer])  # the head is a block
    assert not can_weigh_head(tied, [inner], [inner, "lm_head"])
    assert not can_weigh_head(model.model, [inner], ["lm_head", inner])  # a model without a head


@pytest.fixture(scope="module")
def both_whole(tmp_path_factory):
    """The folder that a training loop saved with neither embedding nor head among the blocks, and the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES))
    folder, ids = tmp_path_factory.mktemp("both") / "saved", torch.randint(40, (4, 8))
    with Salaad(model, SalaadConfig(every=1)) as salaad:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            salaad.step()
            optimizer.zero_grad()
        salaad.save(folder)
    return folder, model


@pytest.mark.parametrize(
    ("options", "in_parts"),
    [({}, (True, True)), ({"embedding": "false"}, (False, True)), ({"lm_head": "false"}, (False, False))],
)
def test_where_the_head_is_split_so_is_an_embedding_that_is_no_block(both_whole, tmp_path, options, in_parts):
    folder, model = both_whole
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    left = sum(n for name, n in sizes.items() if "norm" in name)
    kept = {"embed_tokens": in_parts[0], "lm_head": in_parts[1]}
    floor = left + sum(n for name, n in sizes.items() if any(word in name for word, parts in kept.items() if not parts))
    compress(folder, tmp_path / "made", budget=floor + 200, dtype="float32", **options)
    made = open_folder(tmp_path / "made")
    assert (isinstance(made.model.embed_tokens, SlrEmbedding), isinstance(made.lm_head, SlrLinear)) == in_parts
    if not in_parts[0]:
        assert torch.equal(made.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_of_an_embedding_that_is_no_block_all_of_l_and_s_is_the_embedding(both_whole, tmp_path):
    folder, model = both_whole
    compress(folder, tmp_path / "made", "--embedding", "--lm_head", format="dense", dtype="float32")
    made = load_file(tmp_path / "made" / "model.safetensors")
    for name in (HEAD, "model.embed_tokens.weight"):
        X = model.state_dict()[name]
        torch.testing.assert_close(made[name], X, rtol=0, atol=2e-3 * float(X.norm()))


@pytest.mark.parametrize(("options", "outer"), [({}, 2), ({"embedding": "false"}, 1), ({"lm_head": "false"}, 1)])
def test_an_option_holds_against_the_blocks_of_the_run(runs, tmp_path, options, outer):
    options = {"rpca": True, "budget": "0.9", "dtype": "float32", "refine": 0, **options}
    compress(runs / "full_rank", tmp_path / "made", **options)
    assert json.loads((tmp_path / "made" / "compression.json").read_text())["blocks"] == 14 + outer


@pytest.mark.parametrize(
    ("settings", "options", "outer", "projections"),
    [
        ({"lm_head": True}, {"lm_head": False}, {"embedding"}, 14),
        ({"roles": ["q", "lm_head"], "embedding": False}, {"lm_head": False}, set(), 2),
        ({"roles": ["q", "embedding"], "embedding": False}, {"embedding": False}, set(), 2),
        ({"roles": ["q"], "lm_head": True, "embedding": False}, {"embedding": True}, {"embedding", "lm_head"}, 2),
        ({"lm_head": True}, {"roles": ("q",)}, set(), 2),
    ],
)
def test_the_blocks_of_the_run_stay_apart_from_what_an_option_says(runs, settings, options, outer, projections):
    source = ModelOnDisk.open(runs / "full_rank")
    source = replace(source, run=source.run | {"salaad": source.run["salaad"] | settings | {"gamma": 0.875}})
    split = split_of(source, CompressOptions(checkpoint="run", output="made", rpca=True, **options))
    names = split_names(source.folder.outline, split, {}, "run")
    assert {role_of(name) for name in names if "layers" not in name} == outer
    assert (sum("layers" in name for name in names), split.blocks.gamma) == (projections, 0.875)


def test_what_would_leave_nothing_or_a_trained_block_out_is_refused(runs, tmp_path):
    arguments = ("compress.py", "--output", tmp_path / "made", "--budget", "0.7", "--checkpoint")
    said = refused(*arguments, runs / "salaad", "--embedding", "false")
    assert "were trained, so --embedding false cannot leave it out; leave that out, or add --rpca" in said
    said = refused(*arguments, runs / "full_rank", "--rpca", "--roles", "lm_head", "--lm-head", "false")
    assert "only the lm_head would be split, and --lm-head false leaves it out" in said


def test_an_embedding_that_does_more_than_look_rows_up_is_not_split_beside():
    class Scaled(torch.nn.Embedding):
        def forward(self, ids):
            return 4 * super().forward(ids)

    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **SIZES))
    assert split_names(model, beside_trained(model, {}), {}, "m") == ["model.embed_tokens", "lm_head"]
    model.model.embed_tokens = Scaled(40, 16)
    assert split_names(model, beside_trained(model, {}), {}, "m") == ["lm_head"]


def test_a_rival_that_is_split_with_the_head_has_its_embedding_split_too(runs):
    rival = CheckpointDeployment(ModelOnDisk.open(runs / "full_rank"), PostHoc(SalaadConfig()))
    assert "model.embed_tokens" not in rival.shapes
    split = rival.of(Variant("0.5@energy+head", 1000, head=True)).shapes
    assert split.keys() - rival.shapes.keys() == {"model.embed_tokens", "lm_head"}
