"""The interface of a way to train. The loop, the plan, the checkpoint and the report know no method by name.

A method object lives as long as one start of a run. `train.py` uses it in this order:

    Method.check(outline, config)           can this model be trained so? Before anything is made
    Method.rebuild(model, config)           replace modules; on every start, a resume too
    method = Method(model, config)          on the final device, before the wrapper for data parallelism
    method.build_optimizer()                parameter groups and learning-rate schedule
    method.load_state_dict(), load(folder)  only on a resume; the optimizer's state follows

    every step:  a backward in each of method.passes(), method.after_backward(), clip, optimizer.step(),
                 method.after_step(…)
    at the end:  method.finish()
    now and then:  columns() and drain_records() into the records, variants() to evaluate, writer() and state_dict()

A new method is a subclass in a file of its own, with a dataclass of its settings, and one call of `registry.register`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.common.hashed_files import write_tensors
from salaad.config.methods import FullRankConfig, MethodConfig
from salaad.config.run import RunConfig
from salaad.factored.slr import Slr
from salaad.methods.optimizer import build_optimizer, optimizer_class, projection_weights
from salaad.methods.work import Work
from salaad.model.nested_widths import Widths
from salaad.model.parameters import count_parameters, trained_parameters
from salaad.spectral.cost import Rates

# Bytes per parameter of weights, gradients and the two moments of Adam.
BYTES = {"fp32": (4, 4, 8), "tf32": (4, 4, 8), "bf16-mixed": (4, 4, 8), "bf16": (2, 2, 4)}
_TENSORS = Path("state") / "method.safetensors"


class BlockRecord(NamedTuple):
    """One line of blocks.jsonl, and a sentence for the person who watches, if there is something to say."""

    step: int
    block: str
    columns: Mapping[str, Any]
    remark: str | None = None


class Method:
    """What every method can do, and what it does unless it says otherwise: plain pretraining.

    Args:
        model: the rebuilt model on its final device, before it is wrapped for data parallelism.
        config: the run's configuration; `config.settings` are the method's own.

    Attributes of the class:
        Settings: the dataclass of its settings.
        replaces_modules: `rebuild` changes the model, so `model/` of a checkpoint cannot restore it. The checkpoint
            then holds all weights once more, as they are trained.
        reads_moments: `after_step` reads the optimizer's state of weights that another rank may keep, so `train.shard`
            is refused. A hook of the optimizer's step may set gradients; it runs before others are dropped.
        own_projection_rate: the projections learn at a rate that follows from the method, so that they take no other.
        progress: column of blocks.jsonl → what the progress bar calls its mean over the blocks.
        remedy: what to change in the configuration after the numbers have diverged.
    """

    Settings: ClassVar[type[MethodConfig]] = FullRankConfig
    replaces_modules: ClassVar[bool] = False
    reads_moments: ClassVar[bool] = False
    own_projection_rate: ClassVar[bool] = False
    progress: ClassVar[Mapping[str, str]] = {}
    remedy: ClassVar[str] = "a lower --optimizer.lr"

    def __init__(self, model: PreTrainedModel, config: RunConfig) -> None:
        self.model, self.config = model, config

    # Before training.

    @classmethod
    def check(cls, model: PreTrainedModel, config: RunConfig) -> None:
        """Raise a UserError if the method cannot train `model`, of which only names and shapes are read."""
        optimizer_class(config.optimizer.name)
        if cls.own_projection_rate and config.optimizer.projection_lr != 1:
            raise UserError(
                f"optimizer.projection_lr is {config.optimizer.projection_lr:g}, but {config.method} has a rate of its "
                "own for the projections; leave it out"
            )

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:
        """Replace modules of `model` in place, on whatever device it is; also of a model without numbers ("meta").

        With `replaces_modules` a resume loads the weights afterwards; without, they are there already and stay.
        """

    @classmethod
    def memory(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> dict[str, float]:
        """Bytes on one rank by kind, for --dry-run; `model` is the rebuilt one without numbers."""
        weights, gradients, moments = BYTES[config.train.precision]
        trained = trained_parameters(model)
        return {
            "weights": count_parameters(model) * weights,
            "gradients": trained * gradients,
            "optimizer state": trained * moments,
        }

    @classmethod
    def memory_for_a_moment(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> tuple[float, bool]:
        """Bytes on a GPU that periodic work after a step takes, and whether the next activations are beside them."""
        return 0.0, False

    @classmethod
    def plan(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> list[tuple[str, str]]:
        """Rows that the method adds to --dry-run; `model` is the rebuilt one without numbers."""
        return []

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:
        """What a step computes on devices of these rates, for predictions; `model` is the rebuilt one without numbers.

        One pass of the whole model, one model to evaluate and nothing periodic, unless a method says otherwise.
        """
        whole = (count_parameters(model),)
        return Work(passes=whole, variants=whole)

    @classmethod
    def stored(cls, model: nn.Module) -> dict[str, int]:
        """Parameters by the paper's count, and bytes, of the rebuilt `model` as it is stored after training."""
        return {"parameters": count_parameters(model), "bytes": sum(p.nbytes for p in model.parameters())}

    @classmethod
    def slr_parts(cls, model: nn.Module) -> dict[str, Slr]:
        """Block → U·V + S of what the rebuilt `model` trains in its place, detached; nothing where it trains none.

        U·V need not be in order of its singular values. Of a model without numbers the shapes are right.
        """
        return {}

    @classmethod
    def widths_of(cls, model: PreTrainedModel, settings: MethodConfig) -> Widths | None:
        """The narrower models inside a model of this method, if there are any."""
        return None

    def build_optimizer(self) -> tuple[Optimizer, LambdaLR]:
        """The optimizer with its parameter groups, and the learning rate as a function of the step alone."""
        return build_optimizer(
            self.model.parameters(), self.config.optimizer, self.config.train.steps, projection_weights(self.model)
        )

    def float32_gradients(self) -> list[nn.Parameter]:
        """Weights in bfloat16 whose gradients are kept in float32, and averaged over the ranks by `after_backward`."""
        return []

    # During training.

    def passes(self) -> Sequence[AbstractContextManager]:
        """What the gradient of a step is the mean of: one forward and backward pass in each of these contexts."""
        return [nullcontext()]

    def after_backward(self) -> None:
        """Called once per optimizer step, when the gradients of all micro-batches are there; collective."""
        distributed.average_gradients(self.float32_gradients())

    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:
        """Called after every step.

        Args:
            optimizer: that of `build_optimizer`, whose state may be changed.
            step: counted from 1.
            discarded: 1 if the gradient was not finite and no weight was changed, else 0 (float32, on the device).
        """

    def discard(self) -> None:
        """Called when gradients of a backward were thrown away."""

    def finish(self) -> None:
        """Called after the last step, before the last evaluation."""

    # Records and evaluation.

    def columns(self) -> dict[str, float]:
        """Columns of metrics.jsonl at the weights as they are now; collective, waits for the device."""
        return {"penalty": 0.0}

    def drain_records(self) -> list[BlockRecord]:
        """Lines of blocks.jsonl since the last call; the same on every rank."""
        return []

    def variants(self) -> Iterator[tuple[str, AbstractContextManager, dict[str, float]]]:
        """What to evaluate: a name, a context in which the model is that variant, its parameters and other figures.

        `parameters` is the paper's count, `trained` the number that the optimizer moves; `bytes` are those of a variant
        that is stored as it is.
        """
        yield "X", nullcontext(), {**self.stored(self.model), "trained": trained_parameters(self.model)}

    # Checkpoint and export.

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder that plain transformers opens; called on one rank alone.

        Raises:
            UserError: the method has no such form; it then has to set `replaces_modules`.
        """
        self.model.save_pretrained(folder)

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that a resume needs beside the weights and the optimizer, the same on every rank."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors` gave, from the CPU."""

    def state_bytes(self) -> int:
        """Bytes that this rank keeps beside weights, gradients and the optimizer."""
        return sum(value.nbytes for value in self.tensors().values())

    def writer(self) -> Callable[[Path], Mapping[str, str]]:
        """What writes this rank's tensors into the folder of a checkpoint; collective, so that writing need not be.

        Returns:
            A function of the folder that exchanges nothing with other ranks, which may have failed. It returns name in
            the folder → SHA-256, of files that are on the disk and were hashed while they were written.

        Raises:
            NotSavedError: on every rank, if any cannot prepare it.
        """

        def write(folder: Path) -> dict[str, str]:
            tensors = self.tensors()
            if not tensors or distributed.rank() != 0:
                return {}
            return {str(_TENSORS): write_tensors(tensors, folder / _TENSORS)}

        return write

    def load(self, folder: Path) -> None:
        """Read what `writer` wrote, at any number of ranks."""
        if (folder / _TENSORS).exists():
            self.load_tensors(load_file(folder / _TENSORS))

    def state_dict(self) -> dict[str, Any]:
        """What else a resume needs, as JSON can say it; the same on every rank, collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
