"""What energy leaves on the table: budgets dealt to blocks by measured losses instead, an upper bound.

    python scripts/research/probe_allocation.py --checkpoints runs/nano-20 --output results/elastic/probes/nano-20.json

Each block alone is cut to several fractions of its parameters, as compress.py would cut it, and the loss of the model
with this cut is measured on training text (a probe). Losses of several blocks are taken to add up, so the best split of
a budget over the blocks is found by dynamic programming over the probes. Its perplexity is compared with that of the
split by energy.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import logging

from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least
from salaad.compression.calibration import CalibrationText
from salaad.compression.cut import Whole, cut
from salaad.compression.deployment import own_text
from salaad.compression.from_checkpoint import CheckpointDeployment, deployed
from salaad.compression.split import Parts, PostHoc
from salaad.compression.variants import Variant
from salaad.config.commands import ALTERNATIONS
from salaad.config.methods import SalaadConfig
from salaad.config.run import DataConfig
from salaad.data.text import open_text, validation_batches
from salaad.model.loss import SummedLoss
from salaad.model.perplexity import evaluate
from salaad.runs.model_on_disk import ModelOnDisk
from scripts.shares import shares

PARTS = (0.05, 0.1, 0.15, 0.22, 0.3, 0.4, 0.55, 0.75)  # fractions of a block's n·m that a probe keeps
_STEPS = 400  # number of units that a budget is divided into


def cut_alone(whole: Whole, name: str, parameters: int) -> Parts:
    """Return one block cut to this many parameters, split between L and S by energy."""
    alone = Whole({name: whole.parts[name]}, 0, whole.target, {n: w for n, w in whole.weights.items() if n == name})
    return cut(alone, Variant("probe", parameters, refine=ALTERNATIONS))


def dealt(costs: Mapping[str, list[tuple[int, float]]], budget: int) -> dict[str, int]:
    """Return block → index of its probe, for the least sum of losses within the budget (a multiple-choice knapsack).

    Args:
        costs: block → (parameters, loss) of its probes.
        budget: parameters of all blocks together.
    """
    unit = budget / _STEPS
    best = torch.zeros(_STEPS + 1, dtype=torch.float64)
    choices: list[Tensor] = []
    for probes in costs.values():
        options = torch.full((len(probes), _STEPS + 1), float("inf"), dtype=torch.float64)
        for i, (parameters, loss) in enumerate(probes):
            step = -int(-parameters // unit)
            if step <= _STEPS:
                options[i, step:] = best[: _STEPS + 1 - step] + loss
        best, choice = options.min(0)
        choices.append(choice)
    place, found = _STEPS, {}
    for (name, probes), choice in zip(reversed(costs.items()), reversed(choices), strict=True):
        found[name] = int(choice[place])
        place -= -int(-probes[found[name]][0] // unit)
    return found


def rows_of(path: Path, split: str | None, sequences: int, tokens: int) -> list[dict]:
    """Return a row per size with the perplexity of one checkpoint cut by energy and cut by its probes."""
    source = ModelOnDisk.open(path)
    deployment = CheckpointDeployment(source, PostHoc(SalaadConfig(embedding=True), split) if split else None)
    data = own_text(source, DataConfig(**source.run["data"]))
    vocabulary = source.folder.config.vocab_size
    training = list(CalibrationText(data, vocabulary, sequences, option="--sequences").batches())
    held_out = open_text(data, vocab_size=vocabulary, training=False)
    validation = list(validation_batches(held_out, data, rows=16, max_tokens=tokens))
    model = source.folder.load(torch.float32)

    def measured(parts: Parts, batches: list[dict[str, Tensor]]) -> float:
        with deployed(model, parts):
            return evaluate(SummedLoss(model), batches, model.device).loss

    whole = Whole(deployment.parts, deployment.fixed, deployment._target, deployment.trained_weights)
    dense, probes, cuts = measured({}, training), {}, {}
    for name, (n, m) in tqdm(deployment.shapes.items(), desc=path.name, unit="block", disable=None):
        for part in PARTS:
            cuts[name, part] = cut_alone(whole, name, round(part * n * m))[name]
            loss = measured({name: cuts[name, part]}, training) - dense
            probes.setdefault(name, []).append((cuts[name, part].parameters, loss))
    rows = []
    for share in shares():
        compressible = round(share * (deployment.dense - deployment.fixed))
        chosen = dealt(probes, compressible)
        by_probes = {name: cuts[name, PARTS[i]] for name, i in chosen.items()}
        by_energy = deployment.cut(Variant("energy", deployment.fixed + compressible, None, ALTERNATIONS))
        row = {"model": f"{path.name}{f', {split}' if split else ''}", "share": share}
        for label, parts in (("energy", by_energy), ("probes", by_probes)):
            row[label] = float(torch.tensor(measured(parts, validation)).exp())
            row[f"{label}_parameters"] = deployment.parameters(parts)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Probe every checkpoint and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", nargs="+", type=Path, required=True, help="runs of train.py")
    parser.add_argument("--split", choices=("rpca", "godec"), help="how runs that were trained full-rank are split")
    parser.add_argument("--sequences", type=int, default=64, help="sequences of training text for a probe")
    parser.add_argument("--tokens", type=int, default=100_000, help="validation tokens")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    options = parser.parse_args()
    at_least(options, 1, "sequences", "tokens")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for path in options.checkpoints:
        rows += rows_of(path, options.split, options.sequences, options.tokens)
        write_json({**provenance(), "rows": rows}, options.output)
    lines = [(r["model"], f"{r['share']:.2f}", f"{r['energy']:.2f}", f"{r['probes']:.2f}") for r in rows]
    print(markdown_table(("model", "compressible part kept", "energy", "probes"), lines))


if __name__ == "__main__":
    run_command(main)
