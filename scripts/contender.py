"""A method in training beside others: its model, optimizer, times and memory."""

from dataclasses import replace

import torch

from salaad.config.run import RunConfig
from salaad.methods.registry import method_of
from salaad.model.build import model_source
from salaad.model.loss import IGNORED, SummedLoss
from salaad.model.parameters import cast
from salaad.training.compiled import compile_transformer
from scripts.devices import Marks
from scripts.live_tensors import most_bytes

ROUND = 10  # steps that a method takes before the next method's turn


class Contender:
    """One method with its own copy of the model and its own optimizer.

    Args:
        config: configuration of its run, whose periodic work comes every `ROUND` steps here instead of every `period`.
        device: where it trains.
    """

    def __init__(self, config: RunConfig, device: torch.device) -> None:
        self.period = getattr(config.settings, "every", None)
        if self.period is not None:
            # Restarts take a step, and SALAAD pulls in every one, as in the part of a run that has all the work.
            steady = {"every": ROUND, "rewarmup": 1, "onset": 0.0, "release": 0.0}
            steady = {name: value for name, value in steady.items() if hasattr(config.settings, name)}
            config = replace(config, sections={config.method: replace(config.settings, **steady)})
        self.config, self.device = config, device
        method, source = method_of(config), model_source(config.model, config.data.sequence_length)
        self.model = source.build(config.seed, 0, 1)
        method.rebuild(self.model, config)
        cast(self.model, torch.bfloat16 if config.train.precision == "bf16" else torch.float32).to(device).train()
        self.method = method(self.model, config)
        self.optimizer, _ = self.method.build_optimizer()
        self.steps, self.taken = 0, torch.zeros((), device=device)
        self.loss = SummedLoss(self.model)
        if config.train.compile:
            compile_transformer(self.model)
        self._marks = Marks(device)
        self.seconds: list[float] = []
        self.updates: list[float] = []  # the part of each step's seconds that can contain periodic work

    def step(self, batch: dict[str, torch.Tensor]) -> None:
        """One training step, as train.py takes it."""
        self._marks.set()
        rows, labels = batch["input_ids"].to(self.device), batch["labels"].to(self.device)
        tokens = (labels[:, 1:] != IGNORED).sum()
        size = self.config.train.micro_batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.train.precision == "bf16-mixed"):
            for micro, targets in zip(rows.split(size), labels.split(size), strict=True):
                for context in self.method.passes():
                    with context:
                        (self.loss(micro, targets) / tokens).backward()
        self.method.after_backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optimizer.clip or float("inf"))
        self._marks.set()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        self.method.after_step(self.optimizer, self.steps, self.taken)
        self._marks.set()

    def count_times(self) -> None:
        """Add the times of all steps since the last call; waits for a GPU."""
        between = self._marks.take()  # from a step's start to its clipped gradient, to its end, to the next one's start
        seconds = [before + after for before, after in zip(between[::3], between[1::3], strict=True)]
        self.seconds += seconds
        # On a CPU periodic work is in the second part; on a GPU it may overlap the next step and delay any part of it.
        self.updates += seconds if self.device.type == "cuda" else between[1::3]

    def forget_times(self) -> None:
        """Discard all times so far."""
        self._marks.take()
        self.seconds, self.updates = [], []

    def memory(self, batch: dict[str, torch.Tensor]) -> dict[str, int]:
        """Return the tensor bytes of weights, optimizer and the method's own state, and the peak in one more step."""
        held = {
            "weights": sum(p.nbytes for p in (*self.model.parameters(), *self.model.buffers())),
            "optimizer": sum(
                value.nbytes
                for state in self.optimizer.state.values()
                for value in state.values()
                if torch.is_tensor(value)
            ),
            "method": self.method.state_bytes(),
        }
        peak = sum(held.values()) + most_bytes(lambda: self.step(batch), self.device)
        self.forget_times()
        return {**held, "peak": peak}
