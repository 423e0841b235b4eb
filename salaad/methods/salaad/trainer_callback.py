"""SALAAD in the `Trainer` of transformers, and in its subclasses, such as TRL's.

    trainer = Trainer(model, arguments, train_dataset=rows)
    callback = SalaadCallback(trainer, SalaadConfig(every=10))
    trainer.train()                            # resume_from_checkpoint works as usual
    small = callback.salaad.compress(0.5)

Each `checkpoint-N` of the Trainer gets a folder `surrogate` beside its weights, so that compress.py, evaluate.py and
`Salaad.load` open it too.
"""

import shutil
import warnings
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from transformers import DefaultFlowCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from salaad.common import distributed
from salaad.common.errors import NotSavedError, UserError
from salaad.config.methods import SalaadConfig
from salaad.methods.salaad.plugin import Salaad
from salaad.methods.salaad.storage import write_whole

if TYPE_CHECKING:
    from transformers import Trainer

_LOGGED = ("rank_ratio", "density", "error")


class SalaadCallback(TrainerCallback):
    """A callback that brings the penalty, the ADMM and their checkpoints to a Trainer, to which it adds itself.

    Args:
        trainer: a Trainer that has not begun yet.
        config: targets, ρ, roles and schedule.
        resume_from_checkpoint: the checkpoint that `trainer.train` is given, if outside the Trainer's output folder.

    Attributes:
        salaad: the `Salaad` of the training, from its first step on; after the training, its last state.
    """

    def __init__(
        self,
        trainer: "Trainer",
        config: SalaadConfig | None = None,
        *,
        resume_from_checkpoint: str | Path | None = None,
    ) -> None:
        self.config = config or SalaadConfig()
        self.salaad: Salaad | None = None
        self._trainer, self._folder = trainer, resume_from_checkpoint
        self._written: int | None = None  # the step whose L and S are in a folder of their own
        self._figures: dict[str, float] | None = None  # for the log of the step that has just been taken
        # After the callback that says which steps are logged, and before those that report the logs.
        callbacks = trainer.callback_handler.callbacks
        callbacks.insert(1 if callbacks and isinstance(callbacks[0], DefaultFlowCallback) else 0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Make the `Salaad`, or load it from the checkpoint from which the Trainer resumes.

        Raises:
            UserError: the callback was added to the Trainer once more, the Trainer uses DeepSpeed, or the checkpoint
                holds no L and S.
        """
        if self._trainer.is_deepspeed_enabled:
            raise UserError(
                "the Trainer uses DeepSpeed, whose optimizer takes copies of the gradients that the penalty does not "
                "reach; leave out the deepspeed argument, and train on several devices with torchrun"
            )
        if self._trainer.callback_handler.callbacks.count(self) > 1:
            raise UserError(
                "the Trainer has this SalaadCallback twice, so that each step would count twice; leave out "
                "trainer.add_callback, as the callback adds itself"
            )
        if args.save_strategy == "no" and state.is_world_process_zero:
            warnings.warn(
                "the Trainer saves no checkpoints (save_strategy), so L and S are not saved either; call "
                "callback.salaad.save(folder, tokenizer) after the training, or set save_strategy",
                stacklevel=2,
            )
        if self.salaad is not None:  # left by an exception, such as that after which the Trainer halves its batches
            self.salaad.close()
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        model = self._trainer.model
        if state.global_step == 0:
            self.salaad = Salaad(model, self.config, scaler=scaler, total_steps=state.max_steps)
            return
        folder = Path(self._folder or _checkpoint(args, state.global_step))
        if distributed.first_decides(lambda: _waiting(folder).is_dir()):  # a start was killed before it moved them
            _complete(folder)
        if not (folder / "surrogate" / "index.json").is_file():
            raise UserError(
                f"the Trainer goes on at step {state.global_step}, but {folder} holds no L and S; name the checkpoint "
                "by SalaadCallback(trainer, config, resume_from_checkpoint=FOLDER) if it is another, or, if its saving "
                "was cut off, give trainer.train an older one"
            )
        self.salaad = Salaad.load(model, folder, self.config, scaler=scaler, total_steps=state.max_steps)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step and update the blocks that are due; after the last step, update the others too."""
        last = state.global_step >= state.max_steps
        # Reading the figures waits for the round in progress: an overlapped one would be waited for as soon as begun.
        early = self.config.overlap and control.should_log and not last
        self._figures = self._figures_now() if early else None
        self.salaad.step()
        if last:
            self.salaad.finish()
        if control.should_save:
            self._write(args, state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        """Add the penalty and the means of rank, density and error over the blocks to what is reported.

        With `overlap` they are those before the updates that this step begins, except at the last step.
        """
        if "loss" not in logs:  # logs of an evaluation, or of the end of the training
            return
        figures = self._figures_now() if self._figures is None else self._figures
        logs.update(figures)
        state.log_history[-1].update(figures)

    def _figures_now(self) -> dict[str, float]:
        newest = {name: record for _, name, record in self.salaad.drain_records()}
        figures = {
            f"salaad/{key}": mean(getattr(record, key) for record in newest.values()) for key in _LOGGED if newest
        }
        return {**figures, "salaad/penalty": float(self.salaad.penalty())}

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write L and S of a checkpoint that the end of an epoch asks for."""
        if control.should_save:
            self._write(args, state.global_step)

    def _write(self, args: TrainingArguments, step: int) -> None:
        """Write L, S and the thresholds into a folder of their own; collective.

        The Trainer deletes older checkpoints as soon as it has written a new one. So L and S, which make it complete,
        are written before it, and only moved into it afterwards.

        Raises:
            UserError: on every rank, if they cannot be written, such as for lack of room on the disk.
        """
        waiting = _waiting(_checkpoint(args, step))
        partial = waiting.with_name(".partial-surrogate")

        def finish() -> None:
            for old in waiting.parent.glob(_waiting(Path("*")).name):  # of starts that were killed
                shutil.rmtree(old)
            partial.replace(waiting)

        try:
            write_whole(partial, partial, self.salaad.writer, finish)
        except NotSavedError as error:
            raise UserError(
                f"L and S of step {step} cannot be written into {args.output_dir} ({error}); make room there, and go "
                "on from the newest checkpoint"
            ) from None
        self._written = step

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Put L, S and the thresholds beside the weights that the Trainer has just written; replace older ones.

        Raises:
            UserError: on every rank, if they cannot be written, such as for lack of room on the disk.
        """
        if self._written != state.global_step:  # the checkpoint was asked for after this callback's turn
            self._write(args, state.global_step)
        _complete(_checkpoint(args, state.global_step))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Close the `Salaad`, after an update of the blocks that the last step did not update.

        If the Trainer has loaded the best checkpoint at the end, L and S are loaded from there too.
        """
        best = state.best_model_checkpoint
        is_best = args.load_best_model_at_end and best is not None
        try:
            if not is_best:
                # Only an early stop leaves blocks to update. Its checkpoint, written before, stays fit to resume from.
                self.salaad.finish()
        finally:
            self.salaad.close()
        if is_best:
            self.salaad = Salaad.load(self._trainer.model, best, self.config, total_steps=state.max_steps)
            self.salaad.close()


def _checkpoint(args: TrainingArguments, step: int) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


def _waiting(checkpoint: Path) -> Path:
    """Return where L and S of a checkpoint lie until the Trainer has written its part."""
    return checkpoint.with_name(f".surrogate-of-{checkpoint.name}")


def _complete(checkpoint: Path) -> None:
    """Move L and S, which wait for it, into a checkpoint, in place of older ones; collective.

    Raises:
        UserError: on every rank, if they cannot be moved.
    """
    final = checkpoint / "surrogate"

    def move() -> None:
        if final.exists():  # of an earlier training into this folder, whose weights the Trainer has replaced
            shutil.rmtree(final)
        _waiting(checkpoint).replace(final)

    try:
        distributed.together(move, only=0)
    except NotSavedError as error:
        raise UserError(f"L and S cannot be moved to {final} ({error}); move {_waiting(checkpoint)} there") from None
