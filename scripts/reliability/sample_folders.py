"""Small folders of random weights, one of each form that the programs open: the fuzz damages copies of them."""

from functools import cache
from math import prod
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from salaad.common.files import write_checksums, write_json
from salaad.compression.opening import open_deployment
from salaad.config.methods import SalaadConfig
from salaad.config.run import RunConfig
from salaad.energy_allocation import UnitQueue
from salaad.factored.any_size import save_elastic
from salaad.factored.elastic_file import SizeRange
from salaad.factored.fixed_size import factor
from salaad.factored.slr import Slr
from salaad.methods.salaad.plugin import Salaad
from salaad.methods.salaad.storage import index_of, save_surrogates
from salaad.runs.model_on_disk import RECORD, ModelOnDisk

WORDS = ("a", "b", "c")


def make_folders(root: Path) -> dict[str, Path]:
    """Write small folders of random weights, one of each form that the programs open; return kind → folder."""
    makers = {
        "dense": lambda folder: llama().save_pretrained(folder),
        "factored": lambda folder: factor(llama(), parts_of(llama())).save_pretrained(folder),
        "shards": lambda folder: factor(llama(), parts_of(llama())).save_pretrained(folder, max_shard_size="6KB"),
        "tied": lambda folder: factor(gpt2(), parts_of(gpt2())).save_pretrained(folder),
        "elastic": lambda folder: make_elastic(llama(), folder),
        "elastic-tied": lambda folder: make_elastic(gpt2(), folder),
    }
    folders = {}
    for kind, make in makers.items():
        folders[kind] = root / kind
        make(folders[kind])
        tokenizer().save_pretrained(folders[kind])
        write_json({"parameters": [1000, 900], "run": RunConfig().to_dict()}, folders[kind] / RECORD)
        write_checksums(folders[kind])
    folders["run"] = root / "run"
    make_run(folders["run"])
    return folders


def llama() -> LlamaForCausalLM:
    """Return a LLaMA of one layer of width 16, with the same weights every time."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=40, max_position_embeddings=32, **sizes)).eval()


def gpt2() -> GPT2LMHeadModel:
    """Return a GPT-2 of one layer whose LM head is tied to the embedding."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=32, n_embd=16, n_layer=1, n_head=2)).eval()


def parts_of(model: PreTrainedModel) -> dict[str, Slr]:
    """Return L + S of some matrices of a model, small enough to be stored in parts."""
    ends = ("q_proj", "up_proj", "down_proj", "embed_tokens", "c_attn", "c_fc", "wte")
    chosen = {name: module.weight.detach() for name, module in model.named_modules() if name.endswith(ends)}
    largest = {name: W.abs() >= W.abs().flatten().sort(descending=True).values[12] for name, W in chosen.items()}
    return {name: Slr.from_parts(W, W * largest[name], 3) for name, W in chosen.items()}


def make_elastic(model: PreTrainedModel, folder: Path) -> None:
    """Write an elastic folder with two ranges of sizes, as compress.py --elastic does."""
    parts = parts_of(model)
    queue = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()})
    fixed = sum(p.numel() for p in model.parameters()) - sum(prod(slr.shape) for slr in parts.values())
    few = queue.first(queue.parameters // 2)
    small = {name: parts[name].cut(*kept) for name, kept in few.units().items()}
    vectors = {name: p.detach() for name, p in model.named_parameters() if p.dim() == 1}
    below = fixed + few.parameters + 1
    save_elastic(model, [SizeRange(parts, queue), SizeRange(small, few, vectors, below)], fixed, folder)


def make_run(folder: Path) -> None:
    """Write a run with one checkpoint, and read its L + S once, so that they are in the cache."""
    checkpoint, model = folder / "checkpoints" / "step-0000001", llama()
    for part in ("model", "surrogate", "state"):
        (checkpoint / part).mkdir(parents=True)
    model.save_pretrained(checkpoint / "model")
    tokenizer().save_pretrained(checkpoint / "model")
    salaad = Salaad(model, SalaadConfig(rank_ratio=0.2))
    save_surrogates(salaad.surrogates, checkpoint / "surrogate", index_of(salaad.surrogates))
    trainer = {"step": 1, "config": RunConfig(sections={"salaad": SalaadConfig(rank_ratio=0.2)}).to_dict()}
    write_json(trainer, checkpoint / "state" / "trainer.json")
    write_checksums(checkpoint)
    (folder / "checkpoints" / "latest").write_text(f"{checkpoint.name}\n")
    assert open_deployment(ModelOnDisk.open(folder)).parts


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that has one token for each of WORDS."""
    ids = {word: index for index, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    backend = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
