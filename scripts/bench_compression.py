"""What a compression of a model's shapes takes, step by step: HPA, one threshold on energy, refinement.

    python scripts/bench_compression.py --config 350m.yaml --output results/bench/compression-350m.json
    python scripts/bench_compression.py --config 350m.yaml --device cuda

Only shapes, ranks and densities matter for the time, so L and S are random: L of a quarter of the full rank with
falling singular values, S of density 0.1. Reading a checkpoint and writing a folder are not timed. The two allocations
always run on the CPU, as in compress.py; only the refinement runs on --device.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from tqdm import tqdm

from salaad import hpa
from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least
from salaad.compression.refinement import refine
from salaad.config.command_line import read_command_line
from salaad.energy_allocation import UnitQueue
from salaad.factored.slr import Slr
from salaad.model.roles import find_blocks
from scripts.devices import now, require_device
from scripts.outlines import outline_of

RANK_RATIO, DENSITY = 0.25, 0.1


def random_parts(n: int, m: int) -> Slr:
    """Return a random L + S (n×m) of `RANK_RATIO` and `DENSITY`, as a run with SALAAD might leave it."""
    rank, nnz = round(RANK_RATIO * min(n, m)), round(DENSITY * n * m)
    sigma = torch.linspace(1, 0.05, rank) ** 2
    U, V = torch.linalg.qr(torch.randn(n, rank))[0] * sigma, torch.linalg.qr(torch.randn(m, rank))[0].mT
    values = torch.distributions.Laplace(0, float(sigma.square().mean().sqrt()) / (n * m) ** 0.25).sample((nnz,))
    positions = torch.randperm(n * m)[:nnz].int()
    return Slr((n, m), U.contiguous(), V.contiguous(), positions, values[values.abs().argsort(descending=True)])


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.5, help="share of the parameters of L + S to keep")
    parser.add_argument("--refine", type=int, default=20, help="alternating projections at the most")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to refine")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options, rest = parser.parse_known_args()
    if not 0 < options.share < 1:
        raise UserError(f"--share is {options.share}, outside (0, 1); give the share of the parameters to keep")
    at_least(options, 1, "refine", "threads")
    require_device(options.device)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    config = read_command_line(rest)[0]
    shapes = {name: tuple(X.shape) for name, X in find_blocks(outline_of(config), config.salaad).items()}
    parts = {
        name: random_parts(*shape) for name, shape in tqdm(shapes.items(), desc="making", leave=False, disable=None)
    }
    seconds = {}

    start = time.perf_counter()
    blocks = {name: (*slr.shape, slr.rank, slr.nnz) for name, slr in parts.items()}
    hpa.allocate(blocks, remove=round((1 - options.share) * hpa.parameters(blocks)), kappa=0.5)
    seconds["HPA"] = time.perf_counter() - start

    start = time.perf_counter()
    queue = UnitQueue.of({name: (*slr.shape, slr.sigma, slr.values) for name, slr in parts.items()})
    kept = queue.keep(round(options.share * queue.parameters))
    seconds["energy"] = time.perf_counter() - start

    device = torch.device(options.device)
    seconds["refinement"], errors = 0.0, []
    for name, slr in tqdm(parts.items(), desc="refining", disable=None):
        there = slr.to(device)
        T, cut = there.dense(), there.cut(*kept[name])
        start = now(device)
        fitted = refine(T, rank=cut.rank, nnz=cut.nnz, iterations=options.refine, S=cut.sparse())
        seconds["refinement"] += now(device) - start
        errors.append([float(torch.linalg.vector_norm(T - kind.dense())) for kind in (cut, fitted)])
    before, after = (sum(error[i] ** 2 for error in errors) ** 0.5 for i in range(2))
    print(markdown_table(("step", "seconds"), [(step, f"{spent:.2f}") for step, spent in seconds.items()]))
    print(f"\n{len(parts)} blocks; the error of all of them falls by {1 - after / before:.1%}")
    if options.output:
        setting = {"share": options.share, "refine": options.refine, "rank_ratio": RANK_RATIO, "density": DENSITY}
        setting |= {"device": options.device}
        result = {"blocks": len(parts), "parameters": queue.parameters, **setting, "seconds": seconds}
        write_json({**result, "error": [before, after], "config": config.to_dict(), **provenance()}, options.output)


if __name__ == "__main__":
    run_command(main)
