"""The report, from the stored JSON: results/README.md, the claims, and a page of tables and figures per scale."""

import re
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from salaad.common.formats import millions
from salaad.model.parameters import count_parameters
from scripts.outlines import outline_of
from scripts.reproduction.claims import CLAIMS, NOT_MEASURED, text_table, verdicts
from scripts.reproduction.conclusions import ABOUT as CONCLUDED
from scripts.reproduction.conclusions import conclusions, recorded
from scripts.reproduction.freshness import with_legend
from scripts.reproduction.grid import Scale
from scripts.reproduction.items import Item
from scripts.reproduction.scale_page import Result, scale_page
from scripts.reproduction.trainings import embedding_is_in_table_1
from scripts.results_tables.all_methods import bench_of, fair_table
from scripts.results_tables.compared import WAYS, against_dense
from scripts.results_tables.measured import REPORTED, rows_of, with_seeds

TITLE = "Results"
ABOUT = (  # paragraphs on how to read the page; `about` adds that on the embedding
    "`python scripts/update_results.py` makes this page, the claims and the pages of the scales from the JSON files "
    "under results/, as scripts/reproduce.py does after it has measured; no measured number is typed by hand. Every "
    "item has its command, with which `--again` repeats the measurement.",
    "X stands for the dense weights as trained, L + S for their low-rank plus sparse surrogate, and L̃ + S̃ for that "
    "surrogate cut to a budget of parameters. *Vanilla* is full-rank training without SALAAD; *RPCA* (robust PCA) "
    "splits its weights into L + S after training. κ is the fraction of the removed parameters that is taken from L, "
    "and κ* the best κ of those tried.",
    "ρ = c/(N·√(n·m)) is the strength of the pull on one of N blocks of n×m (eq. 7). A block is updated every K steps, "
    "by J iterations of ADMM; Δα and Δβ are the step sizes of the controller for the thresholds τ_L and τ_S, whose "
    "targets are the rank ratio Γ̂ and the density Υ̂; γ is the share of the singular values' energy that counts for "
    "the rank; δ = ‖X − L − S‖.",
    "Perplexity (PPL) is exp of the mean loss over the second half of the validation text; κ* is chosen on the first "
    "half. Older items use the whole text, and choose κ* on it too; they say so below their tables. Tables of κ, and "
    "the demo's and nano's own pages, are of the text that chose κ*.",
    "*Legacy* perplexity, as older tables of the field have it, is exp of the batches' mean losses, summed and divided "
    "by the number of batches + 1. The fewer the batches, the lower it is. Batches have 32 sequences in the items and "
    "16 in the first table.",
    "A claim agrees only if all parts of its measure hold. It is *not shown* where a part was not recorded, or holds "
    "only because the thing that it is about is missing.",
    "The limits (scripts/reproduction/criteria.py) are the paper's own numbers wherever it prints one. They were set, "
    "or made stricter, when the results of nano, micro and most of nano-20 were known, but none of micro-20.",
    "In the items of nano and micro all weights have one learning rate, as is usual in the field. Later searches found "
    "that a lower rate for the projections is far better for full-rank training and SALAAD alike, so these comparisons "
    "hold for a single rate only. What is compared on the elastic page has two rates, and so have claims that are "
    "judged by it: on small dense models, and on other methods at nano-20.",
    "On the pages of the scales, cuts by energy weight every entry by the optimizer's second moments. Checkpoints "
    "before commit 42d0652 did not store these moments, so there cuts measured before it weight all entries of a block "
    "equally. On the pages of the scales *energy* is not refined, and *energy, refined* is what the elastic page and "
    "the first table call *cut*; what they call *energy* is refined, with equal weights.",
)
PAGES = {
    "demo/README.md": "the demo: a model trained and cut in minutes",
    "nano/README.md": "nano: the search for its settings, and its models cut in every way",
    "micro/README.md": "micro: what L + S costs at every size",
    "elastic/README.md": "one training cut to every size, compared with small dense models and other methods",
    "methods/README.md": "all training methods compared",
    "admm/README.md": "the ADMM update: solvers of the singular-value threshold, balance over processes",
    "bench/README.md": "time and memory of training, inference and compression",
    "gpu/nvidia-h200/README.md": "an H200: whether it computes what the CPU does",
    "kernels/README.md": "the GPU kernels: errors and registers, found without a GPU",
    "scaling/README.md": "predicted hours of the paper's trainings on GPUs",
    "reliability.md": "faults that a training run survives, and the time to recover",
}

README, CLAIMS_PAGE = "README.md", "claims.md"
# Scales at which the claims are judged; others join once there are results of them.
JUDGED = ("nano", "nano-20", "micro", "micro-20")


def write_report(results: Path, items: Sequence[Item], scales: Sequence[Scale]) -> Path:
    """Write README.md and the pages that it opens into the folder of all results, from the JSON that lies there.

    Args:
        results: folder of all results.
        items: the items of the paper.
        scales: those that may have results.

    Returns:
        the path of README.md.
    """
    found = {scale: read_results(scale.results_in(results), items) for scale in scales}
    measured = {scale: result for scale, result in found.items() if result}
    anywhere = frozenset().union(*measured.values())
    pages = {page_of(scale): scale_page(results, scale, of, items, anywhere) for scale, of in measured.items()}
    for path, text in (first_pages(results, scales, list(measured)) | pages).items():
        (results / path).write_text(text)
    return results / README


def first_pages(results: Path, scales: Sequence[Scale], measured: Sequence[Scale]) -> dict[str, str]:
    """Return path → text of the pages that are not of one scale; paths are relative to the folder of all results.

    Args:
        results: folder of all results.
        scales: those that may have results.
        measured: those that have some.
    """
    judged = [scale for scale in scales if scale in measured or scale.name in JUDGED]
    return {README: overview(results, judged, measured), CLAIMS_PAGE: claims_page()}


def read_results(folder: Path, items: Sequence[Item]) -> dict[str, Result]:
    """Return item → result, of the items whose result is there, in the order of `items`.

    Raises:
        UserError: a file is damaged or lacks a part of what an item writes.
    """
    paths = {item: folder / f"{item.name}.json" for item in items}
    return {item.name: item.kept(path) for item, path in paths.items() if path.exists()}


def glance(results: Path, scales: Sequence[Scale]) -> str:
    """Claim by scale: yes, no, not shown, or not measured; with a mark where the code has changed since."""
    columns = [verdicts(scale, scale.results_in(results)) for scale in scales]
    rows = [*zip(*([verdict for _, verdict in column] for column in columns), strict=True)]
    printed, legends = with_legend([one.mark for row in rows for one in row if one.numbers], "verdict")
    marks = iter(printed)
    lines = [
        (
            f"[{claim.name}]({CLAIMS_PAGE}#{anchor(claim.name)})",
            *(f"{one.answer}{next(marks) if one.numbers else ''}" for one in row),
        )
        for claim, row in zip(CLAIMS, rows, strict=True)
    ]
    answered = [any(verdict.answer != NOT_MEASURED for _, verdict in column) for column in columns]
    once = [scale.name for scale in compress(scales, answered) if len(scale.seeds) == 1]
    told = [
        f"[Each claim]({CLAIMS_PAGE}) has its measure and the paper's numbers, and each scale [a page](#other-pages) "
        "of its own numbers. The claims are judged on trainings that, as in the paper, pull X towards L + S until the "
        "end. The first table and the conclusions cover the settings that we recommend too."
        f"{told_beside_dense(results)}"
    ]
    if once:
        told.append(
            f"The claims rest on one seed at {', '.join(once)}; those on Δα, Δβ and ρ, on small dense models and on "
            "other methods do so at every scale."
        )
    table = text_table(("claim", *(scale.name for scale in scales)), lines)
    return "\n\n".join([table, " ".join(told), *legends])


def told_beside_dense(results: Path) -> str:
    """Return a sentence, after a space, on cuts that we recommend beside small dense models; empty if not measured."""
    found = {scale: against_dense(recorded(results, scale), WAYS["without text"]) for scale in JUDGED}
    told = [(f"{of[0]:+.1%} at {scale}", of[1]) for scale, of in found.items() if of is not None]
    if not told:
        return ""
    return (
        " With our settings and the head split, the perplexity of SALAAD's cuts relative to dense models trained at "
        f"their sizes is, at the size where it compares worst, {with_seeds(told)}."
    )


def fair(results: Path) -> list[str]:
    """The table of all methods at the paper's tokens per parameter, and its picture; nothing before it is measured."""
    measured = results / "elastic" / f"{REPORTED}.json"
    if not measured.exists():
        return []
    table = fair_table(rows_of(measured), bench_of(results, REPORTED), "elastic/")
    picture = f"![Perplexity over parameters of every way to a smaller model](elastic/{REPORTED}.png)"
    return [f"## Methods at the paper's tokens per parameter ({REPORTED})", table, picture]


def overview(results: Path, judged: Sequence[Scale], measured: Sequence[Scale]) -> str:
    """The first page as Markdown: all methods, the verdicts, what to conclude, and links to the other pages.

    Args:
        results: folder of all results.
        judged: scales that have a column in the table of claims.
        measured: scales that have a page.
    """
    parts = [f"# {TITLE}", *fair(results), "## The claims at a glance", glance(results, judged)]
    if said := conclusions(results):
        parts += ["## What to conclude", CONCLUDED, "\n".join(f"- {sentence}" for sentence in said)]
    parts += ["## How to read it", "\n".join(f"- {line}" for line in about(judged)), "## Other pages"]
    pages = {CLAIMS_PAGE: "what each claim says, by what it is judged, and the paper's numbers"}
    pages |= {page_of(scale): f"{scale.name}: the paper's tables and figures, and our numbers" for scale in measured}
    parts.append("\n".join(f"- [{path}]({path}): {what}" for path, what in (pages | PAGES).items()))
    return "\n\n".join(parts) + "\n"


def about(scales: Sequence[Scale]) -> list[str]:
    """Return the paragraphs on how to read the page; two of them are made of the scales."""
    within = [scale.name for scale in scales if embedding_is_in_table_1(scale)]
    table = f"; so has Table 1 at {', '.join(within)}" if within else ""
    paper = "The paper's Table 1 leaves it out; its appendix has both."
    first, *others = ABOUT
    embedding = f"*SALAAD, as in the paper* has the embedding among the blocks{table}. {paper}"
    return [first, scales_told(scales), *others, embedding]


def scales_told(scales: Sequence[Scale]) -> str:
    """Return a sentence on the parameters, the text and the length of training of each scale."""
    told = []
    for scale in scales:
        train, parameters = scale.config.train, count_parameters(outline_of(scale.config))
        tokens = train.steps * train.batch * scale.config.data.sequence_length
        text = "Wikipedia" if scale.text else f"the text {scale.config.data.source}"
        told.append(
            f"{scale.name} has {millions(parameters)} parameters and sees {millions(tokens)} tokens of {text}, "
            f"{tokens / parameters:.2g} per parameter"
        )
    return f"{'; '.join(told)} (configs/)."


def anchor(heading: str) -> str:
    """Return the part of a link after # that leads to a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def page_of(scale: Scale) -> str:
    """Return the path of a scale's page, relative to the folder of all results."""
    return str(scale.results_in(Path()) / "README.md")


def claims_page() -> str:
    """The claims as Markdown: statement, measure and the paper's numbers of each."""
    parts = [
        "# The claims",
        "[The verdicts](README.md#the-claims-at-a-glance) are on the page of all results, and so are [the symbols and "
        "terms](README.md#how-to-read-it).",
    ]
    for claim in CLAIMS:
        parts += [f"## {claim.name}", f"{claim.statement} ({claim.section})"]
        parts.append(f"- **It agrees if**: {claim.measure}.\n- **The paper**: {claim.paper}.")
    return "\n\n".join(parts) + "\n"
