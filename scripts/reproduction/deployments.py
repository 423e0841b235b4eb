"""The paper's figures about deployment: the elastic curve, κ, HPA's cuts, robust PCA, downstream accuracy."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from salaad.common.budgets import fit, parse_budget
from salaad.common.formats import markdown_table, millions
from salaad.compression.deployment import best_device
from salaad.compression.variants import Variant
from salaad.config.commands import DEFAULT_TASKS
from salaad.config.methods import SalaadConfig
from salaad.data.tokenizer import load_tokenizer
from salaad.evaluation import lm_harness
from salaad.evaluation.figures import elastic_figure, sweep_figure
from salaad.evaluation.structure import model_statistics, structure_table
from salaad.evaluation.sweep import elastic_table, grid_table, stable_band, ways_table
from salaad.evaluation.tables import accuracy_table
from salaad.factored.slr import Slr
from salaad.model.roles import find_blocks
from salaad.runs.model_on_disk import ModelOnDisk
from scripts.reproduction import pictures, trainings
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import at_budget, choose_kappas, elastic, evaluation, post_hoc
from scripts.reproduction.tables import paper, paper_note


def flexible(scale: Scale) -> Measured:
    """Measure the elastic curves of SALAAD and of vanilla + RPCA: by HPA at κ*, by energy, and by energy refined."""
    curves = {"SALAAD": [], "vanilla + RPCA": []}
    for seed in scale.seeds:
        salaad, vanilla = trainings.SALAAD.seeded(seed), trainings.VANILLA.seeded(seed)
        curves["SALAAD"].append(elastic(salaad, scale))
        curves["vanilla + RPCA"].append(elastic(vanilla, scale, post_hoc(vanilla, scale)))
    first = {label: mine[0] for label, mine in curves.items()}
    elastic_figure(first, scale.results / "flexible.png")
    rows = [
        {"label": label, "seed": seed, **row}
        for label, mine in curves.items()
        for seed, some in zip(scale.seeds, mine, strict=True)
        for row in some
    ]
    tables = {"by HPA, as in the paper": elastic_table(first), "by every way to cut": ways_table(first)}
    return Measured(rows, tables, {"perplexity over parameters": "flexible.png"}, ["tables and picture: seed 0"])


def kappa_sweep(scale: Scale) -> Measured:
    """Measure κ* at every budget, and its range, on the first half of the text, and perplexity at κ* on the second."""
    rows, tables = [], {}
    for seed in scale.seeds:
        measure = evaluation(trainings.SALAAD.seeded(seed).folder(scale), scale)
        budgets = [parse_budget(budget, measure.deployment.dense) for budget in scale.budgets]
        cells, reported = choose_kappas(measure, budgets)
        low, high = stable_band(cells)
        other = {row["variant"]: row["perplexity"] for row in reported}
        rows += [{"seed": seed, **row, "other_half": other.get(row["variant"])} for row in cells]
        tables[f"seed {seed}: κ* from {low:g} to {high:g}, on the first half of the text"] = grid_table(cells)
        at_best = [(millions(row["budget"]), f"{row['kappa']:g}", f"{row['perplexity']:.2f}") for row in reported]
        tables[f"seed {seed}: at κ*, on the second half"] = markdown_table(("budget", "κ*", "PPL"), at_best)
        if seed == scale.seeds[0]:
            sweep_figure(cells, scale.results / "kappa.png")
    return Measured(rows, tables, {"perplexity over κ (gray: the range of κ*), seed 0": "kappa.png"})


def hpa_blocks(scale: Scale) -> Measured:
    """What HPA keeps of every block at the budget of Table 1."""
    row = at_budget(trainings.SALAAD, scale, scale.table_budget)
    deployment = evaluation(trainings.SALAAD.folder(scale), scale).deployment
    before = {name: (*slr.shape, slr.rank, slr.nnz) for name, slr in deployment.parts.items()}
    budget = parse_budget(scale.table_budget, deployment.dense)
    after = fit(before, fixed=deployment.fixed, budget=budget, kappa=row["kappa"])
    pictures.hpa_blocks(before, after, scale.results / "hpa.png")
    rows = [
        dict(
            zip(("block", "n", "m", "rank", "nnz", "rank_kept", "nnz_kept"), (name, *sizes, *after[name]), strict=True)
        )
        for name, sizes in before.items()
    ]
    notes = [f"budget {millions(budget)}, κ* = {row['kappa']:g}"]
    return Measured(rows, {}, {"HPA across the blocks": "hpa.png"}, notes)


def rpca_vanilla(scale: Scale) -> Measured:
    """Robust PCA of weights that were trained without SALAAD."""
    found = {}
    for seed in scale.seeds:
        model = ModelOnDisk.open(trainings.VANILLA.seeded(seed).folder(scale)).folder.load(torch.float32, best_device())
        found[seed] = list(model_statistics(find_blocks(model, SalaadConfig())))
    first = found[scale.seeds[0]]
    pictures.rpca(first, scale.results / "rpca_vanilla.png")
    rows = [{"seed": seed, **asdict(row)} for seed, mine in found.items() for row in mine]
    return Measured(
        rows, {"robust PCA, seed 0": structure_table(first)}, {"by layer and projection, seed 0": "rpca_vanilla.png"}
    )


def rpca_salaad(scale: Scale) -> Measured:
    """Apply robust PCA to SALAAD's L + S and its cut of Table 1, as dense matrices; compare with the true L and S."""
    rows = []
    for seed in scale.seeds:
        run = trainings.SALAAD.seeded(seed)
        small = at_budget(run, scale, scale.table_budget)
        deployment = evaluation(run.folder(scale), scale).deployment
        cut = deployment.cut(Variant(small["variant"], small["budget"], small["kappa"]))
        for of, parts in (("L+S", deployment.parts), ("L̃+S̃", cut)):
            rows += [{"of": of, "block": row["name"], "seed": seed, **row} for row in found_and_true(parts)]
    keys, header = ("rank_ratio", "true_rank_ratio", "density", "true_density"), ("block", *["found", "its own"] * 2)
    tables, pictured = {}, {}
    for of, name in (("L+S", "rpca_salaad"), ("L̃+S̃", "rpca_cut")):
        first = [row for row in rows if (row["of"], row["seed"]) == (of, scale.seeds[0])]
        pictures.rpca_truth(first, scale.results / f"{name}.png")
        pictured[f"{of}: found and its own, seed 0"] = f"{name}.png"
        lines = [(row["block"].removeprefix("model."), *(f"{row[key]:.3f}" for key in keys)) for row in first]
        caption = f"{of}: rank ratio, then density, found by robust PCA and its own, seed 0"
        tables[caption] = markdown_table(header, lines)
    return Measured(rows, tables, pictured, paper_note("rpca_salaad", scale))


def found_and_true(parts: Mapping[str, Slr]) -> list[dict[str, Any]]:
    """Return a row per layer block: rank ratio and density as robust PCA finds them in dense L + S, and as they are."""
    rows = []
    dense = {name: slr.dense().to(best_device()) for name, slr in parts.items() if "layers" in name}
    for row in model_statistics(dense):
        slr = parts[row.name]
        n, m = slr.shape
        rows.append({**asdict(row), "true_rank_ratio": slr.rank / min(n, m), "true_density": slr.nnz / (n * m)})
    return rows


def downstream(scale: Scale) -> Measured:
    """Zero-shot accuracy of X, L̃ + S̃ and vanilla by the evaluation harness."""
    rows: list[dict[str, Any]] = []
    lm_harness.check_tasks(list(DEFAULT_TASKS), scale.task_data)
    kappa = at_budget(trainings.SALAAD, scale, scale.table_budget)["kappa"]
    for label, run in (("X", trainings.SALAAD), ("L̃+S̃", trainings.SALAAD), ("Vanilla", trainings.VANILLA)):
        deployment = evaluation(run.folder(scale), scale).deployment
        tokenizer = load_tokenizer(str(deployment.source.folder.path))
        budget = parse_budget(scale.table_budget, deployment.dense)
        variant = Variant(label, budget, kappa) if label == "L̃+S̃" else Variant("X")
        with deployment.opened(variant, getattr(torch, scale.dtype)) as opened:
            scores = lm_harness.evaluate_tasks(
                opened.model,
                tokenizer,
                list(DEFAULT_TASKS),
                task_data=scale.task_data,
                max_length=scale.max_length,
            )
        about = {"model": scale.name, "variant": label, "dtype": scale.dtype, "harness": lm_harness.harness_version()}
        rows += [{**about, **asdict(score)} for score in scores]
    tables = {"accuracy in percent": accuracies(rows, paper("downstream", scale)), "in full": accuracy_table(rows)}
    return Measured(rows, tables, notes=[f"L̃+S̃ has {millions(budget)} parameters, κ* = {kappa:g}"])


def accuracies(rows: Sequence[dict[str, Any]], theirs: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table in the paper's layout, a line per model and a column per task; the paper's own lines come last."""
    tasks, found = list(DEFAULT_TASKS), {(row["variant"], row["task"]): 100 * row["acc"] for row in rows}
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    lines = [(variant, *(f"{found[variant, task]:.1f}" for task in tasks)) for variant in variants]
    lines += [(f"paper {variant}", *(f"{printed[task]:.1f}" for task in tasks)) for variant, printed in theirs.items()]
    return markdown_table(("model", *tasks), lines)
