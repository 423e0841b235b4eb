"""The commands that train each model of the table of all methods, measure it, and time its method again."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from scripts.results_tables import RESULTS
from scripts.results_tables.measured import REPORTED, Row, by_label, rows_of
from scripts.shares import SEARCHED, SMALL

OUTPUT, OTHER_TEXT = "again.json", "runs/c4.parquet"
_OWN = ("--method=", "--salaad.", "--optimizer.", "--model.", "--seed=")  # options of one row, which come last


def section() -> str:
    """Return the commands of the scale `REPORTED` as a block of shell commands, each below what it is for."""
    rows = rows_of(RESULTS / "elastic" / f"{REPORTED}.json")
    times = ("state and step time of all", timing_command(rows, REPORTED))
    blocks = (f"# {label}\n{shlex.join(words)}" for label, words in [times, *commands(rows, REPORTED)])
    return "```sh\n" + "\n".join(blocks) + "\n```"


def commands(rows: Sequence[Row], config: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the label of every model and the words of a command, one for all seeds that were measured in the same ways.

    Args:
        rows: rows of compare_elastic.py.
        config: the configuration that all rows have.
    """
    for label, mine in by_label(rows).items():
        for seeds, ways in _measured_alike(mine):
            shared, own = _options(mine[0])
            words = ["python", "scripts/compare_elastic.py", *shared, "--rows", label, "--output", OUTPUT]
            words += ["--seeds", ",".join(map(str, seeds))]
            words += ["--repeated", label] if len(seeds) > 1 else []
            words += ["--ways", ";".join(ways)] if ways else []
            if label.startswith(SMALL):
                rates = [word for word in own if word.startswith("--optimizer.")]
                words += [f"--small={' '.join(rates)}", "--small-rows", label] if rates else []
            if mine[0]["method"] not in ("full_rank", "salaad") or label == SEARCHED:
                words += ["--search", f"results/methods/{config}.json"]
            words += ["--other-text", OTHER_TEXT] if "other_perplexity" in mine[0]["X"] else []
            yield label, words


def timing_command(rows: Sequence[Row], config: str) -> list[str]:
    """Return the words of the command that measures the columns of state and step time.

    It times steps that are not compiled, of every method by its name (SALAAD as in the paper is `salaad`) and of the
    other rows by their labels.

    Args:
        rows: rows of compare_elastic.py.
        config: the configuration that all rows have.
    """
    shared, _ = _options(rows[0])
    plain = [*("false" if option == "--train.compile" else word for option, word in pairwise(["", *shared]))]
    words = ["python", "scripts/bench_training.py", *plain, "--threads", "1"]
    for label, (row, *_) in by_label(rows).items():
        if label == "SALAAD" or label.startswith(SMALL):
            _, own = _options(row)
            words += ["--also", f"{label}: {' '.join(word for word in own if not word.startswith('--seed='))}"]
    return [*words, "--output", f"results/bench/methods-{config}.json"]


def _options(row: Row) -> tuple[list[str], list[str]]:
    """Return the options of train.py that a row was trained with: those that all rows have, and its own."""
    options = shlex.split(row["command"])
    first = next(place for place, word in enumerate(options) if word.startswith(_OWN))
    return options[:first], options[first:]


def _measured_alike(rows: Sequence[Row]) -> Iterator[tuple[list[int], list[str]]]:
    """Yield seeds and the ways measured with them all; without any way, all seeds and no way."""
    seeds_of: dict[str, tuple[int, ...]] = {}
    for row in rows:
        for way in row["ways"]:
            seeds_of[way] = (*seeds_of.get(way, ()), row["seed"])
    if not seeds_of:
        yield [row["seed"] for row in rows], []
    for seeds in dict.fromkeys(seeds_of.values()):
        yield [*seeds], [way for way, measured in seeds_of.items() if measured == seeds]
