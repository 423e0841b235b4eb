"""Train and record what the singular-value threshold is given: spectra, and how they move from update to update.

    python scripts/research/record_spectra.py --output results/admm/spectra.json -- --config nano.yaml --salaad.every 10

`scripts/bench_admm.py` draws matrices of any shape from the record. It has, for Z = X − S + U (U = Y/ρ, short side n)
at one update in each phase, the singular values of Z, and the change D to the next update in the basis of Z's singular
vectors, as root mean squares over a grid of index ranges; one more column has the norm per row of the part of D outside
the span of these vectors. All are divided by the largest singular value, so that a larger matrix can be drawn like Z.
"""

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.provenance import provenance
from salaad.config.command_line import read_command_line
from salaad.methods.salaad.plugin import Salaad
from salaad.model.build import describe_model, outline
from salaad.model.roles import find_blocks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
import train

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


def blocks_of(arguments: list[str]) -> dict[str, torch.nn.Parameter]:
    """The blocks of the run that the training options describe."""
    config = read_command_line(arguments)[0]
    return find_blocks(outline(describe_model(config.model, config.data.sequence_length)), config.salaad)


def main() -> None:
    """Train as train.py does, and record the spectra of the chosen blocks on the way."""
    arguments = sys.argv[1:]
    own, rest = (
        (arguments[: arguments.index("--")], arguments[arguments.index("--") + 1 :])
        if "--" in arguments
        else (arguments, [])
    )
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    parser.add_argument(
        "--blocks", default="layers.1.self_attn.q_proj,layers.2.mlp.gate_proj,embed_tokens", help="whose"
    )
    options = parser.parse_args(own)
    wanted = [f"model.{name}" for name in options.blocks.split(",")]
    unknown = [block for block in wanted if block not in blocks_of(rest)]
    if unknown:
        raise UserError(
            f"--blocks names {unknown[0].removeprefix('model.')}, which is no block of the run; name others"
        )
    seen: dict[str, list[Tensor]] = {name: [] for name in wanted}
    found: dict[str, dict] = {name: {} for name in wanted}
    update = Salaad._update

    def watched(self: Salaad, name: str) -> None:
        if name in seen:
            surrogate, number = self.surrogates[name], self.steps // self.config.every
            U = surrogate.dual() / surrogate.rho
            Z = self.weights[name].detach().float() - surrogate.sparse() + U
            for phase, first in PHASES.items():
                if number == first + 1:
                    found[name][phase] = describe(seen[name][0], Z, float(surrogate.tau_L))
            seen[name] = [Z.clone()]
        update(self, name)

    Salaad._update = watched
    with TemporaryDirectory() as folder:
        config, run = read_command_line([*rest, "--output", f"{folder}/run"])
        train.main(config, run)
    write_json({"config": config.to_dict(), **provenance(), "phases": PHASES, "blocks": found}, options.output)


if __name__ == "__main__":
    run_command(main)
