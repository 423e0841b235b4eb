"""The interface of a training method. The loop, the plan, the checkpoint and the report know no method by name.

A method object lives for one start of a run, the first or a resume. `train.py` uses it in this order:

    Method.check(outline, config)           refuse a model that cannot be trained so, before all else
    Method.rebuild(model, config)           replace modules; on every start, also on a resume
    method = Method(model, config)          on the final device, before the data-parallel wrapper
    method.build_optimizer()                parameter groups and learning-rate schedule
    method.load_state_dict(), load(folder)  only on a resume; then the optimizer's state is loaded

    every step:  a backward pass in each context of method.passes(), method.after_backward(), clip, optimizer.step(),
                 method.after_step(…)
    after gradients that are not used:  method.discard()
    at the end:  method.finish()
    at intervals:  columns() and drain_records() to log, variants() to evaluate, writer() and state_dict() to save

A new method is a subclass in a file of its own, with a dataclass of its settings, and one call of `registry.register`.
Then `--method frozen_embedding` chooses this one, in a program that calls `train.main(*read_command_line())`:

    from salaad.methods import base, registry


    class FrozenEmbedding(base.Method):
        @classmethod
        def rebuild(cls, model, config):
            model.get_input_embeddings().requires_grad_(False)


    registry.register("frozen_embedding", FrozenEmbedding)
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
from salaad.methods.optimizer import build_optimizer, projection_weights, require_optimizer
from salaad.methods.work import Work
from salaad.model.nested_widths import Widths
from salaad.model.parameters import count_parameters, trained_parameters
from salaad.spectral.cost import Rates

# Bytes per parameter of weights, gradients and the two moments of Adam.
BYTES = {"fp32": (4, 4, 8), "tf32": (4, 4, 8), "bf16-mixed": (4, 4, 8), "bf16": (2, 2, 4)}
_TENSORS = Path("state") / "method.safetensors"


class BlockRecord(NamedTuple):
    """One line of blocks.jsonl, with an optional remark that is printed to the user."""

    step: int
    block: str
    columns: Mapping[str, Any]
    remark: str | None = None


class Method:
    """The interface of all methods; hooks that a subclass does not override do what plain pretraining does.

    Args:
        model: the rebuilt model on its final device, before it is wrapped for data parallelism.
        config: the run's configuration; `config.settings` are the method's own.

    Attributes of the class:
        Settings: the dataclass of the method's settings.
        replaces_modules: whether `rebuild` replaces modules, so that `model/` of a checkpoint cannot restore the model.
            The checkpoint then holds all weights a second time, as they are trained.
        reads_moments: whether `after_step` reads optimizer state that another rank may keep, so that `train.shard` is
            refused. A pre-step hook of the optimizer may set gradients: it runs before a sharded optimizer drops any.
        own_projection_rate: whether the method sets the projections' learning rate, so that `optimizer.projection_lr`
            is refused.
        progress: column of blocks.jsonl → name of its mean over the blocks in the progress bar.
        remedy: what the error message advises to change in the configuration after training has diverged.
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
        require_optimizer(config.optimizer)
        if cls.own_projection_rate and config.optimizer.projection_lr != 1:
            raise UserError(
                f"optimizer.projection_lr is {config.optimizer.projection_lr:g}, but {config.method} has a rate of its "
                "own for the projections; leave it out"
            )

    @classmethod
    def rebuild(cls, model: PreTrainedModel, config: RunConfig) -> None:
        """Replace modules of `model` in place, on any device, including "meta", which holds shapes but no values.

        With `replaces_modules` a resume loads the weights afterwards; otherwise they are loaded already and must stay.
        """

    @classmethod
    def memory(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> dict[str, float]:
        """Return kind → bytes on one rank, for --dry-run; `model` is the rebuilt model on "meta"."""
        weights, gradients, moments = BYTES[config.train.precision]
        trained = trained_parameters(model)
        return {
            "weights": count_parameters(model) * weights,
            "gradients": trained * gradients,
            "optimizer state": trained * moments,
        }

    @classmethod
    def memory_for_a_moment(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> tuple[float, bool]:
        """Return the bytes of periodic work on a GPU, and whether the next step's activations exist at that time."""
        return 0.0, False

    @classmethod
    def bytes_beside(cls, model: PreTrainedModel, config: RunConfig) -> int:
        """Return the bytes that the first rank saves beside the trained weights: those of `tensors` and of `export`.

        `export` writes a second form of them with `replaces_modules` alone. `model` is the rebuilt model on "meta".
        """
        return count_parameters(model) * BYTES[config.train.precision][0] if cls.replaces_modules else 0

    @classmethod
    def plan(cls, model: PreTrainedModel, config: RunConfig, ranks: int) -> list[tuple[str, str]]:
        """Return the rows that the method adds to --dry-run; `model` is the rebuilt model on "meta"."""
        return []

    @classmethod
    def remark(cls, model: PreTrainedModel, config: RunConfig) -> str:
        """Return what is printed where a run begins, or ""; `model` is the rebuilt model on "meta"."""
        return ""

    @classmethod
    def work(cls, model: PreTrainedModel, config: RunConfig, ranks: int, rates: Rates) -> Work:
        """Return the work of a step on devices of these rates, for predictions; `model` is the rebuilt one on "meta".

        The default is one pass of the whole model, one model to evaluate and no periodic work.
        """
        whole = (count_parameters(model),)
        return Work(passes=whole, variants=whole)

    @classmethod
    def stored(cls, model: nn.Module) -> dict[str, int]:
        """Return parameters, by the paper's count, and bytes of the rebuilt `model` as it is stored after training."""
        return {"parameters": count_parameters(model), "bytes": sum(p.nbytes for p in model.parameters())}

    @classmethod
    def slr_parts(cls, model: nn.Module) -> dict[str, Slr]:
        """Return block → U·V + S, detached, for the blocks that the rebuilt `model` trains in this form.

        The terms of U·V need not be in order of their singular values. On "meta" only the shapes have a meaning.
        """
        return {}

    @classmethod
    def widths_of(cls, model: PreTrainedModel, settings: MethodConfig) -> Widths | None:
        """Return the narrower models inside a model of this method, or None if there are none."""
        return None

    def build_optimizer(self) -> tuple[Optimizer, LambdaLR]:
        """Build the optimizer with its parameter groups, and its learning-rate schedule, which reads the step alone."""
        return build_optimizer(
            self.model.parameters(), self.config.optimizer, self.config.train.steps, projection_weights(self.model)
        )

    def float32_gradients(self) -> list[nn.Parameter]:
        """Return the bfloat16 weights whose gradients are float32, which `after_backward` averages over the ranks."""
        return []

    # During training.

    def passes(self) -> Sequence[AbstractContextManager]:
        """Return the contexts of a step: its gradient is the mean over one forward and backward pass in each.

        It is called for every micro-batch, and returns as many contexts, of the same meaning, for all of a step.
        """
        return [nullcontext()]

    def after_backward(self) -> None:
        """Average `float32_gradients` over the ranks; called once per step, after the last backward; collective."""
        distributed.average_gradients(self.float32_gradients())

    def after_step(self, optimizer: Optimizer, step: int, discarded: Tensor) -> None:
        """Do what the method needs after every optimizer step; the default does nothing.

        Args:
            optimizer: the one from `build_optimizer`, whose state may be changed.
            step: number of the step, counted from 1.
            discarded: 1 if the gradient was not finite and no weight was changed, else 0 (float32, on the device).
        """

    def discard(self) -> None:
        """Prepare for a new backward pass after gradients were thrown away; the default does nothing."""

    def finish(self) -> None:
        """Do what the method needs after the last step, before the last evaluation; the default does nothing."""

    # Records and evaluation.

    def columns(self) -> dict[str, float]:
        """Return columns of metrics.jsonl; collective, and the host waits for the device.

        It is called before `after_step` of the same step.
        """
        return {"penalty": 0.0}

    def drain_records(self) -> list[BlockRecord]:
        """Return the lines of blocks.jsonl since the last call; the same on every rank."""
        return []

    def variants(self) -> Iterator[tuple[str, AbstractContextManager, dict[str, float]]]:
        """Yield each variant to evaluate: its name, a context in which the model computes as this variant, its figures.

        `parameters` is the paper's count, `trained` the number of parameters that the optimizer moves; `bytes` is given
        for a variant that is stored as it is evaluated.
        """
        yield "X", nullcontext(), {**self.stored(self.model), "trained": trained_parameters(self.model)}

    # Checkpoint and export.

    def export(self, folder: Path) -> None:
        """Write the model as a Hugging Face folder that plain transformers opens; called on one rank alone.

        Raises:
            UserError: the model has no such form; the method then has to set `replaces_modules`.
        """
        self.model.save_pretrained(folder)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that a resume needs besides the weights and the optimizer, the same on every rank."""
        return {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Load what `tensors` returned, from tensors on the CPU."""

    def state_bytes(self) -> int:
        """Return the bytes that this rank keeps besides weights, gradients and the optimizer's state."""
        return sum(value.nbytes for value in self.tensors().values())

    def writer(self) -> Callable[[Path], Mapping[str, str]]:
        """Return a function that writes this rank's tensors into a checkpoint's folder; `writer` alone is collective.

        Returns:
            A function of the folder without collective calls, as other ranks may have failed. It returns name in the
            folder → SHA-256 of the files that it has written to the disk, hashed while they were written.

        Raises:
            NotSavedError: on every rank, if any rank cannot prepare the function.
        """

        def write(folder: Path) -> dict[str, str]:
            tensors = self.tensors()
            if not tensors or distributed.rank() != 0:
                return {}
            return {str(_TENSORS): write_tensors(tensors, folder / _TENSORS)}

        return write

    def load(self, folder: Path) -> None:
        """Load what the function from `writer` wrote, at any number of ranks."""
        if (folder / _TENSORS).exists():
            self.load_tensors(load_file(folder / _TENSORS))

    def state_dict(self) -> dict[str, Any]:
        """Return what else a resume needs, as JSON values; the same on every rank, collective."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
