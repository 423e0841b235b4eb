"""Loss on tokens that can be copied from their sequence, and on others: whether a model has learned to copy.

    python scripts/in_context.py --checkpoints runs/full_rank runs/salaad --output results/FILE.json

A token is *copied* if it and the token before it already stood side by side in its sequence (a repeated bigram).
Small models begin to copy such tokens rather suddenly (induction heads), some trainings earlier than others, and a
difference in perplexity between two trainings may be a difference in when that happened. compare_elastic.py
measures the same losses of the models in its tables; this command measures them at any checkpoint of a run.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import logging

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, read_object, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check
from salaad.compression.deployment import best_device, own_text
from salaad.config.run import DataConfig
from salaad.data.text import open_text, validation_batches
from salaad.model.loss import IGNORED
from salaad.runs.model_on_disk import ModelOnDisk

OF_A_ROW = {"model", "step", "all", "copied", "other"}


def repeated_bigrams(input_ids: Tensor) -> Tensor:
    """Whether a token and the one before it already stood side by side earlier in the row (rows × length, bool).

    The earlier bigram may overlap this one, as in a row of equal tokens.
    """
    rows, length = input_ids.shape
    bigrams = input_ids[:, :-1] * (input_ids.max() + 1) + input_ids[:, 1:]
    repeated = torch.zeros(rows, length, dtype=torch.bool, device=input_ids.device)
    for place in range(1, length - 1):
        repeated[:, place + 1] = (bigrams[:, :place] == bigrams[:, place, None]).any(1)
    return repeated


@torch.no_grad()
def losses(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, tuple[float, int]]:
    """Return kind of token → mean loss in nats and number of tokens; the kinds are "all", "copied" and "other"."""
    found: list[tuple[Tensor, Tensor]] = []
    for batch in batches:
        input_ids, labels = (batch[key].to(model.device) for key in ("input_ids", "labels"))
        logits = model(input_ids=input_ids).logits[:, :-1].float()
        targets = labels[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        real = targets.flatten() != IGNORED
        found.append((loss[real], repeated_bigrams(input_ids)[:, 1:].flatten()[real]))
    loss, copied = (torch.cat(parts) for parts in zip(*found, strict=True))
    kinds = {"all": torch.ones_like(copied), "copied": copied, "other": ~copied}
    return {kind: (float(loss[which].double().mean()), int(which.sum())) for kind, which in kinds.items()}


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table, a line per checkpoint."""
    lines = [
        (r["model"], f"{r['step']:,}", *(f"{r[kind][0]:.3f}" for kind in ("all", "copied", "other"))) for r in rows
    ]
    return markdown_table(("model", "step", "all tokens", "copied", "not copied"), lines)


def kept_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a JSON file of this script.

    Raises:
        UserError: the file is none of this script, or cannot be read.
    """
    rows = read_object(path, cure="give another --output").get("rows")
    ours = isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= OF_A_ROW for row in rows)
    check(ours, f"{path} has no results of in_context.py; give another --output")
    return rows


def main() -> None:
    """Measure every checkpoint, add the rows to the file and print its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", nargs="+", type=Path, required=True, help="runs, or checkpoints of them")
    parser.add_argument("--tokens", type=int, default=100_000, help="validation tokens, in full rows")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file, to which rows are added")
    options = parser.parse_args()
    at_least(options, 1, "tokens")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kept = kept_rows(options.output) if options.output.exists() else []
    rows = {(row["model"], row["step"]): row for row in kept}
    for path in options.checkpoints:
        source = ModelOnDisk.open(path)
        check("data" in source.run, f"{path} is no run, whose text would be read; give runs or their checkpoints")
        data = own_text(source, DataConfig(**source.run["data"]))
        text = open_text(data, vocab_size=source.folder.config.vocab_size, training=False)
        batches = list(validation_batches(text, data, rows=16, max_tokens=options.tokens))
        measured = losses(source.folder.load(torch.float32, best_device()), batches)
        if any(row[kind][1] != measured[kind][1] for row in rows.values() for kind in measured):
            raise UserError(
                f"{options.output} holds losses over other tokens than --tokens {options.tokens} of {path} gives; "
                "give another --output"
            )
        label = path.parent.parent.name if path.name.startswith("step-") else path.name
        step = int(source.folder.path.parent.name.rpartition("-")[2])
        rows[label, step] = {"model": label, "step": step, **measured, **provenance()}
        write_json({"rows": list(rows.values())}, options.output)
    print(table([*rows.values()]))


if __name__ == "__main__":
    run_command(main)
