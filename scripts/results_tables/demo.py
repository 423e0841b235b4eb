"""The generated sections of the project's README, and the table of results/demo."""

from collections.abc import Mapping, Sequence
from statistics import pstdev
from typing import Any

from salaad.common.formats import markdown_table, millions
from scripts.reproduction.freshness import CHANGED, mark_of
from scripts.results_tables import RESULTS
from scripts.results_tables.compared import FULL_RANK, LEVEL, Model, Trainings
from scripts.results_tables.measured import REPORTED, by_label, named_seeds, not_copied, rows_of, size_of
from scripts.shares import SEARCHED

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
    parts, lines = [], [("uncut", millions(whole["parameters"]), *_cells(trainings, columns_at(None)))]
    for share in SHARES:
        size = size_of(first["SALAAD"], CUTS["SALAAD"], share)
        parts.append(f"{100 * size['parameters'] / whole['parameters']:.0f} %")
        lines.append((f"{parts[-1]} ({share:g})", millions(size["parameters"]), *_cells(trainings, columns_at(share))))
    names = ("SALAAD", "SALAAD, tuned", "full-rank, cut", "full-rank, cut, tuned", "dense, trained small")
    parts = parts[1:]
    told = (
        f"Perplexity relative to full-rank training ({_seeds(trainings)}; ± {_deviation(trainings):.1%} for uncut "
        f"SALAAD); lower is better, and less than {LEVEL:.0%} apart is *level*. All trainings saw "
        f"{rows[0]['text_tokens'] / 1e6:.1f} M tokens of Wikipedia, 20 per parameter of the uncut model. A size has in "
        f"parentheses its share of what can be cut (embedding and projections).{_as_in_the_paper(trainings)}"
        f"{_at_searched_rates(trainings)}"
    )
    if (costs := trainings.costs("SALAAD", FITTED["SALAAD"])) is not None:
        told += (
            f" *Tuned*: on a twentieth of the training text, for {costs[0]:.0%} of the training's operations; the "
            "other cuts use no text."
        )
    told += (
        f"{_not_copied(trainings, parts)} [All sizes, settings and searches]({ELASTIC}); there the cuts are called "
        f"*cut, head* and *rpca, head*.{_how_old(rows)}"
    )
    return f"{markdown_table(('size', 'parameters', *names), lines)}\n\n{headline(trainings, parts)}\n\n{told}"


def columns_at(share: float | None) -> list[Model]:
    """Return the models of a line of the table: whole for None, else with a share of the compressible parameters."""
    if share is None:
        return [Model("SALAAD"), NOTHING, FULL_RANK, NOTHING, NOTHING]
    cuts = [Model(label, ways[label], share) for label in ("SALAAD", "full-rank") for ways in (CUTS, FITTED)]
    return [*cuts, Model(f"dense, {share:g}")]


NOTHING = Model("")  # has no measurements


def _seeds(trainings: Trainings) -> str:
    """Return over how many seeds the columns of the table are means: the cut models, and the small dense ones."""
    columns = [columns_at(share) for share in SHARES]
    cut = {len(trainings.seeds(model, FULL_RANK)) for *models, _ in columns for model in models} - {0}
    small = {len(trainings.seeds(model)) for *_, model in columns} - {0}
    many, dense = (" to ".join(map(str, sorted({min(counts), max(counts)}))) for counts in (cut or {1}, small or {0}))
    return f"means over {many} seeds" + (f", of dense models over {dense}" if small else "")


def _how_old(rows: Sequence[Row]) -> str:
    """Return a sentence on code that has changed since the measurements; "" if none has."""
    changed = mark_of(commit for row in rows for commit in (row["commit"], *row.get("commits", {}).values()))
    return " Some of the code behind these numbers has changed since." if CHANGED in changed else ""


def _not_copied(trainings: Trainings, parts: Sequence[str]) -> str:
    """Return as a sentence how cuts compare with small dense models over the tokens not copied; "" if not measured."""
    others = Trainings(trainings.rows, not_copied)
    cuts = [(Model("SALAAD", CUTS["SALAAD"], share), Model(f"dense, {share:g}")) for share in SHARES[1:]]
    found = [(part, over) for part, pair in zip(parts, cuts, strict=True) if (over := others.over(*pair)) is not None]
    if not found:
        return ""
    level = {part: compared(over).removesuffix(" than").removesuffix(" with") for part, over in found}
    said = ", and ".join(f"{how} at {part}" for part, how in level.items())
    return (
        " Small dense models copy less from their context; over the tokens that are not copied, SALAAD's cuts are "
        f"{said}."
    )


def _as_in_the_paper(trainings: Trainings) -> str:
    """Return as a sentence what the uncut model of the paper's settings is relative to full-rank training; or ""."""
    over = trainings.over(Model("SALAAD, as in the paper"))
    if over is None:
        return ""
    return f" SALAAD has our settings (`--preset elastic`); with the paper's, the uncut model is {over:+.1%}."


def _at_searched_rates(trainings: Trainings) -> str:
    """Return as a sentence what full-rank training at the best rates of its search is; "" if it was not measured."""
    searched = Model(SEARCHED)
    over, besides = (one.over(searched) for one in (trainings, Trainings(trainings.rows, not_copied)))
    if None in (over, besides):
        return ""
    return (
        f" With the best learning rate of a search full-rank training is {over:+.1%} "
        f"({named_seeds(trainings.seeds(searched))}, relative to the mean of the seeds), and {besides:+.1%} over the "
        "tokens that are not copied."
    )


def _deviation(trainings: Trainings) -> float:
    """Return the standard deviation over the seeds of uncut SALAAD's perplexity relative to full-rank training."""
    ours, whole = (trainings.perplexities(model) for model in (Model("SALAAD"), FULL_RANK))
    return pstdev(ours[seed] / whole[seed] for seed in ours.keys() & whole.keys())


def _cells(trainings: Trainings, models: Sequence[Model]) -> list[str]:
    """Return what each model is relative to full-rank training."""
    return ["–" if (over := trainings.over(model)) is None else f"{over:+.1%}" for model in models]


def headline(trainings: Trainings, parts: Sequence[str]) -> str:
    """Return the table in a sentence: cuts against dense models of their sizes and a full-rank model cut alike.

    Args:
        trainings: the measurements.
        parts: the sizes of the two cuts as shares of all parameters, as text.
    """
    said = []
    for share in SHARES[1:]:
        ours = Model("SALAAD", CUTS["SALAAD"], share)
        rivals = {
            "a dense model trained at that size": Model(f"dense, {share:g}"),
            "a full-rank model cut the same way": Model("full-rank", CUTS["full-rank"], share),
        }
        found = {name: trainings.over(ours, rival) for name, rival in rivals.items()}
        said.append(" and ".join(f"{compared(value)} {name}" for name, value in found.items() if value is not None))
    larger, smaller = said
    return (
        f"**Cut to {parts[0]} of its parameters, SALAAD's model is {larger}; cut to {parts[1]}, it is "
        f"{smaller}{_tuned(trainings, parts)}; uncut, it is {compared(trainings.over(Model('SALAAD')))} full-rank "
        "training.**"
    )


def _tuned(trainings: Trainings, parts: Sequence[str]) -> str:
    """Return what SALAAD's tuned sizes are relative to a full-rank model's, as a part of a sentence; else nothing."""
    over = [trainings.over(*(Model(label, way, share) for label, way in OF_ONE_FOLDER)) for share in SHARES[1:]]
    if None in over:
        return ""
    larger, smaller = map(compared, over)
    rival = "a full-rank model tuned the same way"
    both = f"{larger} {rival} at both sizes"
    sizes = both if larger == smaller else f"{larger} {rival} at {parts[0]}, and {smaller} it at {parts[1]}"
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
