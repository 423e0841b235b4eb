"""Training and inference on the CPU, here and in another checkout of the project, side by side in one run.

    git worktree add --detach ../before COMMIT
    python scripts/bench_against.py --other ../before

Each measurement is a process of its own, which runs `bench_training.py` or `bench_inference.py` of its checkout at the
size of `nano`; options that this script does not know go to both checkouts as options of train.py. The two checkouts
take turns, and each goes first in every other round, so that a machine whose speed drifts slows both. Every ratio is of
two neighbouring processes; the median ratio is reported, with the least and the largest. Timings that only one checkout
has are left out. Each checkout is timed by its own scripts: if these differ, a step and a token must still mean the
same in both.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm

from salaad.common.errors import run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.formats import markdown_table
from salaad.common.validation import at_least
from scripts.checkouts import python_in, require_checkout, require_success
from scripts.trainings import ROOT

SCRIPTS = ("bench_training", "bench_inference")
Times = dict[str, float]  # what is timed → milliseconds


def measure(script: str, checkout: Path, words: Sequence[str]) -> tuple[Times, dict[str, str]]:
    """Run a script of a checkout in a process of its own; return its times, and its commit, machine and versions.

    Raises:
        UserError: the script failed.
    """
    with TemporaryDirectory() as folder:
        output = Path(folder) / "found.json"
        done = python_in(checkout, [f"scripts/{script}.py", *words, "--output", str(output)])
        require_success(done, f"{script}.py of {checkout}")
        found = read_json(output)
    return times_of(found), {name: found[name] for name in ("commit", "machine", "versions")}


def times_of(found: Mapping[str, Any]) -> Times:
    """Return the times in a script's JSON: of a step of each method, or of a token of each model."""
    if "methods" in found:
        return {f"a step, {name}": 1e3 * row["seconds_per_step"] for name, row in found["methods"].items()}
    return {
        f"a token, {row['work']}, {model}, batch {row['batch']}": 1e3 / row[model]
        for row in found["rows"]
        for model in ("dense", "factored")
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table, a line per timing and per ratio factored / dense in a process; above 1 is slower now."""
    by_name, lines = {row["what"]: row for row in rows}, []
    for row in rows:
        usual = (f"{statistics.median(row[label]):,.3g} ms" for label in ("other", "here"))
        lines.append((row["what"], *usual, *_now_over_before(row["other"], row["here"])))
        dense = by_name.get(row["what"].replace("factored", "dense"), row)
        if dense is not row:
            ratios = {
                label: [ours / theirs for ours, theirs in zip(row[label], dense[label], strict=True)]
                for label in ("other", "here")
            }
            usual = (f"{statistics.median(found):.3f}" for found in ratios.values())
            lines.append((f"{row['what']}, over dense", *usual, *_now_over_before(ratios["other"], ratios["here"])))
    return markdown_table(("what", "before", "now", "now over before", "range of ratios"), lines)


def _now_over_before(before: Sequence[float], now: Sequence[float]) -> tuple[str, str]:
    """Return the median ratio of neighbouring processes, and the range from the least to the largest, as text."""
    ratios = [later / earlier for earlier, later in zip(before, now, strict=True)]
    return f"{statistics.median(ratios):.3f}", f"{min(ratios):.2f} to {max(ratios):.2f}"


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--other", type=Path, required=True, help="another checkout of this project")
    parser.add_argument("--rounds", type=int, default=4, help="processes of each checkout and script; an even number")
    parser.add_argument("--steps", type=int, default=60, help="counted steps of full_rank and of salaad in a process")
    parser.add_argument("--threads", type=int, default=1, help="threads on the CPU")
    output = ROOT / "results" / "bench" / "before_after.json"
    parser.add_argument("--output", type=json_file, default=output, help="JSON file to write")
    options, rest = parser.parse_known_args()
    at_least(options, 1, "rounds", "steps", "threads")
    require_checkout(options.other, *(f"scripts/{script}.py" for script in SCRIPTS))
    checkouts = {"other": options.other.absolute(), "here": ROOT}
    config = ["--threads", str(options.threads), "--config", str(ROOT / "configs" / "nano.yaml"), *rest]
    words = {"bench_training": ["--methods", "salaad", "--steps", str(options.steps), *config]}
    words["bench_inference"] = config
    found: dict[str, dict[str, list[float]]] = {}
    about: dict[str, dict[str, str]] = {}
    turns = [(script, i) for i in range(options.rounds) for script in SCRIPTS]
    for script, i in tqdm(turns, desc="rounds", disable=None):
        for label in ("here", "other") if i % 2 else ("other", "here"):
            times, about[label] = measure(script, checkouts[label], words[script])
            for what, time in times.items():
                found.setdefault(what, {name: [] for name in checkouts})[label].append(time)
    rows = [{"what": what, **both} for what, both in found.items() if len(both["here"]) == len(both["other"])]
    print(table(rows))
    settings = {"options": rest, "rounds": options.rounds, "steps": options.steps}
    write_json({**settings, **about, "rows": rows}, options.output)


if __name__ == "__main__":
    run_command(main)
