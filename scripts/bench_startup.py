"""Seconds until an answer: imports, help, and what is refused, beside `import torch` alone.

    python scripts/bench_startup.py --checkpoint runs/demo/salaad --output results/bench/startup.json
    python scripts/bench_startup.py --checkpoint runs/demo/salaad --other ../older-checkout

Every case is a process of its own, and the cases take turns, so that a machine whose speed drifts slows all of them;
medians are reported. `--other` measures the same cases in another checkout, in the same rounds.
"""

import argparse
import statistics
import sys
from functools import partial
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least
from scripts.checkouts import commit_of, python_in, require_checkout
from scripts.devices import in_turns
from scripts.trainings import ROOT

# What is measured: a name, and the words behind `python`.
IMPORTS = {
    "import torch": ("-c", "import torch"),
    "import torch, transformers": ("-c", "import torch, transformers"),
    "import salaad": ("-c", "import salaad"),
    "import torch, transformers, salaad": ("-c", "import torch, transformers, salaad"),
    "from salaad import Salaad": ("-c", "from salaad import Salaad"),
}
COMMANDS = {
    "train.py --help": ("train.py", "--help"),
    "compress.py --help": ("compress.py", "--help"),
    "evaluate.py perplexity --help": ("evaluate.py", "perplexity", "--help"),
    "train.py --lr 1 (refused)": ("train.py", "--lr", "1"),
    "compress.py --kappa 2 (refused)": ("compress.py", "--checkpoint", "x", "--output", "y", "--kappa", "2"),
}
WRONG_TASK = "evaluate.py lm-eval --tasks no_such_task (refused)"


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run, for the case of a wrong task")
    parser.add_argument("--other", type=Path, help="another checkout to measure too")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    at_least(options, 1, "rounds")
    checkouts, commit = {"here": ROOT}, None
    if options.other:
        require_checkout(options.other, "train.py")
        checkouts["other"], commit = options.other.absolute(), commit_of(options.other)
    wrong = ("evaluate.py", "lm-eval", "--checkpoint", str(options.checkpoint.absolute()), "--tasks", "no_such_task")
    cases = {**IMPORTS, **COMMANDS, WRONG_TASK: wrong}
    works = {
        (name, label): partial(python_in, checkouts[label], cases[name]) for name, label in product(cases, checkouts)
    }
    seconds = in_turns(works, options.rounds, torch.device("cpu"))
    rows = [{"case": name, **{label: statistics.median(seconds[name, label]) for label in checkouts}} for name in cases]
    print(table(rows))
    if options.output:
        write_json({"rounds": options.rounds, "other": commit, "rows": rows, **provenance()}, options.output)


def table(rows: list[dict]) -> str:
    """Return a table, a line per case; `over torch` is the time over that of `import torch` in the same rounds."""
    torch = rows[0]["here"]
    lines = [
        (
            row["case"],
            *([f"{row['other']:.2f} s"] if "other" in row else []),
            f"{row['here']:.2f} s",
            f"{row['here'] / torch:.2f}",
        )
        for row in rows
    ]
    header = ("case", *(["before"] if "other" in rows[0] else []), "now", "over torch")
    return markdown_table(header, lines)


if __name__ == "__main__":
    run_command(main)
