"""The demonstration: nano trained vanilla and with SALAAD, side by side, one core each; one table and one picture."""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tqdm import tqdm

from salaad import python_docs
from salaad.cli import read_command_line
from salaad.errors import UserError, run_command
from salaad.figures import training_figure
from salaad.metrics import read_lines
from salaad.report import comparison_table, save_result

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results" / "nano"
METHODS = ("full_rank", "salaad")


def main() -> None:
    """Train both runs, then compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="an eighth of the steps: under 3 minutes")
    parser.add_argument("--output", type=Path, help="folder of the two runs; runs/demo or runs/demo-quick")
    parser.add_argument("--record", action="store_true", help="keep table, picture and figures under results/nano")
    options = parser.parse_args()
    output = options.output or ROOT / "runs" / ("demo-quick" if options.quick else "demo")
    steps = 250 if options.quick else 2000

    print("Reading the documentation on this machine and training a tokenizer on it (once).", flush=True)
    config, _ = read_command_line(["--config", "nano.yaml"])
    python_docs.tokenizer(python_docs.corpus(), config.model.vocab_size)
    print(f"Training {steps} steps twice, vanilla and with SALAAD, one core each, into {output}.", flush=True)
    train_side_by_side(output, steps)

    table = comparison_table(output / "full_rank", output / "salaad")
    print(f"\n{table}")
    picture = output / "training.png"
    training_figure({"vanilla": output / "full_rank", "SALAAD": output / "salaad"}, picture)
    print(f"\nLoss, structure and reconstruction error over time: {picture}")
    if options.record:
        for method in METHODS:
            save_result(output / method, RESULTS / f"{method}.json", "bash scripts/demo.sh --record")
        (RESULTS / "demo.md").write_text(table + "\n")
        shutil.copyfile(picture, RESULTS / "training.png")


def train_side_by_side(output: Path, steps: int) -> None:
    """Start both methods as `train.py` processes of one thread each and show how far they are."""
    output.mkdir(parents=True, exist_ok=True)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = {}
    for method in METHODS:
        command = [sys.executable, "train.py", "--config=nano.yaml", f"--method={method}", f"--train.steps={steps}"]
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
        while all(not process.poll() for process in processes.values()):
            if all(process.poll() == 0 for process in processes.values()):
                break
            time.sleep(1)
            rows = {method: read_lines(output / method / "metrics.jsonl")[-1:] for method in METHODS}
            for method, last in rows.items():
                if last:
                    bars[method].update(last[0]["step"] - bars[method].n)
                    bars[method].set_postfix(loss=f"{last[0]['loss']:.3f}")
            done = min((last[0]["step"] if last else 0) for last in rows.values())
            if quiet and done >= said + steps // 10:
                said = done
                losses = ", ".join(f"{method} {last[0]['loss']:.3f}" for method, last in rows.items())
                print(f"step {done} of {steps}: loss {losses}", flush=True)
    except KeyboardInterrupt:
        raise UserError("interrupted; both runs save where they are, and the same command goes on from there") from None
    finally:
        for bar in bars.values():
            bar.close()
        for process in processes.values():
            # After a Ctrl-C, which reached the runs too, this says nothing new: they save and end.
            if process.poll() is None:
                process.terminate()
            process.wait()
    for method, process in processes.items():
        if process.returncode > 0:
            raise UserError(f"the {method} run ended with exit code {process.returncode}; see {output / method}.log")


if __name__ == "__main__":
    run_command(main)
