"""What to weigh an error by: every idea for --calibrate, cut and refined alike, on held-out text.

    python scripts/research/search_calibration.py --checkpoints runs/demo/salaad --budgets 1183488,918656

A weight is a matrix W beside every block X: worth and error are those of W∘X, or of X·C where inputs are whitened.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import logging

from salaad.common import budgets
from salaad.common.errors import run_command
from salaad.common.validation import at_least
from salaad.compression.calibration import CalibrationText, output_weights
from salaad.compression.deployment import own_text
from salaad.compression.from_checkpoint import CheckpointDeployment
from salaad.compression.refinement import refine
from salaad.compression.variants import parse_budgets
from salaad.config.run import DataConfig
from salaad.data.text import open_text, validation_batches
from salaad.energy_allocation import UnitQueue
from salaad.evaluation.tables import keep_rows
from salaad.factored.slr import Slr
from salaad.model.build import load_model
from salaad.model.loss import SummedLoss
from salaad.model.perplexity import evaluate
from salaad.prox import truncate
from salaad.runs.model_on_disk import ModelOnDisk

ITERATIONS = 20
LIBRARY = "output, half uniform"
DAMPING = 0.1  # of second moments, relative to their mean
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Moments:
    """What the calibration text says about one block.

    Args:
        inputs: E[x xᵀ] (m×m), or for an embedding how often each row is asked for (n).
        outputs: E[g²] of the gradient of each output (n; for an embedding m).
        fisher: mean over the weights of the squared gradient of a sequence's loss.
    """

    inputs: Tensor
    outputs: Tensor
    fisher: float


def collect(model: nn.Module, names: list[str], text: CalibrationText) -> dict[str, Moments]:
    """Second moments of every block's inputs and output gradients, and its empirical Fisher information."""
    modules = {name: model.get_submodule(name) for name in names}
    inputs, outputs, fisher = (dict.fromkeys(names, 0.0) for _ in range(3))

    def watch(name: str) -> Callable:
        def gradient(g: Tensor) -> None:
            outputs[name] += g.double().flatten(0, -2).square().sum(0)

        def hook(module: nn.Module, arguments: tuple[Tensor], output: Tensor) -> None:
            x = arguments[0].detach()
            if isinstance(module, nn.Embedding):
                inputs[name] += torch.bincount(x.flatten(), minlength=module.num_embeddings).double()
            else:
                x = x.flatten(0, -2).double()
                inputs[name] += x.mT @ x
            output.register_hook(gradient)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in modules.items()]
    model.requires_grad_(True)
    for batch in text.batches():
        for row in range(len(batch["input_ids"])):
            SummedLoss(model)(*(batch[key][row : row + 1] for key in ("input_ids", "labels"))).backward()
            for name, module in modules.items():
                fisher[name] += float(module.weight.grad.square().mean())
            model.zero_grad()
    model.requires_grad_(False)
    for hook in hooks:
        hook.remove()
    return {name: Moments(inputs[name], outputs[name], fisher[name]) for name in names}


def damped(moments: Tensor, damping: float = DAMPING) -> Tensor:
    """Square roots of second moments, in the mean square one."""
    mean = moments.mean()
    return ((moments / mean + damping) / (1 + damping)).sqrt() if mean > 0 else torch.ones_like(moments)


def weights(idea: str, name: str, shape: tuple[int, int], moments: dict[str, Moments]) -> Tensor:
    """W (n×m) of one block by one idea."""
    of, W = moments[name], torch.ones(shape, dtype=torch.float64)
    embedding = of.inputs.ndim == 1
    if "input" in idea and not embedding:
        W *= damped(of.inputs.diagonal())
    if "frequency" in idea and embedding:
        W *= damped(of.inputs)[:, None]
    if "output" in idea and not embedding:
        W *= damped(of.outputs, 1.0 if idea == LIBRARY else DAMPING)[:, None]
    if "Fisher" in idea:
        mean = sum(each.fisher for each in moments.values()) / len(moments)
        W *= (of.fisher / mean) ** (1 / 8 if "fourth" in idea else 1 / 2)
    return W


def whitening(shape: tuple[int, int], of: Moments) -> Tensor:
    """C (m×m, lower) of E[x xᵀ] = C·Cᵀ, in the mean square one; nothing for an embedding."""
    if of.inputs.ndim == 1:
        return torch.eye(shape[1], dtype=torch.float64)
    H = of.inputs / of.inputs.diagonal().mean()
    return torch.linalg.cholesky((H + DAMPING * torch.eye(len(H), dtype=torch.float64)) / (1 + DAMPING))


def spectra(parts: dict[str, Slr], factors: dict[str, Tensor], whitened: bool) -> dict:
    """What the line is made of: singular values and entries of the weighed parts."""
    of = {}
    for name, slr in parts.items():
        L, F = (slr.U @ slr.V).double(), factors[name]
        W = F.square().sum(1).sqrt() if whitened else F
        weighed = Slr.from_parts(L @ F if whitened else L * F, slr.sparse() * W, slr.rank)
        of[name] = (*slr.shape, weighed.sigma, weighed.values)
    return of


def fit_weighted(slr: Slr, W: Tensor, rank: int, nnz: int) -> Tensor:
    """L + S of one block, refined where errors are weighed by W."""
    weighed = Slr.from_parts(slr.U @ slr.V * W, slr.sparse() * W, slr.rank)
    S = weighed.cut(rank, nnz).sparse()
    return refine(slr.dense() * W, rank=rank, nnz=nnz, iterations=ITERATIONS, S=S).dense() / W


def fit_whitened(slr: Slr, C: Tensor, rank: int, nnz: int) -> Tensor:
    """L + S of one block, L the best of its rank for the outputs over the text, S the largest entries by Wanda."""
    T, sizes = slr.dense().double(), C.square().sum(1).sqrt()
    S, least, best = torch.zeros_like(T), float("inf"), torch.zeros_like(T)
    for _ in range(ITERATIONS):
        L = torch.linalg.solve_triangular(C.mT, truncate((T - S) @ C, rank)[0].mT, upper=True).mT
        rest = (T - L).flatten()
        places = ((T - L) * sizes).abs().flatten().topk(nnz).indices
        S = torch.zeros_like(rest).index_put((places,), rest[places]).view_as(T)
        error = float(torch.linalg.vector_norm((T - L - S) @ C))
        if error >= least:
            break
        least, best = error, L + S
    return best


IDEAS = ("none", "input", "input, frequency", "output", LIBRARY, "input, output")
IDEAS += ("Fisher per block", "fourth root of Fisher per block", "whitened input")


def main() -> None:
    """Cut every checkpoint to every budget by every idea, and keep the perplexities."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", nargs="+", type=Path, required=True, help="runs trained with method salaad")
    parser.add_argument("--budgets", required=True, help="parameter counts, separated by commas")
    parser.add_argument("--sequences", type=int, default=128, help="sequences of calibration text")
    parser.add_argument("--output", type=Path, default=ROOT / "results" / "nano" / "calibration", help="folder")
    options = parser.parse_args()
    at_least(options, 1, "sequences")
    parse_budgets(options.budgets, 1)  # refuses what is no list of numbers before anything is read
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    for checkpoint in options.checkpoints:
        source = ModelOnDisk.open(checkpoint)
        deployment = CheckpointDeployment(source)
        data = own_text(source, DataConfig(**source.run["data"]))
        text = CalibrationText(data, source.folder.config.vocab_size, options.sequences)
        model = load_model(source.folder.path, torch.float32)
        parts = deployment.parts
        moments = collect(model, list(parts), text)
        held_out = open_text(data, vocab_size=source.folder.config.vocab_size, training=False)
        batches = list(validation_batches(held_out, data, rows=32, max_tokens=10**7))
        blocks = {name: (*slr.shape, slr.rank, slr.nnz) for name, slr in parts.items()}
        check_library(model, moments, text)
        rows = []
        for idea in tqdm(IDEAS, desc=checkpoint.name, disable=None):
            W = {name: weights(idea, name, slr.shape, moments) for name, slr in parts.items()}
            whitened = idea == "whitened input"
            factors = {name: whitening(slr.shape, moments[name]) for name, slr in parts.items()} if whitened else W
            line = UnitQueue.of(spectra(parts, factors, whitened))
            for budget in parse_budgets(options.budgets, deployment.dense):
                kept = line.keep(line.parameters - budgets.to_remove(blocks, fixed=deployment.fixed, budget=budget))
                fit = fit_whitened if whitened else fit_weighted
                with torch.no_grad():
                    for name, slr in parts.items():
                        model.get_submodule(name).weight.copy_(fit(slr, factors[name], *kept[name]))
                result = evaluate(SummedLoss(model), batches, model.device)
                row = {"model": checkpoint.name, "digest": source.digest[:16], "idea": idea, "budget": budget}
                row |= {"sequences": options.sequences, "refine": ITERATIONS}
                rows.append({**row, "perplexity": result.perplexity, "tokens": result.tokens})
                print(rows[-1], flush=True)
        print(keep_rows(rows, options.output / "ideas.json"))


def check_library(model: nn.Module, moments: dict[str, Moments], text: CalibrationText) -> None:
    """The idea that compress.py uses is the one measured here."""
    for name, w in output_weights(SummedLoss(model), list(moments), text.batches(), model.device).items():
        measured = weights(LIBRARY, name, (len(w), 1), moments)
        torch.testing.assert_close(w.double(), measured, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    run_command(main)
