"""Pretrain a language model with SALAAD (paper, Algorithm 1).

Every step is a guided learning step: the optimizer follows the gradient of ℓ(X) + ℓ_ρ(X). When its time has come,
`method.after_step` runs the second stage: singular-value threshold, soft threshold, dual update, I-controller.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from salaad import run, sharding
from salaad.checkpoint import Checkpoints
from salaad.cli import TrainOptions, read_command_line
from salaad.config import ModelConfig, RunConfig
from salaad.cross_entropy import IGNORED
from salaad.data import Text, TrainingStream, merge_states, open_text, validation_batches
from salaad.errors import run_command
from salaad.files import read_json
from salaad.gradients import Gradients
from salaad.interrupt import Agreement, StopRequest
from salaad.launch import leave_together, start_accelerator
from salaad.methods import METHODS
from salaad.metrics import Recorder, Stopwatch
from salaad.models import SummedLoss, build_model, describe_model
from salaad.optimizer import build_optimizer
from salaad.perplexity import evaluate
from salaad.plan import check_run, plan_table
from salaad.report import summarize, summary_table
from salaad.resume import TrainingParts
from salaad.salaad import NotFiniteError


def main(config: RunConfig, options: TrainOptions) -> None:
    """Configuration → data, model, method → the loop."""
    description = describe_model(config.model, config.data.sequence_length)
    accelerator = start_accelerator(config)
    if options.dry_run:
        accelerator.print(plan_table(config, description, sharding.world_size()))
        return
    check_run(config, description)
    folder, checkpoint = run.open_run(config, options)
    if options.resume == "auto" and (folder / "summary.json").exists():
        accelerator.print(f"{folder} is finished:\n\n{summary_table(read_json(folder / 'summary.json'))}")
        return
    with accelerator.local_main_process_first():
        text = open_text(run.with_own_tokenizer(config), vocab_size=description.vocab_size)
    if accelerator.is_main_process:
        run.begin(folder, config, text.corpus_hash, checkpoint)
    accelerator.wait_for_everyone()
    run.require_shared_storage(folder)
    trainer = Trainer(config, accelerator, text, folder, checkpoint)
    try:
        trainer.train()
    except NotFiniteError as error:
        raise run.diverged(folder, trainer.step, error.block) from None
    finally:
        trainer.stream.close()
    leave_together(accelerator)


class Trainer:
    """One run: what a checkpoint holds, and the loop over it."""

    def __init__(
        self, config: RunConfig, accelerator: Accelerator, text: Text, folder: Path, checkpoint: Path | None
    ) -> None:
        self.config, self.accelerator, self.text, self.folder = config, accelerator, text, folder
        self.device = accelerator.device
        fresh = {"step": 0, "tokens": 0, "interval_start": 0, "seconds": None, "data": None}
        state = read_json(checkpoint / "state" / "trainer.json") if checkpoint else fresh
        self.step, self.interval_start = state["step"], state["interval_start"]
        # Sums that the next logged line reports; on the device, so that nobody waits for them.
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        self.tokens = torch.zeros((), dtype=torch.float64, device=self.device)

        source = ModelConfig(path=str(checkpoint / "model")) if checkpoint else config.model
        dtype = torch.bfloat16 if config.train.precision == "bf16" else torch.float32
        description = describe_model(source, config.data.sequence_length)
        self.model = build_model(source, description, config.seed, text.pad_id, text.tokenizer.eos_token_id)
        self.model.to(self.device, dtype).train()
        torch.manual_seed(config.seed + self.step * sharding.world_size() + sharding.rank())  # for dropout, if any
        if config.train.gradient_checkpointing:
            self.model.activation_checkpointing_enable()
        self.method = METHODS[config.method](self.model, config)
        self.optimizer, self.schedule = build_optimizer(self.model.parameters(), config.optimizer, config.train.steps)
        self.gradients = Gradients(self.model, config.optimizer.clip)
        if config.train.compile:
            self.model.base_model.compile()
        loss = SummedLoss(self.model)
        sharding.exclude_from_averaging(loss, self.method.float32_gradients())
        self.loss = accelerator.prepare(loss)
        self.stream = TrainingStream(
            text,
            config.data,
            batch=config.train.batch,
            rank=sharding.rank(),
            world_size=sharding.world_size(),
            seed=config.seed,
            state=state["data"],
        )
        self.checkpoints = Checkpoints(folder / "checkpoints", config.train.keep_last)
        self.parts = TrainingParts(self.model, text.tokenizer, self.method, self.optimizer, self.schedule)
        if checkpoint:
            self.parts.restore(checkpoint, state)
            self.loss_sum += state["sums"][0] if sharding.rank() == 0 else 0.0
            self.tokens += state["sums"][1]
        self.recorder = Recorder(folder, config, self.step, state["tokens"], accelerator.is_main_process)
        self.stopwatch = Stopwatch(self.device, state["seconds"])
        self.saved_step = self.step if checkpoint else -1

    def train(self) -> None:
        """Algorithm 1 over the remaining steps, then the last update, evaluation, checkpoint and summary."""
        train = self.config.train
        request, agreement = StopRequest(), Agreement(self.device)
        batches = iter(self.stream)
        while self.step < train.steps:
            agreement.read()
            if agreement.broken:
                self.check_finite()
            if agreement.stop:
                self.save()
                self.recorder.say(f"stopped after step {self.step}; the same command with --resume auto goes on")
                self.recorder.close()
                return
            batch = next(batches)
            targets = agreement.exchange(count_targets(batch["labels"]), request.asked, self.gradients.norm)

            # Guided learning: the gradient of ℓ, which the owners of the blocks complete by that of ℓ_ρ (eq. 3).
            self.backward(batch, targets)
            self.method.after_backward()
            self.gradients.clip(self.step + 1)
            self.optimizer.step()
            lr = self.schedule.get_last_lr()[0]
            self.schedule.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.step += 1

            # Sparse and low-rank adaptation: every K steps the ADMM update and the controller of a block.
            last = self.step == train.steps
            with self.stopwatch.phase("admm"):
                self.method.after_step()
                if last:
                    self.method.finish()

            if last or (train.eval_every and self.step % train.eval_every == 0):
                self.evaluate()
            if last or self.step % train.log_every == 0:
                self.log(lr)
            if last or (train.save_every and self.step % train.save_every == 0):
                self.save()
        self.recorder.close()
        if self.accelerator.is_main_process:
            print(summarize(self.folder, self.stopwatch.take()))

    def backward(self, batch: dict[str, Tensor], targets: Tensor) -> None:
        """Gradient of the mean loss per predicted token of the global batch, over all micro-batches and ranks."""
        micro_batches = list(
            zip(*(batch[key].split(self.config.train.micro_batch) for key in ("input_ids", "labels")), strict=True)
        )
        for i, (input_ids, labels) in enumerate(micro_batches):
            final = i == len(micro_batches) - 1
            with nullcontext() if final else self.accelerator.no_sync(self.loss):
                summed = self.loss(*(values.to(self.device, non_blocking=True) for values in (input_ids, labels)))
                # The ranks' gradients are averaged, not summed: hence their number in the numerator.
                self.accelerator.backward((summed * (sharding.world_size() / targets)).to(summed.dtype))
            self.loss_sum += summed.detach() / targets
        self.tokens += targets + self.config.train.batch  # the first token of a row is real, but predicted by nothing

    def sums(self) -> list[float]:
        """Loss and tokens since the last logged line, over all ranks; only the loss is a share of each rank's."""
        return [float(sharding.all_sum(self.loss_sum.clone())), float(self.tokens)]

    def log(self, lr: float) -> None:
        """Write what happened since the last line; the only place where the loop waits for the device."""
        self.check_finite()
        penalty = float(self.method.penalty())
        with self.stopwatch.phase("sync"):
            loss_sum, tokens = self.sums()
            self.recorder.blocks(self.method.drain_records())
        seconds = self.stopwatch.take()
        self.recorder.log(
            step=self.step,
            new_tokens=round(tokens),
            positions=self.stream.rows * self.config.data.sequence_length,
            loss=loss_sum / (self.step - self.interval_start),
            penalty=penalty,
            lr=lr,
            grad_norm=float(self.gradients.norm),
            seconds=seconds,
        )
        self.loss_sum.zero_()
        self.tokens.zero_()
        self.interval_start = self.step

    def evaluate(self) -> None:
        """Perplexity of X and of what the method deploys, on the validation text."""
        self.recorder.blocks(self.method.drain_records())
        train, data = self.config.train, self.config.data
        for variant, context, figures in self.method.variants():
            batches = validation_batches(
                self.text,
                data,
                rank=sharding.rank(),
                world_size=sharding.world_size(),
                rows=train.micro_batch,
                max_tokens=train.eval_tokens,
            )
            with self.stopwatch.phase("evaluate"), context, self.accelerator.autocast():
                result = evaluate(SummedLoss(self.model), batches, self.device)
            self.recorder.evaluation(self.step, variant, result, train.precision, figures)

    def check_finite(self) -> None:
        """Stop rather than go on with, record or save numbers that are not finite."""
        broken = self.gradients.first_broken()
        if broken:
            raise run.diverged(self.folder, broken[0] or self.step, broken[1])

    def save(self) -> None:
        """Write a checkpoint of the state after this step; collective."""
        if self.saved_step == self.step:
            return
        self.check_finite()
        with self.stopwatch.phase("save"):
            self.recorder.blocks(self.method.drain_records())
            self.recorder.skipped(sharding.gather(self.stream.counts))
            trainer = {
                "step": self.step,
                "tokens": self.recorder.tokens,
                "interval_start": self.interval_start,
                "seconds": self.stopwatch.read(),
                "sums": self.sums(),
                "data": merge_states(sharding.gather(self.stream.state_dict())),
                "method": self.method.state_dict(),
                "world_size": sharding.world_size(),
                "config": self.config.to_dict(),
            }
            self.saved_step = self.step
            self.checkpoints.save(self.step, lambda folder: self.parts.write(folder, trainer))


def count_targets(labels: Tensor) -> int:
    """Tokens of these rows that are predicted: all but padding and each row's first."""
    return int((labels[:, 1:] != IGNORED).sum())


if __name__ == "__main__":
    run_command(lambda: main(*read_command_line()))
