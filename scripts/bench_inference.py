"""Inference with a model at half its parameters, dense and factored side by side: prefill, decoding, memory.

    python scripts/bench_inference.py --checkpoint runs/demo/salaad --kappa 0.6 --threads 2
    python scripts/bench_inference.py --config 350m.yaml --batches 1,8 --output results/bench/inference-350m.json
    python scripts/bench_inference.py --config 1b.yaml --device cuda --dtype bfloat16

The factored model is cut from a checkpoint by HPA. Without a checkpoint the weights are random, since only shapes,
ranks and densities matter for speed: every block gets the same density, and the rank that brings the whole model to
--share of its parameters. The two models take turns, so that a machine whose speed drifts slows both; medians are
reported. Peak memory is what a fresh process needs, in the memory of the device, to open one of the two saved models
and read a prompt.
"""

import argparse
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM, PreTrainedModel, logging

from salaad.common import native
from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table, megabytes, millions
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.variants import Variant
from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig
from salaad.factored import cpu_kernels, gpu_products
from salaad.factored.fixed_size import factor, slr_modules
from salaad.factored.slr import Slr
from salaad.factored.smaller_form import resident_bytes
from salaad.model.build import describe_model, load_model
from salaad.model.parameters import count_parameters
from salaad.model.roles import find_blocks
from salaad.runs.model_on_disk import ModelOnDisk
from scripts.devices import in_turns, require_device


def cut_checkpoint(run: Path, share: float, kappa: float, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """X of a trained checkpoint, and its L + S cut by HPA to a share of X's parameters."""
    deployment = CheckpointDeployment(ModelOnDisk.open(run))
    dense, model = (load_model(deployment.source.folder.path, dtype) for _ in range(2))
    parts = deployment.cut(Variant("", round(share * deployment.dense), kappa))
    return {"dense": dense, "factored": factor(model, parts)}


def random_models(config: RunConfig, share: float, density: float, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """Return two models of random weights, one dense, one with U·V + S in its blocks."""
    torch.manual_seed(0)
    dense, model = (LlamaForCausalLM(describe_model(config.model, 2048)).to(dtype).eval() for _ in range(2))
    blocks = {name: X.shape for name, X in find_blocks(model, config.salaad).items()}
    inside = sum(n * m for n, m in blocks.values())
    kept = (share * count_parameters(model) - (count_parameters(model) - inside)) / inside
    if kept <= density:
        raise UserError(
            f"--share {share:g} leaves {kept:.3f} of the blocks, less than --density {density:g}; give more"
        )
    parts = {}
    for name, (n, m) in blocks.items():
        rank = round((kept - density) * n * m / (n + m))
        positions = (torch.rand(n, m) < density).flatten().nonzero().squeeze(1)
        values = torch.randn(len(positions)) * 0.02
        parts[name] = Slr((n, m), torch.randn(n, rank) * 0.02, torch.randn(rank, m), positions.int(), values)
    return {"dense": dense, "factored": factor(model, parts)}


def prefill(model: PreTrainedModel, batch: int, length: int) -> Callable[[], None]:
    """Return a function that reads `batch` prompts of `length` tokens."""
    ids = torch.randint(0, model.config.vocab_size, (batch, length), device=model.device)
    return lambda: model(ids, logits_to_keep=1)


def decode(model: PreTrainedModel, batch: int, tokens: int) -> Callable[[], None]:
    """Return a function that writes `tokens` tokens for `batch` prompts of 16 tokens, with the key-value cache."""
    prompt = torch.randint(0, model.config.vocab_size, (batch, 16), device=model.device)

    def run() -> None:
        cache = DynamicCache(config=model.config)
        ids = prompt
        for _ in range(tokens):
            ids = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(-1)

    return run


def compare(models: dict[str, PreTrainedModel], work: Callable, batch: int, amount: int, rounds: int) -> dict:
    """Time both models in alternating rounds; return the median tokens/s of each and their ratio."""
    jobs = {label: work(model, batch, amount) for label, model in models.items()}
    seconds = in_turns(jobs, rounds, models["dense"].device)
    speeds = {label: batch * amount / statistics.median(times) for label, times in seconds.items()}
    return {"work": work.__name__, "batch": batch, **speeds, "ratio": speeds["factored"] / speeds["dense"]}


@torch.inference_mode()
def peak_memory(arguments: tuple) -> int:
    """Return the peak bytes that this process, which must be fresh, needs to open a saved model and read a prompt."""
    threads, length, folder, device = arguments
    logging.disable_progress_bar()
    torch.set_num_threads(threads)
    start = _kilobytes("VmRSS")
    prefill(AutoModelForCausalLM.from_pretrained(folder).to(device), 1, length)()
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * (_kilobytes("VmHWM") - start)


def _kilobytes(field: str) -> int:
    """Return a field of /proc/self/status in kB, such as VmRSS; 0 where the system has no such file."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((int(line.split()[1]) for line in lines if line.startswith(field)), 0)


def read_options() -> tuple[argparse.Namespace, list[str]]:
    """Parse the command line into this script's options and the remaining words, which are options of train.py."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=0.5, help="parameters of the factored model over the dense ones")
    parser.add_argument("--checkpoint", type=Path, help="a run trained with SALAAD; random weights without it")
    parser.add_argument("--kappa", type=float, default=0.5, help="with --checkpoint: the split of HPA")
    parser.add_argument("--density", type=float, default=0.05, help="density of S in every block of random weights")
    parser.add_argument("--batches", default="1,4,16", help="batch sizes, separated by commas")
    parser.add_argument("--length", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to write")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="dtype of the weights")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to compute")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options, rest = parser.parse_known_args()
    at_least(options, 1, "length", "tokens", "rounds", "threads")
    for name in ("share", "density", "kappa"):
        if not 0 <= getattr(options, name) <= 1:
            raise UserError(f"--{name} is {getattr(options, name)}, outside [0, 1]; give a fraction")
    require_device(options.device)
    check(
        not (options.checkpoint and rest),
        f"{' '.join(rest)}: with --checkpoint there is no model to configure; leave it out",
    )
    if not all(part.isdigit() and int(part) for part in options.batches.split(",")):
        raise UserError(f"--batches is {options.batches!r}, which are no numbers above 0; give some such as 1,4,16")
    return options, rest


def density(model: PreTrainedModel) -> float:
    """Return the nonzero entries of S over all entries, in the blocks stored as U·V + S."""
    stored = slr_modules(model).values()
    return sum(module.nnz for module in stored) / sum(prod(module.shape) for module in stored)


def products(device: torch.device, dtype: torch.dtype) -> str:
    """Return the name of the code that computes the factored model's products: Triton's, compiled or torch's."""
    if native.uses_triton(device) and dtype in gpu_products.DTYPES:
        return "Triton's"
    return "compiled" if device.type == "cpu" and dtype == torch.float32 and cpu_kernels.library() else "torch's"


def memory(models: dict[str, PreTrainedModel], threads: int, length: int, device: str) -> dict[str, dict[str, int]]:
    """Return parameters, weight bytes and a fresh process's peak bytes of each model; empties `models` to free them."""
    found = {label: {"parameters": count_parameters(m), "weights": resident_bytes(m)} for label, m in models.items()}
    with TemporaryDirectory() as folder:
        for label in found:
            models.pop(label).save_pretrained(f"{folder}/{label}")
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            jobs = [(threads, length, f"{folder}/{label}", device) for label in found]
            for label, peak in zip(found, pool.map(peak_memory, jobs, chunksize=1), strict=True):
                found[label]["peak"] = peak
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, print a table, write JSON."""
    options, rest = read_options()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    if options.checkpoint:
        models = cut_checkpoint(options.checkpoint, options.share, options.kappa, dtype)
    else:
        models = random_models(read_command_line(rest)[0], options.share, options.density, dtype)
    models = {label: model.to(options.device) for label, model in models.items()}
    rows = [
        compare(models, work, batch, amount, options.rounds)
        for work, amount in ((prefill, options.length), (decode, options.tokens))
        for batch in map(int, options.batches.split(","))
    ]
    about = {
        "model": models["dense"].config.to_diff_dict(),
        **{key: str(value) for key, value in vars(options).items() if key not in ("output", "density")},
        "density": density(models["factored"]),
        "products": products(torch.device(options.device), dtype),
        **provenance(),
    }
    sizes = memory(models, options.threads, options.length, options.device)
    table = [
        (row["work"], row["batch"], f"{row['dense']:,.0f}", f"{row['factored']:,.0f}", f"{row['ratio']:.2f}")
        for row in rows
    ]
    print(markdown_table(("work", "batch", "dense, tokens/s", "factored, tokens/s", "ratio"), table))
    for label, size in sizes.items():
        print(f"\n{label}: {millions(size['parameters'])} parameters, {megabytes(size['weights'])} of weights, peak "
              f"{megabytes(size['peak'])}")  # fmt: skip
    if options.output:
        write_json({**about, "rows": rows, "memory": sizes}, options.output)


if __name__ == "__main__":
    run_command(main)
