"""The singular-value threshold, solver by solver, beside its peers: time, and error against a full SVD in float64.

    python scripts/bench_admm.py --config 350m.yaml --output results/admm/350m.json
    python scripts/bench_admm.py --config 60m.yaml --threads 1 --output results/admm/stacked-60m.json
    python scripts/bench_admm.py --config 350m.yaml --device cuda

Matrices are random, but like those of a recorded run (results/admm/spectra.json, made by research/record_spectra.py):
in every phase of training they have its spectrum and its threshold, and from one update to the next they change by as
much and in the same directions. Each solver starts from what it would have in training: `auto` and the first peer,
`orthogonal`, from the singular vectors of the previous matrix. `orthogonal` is S-SALAAD's step, reimplemented: one
orthogonal iteration (QR, column norms for singular values, no rotation). The stacked solvers are those whose values the
host does not read; here a stack has one matrix. The two `update` rows time the whole second stage of one block. Ours
(`update_round`) is on a GPU the time for as many blocks as the model has of this shape, or as fit into memory, divided
by their number. The authors' is their published update, reimplemented: full SVD in float32, dense L, S and Y, both
thresholds, the dual step.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from tqdm import tqdm

from salaad.common.errors import run_command
from salaad.common.files import json_file, read_json, write_json
from salaad.common.formats import markdown_table
from salaad.common.provenance import provenance
from salaad.common.validation import at_least, check
from salaad.config.command_line import read_command_line
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad import update
from salaad.methods.salaad.round import MOST_ENTRIES, update_round
from salaad.methods.salaad.surrogate import Surrogate
from salaad.model.roles import find_blocks
from salaad.prox import effective_rank, soft_threshold
from salaad.spectral import SvtResult, threshold
from salaad.spectral.products import product_stack
from salaad.spectral.stacks import gram_stack
from scripts.devices import in_turns, require_device
from scripts.outlines import outline_of
from scripts.trainings import ROOT

SPECTRA = ROOT / "results" / "admm" / "spectra.json"
SOLVERS = ("exact", "gram", "auto")
RHO = 1e-6
TEMPORARIES, STATE = 16, 4  # numbers per matrix entry: of the stack being updated, and of every block's state
ROOM = 0.8  # share of a GPU's free memory that a round may take


def recorded(block: str) -> dict[str, dict[str, Any]]:
    """Return phase → what `record_spectra.py` recorded of a block; raise a UserError if it recorded nothing of it."""
    known = read_json(SPECTRA)["blocks"]
    check(block in known, f"--block {block} is not in {SPECTRA.name}; give one of {', '.join(known)}")
    return known[block]


def draw(n: int, m: int, like: dict[str, Any], generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Return a random matrix Z (n×m, n ≤ m), Z at the next update, and τ_L, from a record of `record_spectra.py`."""

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    U, V = torch.linalg.qr(gaussian(n, n))[0], torch.linalg.qr(gaussian(m, n))[0]
    few = torch.tensor(like["sigma"])
    places = torch.linspace(0, len(few) - 1, n)
    low = places.long().clamp_max(len(few) - 2)
    sigma = few[low] + (few[low + 1] - few[low]) * (places - low)
    grid = torch.tensor(like["drift"])
    size = len(grid)
    range_of = (torch.arange(n) * size) // n
    # A mean square entry shrinks as the matrix grows, so that the change keeps its size relative to the matrix.
    scale = (len(few) / n) ** 0.5
    inside = gaussian(n, n) * grid[range_of][:, range_of] * scale
    outside = gaussian(n, m) * grid[range_of, size][:, None] / max(1, m - n) ** 0.5
    Z = (U * sigma) @ V.mT
    D = U @ (inside @ V.mT + outside - (outside @ V) @ V.mT)
    return Z, Z + D, like["tau"]


def orthogonal_step(Z: Tensor, tau: float, basis: Tensor) -> tuple[Tensor, Tensor]:
    """L and its singular values by one orthogonal iteration from `basis` (m×q)."""
    Q = torch.linalg.qr(Z @ basis)[0]
    projected = Z.mT @ Q
    sigma = torch.linalg.vector_norm(projected, dim=0)
    shrunk = (sigma - tau).clamp_min(0)
    return (Q * (shrunk / sigma.clamp_min(1e-30))) @ projected.mT, shrunk.sort(descending=True).values


def authors_update(state: dict[str, Tensor], X: Tensor, rho: float, alpha: float, beta: float) -> None:
    """Update L, S, Y of `state` as the authors' public code does: Algorithm 1's second stage, full SVD, all dense."""
    Z = X - state["S"] + state["Y"] / rho
    U, sigma, Vh = torch.linalg.svd(Z, full_matrices=False)
    shrunk = (sigma - alpha / rho).clamp_min(0)
    state["L"] = U @ torch.diag(shrunk) @ Vh
    state["S"] = soft_threshold(X - state["L"] + state["Y"] / rho, beta / rho)
    state["Y"] = state["Y"] + rho * (X - state["L"] - state["S"])
    effective_rank(shrunk)
    (state["S"] != 0).float().mean().item()


def in_a_stack(solver: str, Z: Tensor, tau: float) -> tuple[Tensor, Tensor, str, float]:
    """Threshold Z as a stack of one matrix; return L, its singular values, the solver and its error bound.

    For a solver that finds no singular values these are ones, as many as the rank.
    """
    stack, taus = Z[None], torch.full((1,), tau, device=Z.device)
    found = gram_stack(stack, taus) if solver == "gram" else product_stack(stack, taus)
    sigma = (torch.arange(len(Z), device=Z.device) < found.rank).float() if found.sigma is None else found.sigma[0]
    return found.L[0], sigma, found.solver, float(found.bound[0])


def blocks_at_once(n: int, m: int, count: int, device: torch.device) -> int:
    """Return how many of `count` blocks (n×m) a timed round updates: as many as fit a GPU; one on a CPU."""
    if device.type == "cpu":
        return 1
    stack = TEMPORARIES * min(count * n * m, MOST_ENTRIES)
    room = ROOM * torch.cuda.mem_get_info(device)[0] / 4 - stack
    return max(1, min(count, int(room // (STATE * n * m))))


class Updates:
    """A repeatable round of updates of equal blocks towards Z (n×m), from the state that training would have left.

    Args:
        Z: the weight of every block.
        before: the thresholding result of the previous matrix, on any device.
        tau: τ_L, which is 20 times τ_S.
        count: number of blocks.
    """

    def __init__(self, Z: Tensor, before: SvtResult, tau: float, count: int) -> None:
        first = Surrogate(Z, RHO, SalaadConfig(delta_alpha=0.0, delta_beta=0.0))
        thresholds = Z.new_tensor([tau, tau / 20, tau / 20])
        first.load_state_dict(first.state_dict() | {"thresholds": thresholds})
        self._Z, self._blocks = Z, [first, *(deepcopy(first) for _ in range(count - 1))]
        self._states = [block.state for block in self._blocks]
        sigma, basis = (None if part is None else part.to(Z.device) for part in (before.sigma, before.basis))
        width = int(torch.count_nonzero(before.sigma))
        self._known = (effective_rank(before.sigma), width, tau > 0, sigma, basis)

    def __call__(self) -> str:
        """Update all blocks once and return the solver of the first block."""
        for block, state in zip(self._blocks, self._states, strict=True):
            block.set_state(state)
            block.set_host_copies(*self._known)
        rows = update_round([(block, self._Z) for block in self._blocks])
        self.rank, self.density = (float(number) for number in rows[0][:2])
        return update.SOLVERS[int(rows[0][-1])]

    def about(self, L: Tensor, rank: int, density: float) -> dict[str, Any]:
        """Update once; return the first block's solver and its errors against L, its effective rank and S's density."""
        solver = self()
        found = self._blocks[0].low_rank().cpu().double()
        return {
            "method": solver,
            "blocks": len(self._blocks),
            "error": float(torch.linalg.vector_norm(found - L) / torch.linalg.vector_norm(L)),
            "rank_error": abs(self.rank - rank / min(L.shape)),
            "density_error": abs(self.density - density),
        }


def measure(
    shape: tuple[int, int], count: int, phase: str, like: dict[str, Any], rounds: int, device: torch.device
) -> list[dict]:
    """Return a row per solver and peer on one matrix of this shape and phase; the model has `count` such blocks."""
    n, m = min(shape), max(shape)
    Z0, Z1, tau = draw(n, m, like, torch.Generator().manual_seed(n * m))
    U, sigma, Vh = torch.linalg.svd(Z1.double(), full_matrices=False)
    shrunk = (sigma - tau).clamp_min(0)
    L, rank = (U * shrunk) @ Vh, effective_rank(shrunk)
    density = float((soft_threshold(Z1.double() - L, tau / 20) != 0).double().mean())
    before = threshold(Z0, tau, None, "gram")
    width = max(1, int(torch.count_nonzero(before.sigma)))
    start = torch.linalg.svd(Z0, full_matrices=False)[2][: min(n, width + 8)].mT.contiguous().to(device)
    Z, basis = Z1.to(device), before.basis.to(device) if before.basis is not None else None

    def by_solver(solver: str) -> tuple[Tensor, Tensor, str, float]:
        found = threshold(Z, tau, basis if solver == "auto" else None, solver)
        return found.L, found.sigma, found.solver, found.bound

    solvers: dict[str, Callable[[], Any]] = {solver: partial(by_solver, solver) for solver in SOLVERS}
    for name in ("gram", "products"):
        solvers[f"{name}, stacked"] = partial(in_a_stack, name, Z, tau)
    solvers["orthogonal"] = lambda: (*orthogonal_step(Z, tau, start), "orthogonal", 0.0)
    about = {}
    for name, work in solvers.items():
        found, values, method, bound = work()
        found, values = found.cpu().double(), values.cpu()
        S = soft_threshold(Z1.double() - found, tau / 20)
        about[name] = {
            "method": method,
            "error": float(torch.linalg.vector_norm(found - L) / torch.linalg.vector_norm(L)),
            "bound": bound,
            "rank_error": abs(effective_rank(values) - rank) / n,
            "density_error": abs(float((S != 0).double().mean()) - density),
        }

    ours = Updates(Z, before, tau, blocks_at_once(n, m, count, device))
    dense = dict.fromkeys("LSY", torch.zeros_like(Z))
    about["update"] = ours.about(L, rank, density)

    def theirs() -> None:
        authors_update(dict(dense), Z, RHO, RHO * tau, RHO * tau / 20)

    works = solvers | {"update": ours, "update of the authors": theirs}
    seconds = {name: min(times) for name, times in in_turns(works, rounds, device).items()}
    seconds["update"] /= about["update"]["blocks"]
    common = {"shape": [n, m], "phase": phase, "rank_ratio": rank / n}
    return [{**common, "rung": name, "seconds": seconds[name], **about.get(name, {})} for name in seconds]


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads on the CPU")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"), help="where to compute")
    parser.add_argument("--block", default="model.layers.2.mlp.gate_proj", help="recorded block to imitate")
    parser.add_argument("--output", type=json_file, help="JSON file to write")
    options, rest = parser.parse_known_args()
    at_least(options, 1, "rounds", "threads")
    require_device(options.device)
    like = recorded(options.block)
    torch.set_num_threads(options.threads)
    config, device = read_command_line(rest)[0], torch.device(options.device)
    shapes = Counter(tuple(sorted(X.shape)) for X in find_blocks(outline_of(config), config.salaad).values())
    rows = []
    for shape, phase in tqdm(list(product(shapes, like)), disable=None):
        rows += measure(shape, shapes[shape], phase, like[phase], options.rounds, device)
    print(table(rows))
    totals = {
        phase: {
            name: sum(
                shapes[tuple(row["shape"])] * row["seconds"]
                for row in rows
                if (row["phase"], row["rung"]) == (phase, name)
            )
            for name in ("update", "update of the authors")
        }
        for phase in like
    }
    for phase, both in totals.items():
        ours, theirs = both["update"], both["update of the authors"]
        told = f"{phase}: all {shapes.total()} blocks {ours:.2f} s, the authors' way {theirs:.2f} s"
        print(f"\n{told}: {theirs / ours:.1f}×")
    if options.output:
        about = {"config": config.to_dict()}
        about |= {name: getattr(options, name) for name in ("device", "threads", "block")}
        write_json({**about, **provenance(), "rounds": totals, "rows": rows}, options.output)


def table(rows: list[dict]) -> str:
    """Return a Markdown table, a line per shape, phase and solver; × is over the full SVD or the authors' update."""
    lines = []
    for row in rows:
        peer = "update of the authors" if row["rung"].startswith("update") else "exact"
        [base] = [r for r in rows if (r["shape"], r["phase"], r["rung"]) == (row["shape"], row["phase"], peer)]
        shown = ("error" in row) and (f"{row['error']:.1e}", f"{row['rank_error']:.1%}", f"{row['density_error']:.1%}")
        name = row["rung"] if row.get("method", row["rung"]) == row["rung"] else f"{row['rung']}: {row['method']}"
        lines.append(
            (
                "×".join(map(str, row["shape"])),
                f"{row['phase']}, {row['rank_ratio']:.2f}",
                name,
                f"{row['seconds'] * 1e3:,.1f} ms",
                f"{base['seconds'] / row['seconds']:.1f}",
                *(shown or ("", "", "")),
            )
        )
    header = ("shape", "phase, rank ratio", "solver", "time", "×", "error in L", "in Γ", "in Υ")
    return markdown_table(header, lines)


if __name__ == "__main__":
    run_command(main)
