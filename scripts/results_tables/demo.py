"""What the first page shows, and the table of results/demo."""

from collections.abc import Mapping, Sequence
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, millions
from scripts.results_tables import RESULTS
from scripts.results_tables.elastic import by_label

Row = Mapping[str, Any]

SCALE = "nano-20"
CUTS = {"full-rank": "rpca, head", "SALAAD": "cut, head"}  # without text, as compress.py cuts unless told otherwise
FITTED = {"full-rank": "rpca, head, tuned, each", "SALAAD": "head, tuned, each"}  # every size by itself
SHARES = (0.75, 0.5, 0.2)  # of the compressible parameters


def sections() -> dict[str, str]:
    """The rows of the project's README, and the demo's table."""
    table = RESULTS / "demo" / "demo.md"
    return {"summary": summary_table(), "samples": samples(), "demo": table.read_text().strip()}


def summary_table() -> str:
    """SALAAD whole and cut, as it is and fitted on text; a full-rank model likewise; dense models of these sizes."""
    models = by_label(read_json(RESULTS / "elastic" / f"{SCALE}.json")["rows"])
    full, salaad = (_measured(models[label], way) for label, way in CUTS.items())
    whole = full["X"]["parameters"]
    lines = [_line("whole", [salaad["X"], None, full["X"], None, full["X"]])]
    for share in SHARES:
        cuts = [_at(row, way, share) for row in (salaad, full) for way in (CUTS[row["label"]], FITTED[row["label"]])]
        lines.append(_line(_part(cuts[0], whole), [*cuts, _dense(models, share)]))
    told = (
        f"Perplexity over {full['X']['tokens']:,} validation tokens of Wikipedia, one seed each, 20 training tokens a "
        "parameter; lower is better. Cuts are made without text; what is *fitted* is then matched and distilled on a "
        f"twentieth of the training text, for {_fitting_cost(salaad):.1%} of the operations of the training."
    )
    header = ("size", "parameters", "SALAAD", "fitted", "full-rank, cut alike", "fitted", "dense, trained small")
    return f"{markdown_table(header, lines)}\n\n{headline(salaad, full, models)} {told}"


def headline(salaad: Row, full: Row, models: Mapping[str, Sequence[Row]]) -> str:
    """The table in a sentence: cuts beside dense models of their sizes and beside cuts of a full-rank model."""
    said = []
    for share in SHARES[1:]:
        mine, alike = (_at(row, CUTS[row["label"]], share) for row in (salaad, full))
        dense, split = (compared(mine["perplexity"] / other["perplexity"]) for other in (_dense(models, share), alike))
        said.append((_part(mine, full["X"]["parameters"]), dense, split))
    (first, *half), (second, *fifth) = said
    whole = compared(salaad["X"]["perplexity"] / full["X"]["perplexity"])
    return (
        f"**At {first} of its parameters SALAAD's model is {half[0]} a dense model trained at that size and {half[1]} "
        f"a full-rank model cut alike; at {second} {fifth[0]} the one and {fifth[1]} the other; whole, {whole} "
        "full-rank training.**"
    )


def compared(ratio: float) -> str:
    """What a ratio of perplexities says, such as `8.1 % better than`."""
    percent = f"{abs(1 - ratio) * 100:.1f}"
    return "level with" if percent == "0.0" else f"{percent} % {'better' if ratio < 1 else 'worse'} than"


def samples() -> str:
    """What the smallest and the largest size of SALAAD's elastic folder write, a line each."""
    rows = read_json(RESULTS / "elastic" / f"{SCALE}.json")["rows"]
    written = {way: texts for row in rows if row["label"] == "SALAAD" for way, texts in row.get("samples", {}).items()}
    texts = written.get("head, tuned") or written["tuned"]
    return "\n".join(f"- {millions(one['parameters'])}: *{' '.join(one['text'].split())}*" for one in texts)


def _measured(rows: Sequence[Row], way: str) -> Row:
    """The first seed of which this way was measured."""
    return next(row for row in rows if way in row["ways"])


def _at(row: Row, way: str, share: float) -> Row | None:
    """What a way gives at a size, if that was measured."""
    return next((size for size in row["ways"].get(way, ()) if size["share"] == share), None)


def _dense(models: Mapping[str, Sequence[Row]], share: float) -> Row | None:
    """The first dense model that was trained with this share, if there is one."""
    return next((row["X"] for row in models.get(f"dense, {share:g}", ())), None)


def _part(size: Row, whole: int) -> str:
    return f"{100 * size['parameters'] / whole:.0f} %"


def _fitting_cost(row: Row) -> float:
    """Operations of fitting a size over those of the training."""
    way, costs = FITTED[row["label"]], row["costs"]
    return costs[way]["operations"] / len(row["ways"][way]) / costs["train"]["operations"]


def _line(name: str, rows: Sequence[Row | None]) -> tuple[str, ...]:
    values = ("–" if row is None else f"{row['perplexity']:.2f}" for row in rows)
    return name, millions(rows[0]["parameters"]), *values
