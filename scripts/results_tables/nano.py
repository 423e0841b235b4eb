"""The tables and pictures of results/nano: the ways to cut, the search of the settings."""

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, millions
from salaad.evaluation.figures import elastic_figure
from salaad.evaluation.sweep import ways_table
from scripts.results_tables import RESULTS
from scripts.run_figures import frontier_figure

NANO = RESULTS / "nano"


def sections() -> dict[str, str]:
    """Every table of the scale `nano`."""
    return {
        "cuts": f"{ways_table(elastic_rows())}\n\n{one_file()}",
        "search": f"{search_table(search_points())}\n\n{learning_rate_table()}",
    }


def draw_pictures() -> None:
    """Draw the two pictures that no other command draws."""
    frontier_figure(search_points(), NANO / "frontier.png")
    elastic_figure(elastic_rows(), NANO / "elastic" / "elastic.png")


def search_points() -> list[dict]:
    """Return one row per run of research/search_nano.py and of nano.yaml: settings, perplexities, vanilla's, size."""
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
            }
        )
    return sorted(points, key=lambda point: -point["size"])


def search_table(points: list[dict]) -> str:
    """Return the search as a Markdown table, the shipped point in bold."""
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
    header = ("lr", "c", "K", "Δα", "Δβ", "X (vs. vanilla)", "L + S (vs. X)")
    header += ("parameters kept of the blocks", "parameters", "rank ratio", "density")
    return markdown_table(header, rows)


def learning_rate_table() -> str:
    """Return a table of the search's vanilla runs: all runs have the learning rate chosen for vanilla, not SALAAD."""
    rows = sorted(vanilla_runs())
    return markdown_table(("vanilla, peak learning rate", "perplexity"), [(f"{lr:g}", f"{x:.2f}") for lr, x in rows])


def vanilla_runs() -> list[tuple[float, float]]:
    """(peak learning rate, perplexity of X) of every vanilla run of the search."""
    results = [read_json(path) for path in (NANO / "search").glob("full_rank*.json")]
    return [(r["config"]["optimizer"]["lr"], r["summary"]["variants"]["X"]["perplexity"]) for r in results]


def elastic_rows() -> dict[str, list[dict]]:
    """Return the cuts by model: of two runs of nano.yaml, vanilla split after training, and of a stronger run.

    evaluate.py sweep --checkpoint runs/nano-salaad --vanilla runs/nano-full_rank --rivals rpca,godec
        --budgets 1401173,1183488,918656,787968 --refine 20 --calibrate 128 --dtype float32
        --output results/nano/elastic/demo; the stronger run without --vanilla, into results/nano/elastic/stronger
    """
    demo = read_json(NANO / "elastic" / "demo" / "sweep.json")["rows"]
    stronger = read_json(NANO / "elastic" / "stronger" / "sweep.json")["rows"]
    labelled = [*demo, *({**row, "label": "SALAAD, stronger"} for row in stronger)]
    order = ("SALAAD", "SALAAD, stronger", "vanilla + RPCA", "vanilla + GoDec")
    return {label: [row for row in labelled if row["label"] == label] for label in order}


def one_file() -> str:
    """Return a sentence with the perplexity of one elastic folder of SALAAD's run at each size."""
    rows = [row for row in read_json(NANO / "elastic" / "one_file" / "perplexity.json")["rows"] if row["budget"]]
    sizes = ", ".join(f"{row['perplexity']:.2f} at {millions(row['budget'])}" for row in rows)
    return f"One elastic folder of SALAAD's run, refined for {millions(rows[-1]['budget'])}: {sizes}."
