"""The tables of results/admm: singular-value threshold, solvers, host reads, how evenly processes share blocks."""

import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import get_args

from salaad.common.files import read_json
from salaad.common.formats import markdown_table
from salaad.common.gpus import GPUS
from salaad.config.command_line import read_command_line
from salaad.methods.salaad import ownership
from salaad.model.roles import find_blocks
from salaad.spectral.cost import RATES, cheapest, seconds
from salaad.spectral.products import operations
from salaad.training.prediction import predict
from scripts.count_reads import table as count_table
from scripts.outlines import description_of, outline_of
from scripts.results_tables import RESULTS

ADMM = RESULTS / "admm"
SCALES = ("60m", "130m", "350m", "1b")


def sections() -> dict[str, str]:
    """Every table about the ADMM update."""
    return {
        "solvers": solver_table(),
        "tried": (ADMM / "tried.md").read_text().strip(),
        "trajectory": trajectory_table(),
        "reads": reads_table(),
        "stacked": stacked_table(),
        "choice": choice_table(),
        "balance": balance_table(),
    }


def solver_table() -> str:
    """Return the tables of scripts/bench_admm.py: our own choice of solver against a full SVD and the two peers."""
    rows, rounds = [], []
    for name in SCALES:
        result = read_json(ADMM / f"{name}.json")
        totals = result["rounds"].values()
        rounds.append((name, *(f"{total['update of the authors'] / total['update']:.1f}×" for total in totals)))
        cells = {(*row["shape"], row["phase"], row["rung"]): row for row in result["rows"]}
        for n, m, phase in dict.fromkeys((*row["shape"], row["phase"]) for row in result["rows"]):
            exact, ours, single = (cells[n, m, phase, solver] for solver in ("exact", "auto", "orthogonal"))
            whole, theirs = (cells[n, m, phase, solver] for solver in ("update", "update of the authors"))
            rows.append(
                (
                    f"{n}×{m}",
                    f"{phase}, {ours['rank_ratio']:.2f}",
                    ours["method"],
                    f"{ours['seconds'] * 1e3:.0f} ms",
                    f"{exact['seconds'] / ours['seconds']:.1f}×",
                    f"{ours['error']:.0e}",
                    f"{ours['bound']:.0e}" if ours["method"] == "subspace" else "rounding",
                    f"{single['error']:.0e}, {single['seconds'] / ours['seconds']:.2f}×",
                    f"{theirs['seconds'] / whole['seconds']:.1f}×",
                )
            )
    header = ("shape", "phase, rank ratio", "solver", "time", "full SVD over ours", "error in L", "error bound")
    header += ("one orthogonal iteration: error, time over ours", "authors' update over ours")
    phases = (f"{phase}: authors' update over ours" for phase in result["rounds"])
    return f"{markdown_table(header, rows)}\n\n{markdown_table(('all blocks, once each', *phases), rounds)}"


def trajectory_table() -> str:
    """Return a table: nano trained with one solver alone (search_nano.py "method=exact seed=0" …), seeds and means."""
    header = ("solver", "seed", "perplexity of X", "of L + S", "mean rank ratio", "mean density")
    found: dict[str, list[tuple[float, ...]]] = {}
    rows = []
    for path in sorted((ADMM / "trajectory").glob("*.json")):
        config, summary = (read_json(path)[key] for key in ("config", "summary"))
        X, deployed = (summary["variants"][name] for name in ("X", "L+S"))
        figures = X["perplexity"], deployed["perplexity"], deployed["rank_ratio"], deployed["density"]
        found.setdefault(config["salaad"]["method"], []).append(figures)
        rows.append((config["salaad"]["method"], config["seed"], *(f"{figure:#.5g}" for figure in figures)))
    for method, runs in found.items():
        means = map(statistics.mean, zip(*runs, strict=True))
        rows.append((method, "mean", *(f"{mean:#.5g}" for mean in means)))
    return markdown_table(header, rows)


def reads_table() -> str:
    """Return the table of scripts/count_reads.py."""
    result = read_json(ADMM / "reads.json")
    commits = f"now commit {result['commit']}, before {result['other']}"
    return f"{count_table(result['rows'])}\n\n{result['versions']}; {commits}."


def stacked_table() -> str:
    """The solvers of stacks, as scripts/bench_admm.py recorded them with one matrix in each."""
    result = read_json(ADMM / "stacked-60m.json")
    cells = {(*row["shape"], row["phase"], row["rung"]): row for row in result["rows"]}
    rows = []
    for n, m, phase in dict.fromkeys((*row["shape"], row["phase"]) for row in result["rows"]):
        alone, gram, products = (cells[n, m, phase, rung] for rung in ("gram", "gram, stacked", "products, stacked"))
        rows.append(
            (
                f"{n}×{m}",
                f"{phase}, {gram['rank_ratio']:.2f}",
                f"{gram['error']:.0e}",
                f"{products['error']:.0e}",
                f"{products['bound']:.0e}",
                f"{products['rank_error']:.1%}, {products['density_error']:.1%}",
                f"{gram['seconds'] / alone['seconds']:.1f}×",
                f"{products['seconds'] / alone['seconds']:.1f}×",
            )
        )
    header = ("shape", "phase, rank ratio", "eigenvectors: error", "products: error", "products: bound")
    header += ("products: error of Γ, of Υ", "eigenvectors: time", "products: time")
    _, calls = operations(n, m)
    told = f"Errors are those of L, times relative to one block alone. Products alone make {calls} calls."
    told = f"{told} {result['machine']}, commit {result['commit']}."
    return f"{markdown_table(header, rows)}\n\n{told}"


def choice_table() -> str:
    """Return a table: predicted time of a round of all blocks on one GPU by either solver of stacks, and the choice."""
    rows = []
    for name, device in product(SCALES, ("h100", "a100", "4090")):
        config, _ = read_command_line(["--config", name])
        shapes = Counter(tuple(sorted(X.shape)) for X in find_blocks(outline_of(config), config.salaad).values())
        rates = RATES[device]
        chosen = {cheapest(n, m, rates) for n, m in shapes}
        total = {
            solver: sum(count * seconds(solver, n, m, rates) for (n, m), count in shapes.items())
            for solver in ("products", "gram")
        }
        shares = []
        for precision in ("fp32", "bf16-mixed"):
            trained = replace(config, train=replace(config.train, precision=precision))
            parts = predict(trained, description_of(config), GPUS[device], 1)
            shares.append(f"{parts['periodic work'] / sum(parts.values()):.1%}")
        rows.append((name, device, ", ".join(sorted(chosen)), *(f"{t:.2f} s" for t in total.values()), *shares))
    header = ("model", "GPU", "chosen", "products", "eigenvectors", "share of a training, fp32", "bf16-mixed")
    return markdown_table(header, rows)


def balance_table() -> str:
    """The most loaded rank's modelled cost over the mean, by blocks and by the way they are dealt."""
    rows, counts = [], (1, 2, 4, 8, 16, 32, 64)
    for name, lm_head in product(SCALES, (False, True)):
        config, _ = read_command_line(["--config", f"{name}.yaml"])
        salaad = replace(config.salaad, embedding=True, lm_head=lm_head)
        costs = ownership.costs_of(find_blocks(outline_of(config), salaad))
        blocks = f"{len(costs)}, {'embedding and head' if lm_head else 'embedding'}"
        for how, deal in DEALINGS.items():
            ratios = [ownership.imbalance(costs, deal(costs, ranks), ranks) for ranks in counts]
            rows.append((name, blocks, how, *(f"{ratio:.2f}" for ratio in ratios)))
    return markdown_table(
        ("model", "blocks", "assignment", "1 process", *(f"{ranks} processes" for ranks in counts[1:])), rows
    )


def one_way(costs: Mapping[str, float], ranks: int) -> dict[str, int]:
    """Return block → owner by plain round-robin, as it once was: the costliest block first."""
    return {name: i % ranks for i, name in enumerate(ownership.dearest_first(costs))}


DEALINGS = {
    "old: round-robin, one way": one_way,
    **{how: partial(ownership.assign_owners, how=how) for how in get_args(ownership.Dealing)},
}
