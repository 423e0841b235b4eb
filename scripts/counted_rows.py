"""The rows of `count_reads.py` that every checkout of this project can count: steps, forward passes, blocks one by one.

`count_reads.py` runs this module here, and for another checkout with the modules of that checkout. So only modules that
both checkouts have are imported, apart from the counter itself.
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from salaad.common.files import read_json
from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.config.run import RunConfig
from salaad.factored import cpu_kernels
from salaad.methods.optimizer import step_unless
from salaad.methods.registry import method_of
from salaad.methods.salaad.surrogate import Surrogate
from salaad.model.build import model_source
from salaad.model.loss import SummedLoss
from salaad.spectral import threshold
from salaad.training.gradients import Gradients
from scripts.bench_admm import SPECTRA, draw
from scripts.bench_inference import random_models
from scripts.host_reads import HostReads

Shapes = Sequence[tuple[int, int]]
Counts = dict[str, int]
SHAPES = [(256, 256)] * 4 + [(688, 256)] * 4 + [(256, 688)] * 2
# The blocks of 350m with a thousandth of their entries: the number of operations does not depend on the size.
MANY = [(32, 32)] * 96 + [(86, 32)] * 48 + [(32, 86)] * 24
LIKE, PHASE = "model.layers.2.mlp.gate_proj", "late"  # the record that blocks are drawn from; its rank is low


def counts(work: Callable[[], Any]) -> Counts:
    """Run `work` and return the counts of its reads, eigensolvers, uploads and operators."""
    with HostReads() as reads:
        work()
    kinds = {"reads": reads.count, "eigensolvers": reads.decompositions, "uploads": reads.uploads}
    return {**kinds, "operators": reads.total}


def all_rows() -> Iterator[tuple[str, Counts]]:
    """Yield the name and the counts of every row."""
    config, _ = read_command_line(["--config", "nano"])
    ids = torch.randint(0, config.model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    for method in ("full_rank", "salaad"):
        yield f"a training step, {method}", step_counts(method, ids)
    yield from forward_counts(config, ids)
    for shapes in (SHAPES, MANY):
        blocks = [drawn(shape, seed, "gram") for seed, shape in enumerate(shapes)]
        yield f"{round_of(shapes)}, one after the other", counts(partial(update_each, blocks))
    for solver in ("gram", "subspace"):
        yield f"an update of one block, {solver}", counts(partial(update_each, [drawn(SHAPES[0], 0, solver)]))


def round_of(shapes: Shapes) -> str:
    """Return the name of a round of these blocks."""
    return f"an ADMM round of {len(shapes)} blocks"


def step_counts(method: str, ids: Tensor) -> Counts:
    """Return the counts of the second training step on one batch, from the forward pass on, without an ADMM update."""
    config, _ = read_command_line(["--config", "nano", "--method", method])
    model = model_source(config.model, config.data.sequence_length).build(config.seed, 0, 1)
    trained = method_of(config)(model, config)
    optimizer, _ = trained.build_optimizer()
    loss, gradients = SummedLoss(model), Gradients(model, config.optimizer.clip)
    found = {}
    for step in (1, 2):  # the first makes the optimizer's state

        def one(step: int = step) -> None:
            loss(ids, ids).backward()
            trained.after_backward()
            gradients.clip(step)
            step_unless(gradients.broken, optimizer)
            optimizer.zero_grad()
            trained.after_step(optimizer, step, gradients.broken)

        found = counts(one)
    return found


@torch.no_grad()
def forward_counts(config: RunConfig, ids: Tensor) -> Iterator[tuple[str, Counts]]:
    """Yield the counts of forward passes of a dense model and of a factored one, in torch alone.

    The factored model has half the parameters, and the embedding is among its blocks.
    """
    models = random_models(config, share=0.5, density=0.05, dtype=torch.float32)
    with patch.object(cpu_kernels, "products", lambda *_: None):
        for name, model in models.items():
            loss = partial(SummedLoss(model), ids, ids)
            loss()  # makes the sparse tensors
            yield f"a forward pass, {name}, as in training and evaluation", counts(loss)
            cache = DynamicCache(config=model.config)
            model(ids, past_key_values=cache)
            yield f"a token written, {name}", counts(partial(model, ids[:, :1], past_key_values=cache))
            yield f"a forward pass, {name}, use_cache=False", counts(partial(model, ids, use_cache=False))
            masked = partial(model, ids, attention_mask=torch.ones_like(ids))
            yield f"a forward pass, {name}, with an attention_mask", counts(masked)
            yield f"a token of generate, {name}", generate_counts(model, ids)


def generate_counts(model: PreTrainedModel, ids: Tensor) -> Counts:
    """Return the counts of one more token of `generate`."""
    fewer, more = (
        counts(partial(model.generate, ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0))
        for tokens in (4, 5)
    )
    return {kind: more[kind] - fewer[kind] for kind in more}


def update_each(blocks: Sequence[tuple[Surrogate, Tensor]]) -> None:
    """Update one block after the other."""
    for surrogate, X in blocks:
        surrogate.update(X)


def drawn(shape: tuple[int, int], seed: int, solver: str) -> tuple[Surrogate, Tensor]:
    """Return a random block (n×m) as an update left it, and its weight, moved since then as far as in a real run."""
    recorded = read_json(SPECTRA)["blocks"][LIKE][PHASE]
    *matrices, tau = draw(*sorted(shape), recorded, torch.Generator().manual_seed(seed))
    before, X = (Z if shape[0] <= shape[1] else Z.mT.contiguous() for Z in matrices)
    surrogate = Surrogate(X, 1e-6, SalaadConfig(delta_alpha=0.0, delta_beta=0.0, method=solver))
    found = threshold(before, tau, solver="gram")
    state = {"thresholds": torch.tensor([tau, tau / 20, tau / 20]), "sigma": found.sigma, "basis": found.basis}
    surrogate.load_state_dict(surrogate.state_dict() | state)
    return surrogate, X


def print_rows() -> None:
    """Print every row as JSON."""
    json.dump(list(all_rows()), sys.stdout)
