"""The tables of results/bench and of results/reliability.md: what the benchmarks and the drills recorded."""

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, megabytes, millions
from scripts import bench_against, bench_startup, bench_storage, bench_training
from scripts.results_tables import RESULTS
from scripts.torture import table as drill_table


def sections() -> dict[str, str]:
    """Every table of times, sizes and faults."""
    return {
        "training": training_table(),
        "inference": inference_table(),
        "compression": compression_table(),
        "storage": storage_table(),
        "startup": startup_table(),
        "before-after": before_after_table(),
        "drills": reliability_table(),
    }


def training_table() -> str:
    """What scripts/bench_training.py recorded: every method beside full-rank, at every shape measured."""
    parts = []
    for path in sorted((RESULTS / "bench").glob("methods-*.json")):
        result = read_json(path)
        batch, length = result["config"]["train"]["batch"], result["config"]["data"]["sequence_length"]
        told = f"{batch} × {length} tokens a step, {result['machine']}, commit {result['commit']}"
        parts.append(f"**{path.stem.removeprefix('methods-')}**: {told}\n\n{bench_training.table(result)}")
    return "\n\n".join(parts)


def inference_table() -> str:
    """What scripts/bench_inference.py recorded: factored speed over dense speed, and memory."""
    rows = []
    for path in sorted((RESULTS / "bench").glob("inference-*.json")):
        result = read_json(path)
        ratios = {
            work: ", ".join(f"{row['ratio']:.2f}" for row in result["rows"] if row["work"] == work)
            for work in ("prefill", "decode")
        }
        dense, factored = result["memory"]["dense"], result["memory"]["factored"]
        rows.append(
            (
                path.stem.removeprefix("inference-"),
                f"{millions(factored['parameters'])} of {millions(dense['parameters'])}",
                f"{result['density']:.2f}",
                result["dtype"],
                result["machine"].removesuffix(", Linux"),
                result.get("products", "torch's"),  # all there were before
                result["batches"],
                ratios["prefill"],
                ratios["decode"],
                f"{factored['weights'] / dense['weights']:.2f}",
                f"{factored['peak'] / dense['peak']:.2f}",
            )
        )
    header = ("shapes", "parameters", "density", "dtype", "machine", "products", "batches")
    header += ("prefill ×", "decode ×", "weights ×", "peak ×")
    told = "\n\nFactored over dense; nano trained and cut, the others random." if rows else ""
    return markdown_table(header, rows) + told


def compression_table() -> str:
    """What scripts/bench_compression.py recorded."""
    rows = []
    for path in sorted((RESULTS / "bench").glob("compression-*.json")):
        result = read_json(path)
        times = [f"{result['seconds'][step]:,.1f} s" for step in ("HPA", "energy", "refinement")]
        rows.append((path.stem.removeprefix("compression-"), result["machine"], str(result["blocks"]), *times))
    return markdown_table(("shapes", "machine", "blocks", "HPA", "energy", "refinement"), rows)


def storage_table() -> str:
    """What scripts/bench_storage.py recorded of the demo's model."""
    result = read_json(RESULTS / "bench" / "storage-nano.json")
    told = (
        f"The demo's model cut to {result['budget']} of its parameters; its X takes {megabytes(result['dense_bytes'])} "
        f"in float32, with whose speed the last two columns compare. {result['machine']}, {result['threads']} threads, "
        f"{result['products']} products in float32, commit {result['commit']}."
    )
    return f"{bench_storage.table(result['rows'])}\n\n{told}"


def startup_table() -> str:
    """What scripts/bench_startup.py recorded."""
    result = read_json(RESULTS / "bench" / "startup.json")
    told = f"Before: commit {result['other']}; now: commit {result['commit']}. {result['machine']}."
    return f"{bench_startup.table(result['rows'])}\n\n{told}"


def before_after_table() -> str:
    """What scripts/bench_against.py recorded, if anything."""
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
    """What scripts/torture.py recorded."""
    rows = read_json(RESULTS / "reliability.json")["rows"]
    return f"{drill_table(rows)}\n\n{rows[0]['machine']}"
