"""The paper's tables, each as rows of plain values and as Markdown in the paper's own layout."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from types import MappingProxyType
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, millions
from scripts.reproduction import pictures, trainings
from scripts.reproduction.grid import ROOT, Run, Scale
from scripts.reproduction.items import Measured
from scripts.reproduction.records import at_budget, on_other_text, perplexity, shown, spread, summary

PAPER = ROOT / "results" / "paper.json"
VARIANTS = ("X", "L+S", "L̃+S̃")
SETTINGS_OF_KNOBS = {"alpha": trainings.ALPHA, "beta": trainings.BETA, "rho": trainings.RHO}
OF_350M = ("ablation350m", "ablation350m_rho")
PRINTED = ("paper final loss", "paper mean δ")


def paper(table: str, scale: Scale) -> Any:
    """The paper's numbers of a table at this scale, or nothing where it has none."""
    return read_json(PAPER).get(table, {}).get(scale.name, {})


def trained(run: Run, scale: Scale, variants: Sequence[str], budget: str | None = None) -> list[dict[str, Any]]:
    """One row a variant: perplexity, legacy figure, parameters and κ* over the seeds of the scale."""
    rows = []
    for variant in variants:
        seeds = [run.seeded(seed) for seed in scale.seeds]
        if variant == "L̃+S̃":
            cells = [at_budget(one, scale, budget or scale.table_budget) for one in seeds]
        else:
            cells = [perplexity(one, scale, variant) for one in seeds]
        others = [on_other_text(one, scale, cell) for one, cell in zip(seeds, cells, strict=True) if scale.other_text]
        rows.append(
            {
                "method": run.method,
                "variant": variant,
                "perplexity": spread([cell["perplexity"] for cell in cells]),
                "legacy_perplexity": spread([cell["legacy_perplexity"] for cell in cells]),
                "parameters": spread([cell["parameters"] for cell in cells]),
                "kappas": [cell["kappa"] for cell in cells],
                "tokens": cells[0]["tokens"],
                "dtype": cells[0]["dtype"],
                "other_perplexity": spread([cell["perplexity"] for cell in others]) if others else None,
            }
        )
    return rows


def paper_note(item: str, scale: Scale) -> list[str]:
    """Return what to know about the paper's own numbers of an item, as a list of at most one note."""
    notes = read_json(PAPER)["notes"]
    return [notes[item]] if scale.is_the_papers and item in notes else []


def layout(
    rows: Sequence[dict[str, Any]], theirs: dict[str, Any], others: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return a Markdown table of method, perplexity, parameters, κ*, legacy perplexity, and the paper's numbers if any.

    Args:
        rows: as `trained` returns them.
        theirs: variant → the paper's perplexity and millions of parameters.
        others: method → the paper's numbers, of methods that are not among the rows.
    """
    header = ["method", "PPL", "Prm (M)", "κ*", "legacy PPL"]
    header += ["PPL, other text"] if rows[0]["other_perplexity"] else []
    header += ["paper PPL", "paper Prm (M)"] if theirs else []
    lines = []
    for row in rows:
        name = "full-rank" if row["method"] == "full_rank" else f"SALAAD {row['variant']}"
        kappas = [f"{kappa:g}" for kappa in row["kappas"] if kappa is not None]
        cells = [shown(row["perplexity"]), f"{row['parameters']['mean'] / 1e6:.2f}", ", ".join(kappas) or "–"]
        known = theirs.get("full-rank" if row["method"] == "full_rank" else row["variant"], ("–", "–"))
        cells += [shown(row["legacy_perplexity"])]
        cells += [shown(row["other_perplexity"])] if row["other_perplexity"] else []
        lines.append([name, *cells, *(map(str, known) if theirs else ())])
    lines += [[name, *["–"] * (len(header) - 3), *map(str, printed)] for name, printed in others.items()]
    return markdown_table(header, lines)


def seeds_note(scale: Scale) -> str:
    """Return a note on the number of seeds behind each number."""
    return f"{len(scale.seeds)} seeds, mean ± standard deviation" if len(scale.seeds) > 1 else "one seed"


def provenance_note(rows: Sequence[dict[str, Any]], scale: Scale) -> str:
    """Return a note on the seeds, the validation tokens and the dtypes of the numbers of a table."""
    other = f"; the other text is {scale.other_text.name}" if scale.other_text else ""
    dtypes = " and ".join(dict.fromkeys(row["dtype"] for row in rows))
    return f"{seeds_note(scale)}; {rows[0]['tokens']:,} validation tokens, the second half, weights in {dtypes}{other}"


def table1(scale: Scale) -> Measured:
    """Full-rank, X, L + S and L̃ + S̃ (Table 1)."""
    rows = trained(trainings.VANILLA, scale, ["X"]) + trained(trainings.SALAAD, scale, VARIANTS)
    table = layout(rows, paper("table1", scale), paper("baselines", scale))
    notes = [provenance_note(rows, scale), *paper_note("table1", scale)]
    return Measured(rows, {"perplexity and parameters": table}, notes=notes)


def embedding(scale: Scale) -> Measured:
    """Measure trainings with and without the embedding among the blocks, and draw the figure of four panels."""
    rows, tables = [], {}
    for label, run in (
        ("embedding included", trainings.WITH_EMBEDDING),
        ("without the embedding", trainings.WITHOUT_EMBEDDING),
    ):
        budget = scale.embedding_budget if run is trainings.WITH_EMBEDDING else None
        mine = [{**row, "blocks": label} for row in trained(run, scale, VARIANTS, budget)]
        ends = [summary(run.seeded(seed), scale)["blocks"] for seed in scale.seeds]
        structure = [row for end in ends for name, row in end.items() if "embed" in name]
        for key in ("rank_ratio", "density") if structure else ():
            mine[1][f"embedding_{key}"] = spread([row[key] for row in structure])
        own = paper("embedding" if run is trainings.WITH_EMBEDDING else "table1", scale)
        tables[label] = layout(mine, own)
        rows += mine
    folders = (run.folder(scale) for run in (trainings.WITH_EMBEDDING, trainings.WITHOUT_EMBEDDING))
    pictures.embedding(*folders, scale.results / "embedding.png")
    picture = {"with and without the embedding, seed 0": "embedding.png"}
    return Measured(rows, tables, picture, [provenance_note(rows, scale)])


def bf16(scale: Scale) -> Measured:
    """Measure trainings in pure bfloat16, evaluated in bfloat16, against trainings in float32."""
    rows = []
    half = replace(scale, dtype="bfloat16")
    for label, run, variants, at in (
        ("bf16", trainings.VANILLA_BF16, ["X"], half),
        ("bf16", trainings.SALAAD_BF16, VARIANTS, half),
        ("fp32", trainings.VANILLA, ["X"], scale),
        ("fp32", trainings.WITH_EMBEDDING, VARIANTS, scale),
    ):
        budget = scale.bf16_budget or scale.embedding_budget  # the embedding is among the blocks
        rows += [{**row, "precision": label} for row in trained(run, at, variants, budget)]
    tables = {
        "trained in bfloat16": layout([r for r in rows if r["precision"] == "bf16"], paper("bf16", scale)),
        "trained in float32": layout([r for r in rows if r["precision"] == "fp32"], {}),
    }
    kept = (
        "in bfloat16 the blocks of SALAAD have gradients and moments in float32, the rest of its weights and all of "
        "full-rank training have them in bfloat16; ρ is 1.2 times that of float32"
    )
    return Measured(rows, tables, notes=[provenance_note(rows, scale), kept])


def ablation_rows(runs: Sequence[Run], table: str, scale: Scale) -> list[dict[str, Any]]:
    """Return one row per run of an ablation, with its ρ, Δα and Δβ as factors on the scale's own."""
    theirs = paper(table, scale) or [None] * len(runs)
    own = {knob: getattr(scale.config.salaad, setting.split(".")[1]) for knob, setting in SETTINGS_OF_KNOBS.items()}
    if scale.is_the_papers:
        own = dict(zip(SETTINGS_OF_KNOBS, trainings.OWN_350M if table in OF_350M else trainings.OWN_130M, strict=True))
    rows = []
    for run, printed in zip(runs, theirs, strict=True):
        factors = dict(run.factors)
        X, whole = (perplexity(run, scale, name) for name in ("X", "L+S"))
        structured = summary(run, scale)["variants"]["L+S"]
        rows.append(
            {
                "alpha": factors.get(trainings.ALPHA, 1),
                "beta": factors.get(trainings.BETA, 1),
                "rho": factors.get(trainings.RHO, 1),
                "X": X["perplexity"],
                "L+S": whole["perplexity"],
                "parameters": structured["parameters"],
                "rank_ratio": structured["rank_ratio"],
                "density": structured["density"],
                "paper": printed,  # perplexity of X and of L + S, millions of parameters
                "own": own,
            }
        )
    return rows


def own_settings(scale: Scale) -> str:
    """Return a phrase for the settings that the factors of an ablation multiply."""
    return "the settings that the paper calls its own" if scale.is_the_papers else "the scale's own settings"


def ablation_table(rows: Sequence[dict[str, Any]], key: str) -> str:
    """Return an ablation as a Markdown table in the paper's layout: a column per value of the factor `key`."""
    symbol = {"alpha": "Δα", "beta": "Δβ"}[key]
    lines = [
        (symbol, *(f"{row[key] * row['own'][key]:.3g}" for row in rows)),
        ("PPL (X)", *(f"{row['X']:.2f}" for row in rows)),
        ("PPL (L+S)", *(f"{row['L+S']:.2f}" for row in rows)),
        ("Prm (M)", *(f"{row['parameters'] / 1e6:.3f}" for row in rows)),
    ]
    if rows[0]["paper"]:
        columns = zip(*(row["paper"] for row in rows), strict=True)
        names = ("paper PPL (X)", "paper PPL (L+S)", "paper Prm (M)")
        lines += [(name, *(f"{value:g}" for value in column)) for name, column in zip(names, columns, strict=True)]
    return markdown_table((f"{symbol} ×", *(f"{row[key]:g}" for row in rows)), lines)


def two_ablations(betas: Sequence[Run], alphas: Sequence[Run], table: str, scale: Scale) -> Measured:
    """Measure an ablation of Δβ at the scale's own Δα, and one of Δα at its own Δβ."""
    rows = ablation_rows((*betas, *alphas), table, scale)
    first, second = rows[: len(betas)], rows[len(betas) :]
    tables = {"Δβ at the scale's own Δα": ablation_table(first, "beta")}
    tables["Δα at the scale's own Δβ"] = ablation_table(second, "alpha")
    marked = [{**row, "grid": "beta"} for row in first] + [{**row, "grid": "alpha"} for row in second]
    notes = [f"factors on {own_settings(scale)}; one seed", *paper_note(table, scale)]
    return Measured(marked, tables, notes=notes)


def ablation_350m(scale: Scale) -> Measured:
    """The paper's ablation of Δβ and Δα at 350M."""
    return two_ablations(trainings.BETAS_350M, trainings.ALPHAS_350M, "ablation350m", scale)


def ablation_130m(scale: Scale) -> Measured:
    """The paper's ablation of Δβ and Δα at 130M, over decades."""
    return two_ablations(trainings.BETAS_130M, trainings.ALPHAS_130M, "ablation130m", scale)


def pairs(runs: Sequence[Run], table: str, scale: Scale) -> Measured:
    """Measure an ablation of ρ under every pair of (Δα, Δβ)."""
    rows = ablation_rows(runs, table, scale)
    lines = [
        (
            f"{row['alpha']:g}, {row['beta']:g}",
            f"{row['rho']:g}",
            f"{row['X']:.2f}",
            f"{row['L+S']:.2f}",
            f"{row['parameters'] / 1e6:.3f}",
            f"{row['rank_ratio']:.2f}",
            f"{row['density']:.2f}",
            *(f"{value:g}" for value in row["paper"] or ()),
        )
        for row in rows
    ]
    header = ["Δα ×, Δβ ×", "ρ ×", "PPL (X)", "PPL (L+S)", "Prm (M)", "rank ratio", "density"]
    header += ["paper PPL (X)", "paper PPL (L+S)", "paper Prm (M)"] if rows[0]["paper"] else []
    notes = [f"factors on {own_settings(scale)}; one seed", *paper_note(table, scale)]
    return Measured(rows, {"ρ under pairs": markdown_table(header, lines)}, notes=notes)


def ablation_rho_350m(scale: Scale) -> Measured:
    """The paper's ablation of ρ at 350M."""
    return pairs(trainings.RHO_PAIRS_350M, "ablation350m_rho", scale)


def ablation_pairs_130m(scale: Scale) -> Measured:
    """Measure the paper's grid of ρ, Δα and Δβ at 130M, and draw all its points in one picture."""
    measured = pairs(trainings.PAIRS_130M, "ablation130m_pairs", scale)
    pictures.ablation(measured.rows, scale.results / "ablation.png")
    measured.pictures["perplexity of L + S over its size"] = "ablation.png"
    return measured


def update_frequency(scale: Scale) -> Measured:
    """Measure final loss, mean δ, perplexity, size, and rank ratio and sparsity of some blocks at three K."""
    theirs = paper("frequency", scale)
    digits = {"loss": 3, "delta": 2, "X": 2, "L+S": 2}
    rows, lines, ends = [], [], {}
    for number, (K, run) in enumerate(zip(trainings.KS, trainings.FREQUENCIES, strict=True)):
        mine = [{"K": K, "seed": seed, **_end(run.seeded(seed), scale)} for seed in scale.seeds]
        ends[K] = summary(run, scale)["blocks"]
        cells = [shown(over_seeds(mine, key), digits[key]) for key in digits]
        printed = [f"{theirs[key][number]:.2f}" for key in ("loss", "delta")] if theirs else []
        lines.append((K, *cells, millions(over_seeds(mine, "parameters")["mean"]), *printed))
        rows += mine
    header = ["K/J", "final loss", "mean δ", "PPL (X)", "PPL (L+S)", "Prm", *(PRINTED if theirs else ())]
    tables = {
        "K/J": markdown_table(header, lines),
        "rank ratio / sparsity of some blocks in percent, seed 0": block_statistics(ends, theirs),
    }
    folders = {K: run.folder(scale) for K, run in zip(trainings.KS, trainings.FREQUENCIES, strict=True)}
    pictures.update_frequency(folders, scale.results / "frequency.png")
    picture = {"over the number of ADMM updates, seed 0": "frequency.png"}
    return Measured(rows, tables, picture, [seeds_note(scale), *paper_note("frequency", scale)])


def block_statistics(ends: Mapping[int, Mapping[str, Any]], theirs: Mapping[str, Any]) -> str:
    """Rank ratio and sparsity of the blocks that the paper shows, else of a few, at every K."""
    known = list(next(iter(ends.values())))
    names = list(theirs["blocks"]) if theirs else known[:: -(-len(known) // 6)]
    lines = []
    for name in names:
        last = [ends[K].get(name) for K in ends]  # what the paper shows need not be a block here
        cells = [f"{100 * row['rank_ratio']:.1f} / {100 * (1 - row['density']):.1f}" if row else "–" for row in last]
        printed = theirs["blocks"][name] if theirs else ()
        cells += [f"{rank} / {sparsity}" for rank, sparsity in zip(printed[::2], printed[1::2], strict=True)]
        lines.append((name.removeprefix("model."), *cells))
    header = [f"{whose}K/J = {K}" for whose in ("", "paper ")[: 2 if theirs else 1] for K in ends]
    return markdown_table(("block", *header), lines)


def _end(run: Run, scale: Scale) -> dict[str, float]:
    """Where a training ended: loss, mean δ over the blocks, perplexities, structure and size of L + S."""
    ended = summary(run, scale)
    structured = {key: ended["variants"]["L+S"][key] for key in ("rank_ratio", "density", "parameters")}
    perplexities = {name: perplexity(run, scale, name)["perplexity"] for name in ("X", "L+S")}
    delta = fmean(row["delta"] for row in ended["blocks"].values())
    return {"loss": ended["final_loss"], "delta": delta, **perplexities, **structured}


def lm_head(scale: Scale) -> Measured:
    """The LM head and the embedding as blocks, at two ρ."""
    rows, lines = [], []
    for label, end, runs in (
        ("LM head", "lm_head", trainings.HEADS),
        ("embedding", "embed_tokens", trainings.EMBEDDINGS),
    ):
        for run, rho in zip(runs, trainings.HEAD_RHOS, strict=True):
            mine = []
            for seed in scale.seeds:
                ends = summary(run.seeded(seed), scale)["blocks"]
                block = next(row for name, row in ends.items() if name.endswith(end))
                own = {key: block[key] for key in ("rank_ratio", "density")}
                mine.append({"block": label, "rho": rho, "seed": seed, **_end(run.seeded(seed), scale), **own})
            digits = {"loss": 3, "X": 2, "L+S": 2, "rank_ratio": 3, "density": 3}
            lines.append((label, f"{rho:g}", *(shown(over_seeds(mine, key), digits[key]) for key in digits)))
            rows += mine
    header = ("among the blocks", "ρ ×", "final loss", "PPL (X)", "PPL (L+S)", "its rank ratio", "its density")
    heads, embeddings = (
        {rho: run.folder(scale) for rho, run in zip(trainings.HEAD_RHOS, runs, strict=True)}
        for runs in (trainings.HEADS, trainings.EMBEDDINGS)
    )
    pictures.lm_head(heads, embeddings, scale.results / "lm_head.png")
    table = {"the LM head beside the embedding": markdown_table(header, lines)}
    return Measured(rows, table, {"the LM head at two ρ, seed 0": "lm_head.png"}, [seeds_note(scale)])


def over_seeds(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Return the spread of column `key` over rows of one per seed."""
    return spread([row[key] for row in rows])
