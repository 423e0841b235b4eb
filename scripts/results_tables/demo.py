"""The generated sections of the project's README, and the table of results/demo."""

from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Any

from salaad.common.formats import markdown_table, millions
from scripts.results_tables import RESULTS
from scripts.results_tables.compared import (
    FULL_RANK,
    LEVEL,
    Model,
    Trainings,
    not_copied_over,
)
from scripts.results_tables.measured import (
    COPIED,
    REPORTED,
    by_label,
    is_paired,
    not_copied,
    rates_of_small,
    rows_of,
    size_of,
)

Row = Mapping[str, Any]

CUTS = {"full-rank": "rpca, head", "SALAAD": "cut, head"}  # without text, as compress.py cuts unless told otherwise
FITTED = {"full-rank": "rpca, head, tuned", "SALAAD": "head, tuned"}  # one folder of all sizes
OF_ONE_FOLDER = (("SALAAD", FITTED["SALAAD"]), ("full-rank", FITTED["full-rank"]))
ELASTIC = f"results/elastic/README.md#{REPORTED}"
SHARES = (0.75, 0.5, 0.2)  # of the compressible parameters


def sections() -> dict[str, str]:
    """Return the sections of the project's README, and the demo's table."""
    table = RESULTS / "demo" / "demo.md"
    return {"summary": summary_table(), "samples": samples(), "demo": table.read_text().strip()}


def summary_table() -> str:
    """Return a table: a SALAAD and a full-rank model whole, cut, and fitted on text; dense models of these sizes."""
    rows = rows_of(RESULTS / "elastic" / f"{REPORTED}.json")
    trainings = Trainings(rows)
    first = {label: mine[0] for label, mine in by_label(rows).items()}
    whole = first[FULL_RANK.label]["X"]
    lines = [("uncut", millions(whole["parameters"]), *_cells(rows, columns_at(None)))]
    for share in SHARES:
        size = size_of(first["SALAAD"], CUTS["SALAAD"], share)
        part = f"{100 * size['parameters'] / whole['parameters']:.0f} %"
        lines.append((part, millions(size["parameters"]), *_cells(rows, columns_at(share))))
    told = (
        "Perplexity relative to full-rank training with the same seed, as means over the seeds (of uncut SALAAD "
        f"± {_deviation(trainings):.1%}); lower is better. *Level*: less than {LEVEL:.0%} apart. All models saw "
        f"{rows[0]['text_tokens'] / 1e6:.1f} M tokens of Wikipedia, 20 per parameter of the uncut model."
    )
    if Trainings(rows, not_copied).seeds(FULL_RANK):
        told += f" In parentheses: over the tokens that are not copied; {COPIED}."
    if (costs := trainings.costs("SALAAD", FITTED["SALAAD"])) is not None:
        told += (
            " *Tuned* models are sizes of one folder, tuned on a twentieth of the training text for "
            f"{costs[0]:.0%} of the training's operations; the other cuts use no text."
        )
    told += (
        " *Compressible* are the parameters of embedding and projections; the cuts have as many parameters as if these "
        f"alone were cut, but split the LM head too. Small dense models have {rates_of_small(rows)}, "
        "[searched for half and a fifth](results/methods/README.md#the-search), copy less from their context, and are "
        "compared with the mean over the others' seeds. [All sizes, and how they were measured]"
        f"({ELASTIC}); there the cuts are called *cut, head* and *rpca, head*."
    )
    names = ("SALAAD", "SALAAD, tuned", "full-rank, cut", "full-rank, cut, tuned", "dense, trained small")
    columns = zip(names, columns_at(SHARES[-1]), strict=True)
    header = ("size", "parameters", *(f"{name}{_seeds(trainings, model)}" for name, model in columns))
    parts = [part for part, *_ in lines[2:]]
    return f"{markdown_table(header, lines)}\n\n{headline(trainings, parts)}\n\n{told}"


def columns_at(share: float | None) -> list[Model]:
    """Return the models of a line of the table: whole for None, else with a share of the compressible parameters."""
    if share is None:
        return [Model("SALAAD"), NOTHING, FULL_RANK, NOTHING, NOTHING]
    cuts = [Model(label, ways[label], share) for label in ("SALAAD", "full-rank") for ways in (CUTS, FITTED)]
    return [*cuts, Model(f"dense, {share:g}")]


NOTHING = Model("")  # has no measurements


def _seeds(trainings: Trainings, model: Model) -> str:
    """Return in parentheses how many seeds a column is a mean of; of a small dense model its own seeds."""
    count = len(trainings.seeds(model, FULL_RANK) if is_paired(model.label) else trainings.seeds(model))
    return f" ({count} seeds)" if count > 1 else " (one seed)" if count else ""


def _besides(trainings: Trainings, model: Model, other: Model) -> str:
    """Return in parentheses what a model is relative to another over the tokens not copied; empty if not measured.

    It is empty too where the two are level, over these tokens and over all.
    """
    over = Trainings(trainings.rows, not_copied).over(model, other)
    if over is None or max(abs(over), abs(trainings.over(model, other))) < LEVEL:
        return ""
    return f" ({compared(over).removesuffix(' than').removesuffix(' with')} over the tokens not copied)"


def _deviation(trainings: Trainings) -> float:
    """Return the standard deviation over the seeds of uncut SALAAD's perplexity relative to full-rank training."""
    ours, whole = (trainings.perplexities(model) for model in (Model("SALAAD"), FULL_RANK))
    return pstdev(ours[seed] / whole[seed] for seed in ours.keys() & whole.keys())


def _cells(rows: Sequence[Row], models: Sequence[Model]) -> list[str]:
    """Return what each model is relative to full-rank training, over all tokens and over those not copied."""
    cells = []
    for model in models:
        over, besides = Trainings(rows).over(model), not_copied_over(rows, model)
        cells.append("–" if over is None else f"{over:+.1%}" + ("" if besides is None else f" ({besides})"))
    return cells


def headline(trainings: Trainings, parts: Sequence[str]) -> str:
    """Return the table in a sentence: cuts against dense models of their sizes and a full-rank model cut alike.

    Args:
        trainings: the measurements.
        parts: what half and a fifth of the compressible parameters are of all parameters, as text.
    """
    said = []
    for share in SHARES[1:]:
        ours = Model("SALAAD", CUTS["SALAAD"], share)
        rivals = {
            "a dense model trained at that size": Model(f"dense, {share:g}"),
            "a full-rank model cut the same way": Model("full-rank", CUTS["full-rank"], share),
        }
        found = {name: trainings.over(ours, rival) for name, rival in rivals.items()}
        said.append(
            " and ".join(
                f"{compared(value)} {name}{_besides(trainings, ours, rivals[name])}"
                for name, value in found.items()
                if value is not None
            )
        )
    half, fifth = said
    return (
        f"**Cut to half of the compressible parameters ({parts[0]} of all), SALAAD's model is {half}; cut to a fifth "
        f"({parts[1]} of all), it is {fifth}{_tuned(trainings)}; uncut, it is "
        f"{compared(trainings.over(Model('SALAAD')))} full-rank training.**"
    )


def _tuned(trainings: Trainings) -> str:
    """Return what SALAAD's tuned sizes are relative to a full-rank model's, as a part of a sentence; else nothing."""
    over = [trainings.over(*(Model(label, way, share) for label, way in OF_ONE_FOLDER)) for share in SHARES[1:]]
    if None in over:
        return ""
    half, fifth = map(compared, over)
    rival = "a full-rank model tuned the same way"
    sizes = f"{half} {rival} at both sizes" if half == fifth else f"{half} {rival} at half, and {fifth} it at a fifth"
    return f"; tuned on text, it is {sizes}"


def compared(difference: float) -> str:
    """What a relative difference of perplexities says, such as `8.1 % better than`; up to `LEVEL` it says nothing."""
    if abs(difference) < LEVEL:
        return "level with"
    return f"{100 * abs(difference):.1f} % {'better' if difference < 0 else 'worse'} than"


def samples() -> str:
    """What the smallest and the largest size of SALAAD's elastic folder write, a line each; of the first seed."""
    rows = reversed(rows_of(RESULTS / "elastic" / f"{REPORTED}.json"))
    written = {way: texts for row in rows if row["label"] == "SALAAD" for way, texts in row.get("samples", {}).items()}
    texts = written.get("head, tuned") or written["tuned"]
    return "\n".join(f"- {millions(one['parameters'])}: *{' '.join(one['text'].split())}*" for one in texts)
