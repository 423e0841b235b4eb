"""Distillation: a cut model, or all sizes of one in turn, learns the predictions of the dense model on text.

    minimise  E KL(q(· | tokens before) ‖ p_{L̃+S̃}(· | tokens before))   over U, V, the entries of S and the rest

q is what the dense model predicts, or that mixed with what the text says: a dense model is wrong here and there, and a
cut one that learns from both can end nearer to text of that kind than one that learns from either.

Of many sizes each step trains two on the same text. One is the smallest, which has least in common with the others and
else falls behind. The other follows the multiples of the golden ratio over the range, evenly spaced in the logarithm of
the compressible parameters, so that every stretch of steps covers all of it.
"""

import math
import time
from collections.abc import Callable, Sequence
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

SIZES_A_STEP = 2  # of many
RATE = 0.005  # as in `Fitting`; half of it is level for a well-trained model, twice and four times are worse
_SECONDS = 60  # between two times that the state is saved
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
    """Train `tuned` for so many batches, from the last step on that was saved.

    Args:
        tuned: what is trained; the dense model in it is the teacher.
        open_stream: the text from a saved position on, or from its beginning.
        steps: batches.
        saved: the state.
        request: to stop, after saving.
        text_share: of q.
        kept_at: step → the sizes that are trained then, alike: block → (rank, entries), all units for None.

    Raises:
        UserError: the text cannot be read any further, or repeats, or a stop was requested; what was done is saved.
    """
    state, learner = saved.load(), Learner(tuned, Fitting(tuned.trained(), steps, RATE), text_share, kept_at)
    if state is not None:
        learner.load_state_dict(state)
    fitting, since = learner.fitting, time.monotonic()
    stream = open_stream(None if state is None else state["data"])

    def save() -> None:
        saved.save({**learner.state_dict(), "data": stream.state_dict()})

    def interrupted() -> UserError:
        return UserError(f"interrupted after {fitting.done} of {steps} steps; the same command goes on from there")

    bar = tqdm(total=steps, initial=fitting.done, desc="distilling", unit="step", leave=False, disable=None)
    try:
        while fitting.done < steps:
            try:
                batch = next(stream)
            except (UserError, Stopped) as error:
                save()
                raise (error if isinstance(error, UserError) else interrupted()) from None
            if stream.repeats:
                save()
                raise UserError(
                    f"the training text repeats after {fitting.done} of the {steps} batches of --distill; give fewer "
                    "tokens, or more text"
                )
            loss = learner.step(batch["input_ids"], batch["labels"])
            bar.update()
            bar.set_postfix_str(f"divergence {loss:.3f}", refresh=False)
            if request.asked or time.monotonic() - since > _SECONDS:
                save()
                since = time.monotonic()
            if request.asked:
                raise interrupted()
        save()
    finally:
        bar.close()
        stream.close()


class Learner:
    """A cut model that learns from the dense one, a batch a step.

    Args:
        tuned: both of them.
        fitting: the steps.
        text_share: of what is learned.
        kept_at: step → the sizes that are trained then.
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
        """Learn from one batch (rows × length); its mean divergence over tokens and sizes."""
        ids, labels = ids.to(self._device), labels.to(self._device)
        with torch.no_grad():
            teacher = self._divergence.hidden_and_head(ids)
        sizes = self._kept_at(self.fitting.done)
        tokens = len(sizes) * (labels != IGNORED).sum()
        call = partial(self.tuned.call, self._divergence, ids, labels, teacher)
        return self.fitting.step(call(kept=kept) / tokens for kept in sizes)

    def state_dict(self) -> dict[str, Any]:
        """The state between two steps."""
        return {"tuned": self.tuned.state_dict(), "fitting": self.fitting.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.tuned.load_state_dict(state["tuned"])
        self.fitting.load_state_dict(state["fitting"])


def sizes_in_turn(smallest: int, largest: int, keep: Callable[[int], Kept]) -> Callable[[int], list[Kept]]:
    """Step → what two sizes keep: one between two counts of compressible parameters in turn, and the smallest."""

    def kept_at(step: int) -> list[Kept]:
        place = (step + 1) * _GOLDEN % 1
        return [keep(round(largest * (smallest / largest) ** place)), keep(smallest)]

    return kept_at
