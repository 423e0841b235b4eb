"""How a written folder is used and what it is: the lines that compress.py prints, and the model card README.md.

The card is not among the folder's checksums: whoever publishes a model rewrites it, and evaluate.py adds perplexity.
"""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from salaad.common.budgets import format_count
from salaad.common.files import is_file, replacing
from salaad.common.formats import megabytes
from salaad.compression.variants import Variant
from salaad.config.commands import CompressOptions
from salaad.model.folders import CARD, SOURCE_CARD

_BEGIN, _END = "<!-- perplexity:begin -->", "<!-- perplexity:end -->"
_LARGEST_CARD = 2**20  # bytes
_INSTALL = "The package `salaad` is installed by `pip install -e .` in a clone of SALAAD's repository.\n\n"


@dataclass(frozen=True)
class Usage:
    """Instructions for opening a folder and measuring its perplexity.

    Args:
        folder: the folder as the user names it.
        in_parts: the folder holds blocks as U, V and S, which transformers alone cannot read.
        size: of an elastic folder, a budget that it holds.
        evaluation: further options of evaluate.py, or None where no tokenizer can read text for it.
    """

    folder: str
    in_parts: bool
    size: str | None
    evaluation: tuple[str, ...] | None

    @property
    def opening(self) -> str:
        """Lines of Python that open the model."""
        budget = "" if self.size is None else f", budget={json.dumps(self.size)}"
        lines = ["import salaad  # without it transformers cannot read the parts"] if self.in_parts else []
        lines += ["from transformers import AutoModelForCausalLM", ""]
        lines += [
            f"model = AutoModelForCausalLM.from_pretrained({json.dumps(self.folder, ensure_ascii=False)}{budget})"
        ]
        return "\n".join(lines)

    @property
    def measuring(self) -> str | None:
        """The command that measures the perplexity of exactly this model."""
        if self.evaluation is None:
            return None
        size = () if self.size is None else ("--variants", self.size)
        words = ("python", "evaluate.py", "perplexity", "--checkpoint", self.folder, *size, *self.evaluation)
        return shlex.join(words)

    def said(self) -> str:
        """Return `opening` and `measuring` as text for a terminal."""
        measured = f"\n\nMeasure its perplexity:\n\n```bash\n{self.measuring}\n```" if self.measuring else ""
        return f"Open it:\n\n```python\n{self.opening}\n```{measured}"


def not_smaller(
    options: CompressOptions, kind: str, kept_dense: int, blocks: int, dense: int, on_disk: int
) -> list[str]:
    """Return a warning with a remedy if a folder takes no fewer bytes on disk than the dense model, else an empty list.

    Args:
        options: the options of compress.py.
        kind: where L and S come from, the `kind` of the deployment.
        kept_dense: number of blocks that are stored dense.
        blocks: number of all blocks.
        dense: bytes of the dense model.
        on_disk: bytes of the folder's weights.
    """
    if on_disk < dense:
        return []
    bytes_of_both = f"{megabytes(on_disk)}, dense {megabytes(dense)}"
    sizes = f"Warning: the folder is no smaller on disk than the dense model ({bytes_of_both})"
    if options.elastic:
        why = "it holds all of L + S and the place of every entry; leave --elastic out and give a --budget"
        return [f"{sizes}, since {why} for a smaller folder of one size."]
    cure = "a --budget" if options.budget is None else "a smaller --budget"
    if kind == "nested":
        return [f"{sizes}, since it holds the widest of the models inside; give {cure}."]
    if options.format == "dense":
        return [f"{sizes}, since --format dense stores L + S as one matrix; leave that out for a smaller one."]
    return [f"{sizes}, since {kept_dense} of {blocks} blocks would take more as U, V and S than dense; give {cure}."]


def in_words(variants: Sequence[Variant]) -> str:
    """Return the budgets of the variants in words, such as `1.18M and 920K`."""
    *all_but_last, last = [format_count(variant.budget) for variant in variants]
    return f"{', '.join(all_but_last)} and {last}" if all_but_last else last


def history(name: str, kind: str, activation: str | None, options: CompressOptions, variants: Sequence[Variant]) -> str:
    """Return sentences on what a folder was made of, and how.

    Args:
        name: name of the model that the folder was made of.
        kind: where its L and S come from, the `kind` of the deployment.
        activation: what stands between the factors of its layers, if anything does.
        options: the options of compress.py.
        variants: the variant that the options ask for, or those at which ranges of sizes begin.
    """
    variant = variants[0]
    if kind == "nested":
        return f"This is one of the narrower models inside {name}. It was written by compress.py of SALAAD."
    if activation is not None:
        return (
            f"This is {name}, with layers y = U·{activation}(V·x) + S·x, as they were trained, in place of weight "
            "matrices: U and V are thin, S is sparse or empty. It was written by compress.py of SALAAD."
        )
    origin = {
        "trained": "as they were trained with SALAAD",
        "rpca": "found by robust PCA in the finished weights",
        "godec": "found by GoDec in the finished weights",
        "elastic": "taken from a folder of all sizes",
        "stored": "those of a folder of one size",
        "factors": "factors that were trained themselves",
    }[kind.partition("-")[0]]
    if kind.startswith(("trained-", "factors-")):
        origin += ", where training left any, and else found by robust PCA in the finished weights"
    if options.elastic:
        ranges = f" in each of {len(variants)} ranges of sizes" if len(variants) > 1 else ""
        fitted = options.match or options.distill
        most = "about as many units as X has parameters for" if fitted else "all units"
        cut = f"{most} are kept, in one order by energy per parameter{ranges}, and a size reads the first of them"
    elif variant.budget is None:
        cut = "all of L + S is kept"
    else:
        way = "energy per parameter" if variant.kappa is None else f"HPA with κ = {variant.kappa:g}"
        cut = f"they are cut to {format_count(variant.budget)} parameters of the whole model by {way}"
    if refined := [one for one in variants if one.refine]:
        fitted = f" for {in_words(refined)}" if options.elastic else ""
        cut += f", refined{fitted} by {refined[0].refine} alternating projections"
    if variant.calibrated:
        cut += f", weighed on {options.calibrate} sequences of text"
    if options.match:
        cut += f"; every layer was then matched to the dense one on {options.match} sequences of text"
    if options.distill:
        learned = "the predictions of the dense model" + (" and the text itself" if options.text_share else "")
        sizes = f" at all sizes from {in_words(variants[-1:])} up" if options.elastic else ""
        cut += f"; {learned} were then learned{sizes} on {options.distill} tokens of text"
    return (
        f"This is {name} with L + S in place of its weight matrices: L is the product of two thin factors, S is "
        f"sparse. L and S are {origin}; {cut}. It was written by compress.py of SALAAD."
    )


def write_card(folder: Path, usage: Usage, *, how: str, sizes: str, base: str | None) -> None:
    """Write README.md of a folder that already holds everything else, including the source model's card.

    Args:
        folder: the folder.
        usage: instructions for opening and measuring it.
        how: sentences on what it was made of, and how (see `history`).
        sizes: a table of sizes, and sentences on them.
        base: name on the hub of the model that the folder was made of, if it has one.
    """
    metadata = ModelCardData(
        base_model=base,
        library_name="transformers",
        license=_license(folder / SOURCE_CARD),
        pipeline_tag="text-generation",
        tags=["salaad", "low-rank", "sparse"],
    )
    usage = replace(usage, folder=Path(usage.folder).name)  # whoever reads the card has the folder somewhere else
    measuring = "Not measured" + (f"; this does it:\n\n```bash\n{usage.measuring}\n```" if usage.measuring else ".")
    if is_file(folder / SOURCE_CARD):
        how += f"\n\nThe card of the model it was made of is [{SOURCE_CARD}]({SOURCE_CARD})."
    (folder / CARD).write_text(
        f"---\n{metadata.to_yaml()}\n---\n\n# {usage.folder}\n\n{how}\n\n## Use\n\n{_INSTALL * usage.in_parts}"
        f"```python\n{usage.opening}\n```\n\n## Size\n\n{sizes}\n\n## Perplexity\n\n{_BEGIN}\n{measuring}\n{_END}\n"
    )


def add_perplexity(folder: Path, table: str) -> None:
    """Put a table of perplexities into a card that `write_card` wrote; other cards and symlinks stay as they are."""
    card = folder / CARD
    if card.is_symlink() or not is_file(card) or card.stat().st_size > _LARGEST_CARD:
        return
    with suppress(OSError, ValueError):  # a folder that cannot be written to is measured all the same
        before, begin, rest = card.read_text().partition(_BEGIN)
        _, end, after = rest.partition(_END)
        if end:
            with replacing(card) as temporary:
                temporary.write_text(f"{before}{begin}\n{table}\n{end}{after}")


def _license(card: Path) -> str | None:
    """Return the licence that the source model's card names, if the card can be read."""
    if not is_file(card) or card.stat().st_size > _LARGEST_CARD:
        return None
    try:
        text = card.read_text()
        found = ModelCard(text, ignore_metadata_errors=True).data.get("license") if text.startswith("---") else None
    except Exception:  # its author may have written anything
        return None
    return found if isinstance(found, str) else None
