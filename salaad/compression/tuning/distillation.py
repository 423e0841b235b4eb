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

import torch
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
RATE = 0.01  # as in `Fitting`; higher ones cost more in the large sizes than they win in the small
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
        UserError: the text is shorter; or it cannot be read any further or a stop was requested, and what was done is
            saved.
    """
    state, fitting = saved.load(), Fitting(tuned.trained(), steps, RATE)
    if state is not None:
        tuned.load_state_dict(state["tuned"])
        fitting.load_state_dict(state["fitting"])
    wrapper, device = SummedDivergence(tuned.model, text_share), next(tuned.parameters()).device
    stream, since = open_stream(None if state is None else state["data"]), time.monotonic()

    def save() -> None:
        saved.save({"tuned": tuned.state_dict(), "fitting": fitting.state_dict(), "data": stream.state_dict()})

    def interrupted() -> UserError:
        return UserError(f"interrupted after {fitting.done} of {steps} steps; the same command goes on from there")

    bar = tqdm(total=steps, initial=fitting.done, desc="distilling", unit="step", leave=False, disable=None)
    try:
        while fitting.done < steps:
            try:
                ids, labels = (part.to(device) for part in next(stream).values())
            except (UserError, Stopped) as error:
                save()
                raise (error if isinstance(error, UserError) else interrupted()) from None
            if stream.passes:
                raise UserError(
                    f"the training text ends after {fitting.done} of the {steps} batches that --distill asks for; give "
                    "fewer tokens, or more text"
                )
            with torch.no_grad():
                teacher = wrapper.hidden_and_head(ids)
            sizes = kept_at(fitting.done)
            tokens = len(sizes) * (labels != IGNORED).sum()
            loss = fitting.step(tuned.call(wrapper, ids, labels, teacher, kept=kept) / tokens for kept in sizes)
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


def sizes_in_turn(smallest: int, largest: int, keep: Callable[[int], Kept]) -> Callable[[int], list[Kept]]:
    """Step → what two sizes keep: one between two counts of compressible parameters in turn, and the smallest."""

    def kept_at(step: int) -> list[Kept]:
        place = (step + 1) * _GOLDEN % 1
        return [keep(round(largest * (smallest / largest) ** place)), keep(smallest)]

    return kept_at
