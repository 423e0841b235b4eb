"""The tables of results/bench and of results/reliability.md: what the benchmarks and the drills recorded."""

from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import megabytes
from scripts import bench_against, bench_startup, bench_storage, bench_training
from scripts.results_tables import RESULTS
from scripts.results_tables.deployment import compression_table, inference_table
from scripts.torture import table as drill_table


def sections() -> dict[str, str]:
    """Every table of times, sizes and faults."""
    about_inference = "The weights of nano are trained and cut, those of the other models random."
    return {
        "training": training_table(),
        "inference": f"{inference_table(recorded('inference'))}\n\n{about_inference}",
        "compression": compression_table(recorded("compression")),
        "storage": storage_table(),
        "startup": startup_table(),
        "before-after": before_after_table(),
        "drills": reliability_table(),
    }


def training_table() -> str:
    """Return the tables of scripts/bench_training.py: every method against full-rank, at every shape measured."""
    parts = []
    for name, result in recorded("methods").items():
        batch, length = result["config"]["train"]["batch"], result["config"]["data"]["sequence_length"]
        told = f"{batch} × {length} tokens a step, {result['machine']}, commit {result['commit']}"
        parts.append(f"**{name}**: {told}\n\n{bench_training.table(result)}")
    return "\n\n".join(parts)


def recorded(kind: str) -> dict[str, Any]:
    """Read the results of a benchmark, NAME → content of results/bench/`kind`-NAME.json."""
    paths = sorted((RESULTS / "bench").glob(f"{kind}-*.json"))
    return {path.stem.removeprefix(f"{kind}-"): read_json(path) for path in paths}


def storage_table() -> str:
    """Return the table of scripts/bench_storage.py for nano-20's model."""
    result = read_json(RESULTS / "bench" / "storage-nano-20.json")
    told = (
        f"nano-20's model, trained with SALAAD and cut to {result['budget']} of its parameters. The last two columns "
        f"are speeds relative to X in float32, which takes {megabytes(result['dense_bytes'])}. "
        "Perplexities are comparable within this table only. "
        f"{result['machine']}, {result['threads']} threads, {result['products']} products in float32, "
        f"commit {result['commit']}."
    )
    return f"{bench_storage.table(result['rows'])}\n\n{told}"


def startup_table() -> str:
    """Return the table of scripts/bench_startup.py."""
    result = read_json(RESULTS / "bench" / "startup.json")
    told = f"Before: commit {result['other']}; now: commit {result['commit']}. {result['machine']}."
    return f"{bench_startup.table(result['rows'])}\n\n{told}"


def before_after_table() -> str:
    """Return the tables of scripts/bench_against.py, one for each recorded comparison."""
    parts = []
    for path in sorted((RESULTS / "bench").glob("before_after*.json")):
        result = read_json(path)
        before, now = result["other"], result["here"]
        named = zip(("Before", "now"), (before, now), strict=True)
        commits = "; ".join(f"{when}: commit {one['commit']}, {one['versions']}" for when, one in named)
        told = f"{commits}. {result['rounds']} processes of each, {now['machine']}."
        parts.append(f"{bench_against.table(result['rows'])}\n\n{told}")
    return "\n\n".join(parts)


def reliability_table() -> str:
    """Return the table of scripts/torture.py."""
    rows = read_json(RESULTS / "reliability.json")["rows"]
    return f"{drill_table(rows)}\n\n{rows[0]['machine']}"
