"""A small cut model to be fitted to its dense one, and what a fit of it takes."""

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.compression.tuning.tuned_model import TunedModel
from salaad.factored.slr import Slr

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
Q, WTE = "model.layers.1.self_attn.q_proj", "model.embed_tokens"


class NeverAsked:
    """A request to stop that never comes."""

    asked = False


def drawn(n: int, m: int, rank: int, nnz: int) -> Slr:
    """Return a random n×m matrix U·V + S."""
    S = torch.zeros(n * m)
    S[torch.randperm(n * m)[:nnz]] = torch.randn(nnz)
    return Slr.from_parts(torch.randn(n, rank) @ torch.randn(rank, m), S.view(n, m), rank)


def tuned_model(rank: int = 5, **sizes: int) -> TunedModel:
    """Return a LLaMA of random weights, of which the blocks Q and WTE, the head and a norm are trained."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, initializer_range=0.3, **SIZES | sizes)).eval()
    parts = {Q: drawn(16, 16, rank, 30), WTE: drawn(40, 16, 4, 20)}
    others = {"lm_head.weight": model.lm_head.weight, "model.norm.weight": torch.full((16,), 2.0)}
    return TunedModel(model, parts, others)


def ids(rows: int = 3, seed: int = 1) -> Tensor:
    """Return token ids (rows × 9)."""
    return torch.randint(3, 40, (rows, 9), generator=torch.Generator().manual_seed(seed))
