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
SMALLER = {0.75: "three quarters", 0.5: "half", 0.2: "a fifth"}  # of what can be compressed


def sections() -> dict[str, str]:
    """The rows of the project's README, and the demo's table."""
    table = RESULTS / "demo" / "demo.md"
    return {"summary": summary_table(), "samples": samples(), "demo": table.read_text().strip()}


def summary_table() -> str:
    """SALAAD whole and cut, as it is and fitted on text; a full-rank model likewise; dense models of these sizes."""
    models = by_label(read_json(RESULTS / "elastic" / f"{SCALE}.json")["rows"])
    full, salaad = (_measured(models[label], way) for label, way in CUTS.items())
    lines = [("whole", *_line([salaad["X"], None, full["X"], None, full["X"]]))]
    for share, name in SMALLER.items():
        small = [row["X"] for row in models.get(f"dense, {share:g}", ())]
        cuts = [_at(row, way, share) for row in (salaad, full) for way in (CUTS[row["label"]], FITTED[row["label"]])]
        lines.append((f"cut to {name}", *_line([*cuts, *(small[:1] or [None])])))
    told = (
        f"Perplexity over {full['X']['tokens']:,} validation tokens, one seed each, 20 training tokens a parameter; "
        "lower is better. Shares are of what can be compressed. Cuts are made without text; what is *fitted* is then "
        "matched and distilled on a twentieth of the training text."
    )
    header = ("size", "parameters", "SALAAD", "fitted", "full-rank, cut alike", "fitted", "dense, trained small")
    return f"{markdown_table(header, lines)}\n\n{headline(salaad, full, models)} {told}"


def headline(salaad: Row, full: Row, models: Mapping[str, Sequence[Row]]) -> str:
    """The table in a sentence: cuts beside dense models of their sizes, and the whole models beside one another."""
    half, fifth = (
        compared(_at(salaad, CUTS["SALAAD"], share)["perplexity"] / small[0]["X"]["perplexity"])
        for share, small in ((share, models[f"dense, {share:g}"]) for share in (0.5, 0.2))
    )
    whole = compared(salaad["X"]["perplexity"] / full["X"]["perplexity"])
    return (
        f"**Cut to half, SALAAD's model is {half} than a dense model trained at that size; cut to a fifth, {fifth}; "
        f"whole, it is {whole} than full-rank training.**"
    )


def compared(ratio: float) -> str:
    """What a ratio of perplexities says, such as `8.1 % better`."""
    return f"{abs(1 - ratio) * 100:.1f} % {'better' if ratio <= 1 else 'worse'}"


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


def _line(rows: Sequence[Row | None]) -> tuple[str, ...]:
    return millions(rows[0]["parameters"]), *("–" if row is None else f"{row['perplexity']:.2f}" for row in rows)
