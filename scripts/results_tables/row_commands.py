"""For each model of the table of all methods, the commands that train it and measure it again."""

import shlex
from collections.abc import Iterator, Sequence
from itertools import takewhile

from scripts.results_tables import RESULTS
from scripts.results_tables.measured import REPORTED, Row, by_label, rows_of
from scripts.shares import SEARCHED, SMALL

OUTPUT, OTHER_TEXT = "again.json", "runs/c4.parquet"
_OWN = ("--method=", "--salaad.", "--optimizer.", "--model.", "--seed=")  # options of one row, which come last


def section() -> str:
    """Return the commands of the scale `REPORTED` as a block of shell commands, each below the name of its model."""
    rows = rows_of(RESULTS / "elastic" / f"{REPORTED}.json")
    blocks = (f"# {label}\n{shlex.join(words)}" for label, words in commands(rows, REPORTED))
    return "```sh\n" + "\n".join(blocks) + "\n```"


def commands(rows: Sequence[Row], config: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the label of every model and the words of a command, one for all seeds that were measured in the same ways.

    Args:
        rows: rows of compare_elastic.py.
        config: the configuration that all rows have.
    """
    for label, mine in by_label(rows).items():
        for seeds, ways in _measured_alike(mine):
            options = shlex.split(mine[0]["command"])
            shared = [*takewhile(lambda word: not word.startswith(_OWN), options)]
            words = ["python", "scripts/compare_elastic.py", *shared, "--rows", label, "--output", OUTPUT]
            words += ["--seeds", ",".join(map(str, seeds))]
            words += ["--ways", ";".join(ways)] if ways else []
            if label.startswith(SMALL):
                own = [word for word in options if word.startswith("--optimizer.")]
                words += [f"--small={' '.join(own)}", "--small-rows", label] if own else []
            if mine[0]["method"] not in ("full_rank", "salaad") or label == SEARCHED:
                words += ["--search", f"results/methods/{config}.json"]
            words += ["--other-text", OTHER_TEXT] if "other_perplexity" in mine[0]["X"] else []
            yield label, words


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
