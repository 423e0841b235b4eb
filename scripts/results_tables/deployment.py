"""Tables of what inference and compression cost, a line per result: for results/bench, and for pages of GPUs."""

from collections.abc import Mapping
from typing import Any

from salaad.common.formats import markdown_table, millions


def inference_table(results: Mapping[str, Any]) -> str:
    """Return the table of scripts/bench_inference.py, a line per name: factored over dense speed, and memory."""
    rows = []
    for name, result in results.items():
        ratios = {
            work: ", ".join(f"{row['ratio']:.2f}" for row in result["rows"] if row["work"] == work)
            for work in ("prefill", "decode")
        }
        dense, factored = result["memory"]["dense"], result["memory"]["factored"]
        rows.append(
            (
                name,
                f"{millions(factored['parameters'])} of {millions(dense['parameters'])}",
                f"{result['density']:.2f}",
                result["dtype"],
                result["machine"].removesuffix(", Linux"),
                result.get("products", "torch's"),  # older results do not say; all were torch's
                result["batches"],
                ratios["prefill"],
                ratios["decode"],
                f"{factored['weights'] / dense['weights']:.2f}",
                f"{factored['peak'] / dense['peak']:.2f}",
            )
        )
    header = ("shapes", "parameters", "density", "dtype", "machine", "products", "batches")
    header += ("prefill ×", "decode ×", "weights ×", "peak ×")
    return markdown_table(header, rows)


def compression_table(results: Mapping[str, Any]) -> str:
    """Return the table of scripts/bench_compression.py, a line per name."""
    rows = []
    for name, result in results.items():
        times = [f"{result['seconds'][step]:,.1f} s" for step in ("HPA", "energy", "refinement")]
        rows.append((name, result["machine"], str(result["blocks"]), *times))
    return markdown_table(("shapes", "machine", "blocks", "HPA", "energy", "refinement"), rows)
