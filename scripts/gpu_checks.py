"""Whether the GPU computes what the CPU does: every solver, the ADMM, factored layers, training steps, resume, ranks.

    python scripts/gpu_checks.py --output results/gpu/NAME/checks.json
    python scripts/gpu_checks.py --device cpu --tiny

Every check gives one error and the limit that it must not exceed. References are computed in float64 on the CPU, except
for training, whose reference is the same training in float32 on the CPU, in one process, without interruption.
"""

import argparse
import math
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import run
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.provenance import provenance
from salaad.config.command_line import read_command_line
from salaad.config.methods import SETTINGS, SalaadConfig
from salaad.factored.fixed_size import factor
from salaad.factored.slr import Slr
from salaad.methods.salaad.round import update_round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.model.roles import find_blocks
from salaad.spectral import TOLERANCE, threshold
from salaad.spectral.products import product_stack, width_of
from salaad.spectral.stacks import gram_stack
from scripts.bench_training import Contender
from scripts.devices import require_device
from scripts.reliability.toy_run import ROOT, launch_command, toy_arguments, write_text, write_tokenizer

ROUNDING = 2e-3  # of products and reductions in float32 that are summed in another order, after some steps of Adam
DTYPES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}  # largest relative error of a model's logits


class Check(NamedTuple):
    """One thing that was compared.

    Args:
        name: of what.
        error: relative to the reference.
        limit: the largest error that passes.
        problem: why there is no error; it does not pass.
    """

    name: str
    error: float
    limit: float
    problem: str = ""

    @property
    def passes(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit


def solvers(device: torch.device, tiny: bool) -> Iterator[Check]:
    """SVT_τ by every solver, on matrices with falling singular values, square and not."""
    for n, m in ((24, 24), (40, 24)) if tiny else ((512, 512), (1376, 512), (2048, 5461)):
        Z = _matrix(n, m)
        U, sigma, Vh = torch.linalg.svd(Z, full_matrices=False)
        tau = float(sigma[len(sigma) // 4])
        L = (U * (sigma - tau).clamp_min(0)) @ Vh
        width = len(sigma) // 4 + 2
        basis = (Vh if n > m else U.mT)[:width].mT.float().to(device)
        Z32 = Z.float().to(device)
        for solver in ("exact", "gram", "subspace"):
            yield Check(f"SVT by {solver}, {n}×{m}", _relative(threshold(Z32, tau, basis, solver).L, L, Z), TOLERANCE)
        lying, taus = Z32.mT if n > m else Z32, torch.tensor([tau], device=device)  # the short side first
        q = width_of(width, min(n, m))
        for solver, found in (
            ("gram", gram_stack(lying[None], taus)),
            ("products", product_stack(lying[None], taus, q)),
        ):
            wanted = L.mT if n > m else L
            yield Check(f"SVT of a stack by {solver}, {n}×{m}", _relative(found.L[0], wanted, Z), TOLERANCE)


def updates(device: torch.device, tiny: bool) -> Iterator[Check]:
    """T of a block after ten rounds, its weight moving in between, beside the same on the CPU."""
    n, m = (24, 40) if tiny else (512, 1376)
    config, X, D = SalaadConfig(delta_alpha=0.05, delta_beta=0.005), _matrix(n, m).float(), _matrix(n, m).float()
    blocks = [Surrogate(X.to(place), 1e-6, config) for place in (device, "cpu")]
    for step in range(10):
        for block in blocks:
            update_round([(block, (X + 0.01 * step * D).to(block.T.device))])
    yield Check(f"T after 10 updates, {n}×{m}", _relative(blocks[0].T, blocks[1].T, X), 20 * TOLERANCE)


@torch.no_grad()
def layers(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Logits of a model with U·V + S in its blocks beside those of the same model, dense, in float64."""
    width = 32 if tiny else 512
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=3 * width - 8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    parts = {}
    for name, X in find_blocks(model, SalaadConfig()).items():
        S = torch.where(torch.rand_like(X) < 0.05, X, 0)
        U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
        rank = len(sigma) // 4
        parts[name] = Slr.from_factors(U[:, :rank], sigma[:rank, None] * Vh[:rank], S)
        X.copy_(parts[name].dense())
    exact = LlamaForCausalLM(config).eval().double()
    exact.load_state_dict(model.state_dict())
    small = factor(model, parts)
    for dtype, limit in DTYPES.items():
        there = small.to(device, dtype)
        for rows, length in ((1, 1), (1, 7), (2, 64)):
            ids = torch.randint(0, 256, (rows, length))
            wanted = exact(ids).logits
            found = there(ids.to(device)).logits
            yield Check(f"factored model, {rows}×{length}, {dtype}"[:48], _relative(found, wanted, wanted), limit)


def steps(device: torch.device, tiny: bool) -> Iterator[Check]:
    """The loss after ten steps of every method, beside the same on the CPU."""
    small = ["--config", "nano", "--data.sequence_length=64"]
    small += ["--model.hidden_size=32", "--model.intermediate_size=48", "--model.vocab_size=256"] if tiny else []
    for method in ("full_rank", "salaad") if tiny else SETTINGS:
        config = read_command_line([*small, "--method", method])[0]
        losses = []
        for place in (device, torch.device("cpu")):
            torch.manual_seed(0)
            contender = Contender(config, place)
            torch.manual_seed(1)
            for _ in range(10):
                ids = torch.randint(2, config.model.vocab_size // 4, (4, 64))
                contender.step({"input_ids": ids, "labels": ids})
            with torch.no_grad():
                losses.append(float(contender.loss(ids.to(place), ids.to(place))))
        yield Check(f"10 steps of {method}", abs(losses[0] / losses[1] - 1), ROUNDING)


def runs(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Validation loss of whole trainings beside one on the CPU: on the device, interrupted, on all GPUs."""
    with tempfile.TemporaryDirectory() as work:
        texts = write_text(Path(work))
        tokenizer = write_tokenizer(Path(work) / "tokenizer")

        def trained(name: str, processes: int = 1, hidden: bool = False, **options: object) -> float:
            words = toy_arguments(texts, tokenizer, train__batch=8, **options)
            command, environment = launch_command(words, Path(work) / name, 1)
            if processes > 1:
                command[2:2] = ["--multi_gpu", "--num_processes", str(processes), "--main_process_port", "0"]
            environment |= {"CUDA_VISIBLE_DEVICES": ""} if hidden or device.type == "cpu" else {}
            done = run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError((done.stderr.strip().splitlines() or ["killed"])[-1])
            return math.log(read_json(Path(work) / name / "summary.json")["variants"]["X"]["perplexity"])

        reference = trained("cpu", hidden=True)
        alone = trained("alone", train__save_every=6)
        yield Check("training", abs(alone / reference - 1), ROUNDING)
        beside = trained("beside", salaad__overlap="true")
        yield Check("training with updates beside it", abs(beside / reference - 1), ROUNDING)
        again = trained("again", resume=Path(work) / "alone" / "checkpoints" / "step-0000006")
        yield Check("resumed training", abs(again / reference - 1), ROUNDING)
        if device.type == "cuda" and torch.cuda.device_count() > 1:
            processes = max(count for count in (2, 4, 8) if count <= torch.cuda.device_count())
            yield Check(f"training on {processes} GPUs", abs(trained("many", processes) / reference - 1), ROUNDING)


KINDS: dict[str, Callable[[torch.device, bool], Iterator[Check]]] = {
    "solvers": solvers,
    "updates": updates,
    "layers": layers,
    "steps": steps,
    "runs": runs,
}


def all_checks(device: torch.device, tiny: bool) -> Iterator[Check]:
    """Every check; one that breaks off is a row too, and the others go on."""
    for kind, make in KINDS.items():
        try:
            yield from make(device, tiny)
        except Exception as error:
            traceback.print_exc()
            yield Check(kind, math.nan, 0.0, " ".join(str(error).split())[:200] or type(error).__name__)


def _matrix(n: int, m: int) -> Tensor:
    """n×m in float64 on the CPU with singular values that fall like 1/k, the same in every call of a shape."""
    generator = torch.Generator().manual_seed(n * m)
    U, V = (torch.linalg.qr(torch.randn(k, min(n, m), generator=generator).double())[0] for k in (n, m))
    return (U / torch.arange(1, min(n, m) + 1)) @ V.mT


def _relative(found: Tensor, wanted: Tensor, scale: Tensor) -> float:
    difference = found.detach().cpu().double() - wanted.detach().cpu().double()
    return float(torch.linalg.vector_norm(difference) / torch.linalg.vector_norm(scale.double()))


def main() -> None:
    """Compare, print a table, write JSON.

    Raises:
        UserError: there is no such device, or a check does not pass.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes, to check the checks")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options = parser.parse_args()
    require_device(options.device)
    checks = []
    for check in all_checks(torch.device(options.device), options.tiny):
        checks.append(check)
        print(f"{check.name}: {check.problem or f'{check.error:.1e}'} (limit {check.limit:.0e})", flush=True)
    if options.output:
        rows = [{**check._asdict(), "error": check.error if math.isfinite(check.error) else None} for check in checks]
        write_json({**provenance(), "checks": rows}, options.output)
    failed = [check.name for check in checks if not check.passes]
    if failed:
        raise UserError(f"{len(failed)} of {len(checks)} checks do not pass ({', '.join(failed)}); report them")


if __name__ == "__main__":
    run_command(main)
