"""Fitting a cut to the dense model on text: matching, then distillation, for one size or all sizes of a folder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from salaad.common.errors import UserError
from salaad.common.signals import StopRequest
from salaad.compression.calibration import CalibrationText
from salaad.compression.deployment import FittedOnText, best_device
from salaad.compression.split import Parts
from salaad.compression.tuning.distillation import RATE, SIZES_A_STEP, WITHOUT_TUNING, Distillation
from salaad.compression.tuning.matching import PASSES, Matching, layer_names
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.compression.unfinished import Unfinished
from salaad.config.run import DataConfig
from salaad.data.batches import TrainingStream
from salaad.data.text import Text, fingerprint, open_text, rows_before_repeating
from salaad.data.tokenizer import tokenizer_digest
from salaad.hpa import Kept
from salaad.model.build import training_flops
from salaad.model.loss import SummedLoss
from salaad.runs.model_on_disk import ModelOnDisk

_ROWS = 8  # rows of a batch
_LIKELY_ENOUGH = 16  # bytes of text files per requested token above which rows are not counted
# Settings by which the same files and the same tokenizer give other rows.
_MAKES_ROWS = ("text_field", "sequence_length", "packing", "shuffle_window", "streams")


class Fitted(NamedTuple):
    """A cut, and the other parameters of the model that were fitted with it.

    Args:
        parts: block → its units.
        vectors: norms and biases, by name.
    """

    parts: Parts
    vectors: dict[str, Tensor]


@dataclass(frozen=True)
class Tuning:
    """The fitting of cuts of one model to that model, on text.

    Args:
        source: the dense model on disk.
        data: the text, of which training rows are read.
        how: on how much of the text.
        unfinished: where states are saved.
    """

    source: ModelOnDisk
    data: DataConfig
    how: FittedOnText
    unfinished: Unfinished

    def check(self) -> None:
        """Raise a UserError if the text cannot be read or is too short, or the model cannot be fitted."""
        SummedLoss(self.source.folder.outline, WITHOUT_TUNING)
        if self.how.match:
            layer_names(self.source.folder.outline)
            self._sequences.check()
        self._check_length()

    def _check_length(self) -> None:
        """Raise a UserError if distillation would read some of the text twice.

        Rows of files that are so large that they almost surely suffice, or of unknown size, are not counted: for those,
        distillation itself raises the error.
        """
        asked, length = self.steps * _ROWS, self.data.sequence_length
        size = [self._text.sizes.get(file) for file in self._text.train_files]
        if None in size or sum(size) > _LIKELY_ENOUGH * asked * length:
            return
        found = rows_before_repeating(self._text, self.data, _ROWS, asked)
        if found < asked:
            whole = found - found % _ROWS
            raise UserError(
                f"the training text gives {found} sequences of {length} tokens before it repeats, {asked} are asked "
                f"for; give --distill {whole * length} or less, or more text"
            )

    @property
    def tokens(self) -> int:
        """Positions of text that are read, padding included."""
        return (self.how.match + self.steps * _ROWS) * self.data.sequence_length

    def operations(self, ranges: int | None) -> float:
        """Return the floating-point operations, as training counts them, of fitting `ranges` ranges or one size.

        Matching runs each layer forward dense and cut, and forward and backward in every pass over the sequences;
        distillation runs the dense model forward once, and the cut one forward and backward at every size of a step.
        """
        a_token = training_flops(self.source.folder.outline, self.data.sequence_length)
        matched = self.how.match * self.data.sequence_length * (2 / 3 + PASSES)
        learned = self.steps * _ROWS * self.data.sequence_length * (1 / 3 + (SIZES_A_STEP if ranges else 1))
        return a_token * (ranges or 1) * (matched + learned)

    @property
    def steps(self) -> int:
        """The number of batches of distillation."""
        return ceil(self.how.tokens / (_ROWS * self.data.sequence_length))

    def matched(self, parts: Parts, name: str) -> Fitted:
        """Return the cut named `name` after matching; as it is, with the model's norms and biases, if that is left out.

        Matrices outside the blocks, such as the head, stay as they are: fitting them too was no better, and the sizes
        of a folder share them.
        """
        cut = Fitted(parts, {key: p.detach().cpu() for key, p in self._model.named_parameters() if p.dim() == 1})
        if not self.how.match:
            return cut
        tuned, saved = TunedModel(self._model, *cut), SavedTuning(self.unfinished.path(f"match {name}"))
        device = best_device()
        texts = [{key: part.to(device) for key, part in batch.items()} for batch in self._sequences.batches()]
        with StopRequest() as request:
            Matching(tuned, texts, saved, request).run()
        return Fitted(tuned.parts(), tuned.other_parameters())

    def distilled(
        self, cut: Fitted, name: str, kept_at: Callable[[int], Sequence[Kept | None]] = lambda step: [None]
    ) -> Fitted:
        """Return the cut named `name` after distillation at the sizes of `kept_at`; unchanged if that is left out."""
        if not self.how.tokens:
            return cut
        tuned, saved = TunedModel(self._model, *cut), SavedTuning(self.unfinished.path(f"distill {name} {RATE}"))
        with StopRequest() as request:
            open_stream = partial(TrainingStream, self._text, self.data, batch=_ROWS, stop=request)
            Distillation(tuned, open_stream, self.steps, saved, request, self.how.text_share, kept_at).run()
        return Fitted(tuned.parts(), tuned.other_parameters())

    @property
    def reads(self) -> str:
        """A key that changes with the text that is read, how much of it and in which order."""
        matched_on = self._sequences.digest if self.how.match else ""
        made = [f"{name}={getattr(self.data, name)}" for name in _MAKES_ROWS]
        files = fingerprint(self._text.train_files, self._text.sizes)
        return " ".join([str(self.how), matched_on, files, tokenizer_digest(self._text.tokenizer), *made])

    @cached_property
    def _text(self) -> Text:
        return open_text(self.data, vocab_size=self.source.folder.config.vocab_size, validation=False)

    @cached_property
    def _sequences(self) -> CalibrationText:
        return CalibrationText(self.data, self.source.folder.config.vocab_size, self.how.match, option="--match")

    @cached_property
    def _model(self) -> PreTrainedModel:
        device = best_device()
        return self.source.folder.load(torch.bfloat16 if device.type == "cuda" else torch.float32, device)
