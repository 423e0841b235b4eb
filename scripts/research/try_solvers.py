"""Other ways to the singular-value threshold than those of salaad/spectral, on the same matrices: what they cost.

    python scripts/research/try_solvers.py --output results/admm/tried.json
    python scripts/research/try_solvers.py --device cuda

A table is written beside the JSON; it includes our own choice of solver in each phase. The TF32 and bfloat16 rows round
the inputs of each product as a device with such products does, which shows their error on any device, not their speed.
"""

import argparse
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch
from torch import Tensor

from salaad.common.errors import UserError, run_command
from salaad.common.files import json_file, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least
from salaad.spectral import threshold
from scripts.bench_admm import draw, recorded
from scripts.devices import in_turns, require_device

SPARE = 8  # columns of a subspace beyond the kept rank
STEPS = 14  # of a Newton–Schulz iteration
MANTISSA = {"TF32": 10, "bfloat16": 7}  # bits after the leading one


def power_step(Z: Tensor, tau: float, vectors: Tensor, kept: int) -> Tensor:
    """SVT by one block power iteration from the kept left vectors of the previous matrix, then Rayleigh–Ritz."""
    Q = torch.linalg.qr(Z @ (Z.mT @ vectors[:, :kept]))[0]
    return _ritz(Z, tau, Q)


def randomised(Z: Tensor, tau: float, vectors: Tensor, kept: int) -> Tensor:
    """SVT by two power iterations from a random subspace of `kept` columns, without the previous vectors."""
    torch.manual_seed(0)
    U, sigma, V = torch.svd_lowrank(Z, kept, niter=2)
    return (U * (sigma - tau).clamp_min(0)) @ V.mT


def all_vectors(Z: Tensor, tau: float, vectors: Tensor, kept: int) -> Tensor:
    """SVT by a step of Ogita and Aishima's refinement of all previous eigenvectors: ZZᵀ, four n×n products and UᵀZ."""
    A, R = Z @ Z.mT, torch.eye(len(Z), device=Z.device) - vectors.mT @ vectors
    S = vectors.mT @ A @ vectors
    values = S.diagonal() / (1 - R.diagonal())
    gaps = values - values[:, None]
    near = 2 * (_norm(S - values.diag()) + _norm(A) * _norm(R))
    E = torch.where(gaps.abs() > near, (S + values * R) / torch.where(gaps == 0, 1, gaps), R / 2)
    U = vectors + vectors @ E
    projected = U.mT @ Z
    sigma = torch.linalg.vector_norm(projected, dim=1)
    return (U * (1 - tau / sigma).clamp_min(0)) @ projected


def newton_schulz(Z: Tensor, tau: float, vectors: Tensor, kept: int) -> Tensor:
    """SVT by products alone: ((H − τ) + |H − τ|)/2·P for Z = HP, with P and the sign of H − τ by Newton–Schulz."""
    P = _polar(Z)
    H = Z @ P.mT
    H = (H + H.mT) / 2 - tau * torch.eye(len(Z), device=Z.device)
    return (H + H @ _polar(H)) @ P / 2


def rounded(parts: int, bits: int) -> Callable[[Tensor, float, Tensor, int], Tensor]:
    """Return SVT by all eigenvectors of the Gram matrix, every factor of a product being a sum of rounded parts."""

    def find(Z: Tensor, tau: float, vectors: Tensor, kept: int) -> Tensor:
        eigenvalues, U = torch.linalg.eigh(_product(Z, Z.mT, parts, bits))
        sigma = eigenvalues.clamp_min(tau**2).sqrt()
        return _product(U * (1 - tau / sigma), _product(U.mT, Z, parts, bits), parts, bits)

    return find


IDEAS = {
    "one power step": power_step,
    "randomised, cold": randomised,
    "refining all vectors": all_vectors,
    f"Newton–Schulz, 2 × {STEPS} steps": newton_schulz,
    "Gram in TF32": rounded(1, MANTISSA["TF32"]),
    "Gram in TF32, twice": rounded(2, MANTISSA["TF32"]),
    "Gram in bfloat16, three times": rounded(3, MANTISSA["bfloat16"]),
}


def _norm(M: Tensor) -> Tensor:
    """An approximation of ‖M‖₂ of a symmetric M by power iteration."""
    x = torch.ones(len(M), 1, device=M.device)
    for _ in range(10):
        x = M @ (x / torch.linalg.vector_norm(x).clamp_min(1e-30))
    return torch.linalg.vector_norm(x)


def _ritz(Z: Tensor, tau: float, Q: Tensor) -> Tensor:
    B = Q.mT @ Z
    eigenvalues, W = torch.linalg.eigh(B @ B.mT)
    sigma = eigenvalues.clamp_min(tau**2).sqrt()
    return ((Q @ W) * (1 - tau / sigma)) @ (W.mT @ B)


def _polar(X: Tensor, least: float = 1e-3) -> Tensor:
    """The polar factor of X (n×m) by cubic steps, scaled for singular values from `least` times the largest up."""
    A = X @ X.mT
    X = X / torch.linalg.matrix_norm(A, float("inf")).sqrt()
    for _ in range(STEPS):
        scale = (3 / (1 + least + least**2)) ** 0.5
        X = 1.5 * scale * X - 0.5 * scale**3 * ((X @ X.mT) @ X)
        least = 0.5 * scale * least * (3 - scale**2 * least**2)
    return X


def _product(left: Tensor, right: Tensor, parts: int, bits: int) -> Tensor:
    """The product as a sum over pairs of rounded parts, without those below the rounding of the last part."""
    lefts, rights = _split(left, parts, bits), _split(right, parts, bits)
    return sum(lefts[i] @ rights[j] for i in range(parts) for j in range(parts - i))


def _split(X: Tensor, parts: int, bits: int) -> list[Tensor]:
    found = []
    for _ in range(parts):
        mantissa, exponent = torch.frexp(X)
        found.append(torch.ldexp((mantissa * 2 ** (bits + 1)).round(), exponent - (bits + 1)))
        X = X - found[-1]
    return found


def measure(n: int, m: int, phase: str, like: dict, rounds: int, device: torch.device) -> list[dict]:
    """Return a row for our own choice of solver and one for each of IDEAS, on the same matrix."""
    before, Z, tau = draw(n, m, like, torch.Generator().manual_seed(n * m))
    U, sigma, Vh = torch.linalg.svd(Z.double(), full_matrices=False)
    L = (U * (sigma - tau).clamp_min(0)) @ Vh
    old = threshold(before, tau, None, "gram")
    vectors = torch.linalg.svd(before, full_matrices=False)[0].to(device)
    kept = min(n, int(torch.count_nonzero(old.sigma)) + SPARE)
    Z, basis = Z.to(device), None if old.basis is None else old.basis.to(device)

    def ours() -> Tensor:
        return threshold(Z, tau, basis).L

    def error(found: Tensor) -> float:
        return float(torch.linalg.vector_norm(found.cpu().double() - L) / torch.linalg.vector_norm(L))

    works = {"ours": ours} | {name: partial(find, Z, tau, vectors, kept) for name, find in IDEAS.items()}
    seconds = {name: min(times) for name, times in in_turns(works, rounds, device).items()}
    common = {"shape": [n, m], "phase": phase}
    return [{**common, "idea": name, "seconds": seconds[name], "error": error(work())} for name, work in works.items()]


def main() -> None:
    """Measure, print a table, write it and JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", default="1024x1024,1024x2736", help="n x m, n ≤ m, separated by commas")
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to compute")
    parser.add_argument("--block", default="model.layers.2.mlp.gate_proj", help="recorded block to imitate")
    parser.add_argument("--output", type=json_file, help="JSON file to write; a table is written beside it")
    options = parser.parse_args()
    at_least(options, 1, "rounds", "threads")
    require_device(options.device)
    likes = recorded(options.block)
    if re.fullmatch(r"\d+x\d+(,\d+x\d+)*", options.shapes):
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    else:
        shapes = []
    if not shapes or any(not 0 < n <= m for n, m in shapes):
        raise UserError(f"--shapes is {options.shapes!r}; give some such as 512x512,512x1376, the short side first")
    torch.set_num_threads(options.threads)
    rows = [
        row
        for n, m in shapes
        for phase, like in likes.items()
        for row in measure(n, m, phase, like, options.rounds, torch.device(options.device))
    ]
    text = table(rows)
    print(text)
    if options.output:
        about = {"device": options.device, "threads": options.threads, "block": options.block, **provenance()}
        write_json({**about, "rows": rows}, options.output)
        options.output.with_suffix(".md").write_text(text + "\n")


def table(rows: list[dict]) -> str:
    """A line per shape and idea; in each phase the time over that of our own choice, and the error in L."""
    lines = []
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    for shape, idea in dict.fromkeys((tuple(row["shape"]), row["idea"]) for row in rows):
        cells = []
        for phase in phases:
            here = {row["idea"]: row for row in rows if (tuple(row["shape"]), row["phase"]) == (shape, phase)}
            row, ours = here[idea], here["ours"]
            time = f"{row['seconds'] * 1e3:.0f} ms" if idea == "ours" else f"{row['seconds'] / ours['seconds']:.1f}×"
            cells += [time, f"{row['error']:.0e}"]
        lines.append(("×".join(map(str, shape)), idea, *cells))
    header = [cell for phase in phases for cell in (f"{phase}: time", "error in L")]
    return markdown_table(("shape", "idea", *header), lines)


if __name__ == "__main__":
    run_command(main)
