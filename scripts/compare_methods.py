"""Every way to train at one scale: a short search of its learning rate, then one training in full with the best.

    python scripts/compare_methods.py --config nano --output results/nano/methods.json
    python scripts/compare_methods.py --config nano-20 --methods lora,galore --search-only --output FILE --jobs 2

For every method the same three learning rates are tried in runs of an eighth of the length: what the method brings for
this size, half and double of it; and one more on the side where the best lies at the edge, up to three times. What the
JSON file has is kept, an interrupted run goes on, and the file is written anew after every run.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.errors import run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, split_list
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from scripts.trainings import ROOT, trained

EIGHTH, FACTORS, MOST_MORE, SEARCH_TOKENS = 8, (0.5, 1.0, 2.0), 3, 50_000


@dataclass(frozen=True)
class Contest:
    """What every method is given alike.

    Args:
        config: file in configs/.
        runs: folder of the runs.
        extra: options of train.py for all.
    """

    config: str
    runs: Path
    extra: tuple[str, ...]

    def result(self, method: str, lr: float, steps: int | None) -> dict[str, Any]:
        """The summary of a run, trained if it is not there; in full without `steps`."""
        folder = self.runs / (f"{method}-lr{lr:g}" + ("" if steps is None else f"-{steps}-steps"))
        words = ["--config", self.config, "--method", method, *self.extra, f"--optimizer.lr={lr:g}"]
        if steps is not None:
            words += [f"--train.steps={steps}", "--train.eval_every=0", f"--train.eval_tokens={SEARCH_TOKENS}"]
        about, summary = trained(words, folder)
        if summary is None:
            print(f"{folder.name}: diverged", flush=True)
            return {"lr": lr, "steps": steps, **about, "variants": {}}
        variants = summary["variants"]
        shown = ", ".join(f"{name} {row['perplexity']:.2f}" for name, row in variants.items())
        print(f"{folder.name}: {shown}", flush=True)
        return {"lr": lr, **about, "variants": variants}

    def complete(self, method: str, entry: dict[str, Any], search_only: bool, save: Callable[[], None]) -> None:
        """Add to the entry of a method what it lacks: the runs of its search, and that in full at the best rate."""
        config, _ = read_command_line(["--config", self.config, "--method", method, *self.extra])
        entry["own_lr"], steps = config.optimizer.lr, config.train.steps // EIGHTH
        search = entry.setdefault("search", [])

        def tried(lr: float) -> None:
            if lr not in [row["lr"] for row in search]:
                search.append(self.result(method, lr, steps))
                search.sort(key=lambda row: row["lr"])
                save()

        for factor in FACTORS:
            tried(entry["own_lr"] * factor)
        for _ in range(MOST_MORE):
            rates, best = [row["lr"] for row in search], best_rate(entry)
            if best not in (min(rates), max(rates)):
                break
            tried(best / 2 if best == min(rates) else best * 2)
        if not search_only and "full" not in entry:
            entry["full"] = self.result(method, best_rate(entry), None)
            save()


def best_rate(entry: dict[str, Any]) -> float:
    """The learning rate of the lowest perplexity in the search of a method."""
    return min(entry["search"], key=_perplexity)["lr"]


def _perplexity(result: dict[str, Any]) -> float:
    """Of X; that of a run whose numbers diverged is infinite."""
    return result["variants"]["X"]["perplexity"] if result["variants"] else float("inf")


def main() -> None:
    """Train what is missing and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="nano", help="configuration of all runs")
    parser.add_argument("--methods", default=",".join(SETTINGS), help="which, separated by commas")
    parser.add_argument("--runs", type=Path, help="where the runs go; runs/methods-CONFIG unless given")
    parser.add_argument("--search-only", action="store_true", help="no run in full")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file, to which results are added")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options, extra = parser.parse_known_args()
    at_least(options, 1, "jobs")
    contest = Contest(options.config, options.runs or ROOT / "runs" / f"methods-{options.config}", tuple(extra))
    contest.runs.mkdir(parents=True, exist_ok=True)
    found = read_json(options.output)["methods"] if options.output.exists() else {}
    lock = Lock()

    def save() -> None:
        with lock:
            ordered = {name: found[name] for name in SETTINGS if found.get(name, {}).get("search")}
            write_json({"config": options.config, **provenance(), "methods": ordered}, options.output)

    def measure(method: str) -> None:
        contest.complete(method, found.setdefault(method, {}), options.search_only, save)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(measure, split_list(options.methods)))


if __name__ == "__main__":
    run_command(main)
