"""The demonstration: a small model trained full-rank and with SALAAD, then cut to three sizes and put to use."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, logging

from salaad.common.errors import UserError, run_command
from salaad.common.files import read_json_lines
from salaad.common.formats import markdown_table, megabytes, millions
from salaad.common.validation import check
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.variants import Variant
from salaad.compression.write import compress
from salaad.config.command_line import read_command_line
from salaad.config.commands import ALTERNATIONS, CompressOptions
from salaad.config.run import RunConfig
from salaad.data import python_docs
from salaad.evaluation import sweep
from salaad.evaluation.figures import elastic_figure
from salaad.evaluation.tables import keep_rows
from salaad.evaluation.variant_perplexity import VariantEvaluation
from salaad.runs.model_on_disk import ModelOnDisk
from salaad.runs.summary import save_result
from scripts.elastic_ways import split_for
from scripts.run_figures import training_figure
from scripts.trainings import ROOT

RESULTS = ROOT / "results" / "demo"
CONFIG = "demo.yaml"
METHODS = ("full_rank", "salaad")
KAPPAS = (0.2, 0.4, 0.6, 0.8)
PROMPT = "The function returns"


def main() -> None:
    """Train both runs, sweep the sizes, compress to half, compare, generate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer steps and less validation text: minutes")
    parser.add_argument("--output", type=Path, help="folder of the two runs; runs/demo or runs/demo-quick")
    parser.add_argument("--record", action="store_true", help="keep table, pictures and figures under results/demo")
    options = parser.parse_args()
    check(not (options.quick and options.record), "--record keeps the results of the whole demo; leave out --quick")
    output = (options.output or ROOT / "runs" / ("demo-quick" if options.quick else "demo")).absolute()
    steps, tokens = (250, 20_000) if options.quick else (2000, 10**7)  # of the validation text: all that there is
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    print("Reading the documentation on this machine and training a tokenizer on it (once).", flush=True)
    config, _ = read_command_line(["--config", CONFIG])
    python_docs.tokenizer(python_docs.corpus(), config.model.vocab_size)
    print(f"Training {steps} steps twice, vanilla and with SALAAD, one core each, into {output}.", flush=True)
    train_side_by_side(output, steps)
    training_figure({"vanilla": output / "full_rank", "SALAAD": output / "salaad"}, output / "training.png")

    print(
        "Cutting both to three sizes, by HPA at four κ and by energy; the vanilla model by way of robust PCA.",
        flush=True,
    )
    rows = deploy(output, config, tokens)
    table = deployment_table(rows)
    print(f"\n{table}\n")
    print(write_text(output))
    pictures = ("training.png", "elastic.png")
    print(f"\nPictures: {', '.join(str(output / name) for name in pictures)}")
    if options.record:
        for method in METHODS:
            save_result(output / method, RESULTS / f"{method}.json", "bash scripts/demo.sh --record")
        (RESULTS / "demo.md").write_text(table + "\n")
        for name in (*pictures, "sweep.json"):
            shutil.copyfile(output / name, RESULTS / name)


def deploy(output: Path, config: RunConfig, tokens: int) -> list[dict[str, Any]]:
    """Sweep both models over sizes and κ on so many tokens, draw the pictures, and return the rows of the one table."""
    deployments = {
        "SALAAD": CheckpointDeployment(ModelOnDisk.open(output / "salaad"), split_for(None, head=False)),
        "vanilla + RPCA": CheckpointDeployment(ModelOnDisk.open(output / "full_rank"), split_for("rpca", head=False)),
    }
    # Half of what can be compressed (the embedding too, which is split after training), half of the whole model, and a
    # fifth of what can be compressed.
    fixed, dense = deployments["SALAAD"].fixed, deployments["SALAAD"].dense
    budgets = [fixed + (dense - fixed) // 2, dense // 2, fixed + (dense - fixed) // 5]
    evaluations = {
        label: VariantEvaluation(deployment, config.data, tokens=tokens, dtype="float32", batch=32)
        for label, deployment in deployments.items()
    }
    variants = [*sweep.grid(budgets, KAPPAS), *sweep.by_energy(budgets, ALTERNATIONS, head=True)]
    rows = sweep.measure(evaluations, variants)
    elastic_figure(rows, output / "elastic.png")
    keep_rows([{"label": label, **row} for label, mine in rows.items() for row in mine], output / "sweep.json")
    table = []
    for label, name, cut in (("vanilla + RPCA", "vanilla", "vanilla + RPCA"), ("SALAAD", "SALAAD", "L̃ + S̃")):
        whole = {row["variant"]: row for row in rows[label] if row["budget"] is None}
        table.append(shown(f"X ({name})", whole["X"], deployments[label]))
        if label == "SALAAD":
            table.append(shown("L + S", whole["L+S"], deployments[label]))
        for way in ("HPA at κ*", "energy, refined", "energy, refined, head too"):
            table += [shown(f"{cut}, {way}", row, deployments[label]) for row in sweep.ways(rows[label])[way]]
    return table


def shown(label: str, row: Mapping[str, Any], deployment: CheckpointDeployment) -> dict[str, Any]:
    """Return a row of the table: the measured row with its label, and the bytes of the weights on disk."""
    variant = Variant(row["variant"], row["budget"], row["kappa"], row["refine"], head=row["head"])
    deployment = deployment.of(variant)
    return {**row, "label": label, "bytes": deployment.disk_bytes(deployment.cut(variant), element=4)}


def write_text(output: Path) -> str:
    """Compress the SALAAD run to half its parameters, open the folder as any user would, and let it write a line."""
    run = ModelOnDisk.open(output / "salaad")
    folder = output / f"half-{run.digest[:8]}"
    said = ""
    if not folder.exists():
        how = {"budget": "0.5", "allocation": "energy", "refine": ALTERNATIONS, "dtype": "float32"}
        said = compress(CompressOptions(checkpoint=run.name, output=str(folder), **how), run)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    text = tokenizer.decode(model.generate(**prompt, max_new_tokens=30, repetition_penalty=1.3)[0])
    return f"{said}\n\nHalf the model writes: {' '.join(text.split())}"


def train_side_by_side(output: Path, steps: int) -> None:
    """Start both methods as `train.py` processes of one thread each and show how far they are."""
    output.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = {}
    for method in METHODS:
        command = [sys.executable, "train.py", f"--config={CONFIG}", f"--method={method}", f"--train.steps={steps}"]
        with (output / f"{method}.log").open("w") as log:
            processes[method] = subprocess.Popen(
                [*command, f"--output={output / method}"], cwd=ROOT, env=environment, stdout=log, stderr=log
            )
    quiet = not sys.stderr.isatty()
    bars = {
        method: tqdm(total=steps, desc=f"{method:9}", unit="step", position=i, disable=quiet)
        for i, method in enumerate(METHODS)
    }
    said = 0
    try:
        # Until both have ended, or one of them with an error.
        while None in (codes := [process.poll() for process in processes.values()]) and not any(codes):
            time.sleep(1)
            rows = {method: read_json_lines(output / method / "metrics.jsonl")[-1:] for method in METHODS}
            for method, last in rows.items():
                if last:
                    bars[method].update(last[0]["step"] - bars[method].n)
                    bars[method].set_postfix(loss=f"{last[0]['loss']:.3f}")
            done = min((last[0]["step"] if last else 0) for last in rows.values())
            if quiet and done >= said + steps // 10:
                said = done
                # One run may be ahead of the other, so each loss has its own step.
                told = (f"{name} at step {last[0]['step']}: loss {last[0]['loss']:.3f}" for name, last in rows.items())
                print(f"{', '.join(told)}, of {steps} steps", flush=True)
    except KeyboardInterrupt:
        raise UserError("interrupted; both runs save where they are, and the same command goes on from there") from None
    finally:
        for bar in bars.values():
            bar.close()
        for process in processes.values():
            # After a Ctrl-C, which the runs received too, this changes nothing: they are saving and will end.
            if process.poll() is None:
                process.terminate()
            process.wait()
    for method, process in processes.items():
        if process.returncode:  # below zero: the number of the signal that killed it
            raise UserError(f"the {method} run ended with exit code {process.returncode}; see {output / method}.log")
    for method in METHODS:
        if not (output / method / "summary.json").exists():
            raise UserError(f"the {method} run ended before its last step; the same command goes on with it")


def deployment_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table, one line per model and size: `label`, `kappa`, `perplexity`, `parameters`, `bytes` of a row."""
    lines = [
        (
            row["label"],
            f"{row['kappa']:g}" if row["kappa"] is not None else "–",
            f"{row['perplexity']:.2f}",
            millions(row["parameters"]),
            megabytes(row["bytes"]),
        )
        for row in rows
    ]
    table = markdown_table(("model", "κ*", "perplexity", "parameters", "bytes"), lines)
    first = rows[0]
    return (
        f"{table}\n\nPerplexity over {first['tokens']:,} validation tokens; weights in {first['dtype']}, bytes on disk"
    )


if __name__ == "__main__":
    run_command(main)
