"""One training at every size: SALAAD's cuts beside small dense models, all other methods and all other ways to cut.

    python scripts/compare_elastic.py --config nano-20 --seeds 0,1,2 --output results/elastic/nano-20.json \\
        --search results/methods/nano-20.json --other-text runs/c4.parquet \\
        --data.source files --data.files 'runs/wikipedia/train-*' --data.validation_files 'runs/wikipedia/valid*' \\
        --data.tokenizer runs/wikipedia-4096.model

Every model is trained on the same tokens and measured whole; models that can be cut are measured at eight sizes too,
from three quarters of the compressible parameters to a fifth, evenly spaced in their logarithm. The elastic score of a
curve is the mean over these sizes of log(perplexity / perplexity of full-rank training with the same seed). Rows in the
JSON file are kept, and an interrupted run goes on. With --list nothing is trained or measured; what is left, and how
long it will take, is shown.
"""

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import logging

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check, split_list
from salaad.compression.variants import Variant
from salaad.config.command_line import read_command_line
from salaad.runs.summary import origin_of
from scripts.compare_methods import best_rates, results_in
from scripts.elastic_trainings import Settings, Training, trainings
from scripts.elastic_ways import (
    BEGINS,
    WAYS,
    TrainedModel,
    budgets_of,
    cut_bytes,
    folder_name,
    samples,
    split_of_way,
    way_of_tuning,
)
from scripts.measured_text import MeasuredText
from scripts.shares import SMALL
from scripts.side_by_side import side_by_side
from scripts.trainings import ROOT, config_of, is_same, trained

FIGURES = ("variant", "parameters", "perplexity")
OF_A_CUT = (*FIGURES, "legacy_perplexity", "other_perplexity", "in_context", "kappa", "bytes")
OF_A_ROW = {"label", "seed", "command", "config", "commit", "machine", "X", "ways", "minutes"}


# Adds what was found to a row, at once, and writes all rows.
Keep = Callable[[dict[str, Any], Mapping[str, Any]], None]


@dataclass(frozen=True)
class Comparison:
    """The settings that all trainings share, and the measurement of one training.

    Args:
        config: file in configs/.
        runs: folder of the runs.
        extra: options of train.py for all trainings.
        tokens: validation tokens; every figure is measured on their second half.
        other_text: a second validation file, on which whole models and their half and fifth are measured too.
        ways: which ways to smaller models are measured.
    """

    config: str
    runs: Path
    extra: tuple[str, ...]
    tokens: int
    other_text: str | None = None
    ways: tuple[str, ...] = tuple(WAYS)

    def words(self, training: Training, seed: int) -> list[str]:
        """Return the options of train.py for a training with a seed."""
        return ["--config", self.config, *self.extra, *training.words, f"--seed={seed}"]

    def folder(self, training: Training, seed: int) -> Path:
        """Return the folder of a training's run."""
        return self.runs / f"{training.label.replace(', ', '-').replace(' ', '_')}-{seed}"

    @cached_property
    def text(self) -> MeasuredText:
        """The text that all models are trained and measured on."""
        config, _ = read_command_line(["--config", self.config, *self.extra])
        return MeasuredText.of(config, self.tokens, self.other_text)

    def left(self, training: Training, row: Mapping[str, Any]) -> list[str]:
        """Return what a training's row does not have yet: "train", unless there is a row, and ways."""
        ways = [way for way in training.ways if way in self.ways and way not in row.get("ways", {})]
        return ways if row else ["train", *ways]

    def complete(self, training: Training, seed: int, row: dict[str, Any], keep: Keep) -> None:
        """Train and measure what the row of a training with one seed lacks: the whole model, and smaller ones."""
        left = self.left(training, row)
        words, folder = self.words(training, seed), self.folder(training, seed)
        about, summary = trained(words, folder)
        if summary is None:
            raise UserError(f"{folder.name} diverged; give lower learning rates")
        model = TrainedModel(folder, self.tokens, summary["tokens"], self.other_text)
        if "train" in left:
            found = {"label": training.label, "seed": seed, **about, "text_tokens": summary["tokens"]}
            found |= {"config": config_of(folder), "text": self.text.digests}
            found |= {"method": read_command_line(words)[0].method, **self.figures(model, summary), "ways": {}}
            found["minutes"] = {"train": summary["seconds"]["train"] / 60}
            found["costs"] = {"train": model.training_cost(summary["positions"])}
            keep(row, found)
            print(f"{folder.name}: X {row['X']['perplexity']:.2f}", flush=True)
        for way in (way for way in left if way != "train"):
            found = {key: {**row.get(key, {}), way: value} for key, value in self.of_a_way(model, way).items()}
            if "text" in row:
                found["text"] = row["text"] | self.text.digests  # which may have a second text that the row had not
            keep(row, found)
            shown = ", ".join(f"{size['perplexity']:.2f}" for size in row["ways"][way])
            print(f"{folder.name}, {way}: {shown}", flush=True)

    def of_a_way(self, model: TrainedModel, way: str) -> dict[str, Any]:
        """Measure a way to smaller models; return key of the row → the way's entry in the dict that is there."""
        since = time.perf_counter()
        sizes = [
            {"share": share, **{key: size[key] for key in OF_A_CUT if size.get(key) is not None}}
            for share, size in WAYS[way](model)
        ]
        found = {"ways": sizes, "minutes": (time.perf_counter() - since) / 60}
        found |= {"commits": provenance()["commit"], "machines": provenance()["machine"]}
        if costs := model.costs_of(way):
            found["costs"] = costs
        if way_of_tuning(way) == "tuned":
            name = folder_name(BEGINS, *split_of_way(way))
            found["samples"] = samples(model.run / name, budgets_of(model)[-1][1])
        return found

    def is_elsewhere(self, training: Training, seed: int, row: Mapping[str, Any]) -> bool:
        """Return whether a row lacks ways, and the run it was measured on is not the one in its folder here."""
        if not row or not self.left(training, row):
            return False
        folder = self.folder(training, seed)
        here = origin_of(folder) if (folder / "summary.json").exists() else {}
        return any(row[key] != here.get(key) for key in ("commit", "machine"))

    def figures(self, model: TrainedModel, summary: dict[str, Any]) -> dict[str, Any]:
        """Return the figures of the whole model (X), and of L + S where there is one."""
        measure, found = model.evaluation(model.source), {}
        known = measure.deployment.default_variants.split(",")
        for name in (name for name in ("X", "L+S") if name in known):
            row, of = model.row(measure, Variant(name)), summary["variants"][name]
            found[name] = {key: row[key] for key in (*OF_A_CUT, "tokens") if row.get(key) is not None}
            found[name] |= {key: of[key] for key in ("trained", "bytes") if key in of}
            if name == "L+S":
                found[name]["bytes"] = cut_bytes(measure.deployment, Variant(name))
        return found


def listing(comparison: Comparison, todo: Sequence[tuple[Training, int]], rows: Mapping[tuple[str, int], Any]) -> str:
    """Return a Markdown table of what is left of every training, with minutes estimated from the existing rows."""
    steps = {what for row in rows.values() for what in row["minutes"]}
    took = {what: fmean(row["minutes"][what] for row in rows.values() if what in row["minutes"]) for what in steps}
    lines = []
    for training, seed in todo:
        row = rows.get((training.label, seed), {})
        left = comparison.left(training, row)
        known = [took[what] for what in left if what in took]
        minutes = f"{sum(known):.0f}" if known else "not known" if left else ""
        minutes = minutes if len(known) in (0, len(left)) else f"more than {minutes}"
        told = " (of a run that is not here)" if comparison.is_elsewhere(training, seed, row) else ""
        lines.append((training.label, seed, f"{'; '.join(left)}{told}" if left else "–", minutes))
    return markdown_table(("model", "seed", "left", "minutes"), lines)


def measured_elsewhere(
    comparison: Comparison, todo: Sequence[tuple[Training, int]], rows: Mapping[tuple[str, int], Any]
) -> str | None:
    """Return a sentence on the rows that cannot be completed, as their runs are not here; None without any."""
    names = [
        f"{training.label} (seed {seed})"
        for training, seed in todo
        if comparison.is_elsewhere(training, seed, rows.get((training.label, seed), {}))
    ]
    if not names:
        return None
    return (
        f"there are ways left of {'; '.join(names)}, but the rows were measured on other runs than are in "
        f"{comparison.runs}; give another --output, or other --rows or --ways, or delete the rows"
    )


def kept_rows(path: Path, config: str) -> list[dict[str, Any]]:
    """Return the rows of a JSON file of this script.

    Raises:
        UserError: the file is none of this script, has rows of another configuration, or cannot be read.
    """
    kept = read_json(path)
    rows = kept.get("rows") if isinstance(kept, dict) else None
    ours = isinstance(rows, list) and all(isinstance(row, dict) and row.keys() >= OF_A_ROW for row in rows)
    check(ours and "config" in kept, f"{path} has no results of compare_elastic.py; give another --output")
    check(kept["config"] == config, f"{path} has results of --config {kept['config']}; give another --output")
    return rows


def require_same(row: Mapping[str, Any], asked: Sequence[str]) -> None:
    """Raise a UserError if a row was trained with other settings than these options of train.py give."""
    if not is_same(row["config"], read_command_line(list(asked))[0].to_dict()):
        raise UserError(f"{row['label']} was measured with {row['command']}; give another --output, or delete its row")


def main() -> None:
    """Train and measure what is missing; write the JSON file."""
    options, extra = parse_options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    runs = options.runs.absolute() if options.runs else ROOT / "runs" / f"elastic-{options.config}"
    comparison = Comparison(options.config, runs, extra, options.tokens, options.other_text, options.ways)
    searched = results_in(options.search, "--search")["methods"] if options.search else {}
    rates = {name: best_rates(entry["search"]) for name, entry in searched.items()}
    small = dict.fromkeys(options.small_rows, tuple(options.small.split()))
    settings = Settings(tuple(options.dense.split()), small, tuple(options.salaad.split()), rates)
    every = trainings(options.config, extra, settings)
    order = [training.label for training in every]
    todo = asked_for(every, options)
    kept = kept_rows(options.output, options.config) if options.output.exists() else []
    rows, lock = {(row["label"], row["seed"]): row for row in kept}, Lock()
    for training, seed in todo:  # before any of them is trained
        if (training.label, seed) in rows:
            require_same(rows[training.label, seed], comparison.words(training, seed))

    if options.list:
        print(listing(comparison, todo, rows))
        return
    elsewhere = measured_elsewhere(comparison, todo, rows)
    check(elsewhere is None, elsewhere)
    todo = [
        (training, seed) for training, seed in todo if comparison.left(training, rows.get((training.label, seed), {}))
    ]
    if todo:
        comparison.text.require_behind(kept)

    def place(row: dict[str, Any]) -> tuple[int, int]:
        """Return the sort key of a row: rows in the order of the trainings, those with unknown labels last."""
        return order.index(row["label"]) if row["label"] in order else len(order), row["seed"]

    def keep(row: dict[str, Any], found: Mapping[str, Any]) -> None:
        with lock:  # since another job may be writing all rows
            row |= found
            there = sorted(filter(None, rows.values()), key=place)
            write_json({"config": options.config, **provenance(), "rows": there}, options.output)

    def measure(item: tuple[Training, int]) -> None:
        training, seed = item
        comparison.complete(training, seed, rows.setdefault((training.label, seed), {}), keep)

    runs.mkdir(parents=True, exist_ok=True)
    with side_by_side(options.jobs) as submit:
        for ended in as_completed([submit(measure, item) for item in todo]):
            ended.result()


def parse_options() -> tuple[argparse.Namespace, tuple[str, ...]]:
    """Return this script's options, checked, and the options of train.py for all runs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="nano", help="configuration of all runs")
    parser.add_argument("--seeds", default="0", help="separated by commas; the first is trained for every row")
    parser.add_argument("--rows", help="labels of models (see --list), separated by semicolons; all unless given")
    parser.add_argument("--ways", default=";".join(WAYS), help="ways to smaller models, separated by semicolons")
    parser.add_argument("--repeated", default="full-rank;SALAAD", help="labels that are trained with every seed")
    parser.add_argument("--dense", default="", help="options of train.py for dense models and SALAAD")
    parser.add_argument("--small", default="", help="options of train.py for --small-rows, behind those of --dense")
    parser.add_argument("--small-rows", default="", help="labels of small dense models, separated by semicolons")
    parser.add_argument(
        "--search", type=Path, help="JSON of compare_methods.py, for the learning rates of other methods"
    )
    parser.add_argument("--other-text", help="a second validation file, for whole models and for half and a fifth")
    parser.add_argument("--salaad", default="", help="options of SALAAD, in place of the recommended ones")
    parser.add_argument("--tokens", type=int, default=600_000, help="validation tokens; the second half is measured")
    parser.add_argument("--runs", type=Path, help="where the runs go; runs/elastic-CONFIG unless given")
    parser.add_argument("--output", type=json_file, required=True, help="JSON file, to which rows are added")
    parser.add_argument("--list", action="store_true", help="show what is left and do nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side")
    options, extra = parser.parse_known_args()
    at_least(options, 1, "jobs", "tokens")
    read = {"--search": options.search, "--other-text": None if options.list else options.other_text}
    for name, file in read.items():
        check(file is None or Path(file).is_file(), f"{name} {file} is no file; give an existing one")
    options.ways = separated(options.ways)
    for way in options.ways:
        check(way in WAYS, f"there is no way {way!r}; give some of {'; '.join(WAYS)}")
    options.small_rows = separated(options.small_rows) if options.small_rows else ()
    for label in options.small_rows:
        check(label.startswith(SMALL), f"--small-rows names {label!r}; give labels that begin with {SMALL!r}")
    given = f"--small is {options.small!r} and --small-rows {'; '.join(options.small_rows)!r}"
    check(bool(options.small) == bool(options.small_rows), f"{given}; give both, or neither")
    seeds = split_list(options.seeds)
    decimal = seeds and all(map(str.isdecimal, seeds))
    check(decimal, f"--seeds is {options.seeds!r}; give whole numbers such as 0,1,2")
    options.seeds = [int(seed) for seed in dict.fromkeys(seeds)]
    return options, tuple(extra)


def separated(names: str) -> tuple[str, ...]:
    """Return the names in a list with semicolons; spaces around them count for nothing."""
    return tuple(name.strip() for name in names.split(";"))


def asked_for(every: Sequence[Training], options: argparse.Namespace) -> list[tuple[Training, int]]:
    """Return the trainings that --rows names, each with all seeds that it is trained with."""
    labels, repeated = [training.label for training in every], separated(options.repeated)
    asked = separated(options.rows) if options.rows else labels
    for label in (*asked, *repeated, *options.small_rows):
        check(label in labels, f"there is no row {label!r}; give some of {'; '.join(labels)}")
    return [
        (training, seed)
        for training in every
        if training.label in asked
        for seed in (options.seeds if training.label in repeated else options.seeds[:1])
    ]


if __name__ == "__main__":
    run_command(main)
