"""The trainings behind the paper's tables and figures: a method, a seed, and factors on a scale's own settings."""

import shlex
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from salaad.common.errors import UserError
from salaad.common.files import REMAKE, read_json, read_object
from salaad.config.command_line import read_command_line
from salaad.config.run import RunConfig
from salaad.model.build import training_flops
from salaad.runs.summary import save_result
from scripts.outlines import outline_of
from scripts.trainings import ROOT, config_of, is_same, train_to_the_end

SHORT = {
    "salaad.rho_constant": "rho",
    "salaad.rho": "absolute",
    "salaad.delta_alpha": "da",
    "salaad.delta_beta": "db",
    "salaad.every": "k",
    "salaad.embedding": "embedding",
    "salaad.lm_head": "head",
    "train.precision": "precision",
    "model.like": "like",
    "model.parameters": "parameters",
}
# Placeholders for the user's own files in a command: a path of one machine would be of no use on another.
PLACES = {"c4": "FOLDER", "tokenizer": "FILE", "other-text": "FILE", "task-data": "DIR"}
PAPERS = ("60m", "130m", "350m", "1b")
TRAINED_ON = ("c4", "tokenizer")  # options that every training depends on, so every command names them


@dataclass(frozen=True)
class Scale:
    """A model size with its text, seeds and budgets, at which the paper is reproduced.

    Args:
        name: as typed for --scale; also the name of its folders in runs/ and results/.
        size: name of its YAML file in configs/; `name` unless given.
        text: folder with train-*.jsonl.xz and validation.jsonl.xz; the text of the config unless given.
        options: further options of train.py, after those for config and text.
        seeds: the seeds of trainings behind a headline claim.
        budgets: sizes of the elastic curve, as fractions of the dense model's parameters.
        table_budget: budget of L̃ + S̃ in Table 1.
        embedding_budget: budget of L̃ + S̃ where the embedding is among the blocks; `table_budget` unless given.
        bf16_budget: the same in the paper's table of trainings in bfloat16; `embedding_budget` unless given.
        dtype: name of the dtype of the evaluations.
        tokens: validation tokens per evaluation.
        max_length: tokens per row of a downstream task; the model's maximum unless given, which the longest choices
            exceed with a small tokenizer.
        task_data: folder with the downstream tasks' data; read from the hub unless given.
        other_text: a second validation file, on which Table 1 is measured too.
        asked: names of the options in PLACES that the user gave.
    """

    name: str
    size: str | None = None
    text: Path | None = None
    options: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0,)
    budgets: tuple[str, ...] = ("0.9", "0.75", "0.64", "0.5", "0.43")
    table_budget: str = "0.64"
    embedding_budget: str | None = None
    bf16_budget: str | None = None
    dtype: str = "float32"
    tokens: str = "10M"
    max_length: int | None = None
    task_data: Path | None = None
    other_text: Path | None = None
    asked: tuple[str, ...] = ()

    @property
    def is_the_papers(self) -> bool:
        """Whether the paper trained at this scale too, so that its absolute numbers apply."""
        return self.name in PAPERS

    @property
    def config(self) -> RunConfig:
        """The configuration of this scale before any factor is applied."""
        return _config(tuple(self.command_options))

    @property
    def command_options(self) -> list[str]:
        """The options of train.py that all trainings of this scale have in common."""
        # The globs of the documented commands of the other comparisons, so that their trainings can be used here.
        globs = {"files": "train-*", "validation_files": "valid*"} if self.text else {}
        files = [f"--data.{key}={self.text / glob}" for key, glob in globs.items()]
        return ["--config", f"{self.size or self.name}.yaml", *(TEXT if self.text else ()), *files, *self.options]

    def command(self, *items: str, reads: Sequence[str] = ()) -> str:
        """Return the command that makes `items`, with a placeholder for every given option that they read."""
        options = [f"--{name} {PLACES[name]}" for name in self.asked if name in (*TRAINED_ON, *reads)]
        return " ".join(["python scripts/reproduce.py --scale", self.name, *options, *items])

    @property
    def runs(self) -> Path:
        """The folder of this scale's trainings."""
        return ROOT / "runs" / "reproduce" / self.name

    @property
    def results(self) -> Path:
        """The folder of this scale's results."""
        return self.results_in(ROOT / "results")

    def results_in(self, results: Path) -> Path:
        """Return the folder of this scale's results in a folder of all results."""
        return results / self.name / "reproduce"


@cache
def _config(options: tuple[str, ...]) -> RunConfig:
    return read_command_line([*options, "--output", "unused"])[0]


@cache
def _flops_per_run(options: tuple[str, ...]) -> float:
    config = _config(options)
    positions = config.train.steps * config.train.batch * config.data.sequence_length
    return training_flops(outline_of(config), config.data.sequence_length) * positions


TEXT = ("--data.source=files", "--data.packing=true")
WIKIPEDIA = Path("runs/wikipedia")
ON_WIKIPEDIA = {"text": WIKIPEDIA, "tokens": "600K", "max_length": 512}
MICRO = (f"--data.tokenizer={WIKIPEDIA}-6400.model", "--train.eval_tokens=300000")
# Two epochs of 93 M tokens, in so few steps that c of eq. 7 is far above the paper's, as in all short runs.
SHORT_60M = (
    "--train.steps=1400",
    "--salaad.every=5",
    "--salaad.rho_constant=0.2",
    "--salaad.delta_alpha=0.1",
    "--salaad.delta_beta=0.003",
)
# With the embedding not among the blocks, 0.56 of the parameters are never compressed.
SIZE_60M = {"size": "60m", "budgets": ("0.9", "0.8", "0.75", "0.7", "0.64")}
SCALES = {
    "nano": Scale("nano", seeds=(0, 1, 2), max_length=512),
    "nano-20": Scale(
        "nano-20", options=(f"--data.tokenizer={WIKIPEDIA}-4096.model", "--train.eval_tokens=300000"), **ON_WIKIPEDIA
    ),
    "micro": Scale("micro", options=MICRO, **ON_WIKIPEDIA),
    "micro-20": Scale("micro-20", options=MICRO, **ON_WIKIPEDIA),
    "60m-wikipedia": Scale(
        "60m-wikipedia",
        text=WIKIPEDIA,
        options=(*SHORT_60M, "--train.precision=bf16-mixed"),
        dtype="bfloat16",
        **SIZE_60M,
    ),
    "60m-wikipedia-fp32": Scale("60m-wikipedia-fp32", text=WIKIPEDIA, options=SHORT_60M, **SIZE_60M),
    "60m": Scale("60m", table_budget="44M", embedding_budget="43M", dtype="bfloat16", **SIZE_60M),
    "130m": Scale("130m", table_budget="97M", embedding_budget="94M", bf16_budget="97M", dtype="bfloat16"),
    "350m": Scale("350m", table_budget="194M", embedding_budget="185M", bf16_budget="194M", dtype="bfloat16"),
    "1b": Scale("1b", table_budget="646M", dtype="bfloat16"),
}


@dataclass(frozen=True)
class Run:
    """One training, described by what differs from the settings of a scale.

    Args:
        method: salaad or full_rank.
        seed: determines the initial weights and the order of the text.
        factors: (setting, factor) pairs; the factor multiplies the scale's own value.
        settings: (setting, value) pairs that replace the scale's own values.
        printed: (setting, value) pairs as the paper prints them; at the paper's scales they replace the factors.
    """

    method: str = "salaad"
    seed: int = 0
    factors: tuple[tuple[str, float], ...] = ()
    settings: tuple[tuple[str, str], ...] = ()
    printed: tuple[tuple[str, str], ...] = ()

    def seeded(self, seed: int) -> "Run":
        """Return this training with another seed."""
        return replace(self, seed=seed)

    def changes(self, scale: Scale) -> dict[str, str]:
        """Return name → value of the settings that differ from the scale's, so that equal trainings get equal names."""
        by_factors = not (self.printed and scale.is_the_papers)
        tree, changed = scale.config.to_dict(), {} if by_factors else dict(self.printed)
        for name, factor in self.factors if by_factors else ():
            section, key = name.split(".")
            value = tree[section][key] * factor
            changed[name] = f"{value:.6g}"
        changed |= dict(self.settings)
        return {
            name: value
            for name, value in sorted(changed.items())
            if str(tree[name.split(".")[0]][name.split(".")[1]]).lower() != value.lower()
        }

    def name(self, scale: Scale) -> str:
        """Return the name of the run folder and of the record, such as salaad,da=0.08,seed=1."""
        parts = [f"{SHORT[key]}={value}" for key, value in self.changes(scale).items()]
        return ",".join([self.method, *parts, *([f"seed={self.seed}"] if self.seed else [])])

    def folder(self, scale: Scale) -> Path:
        """Return the run folder."""
        return scale.runs / self.name(scale)

    def record(self, scale: Scale) -> Path:
        """Return the path of the training's record, a JSON file under results/."""
        return scale.results / "runs" / f"{self.name(scale)}.json"

    def recorded(self, scale: Scale) -> bool:
        """Return whether there is a record with these settings; the run folder may be deleted or on another machine."""
        return self.record(scale).exists() and self._has_settings(self.kept(scale)["config"], scale)

    def kept(self, scale: Scale) -> dict[str, Any]:
        """Return the training's record.

        Raises:
            UserError: the file is damaged or lacks a part of what is read of a record.
        """
        match read_object(self.record(scale), cure=REMAKE):
            case {
                "command": _,
                "commit": _,
                "machine": _,
                "config": {"data": {"source": _}},
                "summary": {"tokens": _, "seconds": {}},
            } as record:
                return record
        raise UserError(f"{self.record(scale)} is no record of a training; {REMAKE}")

    def other_settings(self, scale: Scale) -> bool:
        """Return whether the run folder holds a finished run with other settings, as after a change of a YAML file."""
        folder = self.folder(scale)
        return (folder / "summary.json").exists() and not self._has_settings(config_of(folder), scale)

    def _has_settings(self, config: dict[str, Any], scale: Scale) -> bool:
        options = (*scale.command_options, "--method", self.method, "--seed", str(self.seed))
        changes = (f"--{name}={value}" for name, value in self.changes(scale).items())
        asked = _config((*options, *changes)).to_dict()
        if "c4" in (config["data"]["source"], asked["data"]["source"]):  # the same text from the hub and with --c4
            asked["data"] = {**asked["data"], "source": config["data"]["source"]}
        return is_same(config, asked)

    def done(self, scale: Scale) -> bool:
        """Return whether the run folder is here and finished, and the record is of this very run."""
        summary = self.folder(scale) / "summary.json"
        return self.recorded(scale) and summary.exists() and self.kept(scale)["summary"] == read_json(summary)

    def command(self, scale: Scale) -> list[str]:
        """Return the train.py command, as typed after a launcher."""
        changes = [word for name, value in self.changes(scale).items() for word in (f"--{name}", value)]
        return [
            "train.py",
            *scale.command_options,
            *("--method", self.method),
            *("--seed", str(self.seed)),
            *changes,
            *("--output", str(self.folder(scale).relative_to(ROOT))),
        ]

    def flops(self, scale: Scale) -> float:
        """Return the floating-point operations of all forward and backward passes."""
        changes = [f"--{name}={value}" for name, value in self.changes(scale).items() if name.startswith("model.")]
        return _flops_per_run((*scale.command_options, *changes))


def distinct(runs: Iterable[Run], scale: Scale) -> list[Run]:
    """Return each training once, in order: different `Run`s may be the same training at this scale."""
    named: dict[str, Run] = {}
    for run in runs:
        named.setdefault(run.name(scale), run)
    return list(named.values())


def train(run: Run, scale: Scale, launcher: Sequence[str], threads: int) -> None:
    """Start or resume a training, and record it when it ends.

    Raises:
        UserError: the training failed or ended before its last step, or its folder holds one with other settings.
    """
    if run.done(scale):
        return
    folder = run.folder(scale)
    if run.other_settings(scale):
        raise UserError(f"{folder} was trained with other settings than are asked for now; move it away")
    command = run.command(scale)
    train_to_the_end(command, folder, threads, launcher)
    launched = launcher if launcher != (sys.executable,) else ("python",)
    save_result(folder, run.record(scale), shlex.join([*launched, *command]))
