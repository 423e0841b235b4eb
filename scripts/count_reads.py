"""How often the host waits for a device, and how many operations it asks of it: in a step, a forward pass, an update.

    python scripts/count_reads.py --output results/admm/reads.json

Counted on the CPU (`host_reads.py`), and nothing is timed. Where a device is treated in another way than a CPU, the
device's way is counted: its rates decide how blocks are updated, and rows of a factored embedding are taken by
operations whose sizes depend on no numbers. Triton's kernels cannot be counted without a GPU; torch's operations, which
stand in for them, are. The model is that of `nano`; a round is of ten blocks of 256×256, 688×256 and 256×688.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from transformers import DynamicCache

from salaad.common.errors import run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.config.run import RunConfig
from salaad.factored import operators
from salaad.methods.optimizer import step_unless
from salaad.methods.registry import method_of
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.methods.salaad.update import SOLVERS
from salaad.model.build import model_source
from salaad.model.loss import SummedLoss
from salaad.spectral import threshold
from salaad.spectral.cost import RATES
from salaad.training.gradients import Gradients
from scripts.bench_admm import SPECTRA, draw
from scripts.bench_inference import random_models
from scripts.host_reads import HostReads

SHAPES = [(256, 256)] * 4 + [(688, 256)] * 4 + [(256, 688)] * 2
LIKE, PHASE = "model.layers.2.mlp.gate_proj", "late"  # the spectrum that blocks are drawn by: of a low rank
# How the blocks of a round are updated: solver asked for, and whether the host has to wait for a value.
ROUNDS = {
    "one after the other": ("gram", False),
    "stacked, by eigenvectors": ("gram", True),
    "stacked, by products alone": ("products", True),
}


def counts(work: Callable[[], Any]) -> dict[str, int]:
    """What `work` asks of the device."""
    with HostReads() as reads:
        work()
    kinds = {"reads": reads.count, "eigensolvers": reads.decompositions, "uploads": reads.uploads}
    return {**kinds, "operators": reads.total}


def all_counts() -> Iterator[dict[str, Any]]:
    """Every row of the table."""
    config, _ = read_command_line(["--config", "nano"])
    ids = torch.randint(0, config.model.vocab_size, (2, 64), generator=torch.Generator().manual_seed(0))
    for method in ("full_rank", "salaad"):
        yield {"what": f"a training step, {method}", **step_counts(method, ids)}
    yield from forward_counts(config, ids)
    for way, (solver, waits) in ROUNDS.items():
        yield {"what": f"an ADMM round of {len(SHAPES)} blocks, {way}", **round_counts(SHAPES, solver, waits)}
    for solver in ("gram", "subspace"):
        yield {"what": f"an update of one block, {solver}", **round_counts(SHAPES[:1], solver, False)}


def step_counts(method: str, ids: Tensor) -> dict[str, int]:
    """The second step of a training on one batch, from the forward pass on, without an ADMM update."""
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
def forward_counts(config: RunConfig, ids: Tensor) -> Iterator[dict[str, Any]]:
    """Forward passes of a dense model and of one of half its parameters, embedding among its blocks."""
    models = random_models(config, share=0.5, density=0.05, dtype=torch.float32)
    usual = counts(lambda: models["dense"](ids, use_cache=False))
    yield {"what": "a forward pass, dense, with the mask of transformers", **usual}
    with patch.object(operators, "rows_in_torch", operators.plain_rows):
        for name, model in models.items():
            loss = partial(SummedLoss(model), ids, ids)
            loss()  # makes the sparse tensors
            yield {"what": f"a forward pass, {name}, as in training and evaluation", **counts(loss)}
        factored = models["factored"]
        cache = DynamicCache(config=factored.config)
        factored(ids, past_key_values=cache)
        decoding = counts(lambda: factored(ids[:, :1], past_key_values=cache))
    yield {"what": "a token written, factored", **decoding}


def round_counts(shapes: list[tuple[int, int]], solver: str, waits: bool) -> dict[str, Any]:
    """An ADMM round of blocks in the middle of a training."""
    blocks = [drawn(shape, seed, solver) for seed, shape in enumerate(shapes)]
    rows: list[Tensor] = []
    with as_on_a_device() if waits else nullcontext():
        found = counts(lambda: rows.extend(admm_round.update_round(blocks)))
    return {"solvers": sorted({SOLVERS[int(row[-1])] for row in rows}), **found}


def drawn(shape: tuple[int, int], seed: int, solver: str) -> tuple[Surrogate, Tensor]:
    """A block (n×m) as an update left it, and its weight, which has moved since as far as a real one."""
    recorded = read_json(SPECTRA)["blocks"][LIKE][PHASE]
    *matrices, tau = draw(*sorted(shape), recorded, torch.Generator().manual_seed(seed))
    before, X = (Z if shape[0] <= shape[1] else Z.mT.contiguous() for Z in matrices)
    surrogate = Surrogate(X, 1e-6, SalaadConfig(delta_alpha=0.0, delta_beta=0.0, method=solver))
    found = threshold(before, tau, solver="gram")
    state = {"thresholds": torch.tensor([tau, tau / 20, tau / 20]), "sigma": found.sigma, "basis": found.basis}
    surrogate.load_state_dict(surrogate.state_dict() | state)
    return surrogate, X


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Within it blocks are updated as where the host has to wait for a value."""
    rates = replace(RATES["cpu"], waits=True)
    with patch.object(admm_round, "rates_of", lambda device: rates):
        yield


def table(rows: list[dict[str, Any]]) -> str:
    """A line a row, as Markdown."""
    header = ("what", "reads by the host", "eigensolvers, which wait inside", "copies to the device", "operators")
    kinds = ("reads", "eigensolvers", "uploads", "operators")
    return markdown_table(header, [(row["what"], *(f"{row[kind]:,}" for kind in kinds)) for row in rows])


def main() -> None:
    """Count, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    rows = list(all_counts())
    print(table(rows))
    if options.output:
        write_json({"rows": rows, **provenance()}, options.output)


if __name__ == "__main__":
    run_command(main)
