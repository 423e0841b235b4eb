"""Every way to train at one scale: a short search of its learning rate, then one training in full with the best.

    python scripts/compare_methods.py --config nano --output results/methods/nano.json
    python scripts/compare_methods.py --config nano-20 --projections 0.25 --search-only --output FILE --jobs 2

For every method three learning rates are tried in runs of an eighth of the length: the method's default for this size,
half and double of it; and as long as the best one lies at the edge, one more on that side, up to three times. This is
repeated for every further value of --projections, the learning rate of the projections as a share of the main one,
around the best rate found with the share before; methods with a rate of their own for projections skip this. With --own
two alternatives to each method's own settings (`own_settings`) are tried at the best rates. Results in the JSON file
are kept, except for a full run that does not have the best rates or diverged; a file with results of other settings or
another text is refused. An interrupted run goes on, and the file is rewritten after every run. With --jobs, runs of one
method go side by side too.
"""

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import as_completed
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.budgets import finite_number
from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check, split_list
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS
from salaad.methods.registry import method_of
from scripts.own_settings import SHOWN_ONLY, alternatives
from scripts.same_settings import require_same
from scripts.side_by_side import Submit, side_by_side
from scripts.trainings import ROOT, trained

EIGHTH, FACTORS, MOST_MORE, SEARCH_TOKENS = 8, (0.5, 1.0, 2.0), 3, 50_000


class Rates(NamedTuple):
    """The learning rates and method settings of one run.

    Args:
        lr: peak learning rate.
        projections: learning rate of the projections, as a share of `lr`.
        settings: options of train.py that differ from the method's defaults.
    """

    lr: float
    projections: float
    settings: tuple[str, ...] = ()

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Rates":
        """Return the rates of a result; `projections` is 1 where the result has no `projection_lr`."""
        return cls(row["lr"], row.get("projection_lr", 1.0), tuple(row.get("settings", ())))

    @property
    def words(self) -> tuple[str, ...]:
        """The rates and settings as options of train.py."""
        return f"--optimizer.lr={self.lr:g}", f"--optimizer.projection_lr={self.projections:g}", *self.settings

    @property
    def name(self) -> str:
        """A short name for the run's folder; of several settings it has the first."""
        slower = f"x{self.projections:g}" if self.projections != 1 else ""
        return f"lr{self.lr:g}{slower}" + "".join(f"-{short}" for short in self.own[:1])

    @property
    def own(self) -> tuple[str, ...]:
        """The settings without their section, such as `scale=0.5`."""
        return tuple(word.partition(".")[2] for word in self.settings)


@dataclass(frozen=True)
class Contest:
    """The settings that all methods share, and the search for one method.

    Args:
        config: file in configs/.
        runs: folder of the runs.
        projections: shares of the learning rate at which projections learn; if empty, the configured one.
        extra: options of train.py for all runs.
        own: whether the methods' own settings are searched too.
    """

    config: str
    runs: Path
    projections: tuple[float, ...]
    extra: tuple[str, ...]
    own: bool = False

    def words(self, method: str) -> list[str]:
        """Options of train.py for all runs of a method."""
        return ["--config", self.config, "--method", method, *self.extra]

    def shares(self, method: str) -> tuple[float, ...]:
        """Return the shares to try for a method's projections; the configured one alone if the method fixes it."""
        config, _ = read_command_line(self.words(method))
        takes_others = self.projections and not method_of(config).own_projection_rate
        return self.projections if takes_others else (config.optimizer.projection_lr,)

    def words_of(self, method: str, rates: Rates, steps: int | None) -> list[str]:
        """Options of train.py for one run: for `steps` steps, or in full if `steps` is None."""
        words = [*self.words(method), *rates.words]
        if steps is not None:
            words += [f"--train.steps={steps}", "--train.eval_every=0", f"--train.eval_tokens={SEARCH_TOKENS}"]
        return words

    def result(self, method: str, rates: Rates, steps: int | None) -> dict[str, Any]:
        """Return the result of a run, trained unless it is there: for `steps` steps, or in full if `steps` is None."""
        folder = self.runs / (f"{method}-{rates.name}" + ("" if steps is None else f"-{steps}-steps"))
        about, summary = trained(self.words_of(method, rates, steps), folder)
        found = {
            "lr": rates.lr,
            "projection_lr": rates.projections,
            "settings": rates.settings,
            "steps": steps,
            **about,
        }
        if summary is None or any(row["perplexity"] is None for row in summary["variants"].values()):
            print(f"{folder.name}: diverged", flush=True)
            return found | {"variants": {}}
        shown = ", ".join(f"{name} {row['perplexity']:.2f}" for name, row in summary["variants"].items())
        print(f"{folder.name}: {shown}", flush=True)
        return found | {"variants": summary["variants"]}

    def complete(
        self, method: str, entry: dict[str, Any], search_only: bool, save: Callable[[], None], submit: Submit
    ) -> None:
        """Submit the runs that a method's entry lacks: those of its search, and one in full at the best rates."""
        config, _ = read_command_line(self.words(method))
        entry["own_lr"], steps = config.optimizer.lr, config.train.steps // EIGHTH
        search, centre = entry.setdefault("search", []), config.optimizer.lr

        def tried(*several: Rates) -> None:
            new = [rates for rates in several if rates not in map(Rates.of, search)]
            for run in as_completed([submit(self.result, method, rates, steps) for rates in new]):
                # Sorted in place, the list would be empty for a moment in which another search may save it.
                search[:] = sorted([*search, run.result()], key=_order)
                save()

        for share in self.shares(method):
            tried(*(Rates(centre * factor, share) for factor in FACTORS))
            while len(found := _found(search, share)) < len(FACTORS) + MOST_MORE:
                best = min(found, key=found.get)
                if best not in (min(found), max(found)):
                    break
                tried(Rates(best / 2 if best == min(found) else best * 2, share))
            centre = min(found, key=found.get)
        plain = best_rates([row for row in search if not Rates.of(row).settings])
        tried(*(plain._replace(settings=settings) for settings in alternatives(config) if self.own))
        full = entry.get("full")
        if not search_only and not (full and full["variants"] and Rates.of(full) == best_rates(search)):
            entry["full"] = submit(self.result, method, best_rates(search), None).result()
            save()


def _order(row: dict[str, Any]) -> tuple[float, float, tuple[str, ...]]:
    """Return the sort key of a run in the search of a method."""
    rates = Rates.of(row)
    return -rates.projections, rates.lr, rates.settings


def _found(search: list[dict[str, Any]], share: float) -> dict[float, float]:
    """Return learning rate → perplexity of the runs with this share for the projections and no other settings."""
    plain = [row for row in search if not Rates.of(row).settings]
    return {row["lr"]: _perplexity(row) for row in plain if Rates.of(row).projections == share}


def best_rates(search: list[dict[str, Any]]) -> Rates:
    """Return the rates of `best_run`."""
    return Rates.of(best_run(search))


def best_run(search: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the run with the lowest perplexity in the search of a method, among those that can be taken in full."""
    return min((row for row in search if not is_only_shown(row)), key=_perplexity)


def is_only_shown(row: dict[str, Any]) -> bool:
    """Return whether a run of a search has settings that are not taken in full."""
    return bool(set(SHOWN_ONLY) & set(Rates.of(row).settings))


def _perplexity(result: dict[str, Any]) -> float:
    """Return the perplexity of X; infinity for a run that diverged."""
    return result["variants"]["X"]["perplexity"] if result["variants"] else float("inf")


def results_in(path: Path, option: str) -> dict[str, Any]:
    """Return the content of a JSON file of this script, which `option` names.

    Raises:
        UserError: the file is none of this script, or cannot be read.
    """
    found = read_json(path)
    methods = found.get("methods") if isinstance(found, dict) else None
    entries = methods.values() if isinstance(methods, dict) else [None]
    ours = all(isinstance(entry, dict) and entry.get("search") for entry in entries)
    check(ours and "config" in found, f"{option} {path} has no results of compare_methods.py; give another {option}")
    return found


def kept_results(path: Path, contest: Contest) -> dict[str, Any]:
    """Return method → its results in a JSON file of this script.

    Raises:
        UserError: the file is none of this script, or has results of another configuration, length, text or setting.
    """
    kept = results_in(path, "--output")
    check(kept["config"] == contest.config, f"{path} has results of --config {kept['config']}; give another --output")
    for method, entry in kept["methods"].items():
        steps = read_command_line(contest.words(method))[0].train.steps // EIGHTH
        other = next((row["steps"] for row in entry["search"] if row["steps"] != steps), None)
        check(other is None, f"{path} has searches of {other} steps, but here they take {steps}; give another --output")
        for row, length in [*((row, steps) for row in entry["search"]), (entry.get("full") or {}, None)]:
            if "command" in row:  # which some older files lack
                require_same(path, method, row["command"], contest.words_of(method, Rates.of(row), length))
    return kept["methods"]


def main() -> None:
    """Train what is missing and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="nano", help="configuration of all runs")
    parser.add_argument("--methods", default=",".join(SETTINGS), help="which, separated by commas")
    parser.add_argument("--projections", default="", help="shares of the rate at which projections learn, as 1,0.25")
    parser.add_argument("--own", action="store_true", help="search settings of the methods themselves too")
    parser.add_argument("--runs", type=Path, help="where the runs go; runs/methods-CONFIG unless given")
    parser.add_argument("--search-only", action="store_true", help="no run in full")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file, to which results are added")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options, extra = parser.parse_known_args()
    at_least(options, 1, "jobs")
    shares = tuple(
        finite_number(word, f"--projections {word!r}", "a share such as 0.25")
        for word in split_list(options.projections)
    )
    if not all(share > 0 for share in shares):
        raise UserError(f"--projections is {options.projections}, but the shares are above 0; give some such as 1,0.25")
    runs = options.runs.absolute() if options.runs else ROOT / "runs" / f"methods-{options.config}"
    contest = Contest(options.config, runs, shares, tuple(extra), options.own)
    methods = split_list(options.methods)
    check(bool(methods), f"--methods is {options.methods!r}, which names none; give some of {', '.join(SETTINGS)}")
    for method in methods:
        read_command_line(contest.words(method))  # so that nothing is made where an option is refused
    found = kept_results(options.output, contest) if options.output.exists() else {}
    contest.runs.mkdir(parents=True, exist_ok=True)
    lock = Lock()

    def save() -> None:
        with lock:
            ordered = {name: found[name] for name in SETTINGS if found.get(name, {}).get("search")}
            write_json({"config": options.config, **provenance(), "methods": ordered}, options.output)

    # Every search waits in a thread of its own for its runs, which share the threads of all trainings.
    with side_by_side(options.jobs) as search, side_by_side(options.jobs) as submit:

        def measure(method: str) -> None:
            contest.complete(method, found.setdefault(method, {}), options.search_only, save, submit)

        for ended in as_completed([search(measure, method) for method in methods]):
            ended.result()


if __name__ == "__main__":
    run_command(main)
