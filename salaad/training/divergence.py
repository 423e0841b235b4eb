"""How a run handles NaN and infinity.

A step whose loss or gradient is not finite is discarded on the device, before it reaches a weight. The host learns of
it here, together with the next statistics, reports it and counts it.
"""

from contextlib import suppress
from pathlib import Path

from salaad.common.errors import UserError
from salaad.common.files import write_json
from salaad.config.run import TrainConfig
from salaad.runs.checkpoints import Checkpoints
from salaad.runs.records import Recorder
from salaad.training.gradients import Gradients


class NonFinite:
    """The count of discarded steps, which ends the run when they are too many.

    Args:
        gradients: the gradients, which find and count the steps to discard.
        config: the training settings, of which `on_nonfinite` and `max_skipped` are read.
        folder: the run's folder, for diagnosis.json.
        recorder: prints a line about discarded steps.
        discarded: number of steps discarded in earlier starts of the run.
        remedy: what to change in the configuration after a divergence (`Method.remedy`).

    Attributes:
        discarded: discarded steps that the host knows of since the run began; the same on every rank.

    Raises:
        UserError: a weight is not finite to begin with.
    """

    def __init__(
        self,
        gradients: Gradients,
        config: TrainConfig,
        folder: Path,
        recorder: Recorder,
        discarded: int,
        remedy: str,
    ) -> None:
        self._gradients, self._config, self._folder, self._recorder = gradients, config, folder, recorder
        self._remedy = remedy
        self.discarded = discarded
        gradients.discarded += discarded
        weight = gradients.broken_weight()
        if weight:
            raise UserError(f"{weight} is not finite in the model to begin with; give another model or checkpoint")

    def check(self, step: int) -> None:
        """Report the steps discarded up to `step`; waits for the device.

        Raises:
            UserError: a step was discarded and the run is to stop then, too many were, or a weight is not finite.
        """
        found = self._gradients.first_broken()
        if found:
            self.discarded = int(self._gradients.discarded)
            first, where = found
            limit = self._config.max_skipped
            if self._config.on_nonfinite == "stop" or self.discarded > limit:
                raise self.diverged(first, where, may_skip=True)
            self._recorder.say(
                f"step {first}: {where} was not finite, so no step was taken; batches skipped so far: {self.discarded} "
                f"of {limit}"
            )
        weight = self._gradients.broken_weight()
        if weight:
            raise self.diverged(step, weight)

    def diverged(self, step: int, where: str, may_skip: bool = False) -> UserError:
        """Write diagnosis.json for numbers that are not finite, and return the error that ends the run.

        Args:
            step: the step at which they first occurred.
            where: the weight, gradient or block that holds them.
            may_skip: whether no weight was changed, so that skipping the batch is another remedy.
        """
        last = str(Checkpoints(self._folder / "checkpoints").latest() or "none")
        diagnosis = {"step": step, "block": where, "discarded_steps": self.discarded, "last_good_checkpoint": last}
        with suppress(OSError):  # a full disk must not hide the error returned below
            write_json(diagnosis, self._folder / "diagnosis.json")
        stops = self._config.on_nonfinite == "stop"
        more = "--train.on_nonfinite skip" if stops else f"--train.max_skipped above {self._config.max_skipped}"
        skip = f"--resume auto and {more}, or with " if may_skip else ""
        return UserError(
            f"a number is not finite at step {step}, first in {where} (steps discarded so far: {self.discarded}); go "
            f"on with {skip}--resume {last} --output NEW and {self._remedy}; see "
            f"{self._folder / 'diagnosis.json'}"
        )
