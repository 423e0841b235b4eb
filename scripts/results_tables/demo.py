"""The generated sections of the project's README, and the table of results/demo."""

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from salaad.common.files import read_json
from salaad.common.formats import markdown_table, millions
from scripts.results_tables import RESULTS
from scripts.results_tables.elastic import by_label

Row = Mapping[str, Any]

SCALE = "nano-20"
CUTS = {"full-rank": "rpca, head", "SALAAD": "cut, head"}  # without text, as compress.py cuts unless told otherwise
FITTED = {"full-rank": "rpca, head, tuned", "SALAAD": "head, tuned"}  # one folder of all sizes
SHARES = (0.75, 0.5, 0.2)  # of the compressible parameters


def sections() -> dict[str, str]:
    """Return the sections of the project's README, and the demo's table."""
    table = RESULTS / "demo" / "demo.md"
    return {"summary": summary_table(), "samples": samples(), "demo": table.read_text().strip()}


def summary_table() -> str:
    """Return a table: a SALAAD and a full-rank model whole, cut, and fitted on text; dense models of these sizes."""
    models = by_label(read_json(RESULTS / "elastic" / f"{SCALE}.json")["rows"])
    seeds = set.intersection(*({row["seed"] for row in _measured(models[label])} for label in CUTS))
    full, salaad = (_mean([row for row in models[label] if row["seed"] in seeds]) for label in CUTS)
    whole = full["X"]["parameters"]
    lines = [_line("uncut", [salaad["X"], None, full["X"], None, full["X"]])]
    for share in SHARES:
        cuts = [_at(row, way, share) for row in (salaad, full) for way in (CUTS[row["label"]], FITTED[row["label"]])]
        lines.append(_line(_part(cuts[0], whole), [*cuts, _dense(models, share)]))
    trained = "one seed each" if len(seeds) == 1 else f"means of {len(seeds)} seeds, dense models of one"
    told = (
        f"Perplexity over {full['X']['tokens']:,} validation tokens of Wikipedia, {trained}, 20 training tokens per "
        "parameter; lower is better."
    )
    if FITTED["SALAAD"] in salaad["ways"]:
        told += (
            " *Tuned* models are sizes of one folder, matched and distilled on a twentieth of the training text for "
            f"{_fitting_cost(salaad):.0%} of the training's operations; the other cuts use no text."
        )
    if (RESULTS / "elastic" / "in-context" / f"{SCALE}.json").exists():
        told += (
            " Trainings of this length differ in whether they have begun to copy from their context, so compare models "
            "of one seed and one shape ([measured](results/elastic/README.md#nano-20))."
        )
    header = ("size", "parameters", "SALAAD", "tuned", "full-rank, cut the same way", "tuned", "dense, trained small")
    return f"{markdown_table(header, lines)}\n\n{headline(salaad, full, models)} {told}"


def headline(salaad: Row, full: Row, models: Mapping[str, Sequence[Row]]) -> str:
    """Return the table in a sentence: cuts against dense models of their sizes and a full-rank model cut alike."""
    said = []
    for share in SHARES[1:]:
        mine, alike = (_at(row, CUTS[row["label"]], share) for row in (salaad, full))
        others = {
            "a dense model trained at that size": _dense(models, share),
            "a full-rank model cut the same way": alike,
        }
        beside = (f"{compared(mine['perplexity'] / one['perplexity'])} {name}" for name, one in others.items() if one)
        said.append((_part(mine, full["X"]["parameters"]), " and ".join(beside)))
    whole = compared(salaad["X"]["perplexity"] / full["X"]["perplexity"])
    (first, half), (second, fifth) = said
    return (
        f"**At {first} of its parameters SALAAD's model is {half}; at {second} it is {fifth}; uncut it is {whole} "
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


def _measured(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the seeds that were cut; only of those that were fitted on text too, if there are any."""
    cut = [row for row in rows if CUTS[row["label"]] in row["ways"]]
    return [row for row in cut if FITTED[row["label"]] in row["ways"]] or cut


def _mean(rows: Sequence[Row]) -> Row:
    """Return the rows of several seeds of a model as one row, with the means of their perplexities."""
    first = rows[0]
    both = (CUTS[first["label"]], FITTED[first["label"]])
    ways = {way: _mean_sizes([row["ways"][way] for row in rows]) for way in both if way in first["ways"]}
    [X] = _mean_sizes([[row["X"]] for row in rows])
    return {**first, "X": X, "ways": ways}


def _mean_sizes(curves: Sequence[Sequence[Row]]) -> list[Row]:
    """Return curves over the same sizes as one, with the means of their perplexities."""
    return [
        {**sizes[0], "perplexity": fmean(size["perplexity"] for size in sizes)} for sizes in zip(*curves, strict=True)
    ]


def _at(row: Row, way: str, share: float) -> Row | None:
    """Return the figures of a way at a share; None if not measured."""
    return next((size for size in row["ways"].get(way, ()) if size["share"] == share), None)


def _dense(models: Mapping[str, Sequence[Row]], share: float) -> Row | None:
    """Return the figures of the first dense model that was trained at this share, if there is one."""
    return next((row["X"] for row in models.get(f"dense, {share:g}", ())), None)


def _part(size: Row, whole: int) -> str:
    return f"{100 * size['parameters'] / whole:.0f} %"


def _fitting_cost(row: Row) -> float:
    """Operations of fitting all sizes over those of the training."""
    costs = row["costs"]
    return costs[FITTED[row["label"]]]["operations"] / costs["train"]["operations"]


def _line(name: str, rows: Sequence[Row | None]) -> tuple[str, ...]:
    values = ("–" if row is None else f"{row['perplexity']:.2f}" for row in rows)
    return name, millions(rows[0]["parameters"]), *values
