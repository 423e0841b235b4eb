"""The text behind the rows of compare_elastic.py, so that rows of two texts never stand side by side in one table."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from salaad.common.errors import UserError
from salaad.config.run import RunConfig
from salaad.data.batches import count_targets
from salaad.data.text import content_digest, digests_of, open_text, validation_batches
from salaad.runs.run import with_own_tokenizer
from scripts.outlines import description_of


class MeasuredText(NamedTuple):
    """What models are trained and measured on.

    Args:
        digests: what is read → a key of it: training files by their names and sizes, others by their contents too.
        tokens: tokens that are predicted in the second half of the validation text, which every figure is measured on.
    """

    digests: dict[str, str]
    tokens: int

    @classmethod
    def of(cls, config: RunConfig, tokens: int, other_text: str | None) -> "MeasuredText":
        """Open the text of a configuration.

        Args:
            config: the configuration of all trainings.
            tokens: validation tokens to read.
            other_text: a second validation file.

        Raises:
            UserError: a text or the tokenizer is not there or cannot be read.
        """
        data = with_own_tokenizer(config)
        text = open_text(data, vocab_size=description_of(config).vocab_size)
        digests = digests_of(text) | {"validation files": content_digest(text.validation_files)}
        if other_text is not None:
            digests["second text"] = content_digest([other_text])
        batches = validation_batches(text, data, rows=16, max_tokens=tokens, half="second")
        return cls(digests, sum(count_targets(batch["labels"]) for batch in batches))

    def require_behind(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Compare with the text of rows; those of older versions have no digests.

        Raises:
            UserError: a row has another text, or as many tokens of it as another --tokens gives.
        """
        for row in rows:
            name = f"the row {row['label']} of seed {row['seed']}"
            known = row.get("text", {})
            if other := [what for what, digest in self.digests.items() if known.get(what, digest) != digest]:
                raise UserError(
                    f"{name} has other {' and '.join(other)} than are given; give its own, or another --output"
                )
            if row["X"]["tokens"] != self.tokens:
                raise UserError(
                    f"{name} was measured on {row['X']['tokens']:,} tokens, but this validation text and --tokens make "
                    f"{self.tokens:,}; give its own, or another --output"
                )
