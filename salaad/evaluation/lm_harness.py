"""Zero-shot accuracies of a model in memory, computed by the installed lm-evaluation-harness.

Prompts, metrics and versions are the harness's own. Its data comes from the hub, or from a folder (`--task-data DIR`)
with one JSON-lines file for each split that the harness scores, with the hub's columns:

    arc_challenge.test.jsonl    question, choices {text: [...], label: [...]}, answerKey (one of the labels)
    boolq.validation.jsonl      passage, question, label (0 no, 1 yes)
    copa.validation.jsonl       premise, question ("cause" or "effect"), choice1, choice2, label (from 0)
    hellaswag.validation.jsonl  activity_label, ctx_a, ctx_b, endings [...], label (from "0", a string)
    mmlu.test.jsonl             question, choices [...], subject, answer (from 0); all 57 subjects for the group
    piqa.validation.jsonl       goal, sol1, sol2, label (from 0)

Further columns and files are ignored, and nothing is written there. The harness cuts off the beginning of a prompt that
is longer than the model's rows (`max_position_embeddings`).
"""

import difflib
import functools
import importlib.metadata
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.json
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from salaad.common.errors import UserError

# The harness is imported inside functions, as the import takes seconds and not every machine has it.

# Folders in which the harness defines these tasks: reading all its 14,000 definitions would take ten seconds.
_FOLDERS = ("mmlu/default", "arc", "super_glue/copa", "hellaswag", "super_glue/boolq", "piqa")
# Columns of the local files, and the type of the last one, the answer.
_COLUMNS = {
    "arc_challenge": ("question choices answerKey", pyarrow.string()),
    "boolq": ("passage question label", pyarrow.int64()),
    "copa": ("premise question choice1 choice2 label", pyarrow.int64()),
    "hellaswag": ("activity_label ctx_a ctx_b endings label", pyarrow.string()),
    "mmlu": ("question choices subject answer", pyarrow.int64()),
    "piqa": ("goal sol1 sol2 label", pyarrow.int64()),
}


@dataclass(frozen=True)
class TaskScore:
    """A task or group: accuracies from 0 to 1 and their standard errors, None where the harness gives none."""

    task: str
    version: str
    samples: int
    acc: float
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None


def harness_version() -> str:
    """The version of the installed harness; a UserError if there is none."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("lm-eval is not installed, and nothing else scores tasks; run pip install lm-eval") from None


def check_tasks(tasks: Sequence[str], task_data: Path | None) -> None:
    """Check the names of the tasks and their local data before any model is loaded.

    Raises:
        UserError: the harness is not installed; it does not know a name, or the task has no accuracy of its own; a
            folder, file, subject or column of `task_data` is missing; the layout of a task's local data is not known.
    """
    with _quiet():
        index = _manager(tasks).task_index
        for name in tasks:
            config = index[name].cfg or {}  # a tag, which stands for several tasks, has no configuration
            metrics = config.get("metric_list") or config.get("aggregate_metric_list") or ()
            metrics = [metrics] if isinstance(metrics, dict) else metrics
            if "acc" not in [metric["metric"] for metric in metrics]:
                raise UserError(f"task {name} has no accuracy of its own, the one score read; give others, as piqa")
        if task_data is not None:
            _load(tasks, task_data)


def evaluate_tasks(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    task_data: Path | None = None,
    limit: int | None = None,
    batch_size: int | str = "auto",
    max_length: int | None = None,
) -> list[TaskScore]:
    """Zero-shot scores of a causal LM, computed on its device: a row for each task or group asked for.

    Args:
        model: a causal LM; its training mode is restored.
        tokenizer: the tokenizer it was trained with.
        tasks: names that `check_tasks` accepts.
        task_data: folder with local copies of their data in the layout above; None for the hub.
        limit: number of rows of each task, and of each subject of a group; None for all.
        batch_size: rows per forward pass; "auto" is as many as fit on a GPU, and 8 on a CPU.
        max_length: tokens of a row, to which longer prompts are cut; None for the model's `max_position_embeddings`.

    Raises:
        UserError: as `check_tasks`; `limit` is below 1; the hub gives no data; a choice is too long for the model.
    """
    if limit is not None and limit < 1:  # the harness reads 0 as all
        raise UserError(f"limit is {limit}, but a score needs 1 row or more; give --limit 1, or leave it out for all")
    training = model.training
    with _quiet():
        chosen = _load(tasks, task_data)
        from lm_eval import evaluate

        try:
            wrapped = _language_model(model, tokenizer, batch_size, max_length)
            found = evaluate(wrapped, chosen, limit=limit, log_samples=False)
        finally:
            model.train(training)
    return [_score(name, found["results"][name], found["versions"][name]) for name in dict.fromkeys(tasks)]


def _score(name: str, result: dict[str, Any], version: object) -> TaskScore:
    values = [result.get(f"{key},none", "N/A") for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")]
    return TaskScore(name, str(version), result["sample_len"], *(None if v == "N/A" else float(v) for v in values))


def _manager(tasks: Sequence[str]) -> Any:
    """The harness's `TaskManager` that knows all of `tasks`."""
    harness_version()
    manager = _index(_FOLDERS)
    if not set(tasks) <= set(manager.all_tasks):
        manager = _index(())
    for name in tasks:
        if name not in manager.task_index:
            [nearest] = difflib.get_close_matches(name, manager.all_tasks, n=1, cutoff=0)
            raise UserError(f"task {name} is none of the harness's {len(manager.all_tasks):,}; did you mean {nearest}?")
    return manager


@functools.cache
def _index(folders: tuple[str, ...]) -> Any:
    from lm_eval import tasks

    paths = [Path(tasks.__file__).parent / folder for folder in folders]
    return tasks.TaskManager(include_defaults=not folders, include_path=paths)


def _load(tasks: Sequence[str], task_data: Path | None) -> dict[str, dict[str, Any]]:
    """The harness's `tasks` and `groups` by name, with their data loaded."""
    if task_data is not None and not task_data.is_dir():
        raise UserError(f"--task-data {task_data} is no folder (here is {Path.cwd()}); give the one with the files")
    manager, override = _manager(tasks), {"class": _task_class(task_data)}
    index = manager.task_index
    chosen: dict[str, dict[str, Any]] = {"tasks": {}, "groups": {}}
    try:
        for name in tasks:
            # The manager's own `load` takes no class for the tasks in a group.
            loaded = manager.load([manager._factory.build(index[name], overrides=override, registry=index)])
            chosen = {part: held | loaded[part] for part, held in chosen.items()}
        return chosen
    except UserError:
        raise
    except Exception as error:  # of any class: no network, no such data set, rows in another layout
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        cure = "write its rows as the hub has them" if task_data else "give --task-data a folder with local copies"
        where = task_data or "the hub"
        raise UserError(f"the data of {', '.join(tasks)} cannot be read from {where} ({reason}); {cure}") from error


def _task_class(task_data: Path | None) -> type:
    """The harness's task class without few-shot examples, with data from `task_data` unless that is None."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    read = functools.cache(_read)  # all subjects share one file

    class ZeroShot(ConfigurableTask):
        def __init__(self, config: dict[str, Any]) -> None:
            del config["class"]
            super().__init__(config=config | {"num_fewshot": 0})

        def fewshot_docs(self) -> None:
            """No examples: the harness would read the training split even for zero-shot prompts."""

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            if task_data is None:
                super().download(dataset_kwargs, **kwargs)
                return
            name, split = self.config.task, self.config.test_split or self.config.validation_split
            subject = self.DATASET_NAME if self.DATASET_PATH == "cais/mmlu" else None
            rows = read(task_data, "mmlu" if subject else name, split)
            if subject:
                rows = rows.filter(pyarrow.compute.field("subject") == subject)
                if not rows.num_rows:
                    raise UserError(f"mmlu.{split}.jsonl has no row of {subject}; add it, or give single mmlu_SUBJECTs")
            self.dataset = {split: Dataset.from_list(rows.to_pylist())}

        def build_all_requests(self, **options: Any) -> None:
            with redirect_stderr(io.StringIO()):  # a progress bar of milliseconds for each of 57 subjects
                super().build_all_requests(**options)

    return ZeroShot


def _read(folder: Path, name: str, split: str) -> pyarrow.Table:
    """The columns of a local file that the harness needs."""
    if name not in _COLUMNS:
        raise UserError(f"--task-data knows {', '.join(_COLUMNS)} but not {name}; leave {name} out, or use the hub")
    path = folder / f"{name}.{split}.jsonl"
    if not path.is_file():
        raise UserError(f"--task-data {folder} lacks {path.name}; put it there, or leave {name} out")
    try:
        # In one block, as a row must not cross the border of two.
        table = pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=path.stat().st_size + 1))
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is no file of JSON lines ({error}); download or write it again") from error
    columns, answer = _COLUMNS[name][0].split(), _COLUMNS[name][1]
    for column in columns:
        if column not in table.column_names or table[column].null_count:
            raise UserError(f"{path} has rows without {column}; write its rows as the hub has them")
    if table.schema.field(columns[-1]).type != answer:
        raise UserError(f"{path} has a {columns[-1]} that is no {answer}; write its rows as the hub has them")
    return table.select(columns)


def _language_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | str, max_length: int | None
) -> Any:
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm or not sys.stderr.isatty())

        def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            for (_, choice), _, tokens in requests:
                if not 0 < len(tokens) <= self.max_length:
                    what = (
                        f"the choice {choice[:40]!r} has {len(tokens)} tokens, but a row takes 1 to {self.max_length}"
                    )
                    raise UserError(f"{what}; give --max-length {len(tokens)}, or leave its task out")
            return super()._loglikelihood_tokens(requests, *args, **kwargs)

    # The harness finds the choice by counting the tokens of the prompt alone, so no end token may be added (T5).
    ends = tokenizer("a").input_ids[-1] == tokenizer.eos_token_id
    # Its search for the largest batch catches a GPU's lack of memory; on a CPU the process would be killed.
    batch_size = 8 if batch_size == "auto" and model.device.type == "cpu" else batch_size
    # Given here, as the harness's `evaluate` ignores a batch size given together with a model.
    options = {"batch_size": batch_size, "max_length": max_length, "add_bos_token": False if ends else None}
    return Model(pretrained=model, tokenizer=tokenizer, **options)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings and prints of the harness and its libraries, and progress bars unless on a terminal."""
    from datasets.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()):
            yield
    finally:
        logging.disable(before)
