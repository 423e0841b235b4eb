"""Distillation: a cut model, or all sizes of one in turn, learns the predictions of the dense model on text.

    minimise  E KL(q(· | tokens before) ‖ p_{L̃+S̃}(· | tokens before))   over U, V, the entries of S, norms and biases

q is the prediction of the dense model, or a mixture of it and the text's own next token: the dense model is sometimes
wrong, and a cut one that learns from both can end nearer to text of that kind than one that learns from either.

If there are many sizes, each step trains two on the same text. One is the smallest, which has least in common with the
others and else falls behind. The other follows the multiples of the golden ratio modulo 1 over the range, evenly in the
logarithm of the compressible parameters, so that any run of consecutive steps covers the whole range.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from tqdm import tqdm

from salaad.common.errors import Stopped, UserError
from salaad.common.save_pace import SavePace
from salaad.common.signals import StopRequest
from salaad.compression.tuning.fitting import Fitting
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.data.batches import TrainingStream
from salaad.hpa import Kept
from salaad.model.loss import IGNORED, SummedDivergence

SIZES_A_STEP = 2  # if there are many
RATE = 0.005  # as in `Fitting`; half of it is as good for a well-trained model, twice and four times it are worse
WITHOUT_TUNING = "leave --match and --distill out"  # cure where the loss cannot be computed
_SECONDS = 60  # between two saves of the state
_GOLDEN = (math.sqrt(5) - 1) / 2


class Distillation:
    """The distillation of a cut model, one batch per step; it goes on after the last step that was saved.

    Args:
        tuned: the cut model, which holds the dense one, its teacher.
        open_stream: function of `state`, a saved position, that opens the text there; for None at its beginning.
        steps: number of batches.
        saved: where the state is saved.
        request: a request to stop, which is followed after saving.
        text_share: share of the text's own next token in q.
        kept_at: step → the sizes it trains, weighed alike: block → (rank, number of entries), all units for None.
    """

    def __init__(
        self,
        tuned: TunedModel,
        open_stream: Callable[..., TrainingStream],
        steps: int,
        saved: SavedTuning,
        request: StopRequest,
        text_share: float,
        kept_at: Callable[[int], Sequence[Kept | None]],
    ) -> None:
        self._tuned, self._open_stream, self._steps = tuned, open_stream, steps
        self._saved, self._request, self._kept_at = saved, request, kept_at
        self._divergence, self._device = (
            SummedDivergence(tuned.model, text_share, WITHOUT_TUNING),
            next(tuned.parameters()).device,
        )
        self._fitting, self._stream = saved.resumed(tuned, self._begin)

    def _begin(self, state: dict[str, Any] | None) -> tuple[Fitting, TrainingStream]:
        """Take over a saved state; return the optimizer and the text."""
        fitting = Fitting(self._tuned.trained(), self._steps, RATE)
        if state is not None:
            self._tuned.load_state_dict(state["tuned"])
            fitting.load_state_dict(state["fitting"])
        return fitting, self._open_stream(state=state and state["data"])

    def _save(self) -> None:
        state = {"tuned": self._tuned.state_dict(), "fitting": self._fitting.state_dict()}
        self._saved.save({**state, "data": self._stream.state_dict()})

    def run(self) -> None:
        """Take all steps that are left.

        Raises:
            UserError: the text cannot be read any further, or repeats, or a stop was requested; what was done is saved.
        """
        fitting, steps, pace = self._fitting, self._steps, SavePace(_SECONDS)
        bar = tqdm(total=steps, initial=fitting.done, desc="distilling", unit="step", leave=False, disable=None)
        with closing(self._stream), bar:
            try:
                while fitting.done < steps and not self._request.asked:
                    loss = self._step()
                    bar.update()
                    bar.set_postfix_str(f"divergence {loss:.3f}", refresh=False)
                    if pace.is_due():
                        with pace.save():
                            self._save()
            except Stopped:  # while text was waited for
                pass
            except UserError:
                self._save()
                raise
            self._save()
            if self._request.asked or fitting.done < steps:
                raise UserError(
                    f"interrupted after {fitting.done} of {steps} steps; the same command goes on from there"
                )

    def _step(self) -> float:
        """Take a step on the next batch (rows × length); return its mean divergence over tokens and sizes."""
        batch = next(self._stream)
        if self._stream.repeats:
            raise UserError(
                f"the training text repeats after {self._fitting.done} of the {self._steps} batches of --distill; give "
                "fewer tokens, or more text"
            )
        ids, labels = (batch[key].to(self._device) for key in ("input_ids", "labels"))
        with torch.no_grad():
            teacher = self._divergence.hidden_and_head(ids)
        sizes = self._kept_at(self._fitting.done)
        tokens = len(sizes) * (labels != IGNORED).sum()
        call = partial(self._tuned.call, self._divergence, ids, labels, teacher)
        return self._fitting.step(call(kept=kept) / tokens for kept in sizes)


def sizes_in_turn(smallest: int, largest: int, keep: Callable[[int], Kept]) -> Callable[[int], list[Kept]]:
    """Return a function: step → what two sizes keep.

    One of them moves between two counts of compressible parameters, the other is the smallest, which may be nothing.
    """
    ratio = max(smallest, 1) / max(largest, 1)

    def kept_at(step: int) -> list[Kept]:
        place = (step + 1) * _GOLDEN % 1
        return [keep(round(largest * ratio**place)), keep(smallest)]

    return kept_at
