"""Search SALAAD's settings by the elastic curve: train every point, cut it to eight sizes, and score the curve.

    python scripts/research/search_elastic.py full_rank "release=0.2" "pull=decoupled pull_rate=0.3 seed=1"

A point is written as for search_nano.py. A run is cut by energy and refined, the head too, to the eight sizes of
`shares`. Its score is the mean, over these sizes, of the logarithm of perplexity over that of full-rank training, which
is the best of the points named `full_rank …` with the same seed. Finished points are kept. Further options, such as
--data.files, are those of train.py for every point.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from transformers import logging

from salaad.common.errors import run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least
from salaad.compression.variants import Variant
from scripts.elastic_ways import Measured, by_energy
from scripts.research.search_nano import overrides, train
from scripts.shares import NAMED, shares
from scripts.trainings import ROOT


def curve(run: Path, tokens: int) -> dict[str, Any]:
    """Return the perplexity of X, and that at every share, measured as by `cut, head` of compare_elastic.py."""
    model = Measured(run, tokens, text_tokens=0)
    found = {"X": model.evaluation(model.source)(Variant("X"))["perplexity"], "sizes": []}
    if model.source.surrogate:
        for share, row in by_energy(model, head=True):
            found["sizes"].append({"share": share, **{key: row[key] for key in ("parameters", "perplexity")}})
    return found


def score(found: dict[str, Any], full_rank: float) -> float:
    """The mean over the eight sizes of log(perplexity / perplexity of full-rank training)."""
    eight = shares()
    return fmean(math.log(row["perplexity"] / full_rank) for row in found["sizes"] if row["share"] in eight)


def seed_of(point: str) -> str:
    """Return the word of a point that names its seed; `seed=0` if it names none."""
    return next((word for word in point.split() if word.startswith("seed=")), "seed=0")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of point, X, half, a fifth and score: points without a score, then the best first."""
    lines = []
    for row in sorted(rows, key=lambda row: row.get("score", -1)):
        named = {size["share"]: f"{size['perplexity']:.2f}" for size in row["sizes"]}
        shown = f"{row['score']:.2%}" if "score" in row else "–"
        lines.append((row["point"], f"{row['X']:.2f}", *(named.get(share, "–") for share in NAMED), shown))
    return markdown_table(("point", "X", "half", "a fifth", "elastic score"), lines)


def main() -> None:
    """Train, cut and score what is missing; write the JSON file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("points", nargs="+", help="settings to lay over the config, or full_rank")
    parser.add_argument("--config", default="nano.yaml", help="configuration the points differ from")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "elastic", help="where the runs go")
    parser.add_argument(
        "--tokens", type=int, default=200_000, help="validation tokens; figures are of their second half"
    )
    parser.add_argument("--output", type=json_file, required=True, help="JSON file, to which points are added")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one core each")
    options, extra = parser.parse_known_args()
    at_least(options, 1, "jobs", "tokens")
    logging.disable_progress_bar()  # one for every model that is opened
    for point in options.points:
        overrides(point)
    results = options.runs / "results"
    results.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(lambda point: train(point, options.config, options.runs, results, extra), options.points))
    kept = read_json(options.output)["rows"] if options.output.exists() else []
    rows = {row["point"]: row for row in kept}
    for point in options.points:
        name = point.replace(" ", ",").replace("salaad.", "")
        if point not in rows and (results / f"{name}.json").exists():
            about = {key: read_json(results / f"{name}.json")[key] for key in ("command", "commit")}
            rows[point] = {"point": point, **about, **curve(options.runs / name, options.tokens)}
        for row in rows.values():
            rivals = [other for other in rows.values() if other["point"].startswith("full_rank")]
            reference = [other["X"] for other in rivals if seed_of(other["point"]) == seed_of(row["point"])]
            if row["sizes"] and reference:
                row["score"] = score(row, min(reference))
        write_json({"config": options.config, **provenance(), "rows": list(rows.values())}, options.output)
    print(table(list(rows.values())))


if __name__ == "__main__":
    run_command(main)
