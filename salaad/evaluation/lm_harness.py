"""Zero-shot accuracies of a model in memory, computed by the installed lm-evaluation-harness.

Prompts, metrics and versions are the harness's own. Its data comes from the hub, or from a folder (`--task-data DIR`)
with a file TASK.SPLIT.jsonl for each task (`local_tasks`), such as

    arc_challenge.test.jsonl    question, choices {text: [...], label: [...]}, answerKey (one of the labels)
    boolq.validation.jsonl      passage, question, label (0 no, 1 yes)
    hellaswag.validation.jsonl  activity_label, ctx_a, ctx_b, endings [...], label
    lambada_openai.test.jsonl   text
    mmlu.test.jsonl             question, choices [...], subject, answer (from 0); all 57 subjects for the group

The harness cuts off the beginning of a prompt that is longer than the model's rows (`max_position_embeddings`).
"""

import functools
import importlib.metadata
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from salaad.common.errors import UserError
from salaad.evaluation.local_tasks import require_scored, task_class
from salaad.evaluation.task_names import folders, require_known
from salaad.model.build import learned_positions

# The harness is imported inside functions, as the import takes seconds and not every machine has it.


@dataclass(frozen=True)
class TaskScore:
    """The scores of a task or group: accuracies from 0 to 1 and standard errors, None where the harness gives none.

    `others` are further metrics, such as a perplexity.
    """

    task: str
    version: str
    samples: int
    acc: float | None
    acc_stderr: float | None
    acc_norm: float | None
    acc_norm_stderr: float | None
    others: dict[str, float] = field(default_factory=dict)


def harness_version() -> str:
    """Return the version of the installed harness; a UserError if none is installed."""
    try:
        return importlib.metadata.version("lm_eval")
    except importlib.metadata.PackageNotFoundError:
        raise UserError("lm-eval is not installed, and nothing else scores tasks; run pip install lm-eval") from None


def check_tasks(tasks: Sequence[str], task_data: Path | None) -> None:
    """Check the names of the tasks and their local data before any model is loaded.

    Raises:
        UserError: the harness is not installed; it does not know a name; a task, or a member of a group, is scored by
            what a model generates; a folder, file, subject or column of `task_data` is missing, or a row has an answer
            that is no choice.
    """
    harness_version()
    require_known(tasks)
    with _quiet():
        index = _manager(tuple(tasks)).task_index
        for name in tasks:
            for task, config in _definitions(index, name):
                what = f"task {task}" if task == name else f"task {task} of group {name}"
                if task is None:
                    raise UserError(f"group {name} defines a task without a name; leave it out, or use lm_eval itself")
                if config is None:
                    raise UserError(
                        f"{what} is defined only inside another definition; leave it out, or use lm_eval itself"
                    )
                if config.get("class"):
                    raise UserError(
                        f"{what} is code of its own and has no one score; leave it out, or use lm_eval itself"
                    )
                require_scored(config, what)
        if task_data is not None:
            _load(tasks, task_data)


def check_max_length(description: PretrainedConfig, max_length: int | None, name: str) -> None:
    """Raise a UserError if the model called `name` has learned positions, and fewer than `max_length`."""
    positions = learned_positions(description)
    if max_length is not None and positions is not None and max_length > positions:
        raise UserError(
            f"max_length is {max_length}, but {name} has {positions} positions; give --max-length {positions} or less"
        )


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
    """Return zero-shot scores of a causal LM, computed on its device: one for each task or group asked for.

    A group that the harness gives no score of its own is followed by the scores of its members.

    Args:
        model: a causal LM; its training mode is restored.
        tokenizer: the tokenizer it was trained with.
        tasks: names that `check_tasks` accepts.
        task_data: folder with local copies of their data in the layout above; None for the hub.
        limit: number of rows of each task, and of each subject of a group; None for all.
        batch_size: rows per forward pass; "auto" is as many as fit on a GPU, and 8 on a CPU.
        max_length: tokens of a row, to which longer prompts are cut; None for the model's `max_position_embeddings`.

    Raises:
        UserError: as `check_tasks` and `check_max_length`; `limit` is below 1; the hub gives no data; a choice is too
            long for the model.
    """
    check_max_length(model.config, max_length, type(model).__name__)
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
    names = dict.fromkeys(row for name in tasks for row in _rows_of(name, chosen["groups"]))
    results, versions = found["results"], found["versions"]
    for name in chosen["groups"].keys() & names.keys():
        leaves = chosen["groups"][name].get_all_tasks()
        samples = sum(results[task.task_name]["sample_len"] for task in leaves)
        results[name] = {"sample_len": samples, **results.get(name, {})}
    return [_score(name, results[name], versions.get(name, "N/A")) for name in names]


def _rows_of(name: str, groups: Mapping[str, Any]) -> Iterator[str]:
    """Yield the name, and the members' names of a group without a score of its own."""
    yield name
    if name in groups and not groups[name].has_aggregation:
        for member in groups[name].child_names:
            yield from _rows_of(member, groups)


def _score(name: str, result: dict[str, Any], version: object) -> TaskScore:
    values = [result.get(f"{key},none", "N/A") for key in ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")]
    scores = [None if v == "N/A" else float(v) for v in values]
    others = {key.removesuffix(",none"): value for key, value in result.items() if key.endswith(",none")}
    others = {
        key: float(value)
        for key, value in others.items()
        if not key.startswith("acc") and not key.endswith("_stderr") and isinstance(value, float | int)
    }
    return TaskScore(name, str(version), result["sample_len"], *scores, others)


@functools.cache
def _manager(tasks: tuple[str, ...]) -> Any:
    """Return the harness's `TaskManager` of these tasks alone: reading all 14,000 definitions takes ten seconds.

    All are read for a group whose members are defined in other folders.
    """
    from lm_eval.tasks import TaskManager

    known = folders()
    manager = TaskManager(include_defaults=False, include_path=sorted({known[name] for name in tasks}))
    complete = all(config for name in tasks for _, config in _definitions(manager.task_index, name))
    return manager if complete else TaskManager()


def _definitions(
    index: Mapping[str, Any], member: str | Mapping[str, Any], given: Mapping[str, Any] = MappingProxyType({})
) -> Iterator[tuple[str | None, dict[str, Any] | None]]:
    """Yield name and definition of each task of a task or group, as the harness's own files define them.

    Args:
        index: name → entry of the harness's index.
        member: a name, or the settings by which a group names or defines a member.
        given: settings of the groups around it, which replace those of its tasks.

    Yields:
        The name is None for a task that a group defines without one. The definition is None where the index has no
        task of this name.
    """
    own = {"task": member} if isinstance(member, str) else member
    name = own.get("group", own.get("task"))
    entry = index.get(name) if isinstance(name, str) else None
    if entry is not None and entry.tags and entry.cfg is None:  # a tag
        for task in sorted(entry.tags):
            yield from _definitions(index, {**own, "task": task}, given)
        return
    config = own if entry is None else entry.cfg or {}
    scoring = {key: value for key, value in config.items() if key in ("class", "output_type")}
    if isinstance(config.get("task"), list):
        for each in config["task"]:
            yield from _definitions(index, each, scoring | given)
    else:
        yield None if name is None else str(name), None if entry is None else config | given | own


def _load(tasks: Sequence[str], task_data: Path | None) -> dict[str, dict[str, Any]]:
    """Return the harness's `tasks` and `groups` by name, with their data loaded."""
    if task_data is not None and not task_data.is_dir():
        raise UserError(f"--task-data {task_data} is no folder (here is {Path.cwd()}); give the one with the files")
    manager, override = _manager(tuple(tasks)), {"class": task_class(task_data)}
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


def _language_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch_size: int | str, max_length: int | None
) -> Any:
    from lm_eval.models.huggingface import HFLM

    class Model(HFLM):
        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
            return super().loglikelihood(requests, disable_tqdm or not sys.stderr.isatty())

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
            return super().loglikelihood_rolling(requests, disable_tqdm or not sys.stderr.isatty())

        def _loglikelihood_tokens(
            self, requests: list[Any], disable_tqdm: bool = False, **options: Any
        ) -> list[tuple[float, bool]]:
            positions = learned_positions(self.model.config)
            for texts, _, tokens in requests:
                if texts is not None and not 0 < len(tokens) <= self.max_length:  # None in rolling likelihoods
                    helps = len(tokens) > 0 and (positions is None or len(tokens) <= positions)
                    most = self.max_length if helps or positions is None else positions
                    cure = f"give --max-length {len(tokens)}, or leave its task out" if helps else "leave its task out"
                    what = f"the choice {texts[1][:40]!r} has {len(tokens)} tokens, but a row takes 1 to {most}"
                    raise UserError(f"{what}; {cure}")
            # Rolling likelihoods ask for a bar for each batch, whatever they were told.
            return super()._loglikelihood_tokens(requests, disable_tqdm or not sys.stderr.isatty(), **options)

    # The harness finds the choice by counting the tokens of the prompt alone, so no end token may be added (T5).
    ends = tokenizer("a").input_ids[-1] == tokenizer.eos_token_id
    # Its search for the largest batch catches a GPU's lack of memory; on a CPU the process would be killed.
    batch_size = 8 if batch_size == "auto" and model.device.type == "cpu" else batch_size
    # Given here, as the harness's `evaluate` ignores a batch size given together with a model.
    options = {"batch_size": batch_size, "max_length": max_length, "add_bos_token": False if ends else None}
    # Logits in bfloat16 would be summed in it, which rounds a choice of some hundred tokens to a whole number.
    return Model(pretrained=model, tokenizer=tokenizer, softmax_dtype="float32", **options)


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
