"""Distillation: a cut model, or all sizes of one in turn, learns the predictions of the dense model on text.

    minimise  E KL(q(· | tokens before) ‖ p_{L̃+S̃}(· | tokens before))   over U, V, the entries of S, norms and biases

q is the prediction of the dense model, or a mixture of it and the text's own next token: the dense model is sometimes
wrong, and a cut one that learns from both can end nearer to text of that kind than one that learns from either.

If there are many sizes, each step trains two on the same text. One is the smallest, which has least in common with the
others and else falls behind. The other follows the multiples of the golden ratio modulo 1 over the range, evenly in the
logarithm of the compressible parameters, so that any run of consecutive steps covers the whole range.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from salaad.common.errors import Stopped, UserError
from salaad.common.signals import StopRequest
from salaad.compression.tuning.fitting import Fitting
from salaad.compression.tuning.saved import SavedTuning
from salaad.compression.tuning.tuned_model import TunedModel
from salaad.data.batches import TrainingStream
from salaad.hpa import Kept
from salaad.model.loss import IGNORED, SummedDivergence

SIZES_A_STEP = 2  # if there are many
RATE = 0.005  # as in `Fitting`; half of it is as good for a well-trained model, twice and four times it are worse
_SECONDS = 60  # between two saves of the state
_GOLDEN = (math.sqrt(5) - 1) / 2


def distill(
    tuned: TunedModel,
    open_stream: Callable[[dict | None], TrainingStream],
    steps: int,
    saved: SavedTuning,
    request: StopRequest,
    text_share: float,
    kept_at: Callable[[int], Sequence[Kept | None]] = lambda step: [None],
) -> None:
    """Train `tuned` for `steps` batches, going on from the last step that was saved.

    Args:
        tuned: the cut model, whose dense model is the teacher.
        open_stream: saved position → the text from there on; for None from its beginning.
        steps: number of batches.
        saved: where the state is saved.
        request: a request to stop, which is followed after saving.
        text_share: share of the text's own next token in q.
        kept_at: step → the sizes it trains, weighed alike: block → (rank, number of entries), all units for None.

    Raises:
        UserError: the text cannot be read any further, or repeats, or a stop was requested; what was done is saved.
    """

    def begin(state: dict[str, Any] | None) -> tuple[Learner, TrainingStream]:
        learner = Learner(tuned, Fitting(tuned.trained(), steps, RATE), text_share, kept_at)
        if state is None:
            return learner, open_stream(None)
        learner.load_state_dict(state)
        return learner, open_stream(state["data"])

    learner, stream = saved.resumed(tuned, begin)
    fitting, since = learner.fitting, time.monotonic()

    def save() -> None:
        saved.save({**learner.state_dict(), "data": stream.state_dict()})

    bar = tqdm(total=steps, initial=fitting.done, desc="distilling", unit="step", leave=False, disable=None)
    with closing(stream), bar:
        try:
            while fitting.done < steps and not request.asked:
                batch = next(stream)
                if stream.repeats:
                    raise UserError(
                        f"the training text repeats after {fitting.done} of the {steps} batches of --distill; give "
                        "fewer tokens, or more text"
                    )
                loss = learner.step(batch["input_ids"], batch["labels"])
                bar.update()
                bar.set_postfix_str(f"divergence {loss:.3f}", refresh=False)
                if time.monotonic() - since > _SECONDS:
                    save()
                    since = time.monotonic()
        except Stopped:  # while text was waited for
            pass
        except UserError:
            save()
            raise
        save()
        if request.asked or fitting.done < steps:
            raise UserError(f"interrupted after {fitting.done} of {steps} steps; the same command goes on from there")


class Learner:
    """A cut model that learns from the dense one, one batch per step.

    Args:
        tuned: the cut model, which holds the dense one.
        fitting: the optimizer and its schedule.
        text_share: share of the text's own next token in q.
        kept_at: step → the sizes it trains, as of `distill`.
    """

    def __init__(
        self,
        tuned: TunedModel,
        fitting: Fitting,
        text_share: float,
        kept_at: Callable[[int], Sequence[Kept | None]],
    ) -> None:
        self.tuned, self.fitting, self._kept_at = tuned, fitting, kept_at
        self._divergence, self._device = SummedDivergence(tuned.model, text_share), next(tuned.parameters()).device

    def step(self, ids: Tensor, labels: Tensor) -> float:
        """Take a step on one batch (rows × length); return its mean divergence over tokens and sizes."""
        ids, labels = ids.to(self._device), labels.to(self._device)
        with torch.no_grad():
            teacher = self._divergence.hidden_and_head(ids)
        sizes = self._kept_at(self.fitting.done)
        tokens = len(sizes) * (labels != IGNORED).sum()
        call = partial(self.tuned.call, self._divergence, ids, labels, teacher)
        return self.fitting.step(call(kept=kept) / tokens for kept in sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two steps."""
        return {"tuned": self.tuned.state_dict(), "fitting": self.fitting.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.tuned.load_state_dict(state["tuned"])
        self.fitting.load_state_dict(state["fitting"])


def sizes_in_turn(smallest: int, largest: int, keep: Callable[[int], Kept]) -> Callable[[int], list[Kept]]:
    """Return a function: step → what two sizes keep.

    One of them moves between two counts of compressible parameters, the other is the smallest, which may be nothing.
    """
    ratio = max(smallest, 1) / max(largest, 1)

    def kept_at(step: int) -> list[Kept]:
        place = (step + 1) * _GOLDEN % 1
        return [keep(round(largest * ratio**place)), keep(smallest)]

    return kept_at
