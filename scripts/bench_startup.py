"""Seconds until an answer: imports, help, and what is refused, beside `import torch` alone.

    python scripts/bench_startup.py --checkpoint runs/demo/salaad --output results/bench/startup.json
    python scripts/bench_startup.py --checkpoint runs/demo/salaad --other ../older-checkout

Every case is a process of its own, and the cases take turns, so that a machine whose speed drifts slows all of them;
medians are reported. `--other` measures the same cases in another checkout, in the same rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least

ROOT = Path(__file__).resolve().parent.parent
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


def seconds(words: tuple[str, ...], checkout: Path) -> float:
    """Run Python with these words in a checkout and return the wall time in seconds."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    start = time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=checkout, env=environment, capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a run, of which lm-eval is asked for a wrong task"
    )
    parser.add_argument("--other", type=Path, help="another checkout to measure too")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    at_least(options, 1, "rounds")
    if options.other and not (options.other / "train.py").is_file():
        raise UserError(f"--other {options.other} has no train.py; give a checkout of this project")
    wrong = ("evaluate.py", "lm-eval", "--checkpoint", str(options.checkpoint.absolute()), "--tasks", "no_such_task")
    cases = {**IMPORTS, **COMMANDS, WRONG_TASK: wrong}
    checkouts = {"here": ROOT} | ({"other": options.other.absolute()} if options.other else {})
    found: dict[str, dict[str, list[float]]] = {name: {label: [] for label in checkouts} for name in cases}
    for counted in tqdm([False] + [True] * options.rounds, desc="rounds", disable=None):
        for name, words in cases.items():
            for label, checkout in checkouts.items():
                spent = seconds(words, checkout)
                if counted:
                    found[name][label].append(spent)
    rows = [
        {"case": name, **{label: statistics.median(times) for label, times in mine.items()}}
        for name, mine in found.items()
    ]
    print(table(rows))
    if options.output:
        commit = None
        if options.other:
            words = ["git", "-C", str(options.other), "rev-parse", "--short", "HEAD"]
            commit = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
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
