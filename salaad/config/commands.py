"""The options of evaluate.py and compress.py, checked as far as they can be without reading a model."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from salaad.common.budgets import parse_count
from salaad.common.validation import at_least, check, one_or_more

# The paper's downstream tasks.
DEFAULT_TASKS = ("mmlu", "arc_challenge", "copa", "hellaswag", "boolq", "piqa")
# Alternating projections that follow a cut by energy unless --refine is given.
ALTERNATIONS = 20


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What all evaluations share.

    Args:
        checkpoint: a run, one of its checkpoints, any Hugging Face causal-LM folder, or the name of one on the hub.
        output: folder for tables and pictures; RUN/evaluation, or evaluation/NAME for a Hugging Face folder, when none
            is given.
    """

    checkpoint: str
    output: str | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions(OutputOptions):
    """What all evaluations that run the model share.

    Args:
        dtype: dtype of weights and activations; bfloat16, the paper's, on a GPU and float32 on a CPU, where bfloat16 is
            four times slower, unless given.
    """

    dtype: Literal["bfloat16", "float32"] | None = None


@dataclass(frozen=True, kw_only=True)
class TextOptions(EvaluationOptions):
    """What the evaluations that read validation text share.

    Args:
        tokens: validation tokens after which to stop reading, such as 10M.
        batch: rows taken through the model at once.
    """

    tokens: str = "10M"
    batch: int = 32

    def __post_init__(self) -> None:
        at_least(self, 1, "batch")


@dataclass(frozen=True, kw_only=True)
class PerplexityOptions(TextOptions):
    """Perplexity of X, L + S and L + S cut to budgets, over validation text.

    Args:
        variants: what to evaluate, a list: X, L+S, BUDGET@KAPPA such as 194M@0.6 (HPA), BUDGET@energy (one threshold
            for the whole model), either with +head (LM head and embedding are cut too where they are no blocks), or
            BUDGET of an elastic folder or a matformer run; a budget is a parameter count of the whole model or a
            fraction of the dense one. Without it X, with what there is of L+S or narrower widths.
        refine: alternating projections that follow each cut; compress.py takes 20 where it cuts by energy.
        calibrate: sequences of training text by which worth is measured at each cut.
    """

    lists: ClassVar = ("variants",)

    variants: str | None = None
    refine: int = 0
    calibrate: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, 0, "refine", "calibrate")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(TextOptions):
    """The HPA grid of budgets × κ, its best κ per budget, and the elastic curve of every way to cut.

    Args:
        budgets: parameter counts of the whole model, or fractions of the dense one, a list.
        kappas: a list such as 0.2,0.5 or a range FIRST:LAST:STEP.
        vanilla: a run trained with method full_rank, which is split after the fact and cut to the same budgets.
        rivals: how vanilla is split, a list: rpca, godec; rpca without it.
        refine: alternating projections; the cuts by energy are measured without and with them.
        calibrate: sequences of training text; the refined cuts are measured without and with them.
        lm_head: measure the best of the cuts by energy with LM head and embedding cut too.
    """

    lists: ClassVar = ("budgets", "kappas", "rivals")

    budgets: str
    kappas: str = "0:1:0.1"
    vanilla: str | None = None
    rivals: str | None = None
    refine: int = 0
    calibrate: int = 0
    lm_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check(
            self.rivals is None or self.vanilla is not None, "--rivals split vanilla, but there is none; add --vanilla"
        )
        for name in self.ways_to_split:
            check(name in ("rpca", "godec"), f"--rivals names {name!r}, which is no way to split; give rpca or godec")
        at_least(self, 0, "refine", "calibrate")

    @property
    def ways_to_split(self) -> list[str]:
        """The names in --rivals; rpca if none are given."""
        return [name.strip() for name in (self.rivals or "rpca").split(",")]


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions(EvaluationOptions):
    """Zero-shot accuracies by the installed lm-evaluation-harness.

    Args:
        variants: what to evaluate, a list: X, L+S, 194M@0.6, 194M@energy, 194M@energy+head, or 194M of an elastic
            folder or a matformer run.
        refine: alternating projections that follow each cut; compress.py takes 20 where it cuts by energy.
        tasks: names of the harness's tasks, a list.
        task_data: folder with local copies of the tasks' data, for machines without a hub.
        limit: rows per task at the most; all when none is given.
        batch_size: rows at once, or auto.
        max_length: tokens of a row, of which a longer prompt loses its beginning; those of the model without it.
    """

    lists: ClassVar = ("variants", "tasks")

    variants: str = "X"
    refine: int = 0
    tasks: str = ",".join(DEFAULT_TASKS)
    task_data: str | None = None
    limit: int | None = None
    batch_size: str = "auto"
    max_length: int | None = None

    def __post_init__(self) -> None:
        at_least(self, 0, "refine")
        if self.limit is not None:
            at_least(self, 1, "limit")
        if self.max_length is not None:
            at_least(self, 1, "max_length")
        check(all(name.strip() for name in self.tasks.split(",")), f"--tasks {self.tasks!r} names nothing; give names")
        size = self.batch_size
        check(size == "auto" or (size.isdigit() and int(size) > 0), f"--batch-size is {size}; give auto, or 1 or more")


@dataclass(frozen=True, kw_only=True)
class RpcaOptions(OutputOptions):
    """What robust PCA finds in the weights, beside what it finds in noise.

    Args:
        roles: which weights: q k v o gate up down embedding lm_head, or re:PATTERN; all projections without it.
        embedding: take the embedding too.
        growth: factor by which the method's penalty grows; 1.1 is slower and finds sparser S than 1.5.
    """

    roles: tuple[str, ...] | str = ()
    embedding: bool = False
    growth: float = 1.5

    def __post_init__(self) -> None:
        one_or_more(self, "roles")
        check(1 < self.growth < 10, f"--growth is {self.growth}, outside (1, 10); give 1.5, or 1.1 to be thorough")


@dataclass(frozen=True, kw_only=True)
class CompressOptions:
    """A model of the size you name, or one folder for all sizes, out of a checkpoint.

    Args:
        checkpoint: a run, one of its checkpoints, what `Salaad.save` or a Trainer wrote, or an elastic folder; with
            --rpca or --godec any Hugging Face causal-LM folder, or the name of one on the hub.
        output: the folder to make.
        budget: parameters of the whole model, such as 194M, or a fraction of the dense one; all of L + S without it;
            with --elastic also several, such as 0.7,0.5,0.4: each begins a range of sizes with units of its own.
        allocation: energy keeps what has most energy per parameter, by one threshold for the whole model; hpa, the
            paper's way, takes the same fractions of every block; energy unless --kappa is given.
        kappa: of hpa, the part of the removed parameters that the low-rank side gives, from 0 to 1; without it L's
            share of L + S, at which both sides lose the same fraction.
        refine: alternating projections that bring the cut as near to L + S as trained (to X with --rpca or --godec) as
            its ranks and counts allow; 20 by energy and none by hpa unless given.
        calibrate: sequences of training text by which the worth of what is kept is measured.
        match: sequences of training text on which each layer of what is cut is fitted to the dense layer.
        distill: tokens of training text, such as 2M, on which what is cut learns the predictions of the dense model;
            with --elastic in every range at the size it begins with and, in the same step, at another.
        text_share: with --distill, the share of what is learned that the text's own next tokens say, from 0 to 1; a
            little of it helps where the text is like that of the training.
        elastic: write one folder that opens at any size, its units ordered by energy; with --budget they are refined
            for that size, and larger sizes add to it, up to the next one that is named.
        format: factored stores U, V and the sparse S and needs `import salaad` to open; dense is an ordinary folder.
        dtype: dtype of the stored weights; int8 stores U, V and the entries of S in a byte each, with scales, the other
            weights in bfloat16, and is opened in any float dtype.
        rpca: take L + S from robust PCA of the dense weights, whatever the model was trained with.
        godec: take L + S of a given rank and density from alternating projections of the dense weights.
        rank_ratio: with --godec, the rank of L over the shorter side; without it a quarter, or more if the budget has
            room for it.
        density: with --godec, the entries of S over all; without it a quarter, or more if the budget has room for it.
        roles: with --rpca or --godec, which weights to split: q k v o gate up down, or re:PATTERN; without it the
            blocks of the run, or all projections where no run says what its blocks are.
        embedding: split the embedding too, with the projections or, if training left it whole, beside its L + S; unless
            given, it is split where the head is, if it is not tied and no --roles are given, and with --rpca or --godec
            where the run has it among its blocks.
        lm_head: split the head too, likewise; small sizes gain most by it. Unless given, it is split where a cut by
            energy has to remove something and its worth is known (from the training or by --calibrate), but not with
            --godec or --roles, a tied head, or a method that trains its factors.
    """

    checkpoint: str
    output: str
    budget: str | None = None
    allocation: Literal["energy", "hpa"] | None = None
    kappa: float | None = None
    refine: int | None = None
    calibrate: int = 0
    match: int = 0
    distill: str | None = None
    text_share: float = 0.0
    elastic: bool = False
    format: Literal["factored", "dense"] = "factored"
    dtype: Literal["bfloat16", "float32", "int8"] = "bfloat16"
    rpca: bool = False
    godec: bool = False
    rank_ratio: float | None = None
    density: float | None = None
    roles: tuple[str, ...] | str = ()
    embedding: bool | None = None
    lm_head: bool | None = None

    def __post_init__(self) -> None:
        one_or_more(self, "roles")
        at_least(self, 0, "calibrate", "match")
        if self.refine is not None:
            at_least(self, 0, "refine")
        if self.distill is not None:
            parse_count(self.distill, "--distill")  # raises a UserError if it is no count
        check(0 <= self.text_share <= 1, f"--text-share is {self.text_share}, outside [0, 1]; give a share")
        learns = self.distill is not None or not self.text_share
        check(learns, f"--text-share is {self.text_share}, but nothing is distilled; give --distill TOKENS too")
        fitted = self.match or self.distill
        check(self.budget is not None or not fitted, "--match and --distill fit what is cut; give a --budget too")
        if self.allocation is not None:
            nothing = f"--allocation is {self.allocation}, but nothing is cut; give a --budget too"
            check(self.budget is not None or self.elastic, nothing)
        if self.kappa is not None:
            check(0 <= self.kappa <= 1, f"--kappa is {self.kappa}, outside [0, 1]; give the low-rank side's part")
            by_energy = self.elastic or self.allocation == "energy"
            check(not by_energy, f"--kappa is {self.kappa}, but energy finds its own; leave it out")
            check(self.budget is not None, f"--kappa is {self.kappa}, but nothing is cut; give a --budget too")
        if not self.elastic:
            one = "," not in (self.budget or "")
            check(
                one, f"--budget {self.budget} names several sizes, and a folder holds one; give one, or add --elastic"
            )
            cut = self.budget is not None or not (self.refine or self.calibrate)
            check(cut, "--refine and --calibrate fit what is cut, but nothing is; give a --budget too")
        else:
            check(self.format == "factored", "--elastic stores parts, --format dense none; leave one of them out")
            check(self.allocation != "hpa", "--elastic orders its units by energy; leave --allocation hpa out")
            both = self.refine is None or (self.budget is None) == (self.refine == 0)
            check(both, "--elastic fits its units to a size by --refine N and --budget SIZE; give both, or neither")
        parts = self.format == "factored" and not self.elastic
        check(
            parts or self.dtype != "int8", "--dtype int8 stores U, V and S of one size; leave it out for another folder"
        )
        check(not (self.rpca and self.godec), "--rpca and --godec are two ways to split; give one of them")
        post_hoc = self.rpca or self.godec
        check(post_hoc or not self.roles, "--roles needs --rpca or --godec; add one")
        for name in ("rank_ratio", "density"):
            value = getattr(self, name)
            if value is not None:
                option = f"--{name.replace('_', '-')}"
                check(self.godec, f"{option} is {value}, which is GoDec's; add --godec or leave it out")
                check(0 < value <= 1, f"{option} is {value}, outside (0, 1]; give the part of what there could be")

    @property
    def float_dtype(self) -> str:
        """The dtype of the weights that are stored as floats."""
        return "bfloat16" if self.dtype == "int8" else self.dtype

    @property
    def by_energy(self) -> bool:
        """Whether the cut is by energy: unless --kappa or --allocation say that it is by HPA."""
        return self.kappa is None and self.allocation != "hpa"

    @property
    def alternations(self) -> int:
        """Number of alternating projections: --refine, by default `ALTERNATIONS` for a cut by energy, else 0."""
        if self.refine is not None:
            return self.refine
        return ALTERNATIONS if self.budget is not None and self.by_energy else 0
