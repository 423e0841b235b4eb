"""LOST's γ, which its paper does not give: short runs with and without an activation, kept in one JSON file.

python scripts/research/search_gamma.py --output results/methods/gamma.json
"""

import argparse
import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.provenance import provenance
from scripts.compare_methods import EIGHTH, Contest
from scripts.trainings import ROOT

GAMMAS, ACTIVATIONS, LR, STEPS = (0.5, 0.7, 0.9), ("silu", "linear"), 3e-3, 2000 // EIGHTH


def main() -> None:
    """Train what is missing and write the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "gamma", help="where the runs go")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    options = parser.parse_args()
    rows = []
    for gamma, activation in product(GAMMAS, ACTIVATIONS):
        runs = options.runs / f"{gamma}-{activation}"
        runs.mkdir(parents=True, exist_ok=True)
        contest = Contest("nano", runs, (f"--lost.gamma={gamma}", f"--lost.activation={activation}"))
        found = contest.result("lost", LR, STEPS)
        row = {key: found[key] for key in ("steps", "commit", "command")}
        rows.append(
            {"gamma": gamma, "activation": activation, "perplexity": found["variants"]["X"]["perplexity"], **row}
        )
    write_json({**provenance(), "rows": rows}, options.output)


if __name__ == "__main__":
    run_command(main)
