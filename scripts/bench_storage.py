"""What the number format of a compressed folder costs and gains: bytes, perplexity, seconds to open, speed.

    python scripts/bench_storage.py --checkpoint runs/nano-20-salaad --output results/bench/storage-nano-20.json

compress.py cuts the checkpoint to a budget and stores it as float32, bfloat16 and int8; each folder is opened in both
float dtypes. Speeds are relative to the dense X in float32, which takes turns with every model.
"""

import argparse
import sys
import time
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, logging

from salaad.common.budgets import parse_count
from salaad.common.errors import run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table, megabytes
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check
from salaad.compression.opening import open_deployment
from salaad.compression.variants import Variant
from salaad.compression.write import compress
from salaad.config.commands import CompressOptions
from salaad.config.run import DataConfig
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.factored.smaller_form import resident_bytes
from salaad.model.build import load_model
from salaad.runs.model_on_disk import ModelOnDisk
from scripts.bench_inference import compare, decode, prefill, products

STORED, OPENED = ("float32", "bfloat16", "int8"), ("float32", "bfloat16")
LENGTH, TOKENS = 128, 16  # tokens of a prompt, and tokens to write


def measure(folder: Path, dtype: str, options: argparse.Namespace, data: DataConfig, dense: torch.nn.Module) -> dict:
    """Open a folder in a dtype and return its bytes, seconds to open, perplexity, and speeds relative to `dense`."""
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    opened = time.perf_counter() - start
    evaluation = VariantEvaluation(
        open_deployment(ModelOnDisk.open(folder)), data, tokens=parse_count(options.tokens), dtype=dtype, batch=32
    )
    speeds = {}
    for work, amount in ((prefill, LENGTH), (decode, TOKENS)):
        row = compare({"dense": dense, "factored": model}, work, 1, amount, options.rounds)
        speeds[work.__name__] = row["ratio"]
    return {
        "bytes_on_disk": sum(file.stat().st_size for file in folder.glob("*.safetensors")),
        "bytes_in_memory": resident_bytes(model),
        "seconds_to_open": opened,
        "perplexity": evaluation(Variant("X"))["perplexity"],
        **speeds,
    }


@torch.inference_mode()
def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, required=True, help="a run trained with SALAAD")
    parser.add_argument("--budget", default="0.5", help="parameters of the whole model, or a fraction of the dense one")
    parser.add_argument("--tokens", default="10M", help="validation tokens at the most")
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds of each model")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    at_least(options, 1, "rounds", "threads")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    source = ModelOnDisk.open(options.checkpoint)
    check("data" in source.run, f"--checkpoint {source.name} is no run, whose text would be read; give one")
    data = DataConfig(**source.run["data"])
    dense = load_model(source.folder.path, torch.float32)
    rows = []
    with TemporaryDirectory() as place:
        for stored in STORED:
            how = {"checkpoint": str(options.checkpoint), "budget": options.budget, "dtype": stored}
            with torch.inference_mode(False):
                compress(CompressOptions(output=f"{place}/{stored}", **how), source)
        for stored, opened in product(STORED, OPENED):
            found = measure(Path(place, stored), opened, options, data, dense)
            rows.append({"stored": stored, "opened": opened, **found})
    print(table(rows))
    if options.output:
        about = {"budget": options.budget, "threads": options.threads, "length": LENGTH, "tokens": TOKENS}
        about |= {"dense_bytes": resident_bytes(dense), "products": products(torch.device("cpu"), torch.float32)}
        write_json({**about, "rows": rows, **provenance()}, options.output)


def table(rows: list[dict]) -> str:
    """Return a Markdown table, a line per folder and dtype."""
    lines = [
        (
            row["stored"],
            row["opened"],
            megabytes(row["bytes_on_disk"]),
            megabytes(row["bytes_in_memory"]),
            f"{row['perplexity']:.2f}",
            f"{row['seconds_to_open']:.2f} s",
            f"{row['prefill']:.2f}",
            f"{row['decode']:.2f}",
        )
        for row in rows
    ]
    header = ("stored in", "opened in", "on disk", "in memory", "perplexity", "to open", "prefill ×", "decode ×")
    return markdown_table(header, lines)


if __name__ == "__main__":
    run_command(main)
