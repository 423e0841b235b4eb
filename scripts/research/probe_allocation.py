"""A budget dealt to the blocks by measured losses instead of energy, to see how much another split could gain.

    python scripts/research/probe_allocation.py --checkpoints RUN --head --output results/elastic/probes/nano-20.json

Each block alone is cut to several fractions of its parameters, as compress.py would cut it, and the loss of the model
with this cut is measured on training text (a probe). Losses of several blocks are taken to add up, so the best split of
a budget over the blocks is found by dynamic programming over the probes. Its perplexity is compared with that of the
split by energy.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from salaad.compression.from_checkpoint import deployed
from salaad.compression.split import Parts
from salaad.compression.variants import Variant
from salaad.config.commands import ALTERNATIONS
from salaad.config.run import DataConfig
from salaad.model.loss import SummedLoss
from salaad.model.perplexity import evaluate
from scripts.elastic_ways import TrainedModel, budgets_of, split_for

# Fractions of a block's n·m that a probe keeps; with 1 the whole L + S is kept.
PARTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.27, 0.35, 0.45, 0.6, 0.8, 1.0)
_STEPS = 4000  # number of units that a budget is divided into


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


def rows_of(run: Path, split: str | None, head: bool, sequences: int, tokens: int) -> list[dict]:
    """Return a row per size with the perplexity of one run cut by energy and cut by its probes.

    Args:
        run: folder of the run.
        split: method of splitting a run that was trained full-rank.
        head: split LM head and embedding too.
        sequences: sequences of training text for a probe.
        tokens: validation tokens; every figure is measured on their second half.
    """
    measured = TrainedModel(run, tokens, text_tokens=0)
    source = measured.source
    evaluation = measured.evaluation(source, split_for(split, head))
    deployment = evaluation.deployment
    data = own_text(source, DataConfig(**source.run["data"]))
    training = list(CalibrationText(data, source.folder.config.vocab_size, sequences, option="--sequences").batches())
    model = source.folder.load(torch.float32)

    def loss(parts: Parts, batches: list[dict[str, Tensor]]) -> float:
        with deployed(model, parts):
            return evaluate(SummedLoss(model), batches, model.device).loss

    whole = replace(deployment.whole, weights=deployment.trained_weights)
    dense, probes, cuts = loss({}, training), {}, {}
    for name, (n, m) in tqdm(deployment.shapes.items(), desc=run.name, unit="block", disable=None):
        for part in PARTS:
            cuts[name, part] = cut_alone(whole, name, round(part * n * m))[name]
            found = loss({name: cuts[name, part]}, training) - dense
            probes.setdefault(name, []).append((cuts[name, part].least_parameters, found))
    label = ", ".join([run.name, *([split] if split else []), *["head"] * head])
    rows = []
    for share, budget in budgets_of(measured):
        by_probes = {name: cuts[name, PARTS[i]] for name, i in dealt(probes, budget - deployment.fixed).items()}
        variant = Variant(f"{budget}@energy", budget, None, ALTERNATIONS)
        by_energy = deployment.cut(variant)
        row = {"model": label, "share": share}
        for way, parts in (("energy", by_energy), ("probes", by_probes)):
            row[way] = math.exp(loss(parts, evaluation.batches()))
            row[f"{way}_parameters"] = deployment.parameters(parts, variant)
        rows.append(row)
        print(row, flush=True)
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table with a line per model and rule, and a column per share of the compressible parameters."""
    shares = sorted({row["share"] for row in rows}, reverse=True)
    found = {(row["model"], row["share"]): row for row in rows}
    lines = [
        (model, rule, *(f"{found[model, share][rule]:.2f}" for share in shares))
        for model in dict.fromkeys(row["model"] for row in rows)
        for rule in ("energy", "probes")
    ]
    return markdown_table(("model", "split of the budget by", *(f"{share:.2f}" for share in shares)), lines)


def main() -> None:
    """Probe every checkpoint and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", nargs="+", type=Path, required=True, help="runs of train.py")
    parser.add_argument("--split", choices=("rpca", "godec"), help="how runs that were trained full-rank are split")
    parser.add_argument("--head", action="store_true", help="split LM head and embedding too")
    parser.add_argument("--sequences", type=int, default=64, help="sequences of training text for a probe")
    parser.add_argument(
        "--tokens", type=int, default=200_000, help="validation tokens; figures are of their second half"
    )
    parser.add_argument("--output", type=json_file, required=True, help="JSON file to write")
    options = parser.parse_args()
    at_least(options, 1, "sequences", "tokens")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    rows = []
    for path in options.checkpoints:
        rows += rows_of(path, options.split, options.head, options.sequences, options.tokens)
        write_json({**provenance(), "rows": rows}, options.output)
    print(table(rows))


if __name__ == "__main__":
    run_command(main)
