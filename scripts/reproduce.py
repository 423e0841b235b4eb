"""Reproduce the paper, table by table, at any scale.

    python scripts/reproduce.py --scale nano --list          every item, its trainings, its cost, and what is there
    python scripts/reproduce.py --scale nano table1          train what is missing, measure, keep the result
    python scripts/reproduce.py --scale nano table1 --again  measure anew; trainings whose folder is here are kept
    python scripts/reproduce.py --scale nano all --jobs 2    everything, two trainings side by side
    python scripts/reproduce.py --scale 60m --c4 FOLDER table1   C4 as scripts/fetch_c4.py brought it, without network
    python scripts/reproduce.py --scale 350m all --launcher print     the commands, for a cluster

Finished trainings and results are kept, and a training that was interrupted goes on, so it can be stopped at any point.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import logging

from salaad.common.errors import UserError, run_command
from salaad.common.files import read_json
from salaad.common.formats import markdown_table
from salaad.common.validation import at_least, check
from scripts.fetch_c4 import training_options
from scripts.reproduction.catalogue import ITEMS
from scripts.reproduction.claims import claims_table
from scripts.reproduction.cost import MACHINES, hours
from scripts.reproduction.freshness import LEGENDS, commits_of, mark_of
from scripts.reproduction.grid import PLACES, ROOT, SCALES, Run, Scale, distinct, train
from scripts.reproduction.items import Item
from scripts.reproduction.report import write_report
from scripts.results_tables.measured import REPORTED
from scripts.side_by_side import side_by_side


def chosen_items(names: list[str]) -> list[Item]:
    """The items of these names, in the paper's order; all for `all`."""
    unknown = set(names) - {item.name for item in ITEMS} - {"all"}
    if unknown:
        raise UserError(f"there is no item {unknown.pop()}; give all, or any of {', '.join(i.name for i in ITEMS)}")
    return [item for item in ITEMS if "all" in names or item.name in names]


def listing(scale: Scale, items: list[Item]) -> list[dict]:
    """Return one row per item: its title, its trainings and their cost, and whether its result is there."""
    rows = []
    for item in items:
        runs = distinct(item.runs(scale), scale)
        left = [] if item.done(scale) else item.missing(scale)
        rows.append(
            {
                "item": item.name,
                "title": item.title,
                "section": item.section,
                "runs": [run.name(scale) for run in runs],
                "runs_left": [run.name(scale) for run in left],
                "flops": sum(run.flops(scale) for run in runs),
                "hours": {machine: sum(hours(run, scale, machine) for run in runs) for machine in MACHINES},
                "hours_left": {machine: sum(hours(run, scale, machine) for run in left) for machine in MACHINES},
                "done": item.done(scale),
                "mark": mark_of(commits_of(read_json(item.result(scale)))) if item.done(scale) else "",
                "result": str(item.result(scale).relative_to(ROOT)),
                "command": item.command(scale),
                "hub": item.hub,
            }
        )
    return rows


def listing_table(rows: list[dict], whole: dict[str, float]) -> str:
    """Return the rows of `listing` as a Markdown table; `whole` is machine → hours left of all, each training once."""
    lines = [
        (
            row["item"],
            row["title"] + (" (needs the hub)" if row["hub"] else ""),
            row["section"],
            f"{len(row['runs']) - len(row['runs_left'])} of {len(row['runs'])}",
            f"{row['flops']:.1e}",
            *(f"{row['hours_left'][machine]:.2g} of {row['hours'][machine]:.2g} h" for machine in MACHINES),
            f"{row['result']} {row['mark']}".strip() if row["done"] else "–",
        )
        for row in rows
    ]
    left = (f"{whole[machine]:.2g} h" for machine in MACHINES)
    lines.append(("all", "each training once", "", "", "", *left, ""))
    header = ("item", "what", "paper", "trainings done", "FLOPs", *(f"left, {one}" for one in MACHINES), "result")
    legends = [f"{mark}: {legend}" for mark, legend in LEGENDS.items() if any(mark in row["mark"] for row in rows)]
    return "\n\n".join([markdown_table(header, lines), *legends])


def left_of_all(scale: Scale, items: list[Item]) -> dict[str, float]:
    """Return machine → hours of the trainings that some of the items lack, each counted once."""
    runs = distinct((run for item in items if not item.done(scale) for run in item.missing(scale)), scale)
    return {machine: sum(hours(run, scale, machine) for run in runs) for machine in MACHINES}


def train_all(left: list[Run], scale: Scale, jobs: int, launcher: Sequence[str]) -> list[str]:
    """Train, `jobs` side by side, printing what is left and how long it takes; return the names of failed trainings."""
    begun, failed = time.monotonic(), []
    threads = max(1, torch.get_num_threads() // jobs)

    def problem_of(run: Run) -> str | None:
        try:
            train(run, scale, launcher, threads)
        except UserError as problem:  # with which the others can go on
            return str(problem)
        return None

    with side_by_side(jobs) as submit:
        futures = {submit(problem_of, run): run.name(scale) for run in left}
        for number, future in enumerate(as_completed(futures), 1):
            name, problem = futures[future], future.result()
            failed += [name] if problem else []
            minutes = (time.monotonic() - begun) / number * (len(left) - number) / 60
            said = problem or f"{name}: trained"
            print(f"{said}; {len(left) - number} left, about {minutes:.0f} min", flush=True)
    return failed


def left_to_do(items: list[Item], scale: Scale, quiet: bool) -> list[Item]:
    """Return the items without a result; print the kept results of the others unless `quiet`."""
    for item in items:
        if item.done(scale):
            result = item.kept(item.result(scale))
            if not quiet:
                print_result(result)
            repeated = "; some of its trainings were repeated since, on another machine or commit"
            place = f"{item.result(scale).relative_to(ROOT)}{repeated if item.outdated(scale, result) else ''}"
            told = f"{item.name} is kept in {place}; --again measures it anew"
            print(told, file=sys.stderr)  # so that printed commands stand alone
    return [item for item in items if not item.done(scale)]


def print_result(result: dict) -> None:
    """Print an item's title, its tables and the paths of its pictures."""
    print(f"\n## {result['title']}\n")
    for caption, table in result["tables"].items():
        print(f"{caption}\n\n{table}\n")
    for caption, name in result["pictures"].items():
        print(f"picture, {caption}: results/{result['scale']}/reproduce/{name}\n")


def measure_all(items: list[Item], scale: Scale, again: bool) -> list[str]:
    """Measure, keep and print every item whose trainings are there, then write the report; return what went wrong."""
    problems, kept = [], []
    for item in items:
        if left := item.missing(scale, again):
            problems.append(f"{item.name} lacks {', '.join(run.name(scale) for run in left)}")
            continue
        try:
            item.require_second_text(scale)
            result = item.write(scale)
        except UserError as error:
            problems.append(f"{item.name}: {error}")
            continue
        print_result(result)
        kept.append(item.name)
        print(f"kept: {item.result(scale).relative_to(ROOT)}", flush=True)
    if kept:
        try:
            report = write_report(ROOT / "results", ITEMS, list(SCALES.values()))
            print(f"report: {report.relative_to(ROOT)}")
        except UserError as error:  # a damaged file, perhaps of another scale
            problems.append(f"the report is not written: {error}")
    return problems


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("items", nargs="*", help="names from --list, or all")
    found.add_argument("--scale", choices=SCALES, required=True, help="the size at which everything is done")
    found.add_argument("--list", action="store_true", help="show the items (all, or those named) and do nothing")
    found.add_argument("--json", action="store_true", help="with --list: as JSON")
    found.add_argument("--again", action="store_true", help="measure them anew though their results are kept")
    found.add_argument("--jobs", type=int, default=1, help="trainings side by side on this machine")
    found.add_argument("--compile", action="store_true", help="compile the trainings, which on a CPU needs a compiler")
    found.add_argument("--launcher", default="python", help="python, print, or a launcher's words before train.py")
    found.add_argument("--c4", type=Path, help="folder of scripts/fetch_c4.py, for the scales that train on C4")
    found.add_argument("--tokenizer", type=Path, help="file or folder, instead of what the scale takes from the hub")
    found.add_argument("--other-text", type=Path, help="a second validation file, on which Table 1 is measured too")
    found.add_argument("--task-data", type=Path, help="folder with the tasks' data for the downstream table")
    return found


def main() -> None:
    """List, print, or train and measure."""
    options = parser().parse_args()
    at_least(options, 1, "jobs")
    check(options.list or not options.json, "--json is a form of the list; give --list with it")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    scale = asked_scale(options)
    os.chdir(ROOT)  # where the trainings run and the scales' own texts lie
    items = chosen_items(options.items or (["all"] if options.list else []))
    if options.list:
        rows = listing(scale, items)
        print(json.dumps(rows, indent=1) if options.json else listing_table(rows, left_of_all(scale, items)))
        if scale.name == REPORTED and not options.json:
            print(
                f"\nThe table of all methods at {REPORTED}: the first command with compare_elastic.py in "
                "results/elastic/README.md, with --list"
            )
        return
    if not items:
        raise UserError(f"no item is given; give all, or any of {', '.join(item.name for item in ITEMS)}")
    launcher = asked_launcher(options.launcher)
    items = items if options.again else left_to_do(items, scale, quiet=options.launcher == "print")
    runs = distinct((run for item in items for run in item.missing(scale, options.again)), scale)
    if options.launcher == "print":
        print("\n".join(shlex.join(["accelerate", "launch", *run.command(scale)]) for run in runs))
        return
    failed = train_all(runs, scale, options.jobs, launcher)
    problems = measure_all(items, scale, options.again)
    if "all" in options.items:
        print(f"\n{claims_table(scale)}")
    if failed or problems:
        told = [f"{len(failed)} trainings failed ({', '.join(failed)})"] if failed else []
        raise UserError(f"{'; '.join([*told, *problems])}; mend what they say and start again")


def asked_launcher(words: str) -> tuple[str, ...]:
    """Return what is typed before train.py.

    Raises:
        UserError: the words end within quotes, or their first is no program that is there.
    """
    if words in ("python", "print"):
        return (sys.executable,)
    try:
        launcher = tuple(shlex.split(words))
    except ValueError as error:
        raise UserError(f"--launcher is {words!r}, which are no words ({error}); close its quotes") from None
    if not launcher or shutil.which(launcher[0]) is None:
        raise UserError(
            f"--launcher is {words!r}, which begins with no program that is here; give python, print, or the words "
            "before train.py, such as 'accelerate launch'"
        )
    return launcher


def asked_scale(options: argparse.Namespace) -> Scale:
    """Return the scale that is asked for, with the places of its texts and tokenizer.

    Raises:
        UserError: a text or folder is not there, or --c4 is given to a scale with another text.
    """
    scale = SCALES[options.scale]
    places = {name: getattr(options, name.replace("-", "_")) for name in PLACES}
    kinds = dict.fromkeys(("c4", "task-data"), (Path.is_dir, "no folder"))
    kinds |= {"other-text": (Path.is_file, "no file"), "tokenizer": (Path.exists, "not there")}
    for name, (there, what) in kinds.items():
        if places[name] and not there(places[name]):
            raise UserError(f"--{name} {places[name]} is {what} (here is {Path.cwd()}); give an existing one")
    if options.tokenizer and (scale.config.data.source == "python-docs" or scale.config.data.tokenizer):
        raise UserError(f"--tokenizer is given, but {scale.name} has one of its own; leave it out")
    found = {name: place.absolute() for name, place in places.items() if place}
    files = {"task_data": found.get("task-data"), "other_text": found.get("other-text")}
    scale = replace(scale, asked=tuple(found), **files)
    if options.compile:
        scale = replace(scale, options=(*scale.options, "--train.compile=true"))
    if options.c4:
        if scale.config.data.source != "c4":
            raise UserError(f"--c4 is given, but {scale.name} has a text of its own; leave it out")
        scale = replace(scale, options=(*scale.options, *shlex.split(" ".join(training_options(found["c4"])))))
    if options.tokenizer:  # also in place of that beside --c4
        scale = replace(scale, options=(*scale.options, f"--data.tokenizer={found['tokenizer']}"))
    if scale.text and not options.list and not (ROOT / scale.text).is_dir():
        raise UserError(f"{scale.text} is not there; bring it with python scripts/fetch_text.py --output {scale.text}")
    return scale


if __name__ == "__main__":
    run_command(main)
