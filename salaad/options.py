"""The options of evaluate.py and compress.py, checked as far as they can be without reading a model."""

from dataclasses import dataclass
from typing import Literal

from salaad.checks import at_least, check, one_or_more


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What all evaluations share.

    Args:
        checkpoint: a run, one of its checkpoints, or any Hugging Face causal-LM folder.
        dtype: dtype of weights and activations.
        output: folder for tables and pictures; RUN/evaluation, or evaluation/NAME for a Hugging Face folder, when none
            is given.
    """

    checkpoint: str
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(EvaluationOptions):
    """Perplexity of X, L + S and L + S cut to budgets, over validation text.

    Args:
        variants: what to evaluate, separated by commas: X, L+S, or BUDGET@KAPPA such as 194M@0.6 (HPA); a budget is a
            parameter count of the whole model or a fraction of the dense one. Without it X, and L+S where there is one.
        tokens: validation tokens to read at the most, such as 10M.
        batch: rows taken through the model at once.
    """

    variants: str | None = None
    tokens: str = "10M"
    batch: int = 32

    def __post_init__(self) -> None:
        at_least(self, 1, "batch")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(EvaluationOptions):
    """The HPA grid of budgets × κ, its best κ per budget, and the elastic curve.

    Args:
        budgets: parameter counts of the whole model, or fractions of the dense one, separated by commas.
        kappas: a list such as 0.2,0.5 or a range FIRST:LAST:STEP.
        vanilla: a run trained with method full_rank, whose robust PCA is cut to the same budgets beside it.
        tokens: validation tokens to read per cell at the most, such as 1M.
        batch: rows taken through the model at once.
    """

    budgets: str
    kappas: str = "0:1:0.1"
    vanilla: str | None = None
    tokens: str = "10M"
    batch: int = 32

    def __post_init__(self) -> None:
        at_least(self, 1, "batch")


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(EvaluationOptions):
    """Zero-shot accuracies by the installed lm-evaluation-harness.

    Args:
        variants: what to evaluate, separated by commas: X, L+S, or BUDGET@KAPPA such as 194M@0.6.
        tasks: names of the harness's tasks, separated by commas.
        task_data: folder with local copies of the tasks' data, for machines without a hub.
        limit: rows per task at the most; all when none is given.
        batch_size: rows at once, or auto.
    """

    variants: str = "X"
    tasks: str = "mmlu,arc_challenge,copa,hellaswag,boolq,piqa"
    task_data: str | None = None
    limit: int | None = None
    batch_size: str = "auto"

    def __post_init__(self) -> None:
        if self.limit is not None:
            at_least(self, 1, "limit")
        size = self.batch_size
        check(size == "auto" or (size.isdigit() and int(size) > 0), f"--batch_size is {size}; give auto or 1 or more")


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """A model of the size you name, out of a checkpoint, without training.

    Args:
        checkpoint: a run or one of its checkpoints; with --rpca any Hugging Face causal-LM folder.
        output: the folder to make.
        budget: parameters of the whole model, such as 194M, or a fraction of the dense one; all of L + S without it.
        kappa: the part of the removed parameters that the low-rank side gives, from 0 to 1.
        format: factored stores U, V and the sparse S and needs `import salaad` to open; dense is an ordinary folder.
        dtype: dtype of the stored weights.
        rpca: take L + S from robust PCA of the dense weights, whatever the model was trained with.
        roles: with --rpca, which weights to split: q k v o gate up down, or re:PATTERN; all projections without it.
        embedding: with --rpca, split the embedding too.
    """

    checkpoint: str
    output: str
    budget: str | None = None
    kappa: float = 0.5
    format: Literal["factored", "dense"] = "factored"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    rpca: bool = False
    roles: tuple[str, ...] | str = ()
    embedding: bool = False

    def __post_init__(self) -> None:
        one_or_more(self, "roles")
        check(0 <= self.kappa <= 1, f"--kappa is {self.kappa}, outside [0, 1]; give the low-rank side's part")
        check(self.rpca or not (self.roles or self.embedding), "--roles and --embedding need --rpca; add it")
