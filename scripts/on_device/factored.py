"""Checks of models with U·V + S in their blocks: logits against the dense model in float64, also by a CUDA graph."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, StaticCache

from salaad.config.methods import SalaadConfig
from salaad.factored.fixed_size import factor
from salaad.factored.slr import Slr
from salaad.model.roles import find_blocks
from scripts.on_device.check import Check, not_made, relative

DTYPES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # largest relative error of a model's logits
VOCABULARY = 256
PROMPT, LENGTH = 4, 8  # tokens before the first that is decoded, and all of them

Step = Callable[[], Tensor]


@torch.no_grad()
def layers(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield checks of the logits of a model with U·V + S in its blocks against the dense model in float64."""
    small, exact = models(tiny)
    for dtype, limit in DTYPES.items():
        there = small.to(device, dtype)
        for rows, length in ((1, 1), (1, 7), (2, 64)):
            ids = torch.randint(0, VOCABULARY, (rows, length))
            wanted = exact(ids).logits
            error = relative(there(ids.to(device)).logits, wanted, wanted)
            yield Check(f"factored model, {rows}×{length}, {dtype}", error, limit)


def models(tiny: bool) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model whose embedding and projections are U·V + S, and the same model, dense, in float64."""
    width, layers = (16, 1) if tiny else (512, 2)
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width - 8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model, parts = LlamaForCausalLM(config).eval().requires_grad_(False), {}
    for name, X in find_blocks(model, SalaadConfig(embedding=True)).items():
        S = torch.where(torch.rand_like(X) < 0.05, X, 0)
        U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
        rank = len(sigma) // 4
        parts[name] = Slr.from_factors(U[:, :rank], sigma[:rank, None] * Vh[:rank], S)
        X.copy_(parts[name].dense())
    exact = LlamaForCausalLM(config).eval().double()
    exact.load_state_dict(model.state_dict())
    return factor(model, parts), exact


def graphs(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Yield checks of a decoding step captured in a CUDA graph and replayed, against the dense float64 model."""
    if device.type == "cpu":
        yield not_made("decoding in a CUDA graph", "it takes a GPU")
        return
    yield from decoding(device, tiny, captured)


@torch.no_grad()
def decoding(device: torch.device, tiny: bool, capture: Callable[[Step], Step]) -> Iterator[Check]:
    """Yield checks of the logits of tokens decoded one by one, with the function that `capture` makes of a step.

    A step reads its token from a fixed tensor, and its cache counts the tokens itself.
    """
    small, exact = models(tiny)
    ids = torch.randint(0, VOCABULARY, (1, LENGTH))
    wanted = exact(ids).logits[:, PROMPT:]
    for dtype, limit in DTYPES.items():
        there, token = small.to(device, dtype), ids[:, :1].to(device, copy=True)
        cache = StaticCache(config=there.config, max_cache_len=LENGTH)
        step = capture(lambda there=there, token=token, cache=cache: there(token, past_key_values=cache).logits)
        cache.reset()  # capturing has run the step before
        there(ids[:, :PROMPT].to(device), past_key_values=cache)
        found = []
        for place in range(PROMPT, LENGTH):
            token.copy_(ids[:, place : place + 1])
            found.append(step().clone())
        yield Check(f"decoding in a CUDA graph, {dtype}", relative(torch.cat(found, 1), wanted, wanted), limit)


def captured(step: Step) -> Step:
    """Return a function that replays `step` as a CUDA graph; `step` runs first, since its first call compiles."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay
