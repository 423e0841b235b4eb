"""Train and record what the singular-value threshold is given: spectra, and how they move from update to update.

    python scripts/research/record_spectra.py --output results/admm/spectra.json --config nano.yaml --salaad.every 10

Other options are those of train.py. `scripts/bench_admm.py` draws matrices of any shape from the record. It has, for
Z = X − S + U (U = Y/ρ, short side n) at one update in each phase, the singular values of Z, and the change D to the
next update in the basis of Z's singular vectors, as root mean squares over a grid of index ranges; one more column has
the norm per row of the part of D outside the span of these vectors. All are divided by the largest singular value, so
that a larger matrix can be drawn like Z.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch import Tensor

import train
from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.provenance import provenance
from salaad.common.validation import check
from salaad.config.command_line import read_command_line
from salaad.methods.salaad.schedule import Updates
from salaad.model.roles import find_blocks
from scripts.outlines import outline_of

PHASES = {"early": 2, "middle": 11, "late": 200}  # phase → number of the first of its two updates
GRID = 16


def describe(Z: Tensor, following: Tensor, tau: float) -> dict:
    """Return what a matrix like Z and one like `following` can be drawn from: singular values, change and threshold."""
    if Z.shape[0] > Z.shape[1]:
        Z, following = Z.mT, following.mT
    Z, D = Z.double(), (following - Z).double()
    U, sigma, Vh = torch.linalg.svd(Z, full_matrices=False)
    inside, outside = U.mT @ D @ Vh.mT, U.mT @ (D - D @ Vh.mT @ Vh)
    rows = [part.square().mean(1) for part in (inside[:, c] for c in torch.arange(len(sigma)).chunk(GRID))]
    grid = torch.stack([*rows, outside.square().sum(1)], 1)
    grid = torch.stack([part.mean(0) for part in grid.chunk(GRID)]).sqrt()
    scale = float(sigma[0])
    return {"sigma": (sigma / scale).tolist(), "drift": (grid / scale).tolist(), "tau": tau / scale}


def main() -> None:
    """Train as train.py does, and record the spectra of the chosen blocks on the way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--blocks",
        default="layers.1.self_attn.q_proj,layers.2.mlp.gate_proj,embed_tokens",
        help="blocks whose spectra are recorded, separated by commas",
    )
    options, rest = parser.parse_known_args()
    seen: dict[str, Tensor] = {}
    found: dict[str, dict] = {f"model.{name}": {} for name in options.blocks.split(",")}
    numbers: Counter[str] = Counter()
    begin = Updates.begin

    def watched(self: Updates, names: Sequence[str], steps: int) -> None:
        for name in found.keys() & set(names):
            surrogate = self._surrogates[name]
            Z = self._weights[name].detach().float() - surrogate.sparse() + surrogate.dual() / surrogate.rho
            numbers[name] += 1
            for phase, first in PHASES.items():
                if numbers[name] == first + 1:
                    found[name][phase] = describe(seen[name], Z, surrogate.alpha / surrogate.rho)
            seen[name] = Z
        begin(self, names, steps)

    with TemporaryDirectory() as folder:
        config, run = read_command_line([*rest, "--output", f"{folder}/run"])
        blocks = find_blocks(outline_of(config), config.salaad)
        for block in found:
            name = block.removeprefix("model.")
            check(block in blocks, f"--blocks names {name}, which is no block of the run; name others")
        with patch.object(Updates, "begin", watched):
            train.main(config, run)
    write_json({"config": config.to_dict(), **provenance(), "phases": PHASES, "blocks": found}, options.output)


if __name__ == "__main__":
    run_command(main)
