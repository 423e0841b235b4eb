"""Search SALAAD's settings at a small scale: train every point of a list, one core each, and keep one JSON per run.

    python scripts/research/search_nano.py full_rank "rho_constant=0.15 delta_beta=0.002" "every=2"

A point is a list of `key=value` of the `salaad` section (or `section.key=value` of any other, or `seed=value`), laid
over the config. Finished points are kept, so the search can be interrupted and extended.
"""

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from salaad.common.errors import UserError, run_command
from salaad.common.validation import at_least
from salaad.runs.summary import save_result, summary_table
from scripts.trainings import ROOT, trained


def overrides(point: str) -> list[str]:
    """The command-line options of a point; `full_rank` is the vanilla run."""
    options = []
    for word in point.split():
        if word == "full_rank":
            options += ["--method", "full_rank"]
        else:
            key, equals, value = word.partition("=")
            if not (key and equals and value):
                raise UserError(f"point {point!r} holds {word!r}; give full_rank or key=value, such as every=2")
            options += [f"--{key if '.' in key or key == 'seed' else 'salaad.' + key}", value]
    return options


def train(point: str, config: str, runs: Path, results: Path) -> None:
    """Train one point on one core and write its result; nothing to do if that is there already.

    Args:
        point: what is laid over the config.
        config: file in configs/.
        runs: folder of the runs.
        results: folder of their results.
    """
    name = point.replace(" ", ",").replace("salaad.", "")
    result = results / f"{name}.json"
    if result.exists():
        return
    words = ["--config", config, *overrides(point)]
    try:
        summary = trained([*words, "--train.save_every", "0"], runs / name, one_core=True).summary
    except UserError as error:
        print(f"{point}: {error}", flush=True)
        return
    if summary is None:
        print(f"{point}: diverged", flush=True)
        return
    save_result(runs / name, result, "python train.py " + " ".join(words))
    print(f"{point}\n{summary_table(summary)}\n", flush=True)


def main() -> None:
    """Train the points side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", nargs="+", help="settings to lay over the config, or full_rank")
    parser.add_argument("--config", default="nano.yaml", help="configuration the points differ from")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "search", help="where the runs go")
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results" / "nano" / "search", help="where the JSON goes"
    )
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each")
    options = parser.parse_args()
    at_least(options, 1, "jobs")
    for point in options.points:
        overrides(point)  # a UserError if it is no point
    options.results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda point: train(point, options.config, options.runs, options.results), options.points))


if __name__ == "__main__":
    run_command(main)
