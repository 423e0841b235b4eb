"""Make every table and picture of results/ and of the README from the measured JSON: nothing is typed by hand.

python scripts/update_results.py
"""

import re
import statistics
import sys
from dataclasses import fields, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, millions
from salaad.config.command_line import read_command_line
from salaad.evaluation.figures import elastic_figure, frontier_figure
from salaad.evaluation.structure import RpcaRow, structure_table
from salaad.evaluation.sweep import ways_table
from salaad.evaluation.tables import accuracy_table
from salaad.methods.salaad import ownership
from salaad.model.build import describe_model, outline
from salaad.model.roles import find_blocks
from scripts.torture import table as torture_table

ROOT = Path(__file__).resolve().parent.parent
NANO = ROOT / "results" / "nano"


def main() -> None:
    """Tables and pictures under results/, then the README's generated sections."""
    points = search_points()
    frontier = f"{frontier_table(points)}\n\n{learning_rate_table()}"
    (NANO / "frontier.md").write_text(frontier + "\n")
    frontier_figure(points, NANO / "frontier.png")
    (NANO / "rpca.md").write_text(structure_tables() + "\n")
    (NANO / "calibration" / "ideas.md").write_text(ideas_table() + "\n")
    elastic = elastic_rows()
    elastic_figure(elastic, NANO / "elastic" / "elastic.png")
    (ROOT / "results" / "admm" / "balance.md").write_text(balance_table() + "\n")
    (ROOT / "results" / "admm" / "trajectory.md").write_text(trajectory_table() + "\n")
    fill_readme(
        {
            "nano": (NANO / "demo.md").read_text().strip(),
            "frontier": frontier,
            "bench": overhead_table(),
            "elastic": f"{ways_table(elastic)}\n\n{one_file()}",
            "compression": compression_table(),
            "inference": inference_table(),
            "ladder": ladder_table(),
            "lm-eval": harness_table(),
            "reliability": reliability_table(),
        }
    )


def search_points() -> list[dict]:
    """One row per run of scripts/search_nano.py and of the demo: settings, perplexities, that of vanilla, size."""
    vanilla = dict(vanilla_runs())
    points = []
    for path in (*sorted((NANO / "search").glob("*.json")), NANO / "salaad.json"):
        result = read_json(path)
        variants = result["summary"]["variants"]
        if "L+S" not in variants:
            continue
        X, deployed, settings = variants["X"], variants["L+S"], result["config"]["salaad"]
        points.append(
            {
                "settings": settings,
                "lr": result["config"]["optimizer"]["lr"],
                "shipped": path.parent == NANO,
                "X": X["perplexity"],
                "L+S": deployed["perplexity"],
                "vanilla": vanilla[result["config"]["optimizer"]["lr"]],
                "size": deployed["block_parameters"] / deployed["block_parameters_dense"],
                "parameters": deployed["parameters"],
                "rank_ratio": deployed["rank_ratio"],
                "density": deployed["density"],
                "commit": result["commit"],
            }
        )
    return sorted(points, key=lambda point: -point["size"])


def frontier_table(points: list[dict]) -> str:
    """The search as Markdown; the shipped point in bold."""
    rows = []
    for point in points:
        settings = point["settings"]
        cells = [
            f"{point['lr']:g}",
            f"{settings['rho_constant']:g}" if settings["rho"] is None else f"ρ = {settings['rho']:g}",
            f"{settings['every']}",
            f"{settings['delta_alpha']:g}",
            f"{settings['delta_beta']:g}",
            f"{point['X']:.2f} ({point['X'] / point['vanilla'] - 1:+.1%})",
            f"{point['L+S']:.2f} ({point['L+S'] / point['X'] - 1:+.1%})",
            f"{point['size']:.0%}",
            millions(point["parameters"]),
            f"{point['rank_ratio']:.2f}",
            f"{point['density']:.2f}",
        ]
        rows.append([f"**{cell}**" for cell in cells] if point["shipped"] else cells)
    header = ("lr", "c", "K", "Δα", "Δβ", "X (to vanilla)", "L + S (to X)", "of the blocks", "total", "rank", "density")
    return markdown_table(header, rows)


def learning_rate_table() -> str:
    """The vanilla runs of the search: the learning rate that all runs share was chosen for vanilla, not for SALAAD."""
    rows = sorted(vanilla_runs())
    return markdown_table(("vanilla, peak learning rate", "perplexity"), [(f"{lr:g}", f"{x:.2f}") for lr, x in rows])


def vanilla_runs() -> list[tuple[float, float]]:
    """(peak learning rate, perplexity of X) of every vanilla run of the search."""
    results = [read_json(path) for path in (NANO / "search").glob("full_rank*.json")]
    return [(r["config"]["optimizer"]["lr"], r["summary"]["variants"]["X"]["perplexity"]) for r in results]


def overhead_table() -> str:
    """What scripts/bench_training.py recorded: SALAAD beside vanilla, on every machine measured."""
    rows = []
    for path in sorted((ROOT / "results" / "bench").glob("training-*.json")):
        result = read_json(path)
        vanilla, salaad = result["full_rank"], result["salaad"]
        rows.append(
            (
                path.stem.removeprefix("training-"),
                result["machine"],
                f"{result['config']['train']['batch']} × {result['config']['data']['sequence_length']}",
                f"{result['config']['salaad']['every']}",
                f"{vanilla['seconds_per_step'] * 1e3:,.0f} ms",
                f"{salaad['seconds_per_step'] * 1e3:,.0f} ms",
                f"{result['overhead']:.1%}",
                f"{result['admm_buffers_per_block']:.2f}",
            )
        )
    header = ("run", "machine", "tokens a step", "K", "vanilla", "SALAAD", "overhead", "float32 buffers a block")
    told = "Where the overhead is not the ratio of the two times, it is the median over pairs of neighbouring rounds."
    return f"{markdown_table(header, rows)}\n\n{told}"


def ladder_table() -> str:
    """What scripts/bench_admm.py recorded of our own choice of rung, beside a full SVD and the two peers."""
    rows, rounds = [], []
    for name in ("60m", "130m", "350m", "1b"):
        result = read_json(ROOT / "results" / "admm" / f"{name}.json")
        totals = result["rounds"].values()
        rounds.append((name, *(f"{total['update of the authors'] / total['update']:.1f}×" for total in totals)))
        cells = {(*row["shape"], row["phase"], row["rung"]): row for row in result["rows"]}
        for n, m, phase in dict.fromkeys((*row["shape"], row["phase"]) for row in result["rows"]):
            exact, ours, single = (cells[n, m, phase, rung] for rung in ("exact", "auto", "orthogonal"))
            whole, theirs = (cells[n, m, phase, rung] for rung in ("update", "update of the authors"))
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
    header = ("shape", "phase, rank ratio", "rung", "time", "full SVD over it", "error in L", "its bound")
    header += ("a single orthogonal step: error, time over ours", "the authors' update over ours")
    phases = (f"{phase}: the authors' over ours" for phase in result["rounds"])
    return f"{markdown_table(header, rows)}\n\n{markdown_table(('all blocks once', *phases), rounds)}"


def trajectory_table() -> str:
    """nano trained with one rung alone (search_nano.py "method=exact seed=0" and so on): every seed, and the means."""
    header = ("rung", "seed", "perplexity of X", "of L + S", "mean rank ratio", "mean density")
    found: dict[str, list[tuple[float, ...]]] = {}
    rows = []
    for path in sorted((ROOT / "results" / "admm" / "trajectory").glob("*.json")):
        config, summary = (read_json(path)[key] for key in ("config", "summary"))
        X, deployed = (summary["variants"][name] for name in ("X", "L+S"))
        figures = X["perplexity"], deployed["perplexity"], deployed["rank_ratio"], deployed["density"]
        found.setdefault(config["salaad"]["method"], []).append(figures)
        rows.append((config["salaad"]["method"], config["seed"], *(f"{figure:#.5g}" for figure in figures)))
    for method, runs in found.items():
        means = map(statistics.mean, zip(*runs, strict=True))
        rows.append((method, "mean", *(f"{mean:#.5g}" for mean in means)))
    return markdown_table(header, rows)


def balance_table() -> str:
    """The most loaded rank's modelled cost over the mean, embedding and head among the blocks."""
    rows = []
    for name in ("60m", "130m", "350m", "1b"):
        config, _ = read_command_line(["--config", f"{name}.yaml"])
        model = outline(describe_model(config.model, config.data.sequence_length))
        blocks = find_blocks(model, replace(config.salaad, embedding=True, lm_head=True))
        costs = {block: ownership.update_cost(*X.shape) for block, X in blocks.items()}
        ratios = [ownership.imbalance(costs, ownership.assign_owners(costs, ranks), ranks) for ranks in (1, 2, 8, 64)]
        rows.append((name, str(len(blocks)), *(f"{ratio:.2f}" for ratio in ratios)))
    return markdown_table(("model", "blocks", "1 rank", "2 ranks", "8 ranks", "64 ranks"), rows)


def inference_table() -> str:
    """What scripts/bench_inference.py recorded: factored speed over dense speed, and memory."""
    rows = []
    for path in sorted((ROOT / "results" / "bench").glob("inference-*.json")):
        result = read_json(path)
        ratios = {
            work: ", ".join(f"{row['ratio']:.2f}" for row in result["rows"] if row["work"] == work)
            for work in ("prefill", "decode")
        }
        dense, factored = result["memory"]["dense"], result["memory"]["factored"]
        rows.append(
            (
                path.stem.removeprefix("inference-"),
                f"{millions(factored['parameters'])} of {millions(dense['parameters'])}",
                f"{result['density']:.2f}",
                result["dtype"],
                result["machine"].removesuffix(", Linux"),
                result.get("products", "torch's"),  # all there were before
                result["batches"],
                ratios["prefill"],
                ratios["decode"],
                f"{factored['weights'] / dense['weights']:.2f}",
                f"{factored['peak'] / dense['peak']:.2f}",
            )
        )
    header = ("shapes", "parameters", "density", "dtype", "machine", "products", "batches")
    header += ("prefill ×", "decode ×", "weights ×", "peak ×")
    told = "\n\nFactored over dense; nano trained and cut, the others random." if rows else ""
    return markdown_table(header, rows) + told


def harness_table() -> str:
    """Zero-shot scores of the demo's models, from results/nano/lm-eval.json."""
    path = NANO / "lm-eval.json"
    rows = sorted(read_json(path)["rows"], key=lambda row: row["task"]) if path.exists() else []
    return accuracy_table(rows) if rows else "(not measured yet)"


def structure_tables() -> str:
    """What robust PCA finds in the demo's two models, from results/nano/rpca.json."""
    rows = read_json(NANO / "rpca.json")["rows"]
    names = [f.name for f in fields(RpcaRow)]
    tables = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = [RpcaRow(**{name: row[name] for name in names}) for row in rows if row["model"] == model]
        tables.append(f"{model}\n\n{structure_table(mine)}")
    return "\n\n".join(tables)


def elastic_rows() -> dict[str, list[dict]]:
    """Every way to cut, by model: of the demo's two runs, vanilla split after the fact, and of a stronger run.

    evaluate.py sweep --checkpoint runs/demo/salaad --vanilla runs/demo/full_rank --rivals rpca,godec
        --budgets 1401173,1183488,918656,787968 --refine 20 --calibrate 128 --dtype float32
        --output results/nano/elastic/demo; the stronger run without --vanilla, into results/nano/elastic/stronger
    """
    demo = read_json(NANO / "elastic" / "demo" / "sweep.json")["rows"]
    stronger = read_json(NANO / "elastic" / "stronger" / "sweep.json")["rows"]
    labelled = [*demo, *({**row, "label": "SALAAD, stronger"} for row in stronger)]
    order = ("SALAAD", "SALAAD, stronger", "vanilla + RPCA", "vanilla + GoDec")
    return {label: [row for row in labelled if row["label"] == label] for label in order}


def one_file() -> str:
    """What one elastic folder of the demo's run gives at each size, as a sentence."""
    rows = [row for row in read_json(NANO / "elastic" / "one_file" / "perplexity.json")["rows"] if row["budget"]]
    sizes = ", ".join(f"{row['perplexity']:.2f} at {millions(row['budget'])}" for row in rows)
    return f"One elastic folder of the demo's run, refined and fitted to {millions(rows[-1]['budget'])}: {sizes}."


def ideas_table() -> str:
    """Every idea for --calibrate that was tried, from results/nano/calibration/ideas.json."""
    rows = read_json(NANO / "calibration" / "ideas.json")["rows"]
    columns = list(dict.fromkeys((row["model"], row["budget"]) for row in rows))
    lines = []
    for idea in dict.fromkeys(row["idea"] for row in rows):
        found = {(row["model"], row["budget"]): row["perplexity"] for row in rows if row["idea"] == idea}
        lines.append((idea, *(f"{found[column]:.2f}" for column in columns)))
    header = ("errors weighed by", *(f"{model}, {millions(budget)}" for model, budget in columns))
    return markdown_table(header, lines)


def compression_table() -> str:
    """What scripts/bench_compression.py recorded."""
    rows = []
    for path in sorted((ROOT / "results" / "bench").glob("compression-*.json")):
        result = read_json(path)
        times = [f"{result['seconds'][step]:,.1f} s" for step in ("HPA", "energy", "refinement")]
        rows.append((path.stem.removeprefix("compression-"), result["machine"], str(result["blocks"]), *times))
    return markdown_table(("shapes", "machine", "blocks", "HPA", "energy", "refinement"), rows)


def reliability_table() -> str:
    """What scripts/torture.py recorded."""
    rows = read_json(ROOT / "results" / "reliability.json")["rows"]
    return f"{torture_table(rows)}\n\n{rows[0]['machine']}"


def fill_readme(sections: dict[str, str]) -> None:
    """Replace what stands between <!-- NAME:begin --> and <!-- NAME:end -->."""
    path = ROOT / "README.md"
    text = path.read_text()
    for name, section in sections.items():
        pattern = rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)"
        text = re.sub(pattern, lambda match, section=section: f"{match[1]}{section}\n{match[2]}", text, flags=re.DOTALL)
    path.write_text(text)


if __name__ == "__main__":
    main()
