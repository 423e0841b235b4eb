"""Pretrain a language model with SALAAD (paper, Algorithm 1).

Every step is a guided learning step: the optimizer follows the gradient of ℓ(X) + ℓ_ρ(X). Every K steps
`method.after_step` runs the second stage: singular-value threshold, soft threshold, dual update, I-controller.
"""

from salaad.common.errors import run_command
from salaad.config.command_line import read_command_line

if __name__ == "__main__":
    run_command(read_command_line)  # help and wrong options come before the imports below, which take seconds

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from salaad.common import distributed
from salaad.common.errors import NotFiniteError, NotSavedError, Stopped, UserError
from salaad.common.signals import StopRequest
from salaad.config.command_line import TrainOptions
from salaad.config.run import RunConfig
from salaad.data.batches import TrainingStream, count_targets, counts_in, merge_states
from salaad.data.text import Text, open_text, read_validation, validation_batches
from salaad.methods.optimizer import step_unless
from salaad.methods.registry import method_of
from salaad.model.build import ModelFolder, NewModel
from salaad.model.loss import SummedLoss
from salaad.model.parameters import cast
from salaad.model.perplexity import evaluate
from salaad.runs import run
from salaad.runs.checkpoints import Checkpoints, RunState
from salaad.runs.records import Recorder
from salaad.runs.summary import finished, summarize
from salaad.training.agreement import Agreement
from salaad.training.compiled import compile_transformer
from salaad.training.divergence import NonFinite
from salaad.training.gradients import Gradients
from salaad.training.launch import distribute, leave_together, require_same_text, start_accelerator
from salaad.training.plan import check_run, plan_table, rebuilt_outline, sizes_in_words, text_table
from salaad.training.prediction import prediction_table, short_patience
from salaad.training.sharding import shard
from salaad.training.state import TrainingParts, model_to_train, source_of
from salaad.training.step_totals import StepTotals
from salaad.training.stopwatch import Stopwatch


def main(config: RunConfig, options: TrainOptions) -> None:
    """Open data, model and method as configured, and train; with `options.dry_run` only print the plan."""
    source, source_remark = source_of(config, options.output, options.resume)
    accelerator = start_accelerator(config)
    check_run(config, source.config)
    if options.dry_run:
        on_gpu = options.device is not None or accelerator.device.type == "cuda"
        accelerator.print(plan_table(config, source.config, distributed.world_size(), on_gpu))
        if options.device:  # a prediction needs no text, and is made where there may be no network
            accelerator.print(f"\n{prediction_table(config, source.config, options.device)}")
        else:
            accelerator.print(text_table(run.with_own_tokenizer(config, source.path), source.config.vocab_size))
        leave_together(accelerator)
        return
    folder, checkpoint = run.open_run(config, options)
    if summary := distributed.first_decides(lambda: finished(folder, options.resume, checkpoint)):
        accelerator.print(summary)
        leave_together(accelerator)
        return
    with distributed.first_on_its_machine(accelerator.is_local_main_process):
        text = open_text(run.with_own_tokenizer(config, source.path), vocab_size=source.config.vocab_size)
    require_same_text(text)
    checkpoint = distributed.first_decides(
        lambda: run.begin(folder, config, text.corpus_hash, checkpoint, options.resume)
    )
    run.require_shared_storage(folder)
    accelerator.print(f"method {config.method}; model: {sizes_in_words(source.config)}")
    method_remark = "" if checkpoint else method_of(config).remark(rebuilt_outline(config, source.config), config)
    patience_remark = short_patience(config, source.config, distributed.world_size())
    for remark in filter(None, (source_remark, method_remark, patience_remark)):
        accelerator.print(remark)
    with StopRequest() as request:
        trainer = Trainer(config, accelerator, source, text, folder, checkpoint, request)
        try:
            trainer.train()
        except NotFiniteError as error:
            raise trainer.nonfinite.diverged(trainer.step, error.block) from None
        finally:
            trainer.stream.close()
        leave_together(accelerator)


class Trainer:
    """The training loop of one start of a run, and the state that its checkpoints hold."""

    def __init__(
        self,
        config: RunConfig,
        accelerator: Accelerator,
        source: NewModel | ModelFolder,
        text: Text,
        folder: Path,
        checkpoint: Path | None,
        request: StopRequest,
    ) -> None:
        self.config, self.accelerator, self.text, self.folder, self.request = config, accelerator, text, folder, request
        self.device = accelerator.device
        state = RunState.read(checkpoint) if checkpoint else RunState()
        self.step, self.due = state.step, state.due  # an evaluation is due
        self.totals = StepTotals(self.device, state.sums)

        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        self.model = model_to_train(source, config, checkpoint, text.pad_id, text.tokenizer.eos_token_id)
        cast(self.model, dtype).to(self.device).train()
        torch.manual_seed(
            config.seed + self.step * distributed.world_size() + distributed.rank()
        )  # for dropout, if any
        if config.train.gradient_checkpointing:
            self.model.activation_checkpointing_enable()
        self.method = method_of(config)(self.model, config)
        self.optimizer, self.schedule = self.method.build_optimizer()
        sharded = config.train.shard == "optimizer"
        if sharded:
            shard(self.optimizer)
        self.gradients = Gradients(self.model, config.optimizer.clip)
        loss = SummedLoss(self.model)
        if config.train.compile:
            compile_transformer(self.model)
        self.loss = distribute(accelerator, loss, self.method.float32_gradients(), config)
        self.method.discard()  # `distribute` ran a backward pass whose gradients are not used
        self.stream = TrainingStream(
            text,
            config.data,
            batch=config.train.batch,
            rank=distributed.rank(),
            world_size=distributed.world_size(),
            seed=config.seed,
            state=state.data,
            stop=self.request,
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", config.train.keep_last, config.train.keep_every)
        self.parts = TrainingParts(
            source.terms(), self.model, text.tokenizer, self.method, self.optimizer, self.schedule, sharded
        )
        if checkpoint:
            self.parts.restore(checkpoint, state)
        self.recorder = Recorder(
            folder,
            config,
            self.step,
            state.tokens,
            accelerator.is_main_process,
            self.method.progress,
            counts_in(state.data),
            state.due,
        )
        self.nonfinite = NonFinite(
            self.gradients, config.train, folder, self.recorder, state.discarded, self.method.remedy
        )
        self.stopwatch = Stopwatch(self.device, state.seconds)
        self.saved_step = self.step if checkpoint else -1
        self.validation_error: UserError | None = None  # why this rank could not read the validation text

    def train(self) -> None:
        """Run Algorithm 1 over the remaining steps; evaluate and save after the last one, and print the summary."""
        train = self.config.train
        agreement, batches = Agreement(self.device), self.begin()
        if self.due:
            self.evaluate()
        self.recorder.begin()
        while self.step < train.steps and not self.due:
            agreement.read()
            if agreement.broken:
                self.nonfinite.check(self.step)
            if agreement.stop:
                self.stop()
                return
            batch = next(batches)
            stop = self.request.asked or self.stream.error is not None
            targets = agreement.exchange(count_targets(batch["labels"]), stop, self.gradients.broken)

            # Guided learning (eq. 6): during backward the owners of the blocks add ρ(X − T) to the gradient of ℓ.
            loss = self.backward(batch, targets)
            self.method.after_backward()
            self.gradients.clip(self.step + 1)
            step_unless(self.gradients.broken, self.optimizer)
            # Tokens are the targets and the first token of every row, which is no target.
            self.totals.add(loss, targets + train.batch, self.gradients.broken)
            lr = self.schedule.get_last_lr()[0]
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1

            # A log line reads the penalty, which waits for the round in progress; so it comes before a round begins.
            last = self.step == train.steps
            if last or self.step % train.log_every == 0:
                self.log(lr)

            # Sparse and low-rank adaptation: every K steps the ADMM update and the controller of a block.
            with self.stopwatch.phase("admm"):
                self.method.after_step(self.optimizer, self.step, self.gradients.broken)
                if last:
                    self.method.finish()

            self.due = last or (train.eval_every > 0 and self.step % train.eval_every == 0)
            if self.due:
                self.evaluate()
            if last or (train.save_every and self.step % train.save_every == 0):
                self.save(last)
        if self.due:
            self.stop()
            return
        self.recorder.close()
        if self.accelerator.is_main_process:
            print(summarize(self.folder, self.stopwatch.take()))

    def begin(self) -> Iterator[dict[str, Tensor]]:
        """Return the training batches once every rank has its first one; collective.

        A rank may read a checkpoint or text for longer than the timeout of a sum over the ranks; it is waited for here.

        Raises:
            Stopped: on every rank, if any was asked to stop.
        """
        batches = iter(self.stream)
        with suppress(Stopped):
            if self.step < self.config.train.steps:
                batches = chain([next(batches)], batches)
        if any(distributed.gather(self.request.asked)):
            raise Stopped
        return batches

    def backward(self, batch: dict[str, Tensor], targets: Tensor) -> Tensor:
        """Compute the gradient of the global batch's mean loss per target; return this rank's share of that loss."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        micro_batches = list(
            zip(*(batch[key].split(self.config.train.micro_batch) for key in ("input_ids", "labels")), strict=True)
        )
        passes = [(*micro_batch, context) for micro_batch in micro_batches for context in self.method.passes()]
        times = len(passes) // len(micro_batches)
        for i, (input_ids, labels, context) in enumerate(passes):
            final = i == len(passes) - 1
            with nullcontext() if final else self.accelerator.no_sync(self.loss), context:
                summed = self.loss(*(values.to(self.device, non_blocking=True) for values in (input_ids, labels)))
                # The ranks' gradients are averaged, not summed: hence the world size in the numerator. A loss can be
                # infinite while its gradient is finite; 0 · loss is then NaN, and so is the gradient on every rank.
                scale = distributed.world_size() / (targets * times) + 0 * summed.detach()
                self.accelerator.backward((summed * scale).to(summed.dtype))
            loss += summed.detach() / (targets * times)
        return loss

    def log(self, lr: float) -> None:
        """Log the steps since the last line of metrics.jsonl, and the records of earlier rounds; waits for the device.

        It is called before the ADMM round of this step, so `penalty` is that of the T which pulled in this step, or
        would have in a part of the run without a pull.
        """
        self.nonfinite.check(self.step)
        columns = self.method.columns()
        with self.stopwatch.phase("sync"):
            loss_sum, taken, tokens = self.totals.read()
            self.recorder.blocks(self.method.drain_records())
        self.recorder.log(
            step=self.step,
            new_tokens=round(tokens),
            positions=self.stream.rows * self.config.data.sequence_length,
            loss=loss_sum / taken if taken else None,
            **columns,
            lr=lr,
            grad_norm=None if self.gradients.broken else float(self.gradients.norm),
            discarded=self.nonfinite.discarded,
            seconds=self.stopwatch.take(),
        )
        self.totals.clear()

    def evaluate(self) -> None:
        """Measure the perplexity of the method's variants on validation text.

        It is still due if a stop interrupts, or if a rank cannot read the text.
        """
        self.recorder.blocks(self.method.drain_records())
        train = self.config.train
        which = {"rank": distributed.rank(), "world_size": distributed.world_size(), "max_tokens": train.eval_tokens}
        with self.stopwatch.phase("evaluate"):
            try:
                with suppress(Stopped), self.request.ends_waiting():
                    read_validation(self.text, self.config.data, **which)
            except UserError as error:
                self.validation_error = error
            if any(distributed.gather(self.request.asked or self.validation_error is not None)):
                return
        found = []
        for variant, context, figures in self.method.variants():
            batches = validation_batches(self.text, self.config.data, rows=train.micro_batch, **which)
            with self.stopwatch.phase("evaluate"), context, self.accelerator.autocast():
                result = evaluate(SummedLoss(self.model), batches, self.device, lambda: self.request.asked)
            if result is None:
                return
            found.append((variant, result, train.precision, figures))
        for row in found:
            self.recorder.evaluation(self.step, *row)
        self.due = False

    def stop(self) -> None:
        """Save, print how to resume, and raise the error of the text if there is one on any rank; collective."""
        self.save(last=True)
        self.recorder.say(f"stopped after step {self.step}; go on with the same command: {run.resume_command()}")
        self.recorder.close()
        distributed.raise_first(self.validation_error or self.stream.error)

    def save(self, last: bool = False) -> None:
        """Write a checkpoint after this step; collective. If writing fails, go on, or raise a UserError if `last`."""
        if self.saved_step == self.step:
            return
        self.nonfinite.check(self.step)
        with self.stopwatch.phase("save"):
            self.recorder.blocks(self.method.drain_records())
            data = merge_states(distributed.gather(self.stream.state_dict()))
            self.recorder.text_read(self.step, counts_in(data))
            state = RunState(
                step=self.step,
                tokens=self.recorder.tokens,
                sums=distributed.gather(self.totals.own()),
                discarded=self.nonfinite.discarded,
                due=self.due,
                seconds=self.stopwatch.read(),
                data=data,
                method=self.method.state_dict(),
                world_size=distributed.world_size(),
                config=self.config.to_dict(),
            )
            try:
                self.checkpoints.save(self.step, self.parts.writer(state, self.recorder))
                self.saved_step = self.step
            except NotSavedError as error:
                self.recorder.say(run.not_saved(self.folder, self.config.train, self.step, str(error), last))


if __name__ == "__main__":
    run_command(lambda: main(*read_command_line()))
