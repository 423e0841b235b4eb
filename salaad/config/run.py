"""The whole configuration of a run: frozen dataclasses that check themselves. Imports nothing heavy.

A YAML file names only what differs from these defaults; `command_line.read_command_line` builds the same objects.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from salaad.common.validation import at_least, check, one_or_more
from salaad.config.methods import SETTINGS, MethodConfig, settings_class

_MOST_LAYERS, _WIDEST = 1024, 2**24  # limits beyond which computing a plan takes minutes or overflows


@dataclass(frozen=True)
class ModelConfig:
    """A LLaMA by its sizes, or an existing Hugging Face folder to go on from.

    Args:
        hidden_size: width of the residual stream.
        intermediate_size: width of the SwiGLU layer.
        num_hidden_layers: number of Transformer layers.
        num_attention_heads: heads per layer; must divide the hidden size.
        vocab_size: rows of the embedding and of the LM head.
        path: a Hugging Face causal-LM folder to go on from, or the name of a model on the hub; the sizes above are
            then ignored; sltrain, loro and cola keep its embedding, head and norms alone.
        like: a file in configs/ whose model lends its depth, its heads and its proportions to one of `parameters`
            parameters, with the vocabulary above; the sizes found take the place of those above.
        parameters: of the model that is `like` another, as a number (194M) or as a fraction of that model's (0.5).
    """

    hidden_size: int = 128
    intermediate_size: int = 344
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    vocab_size: int = 32000
    path: str | None = None
    like: str | None = None
    parameters: str | float | None = None

    def __post_init__(self) -> None:
        check(
            (self.like is None) == (self.parameters is None),
            "model.like and model.parameters belong together; give both, such as like 350m and parameters 194M",
        )
        check(not (self.like and self.path), "model.like makes a new model, model.path goes on from one; give only one")
        names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        at_least(self, 1, *names)
        for name in names:
            value, most = getattr(self, name), _MOST_LAYERS if name == "num_hidden_layers" else _WIDEST
            check(value <= most, f"model.{name} is {value:,}, more than any model has; give {most:,} or less")
        check(
            self.hidden_size % (2 * self.num_attention_heads) == 0,
            f"model.hidden_size {self.hidden_size} does not split into {self.num_attention_heads} heads of even "
            f"width; give a multiple of {2 * self.num_attention_heads}",
        )


@dataclass(frozen=True)
class DataConfig:
    """Where text comes from and how it becomes rows of tokens.

    Args:
        source: `python-docs` (documentation found on this machine), `c4` (streamed from the hub) or `files`.
        files: training files as globs: .jsonl/.json, .txt/.md, where a blank line ends a document (plain or .gz .zst
            .xz .bz2), or .parquet.
        validation_files: validation files, the same kinds; needed when the source is `files`.
        tokenizer: a hub name, a folder or a sentencepiece .model file. Unless told otherwise a run from `model.path`
            takes that folder's own, c4 and files take t5-base, python-docs trains its own.
        text_field: the column that holds the text in JSON lines and parquet.
        sequence_length: tokens in a row.
        packing: join documents end to end and cut rows from them, instead of one truncated or padded document a row.
        shuffle_window: documents are shuffled within windows of this many; 1 keeps their order.
        streams: virtual streams the files are dealt to; only their greatest common divisor with the batch is used.
            Fewer are faster where there are few compressed files, since every stream decompresses its files itself.
        workers: processes per rank that read and tokenise ahead of the model; 0 does it in the trainer itself.
        max_bad_documents: broken JSON lines or texts of a wrong type that a stream may meet in one pass over its part
            of a file before the run stops.
        retries: times a file that cannot be read is tried again, after 1, 2, 4, … seconds, at most 30 each; 0 gives up
            at once.
        max_lost_files: parts of files that a stream may find vanished, damaged or unreadable after all tries in one
            pass, and whose rest it passes over, before the run stops; 0 stops at the first.
    """

    source: Literal["python-docs", "c4", "files"] = "python-docs"
    files: tuple[str, ...] | str = ()
    validation_files: tuple[str, ...] | str = ()
    tokenizer: str | None = None
    text_field: str = "text"
    sequence_length: int = 256
    packing: bool = False
    shuffle_window: int = 1000
    streams: int = 16
    workers: int = 1
    max_bad_documents: int = 100
    retries: int = 6
    max_lost_files: int = 0

    def __post_init__(self) -> None:
        one_or_more(self, "files", "validation_files")
        at_least(self, 2, "sequence_length")
        at_least(self, 1, "shuffle_window", "streams")
        at_least(self, 0, "workers", "max_bad_documents", "retries", "max_lost_files")
        given = [name for name in ("files", "validation_files") if getattr(self, name)]
        check(
            self.source == "files" or not given,
            f"data.{' and data.'.join(given)} is given, but data.source is {self.source}; set data.source to files",
        )

    def require(self, *, training: bool, validation: bool) -> None:
        """Raise a UserError if files are to be read for training or for validation, and none are named."""
        check(
            self.source != "files" or not training or bool(self.files),
            "data.source is files, but data.files is empty; give at least one path or glob",
        )
        check(
            self.source != "files" or not validation or bool(self.validation_files),
            "data.source is files, but data.validation_files is empty; give files that training does not read",
        )

    def name_of(self, part: Literal["training", "validation"]) -> str:
        """Return a description of the training or the validation text, in words."""
        if self.source == "files":
            return ", ".join(self.files if part == "training" else self.validation_files)
        known = {"python-docs": "the documentation on this machine (python-docs)", "c4": "C4, from the hub"}
        return f"{known[self.source]}, its {part} part"


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of the guided learning steps and its learning-rate schedule.

    Args:
        name: a class of torch.optim, such as AdamW, Adam, SGD or Adafactor.
        lr: peak learning rate.
        projection_lr: that of the projections, as a share of `lr`; embeddings, also of positions, LM head and vectors
            keep `lr`.
        betas: Adam's two decay rates; ignored by optimizers without them.
        eps: Adam's epsilon; ignored by optimizers without it.
        weight_decay: decoupled in AdamW and Adafactor; other optimizers of torch add it to the gradient.
        warmup: fraction of the steps with linearly rising learning rate.
        final_lr: the cosine ends at this fraction of the peak.
        clip: largest norm of the gradient; 0 leaves it alone.
    """

    name: str = "AdamW"
    lr: float = 3e-3
    projection_lr: float = 1.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup: float = 0.1
    final_lr: float = 0.1
    clip: float = 1.0

    def __post_init__(self) -> None:
        at_least(self, 0, "lr", "projection_lr", "eps", "weight_decay", "clip")
        for name in ("warmup", "final_lr"):
            value = getattr(self, name)
            check(0 <= value <= 1, f"optimizer.{name} is {value}, but it is a fraction; give a number from 0 to 1")
        for beta in self.betas:
            check(0 <= beta < 1, f"optimizer.betas holds {beta}; give numbers from 0 to below 1")


@dataclass(frozen=True)
class TrainConfig:
    """How long and how training runs, evaluates and saves.

    Args:
        steps: optimizer steps.
        batch: sequences in a global batch.
        micro_batch: the most sequences one process takes through the model at once.
        precision: fp32, tf32 (fp32 with TF32 products), bf16-mixed (fp32 weights) or bf16 (everything but the ADMM).
        compile: compile the Transformer with torch.compile.
        gradient_checkpointing: recompute activations in the backward pass to save memory.
        shard: optimizer lets every process keep the optimizer's moments of its share of the weights only, and send
            those weights to the others after each step (ZeRO-1): the same numbers in less memory.
        log_every: steps between two lines of metrics.jsonl.
        eval_every: steps between two evaluations on validation text; 0 evaluates only at the end.
        eval_tokens: non-padding validation tokens after which an evaluation reads no further row.
        save_every: steps between two checkpoints; 0 saves only at the end.
        keep_last: newest checkpoints that stay; older ones of the same run are deleted; 0 keeps all.
        keep_every: checkpoints at multiples of so many steps always stay; 0 names none.
        on_nonfinite: a step whose loss or gradient is NaN or infinite is never taken; then stop, or skip its batch.
        max_skipped: batches that may be skipped so before the run stops all the same.
    """

    steps: int = 1000
    batch: int = 512
    micro_batch: int = 32
    precision: Literal["fp32", "tf32", "bf16-mixed", "bf16"] = "fp32"
    compile: bool = False
    gradient_checkpointing: bool = False
    shard: Literal["none", "optimizer"] = "none"
    log_every: int = 10
    eval_every: int = 1000
    eval_tokens: int = 1_000_000
    save_every: int = 1000
    keep_last: int = 2
    keep_every: int = 0
    on_nonfinite: Literal["stop", "skip"] = "stop"
    max_skipped: int = 10

    def __post_init__(self) -> None:
        at_least(self, 1, "steps", "batch", "micro_batch", "log_every", "eval_tokens")
        at_least(self, 0, "eval_every", "save_every", "keep_last", "keep_every", "max_skipped")


@dataclass(frozen=True)
class WandbConfig:
    """Weights & Biases, carrying the same numbers as metrics.jsonl and blocks.jsonl.

    Args:
        mode: disabled, offline (writes into the run's folder) or online.
        project: name of the project there.
    """

    mode: Literal["disabled", "offline", "online"] = "disabled"
    project: str = "salaad"


@dataclass(frozen=True)
class RunConfig:
    """One training run.

    Args:
        method: how the model is trained: salaad; full_rank, lora, relora, galore, loro, cola, sltrain, lost or
            matformer, to compare it with; or another registered method.
        seed: seeds the weights and the order of the data.
        model: the model.
        data: the text.
        optimizer: the optimizer and its schedule.
        train: length, precision, evaluation and checkpoints.
        wandb: Weights & Biases.
        sections: method → its settings, of every method whose settings are given; `config.salaad` is those of salaad,
            and its defaults where none are given.
    """

    method: str = "salaad"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    wandb: WandbConfig = field(default_factory=WandbConfig)
    sections: Mapping[str, MethodConfig] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings_class(self.method)
        check(0 <= self.seed < 2**53, "seed is no number from 0 to 2^53, which every generator takes; give one")
        self.data.require(training=True, validation=True)

    def __getattr__(self, name: str) -> MethodConfig:
        # Called only for names that are no fields: the section of a method, by its name in a YAML file.
        if name not in SETTINGS:
            raise AttributeError(f"a run's configuration has no {name}")
        return self.sections.get(name) or SETTINGS[name]()

    @property
    def settings(self) -> MethodConfig:
        """The settings of this run's own method."""
        return getattr(self, self.method)

    def to_dict(self) -> dict:
        """Return plain dictionaries and lists, as YAML and JSON hold them; a method's settings form a section.

        The sections of methods other than the run's own are left out if they equal the defaults.
        """
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "sections"}
        for name, kind in SETTINGS.items():
            section = getattr(self, name)
            if dataclasses.fields(kind) and (name == self.method or section != kind()):
                plain[name] = section
        return {key: _plain(value) for key, value in plain.items()}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return list(value) if isinstance(value, tuple) else value
