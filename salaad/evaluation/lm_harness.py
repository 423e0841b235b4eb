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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from salaad.common.errors import UserError
from salaad.evaluation.local_tasks import SCORED, task_class
from salaad.evaluation.task_names import folders, require_known

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
        UserError: the harness is not installed; it does not know a name; a task is scored by what a model generates;
            a folder, file, subject or column of `task_data` is missing, or a row has an answer that is no choice.
    """
    harness_version()
    require_known(tasks)
    with _quiet():
        index = _manager(tuple(tasks)).task_index
        for name in tasks:
            config = index[name].cfg or {}
            if config.get("class"):
                raise UserError(
                    f"task {name} is code of its own and has no one score; leave it out, or use lm_eval itself"
                )
            if "output_type" in config and config["output_type"] not in SCORED:
                task_class(None)(config | {"class": None})  # raises, and says why
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
    """Return zero-shot scores of a causal LM, computed on its device: one for each task or group asked for.

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
    """Return the harness's `TaskManager` of these tasks alone: reading all 14,000 definitions takes ten seconds."""
    from lm_eval.tasks import TaskManager

    known = folders()
    return TaskManager(include_defaults=False, include_path=sorted({known[name] for name in tasks}))


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

        def _loglikelihood_tokens(self, requests: list[Any], *args: Any, **kwargs: Any) -> list[tuple[float, bool]]:
            for texts, _, tokens in requests:
                if texts is not None and not 0 < len(tokens) <= self.max_length:  # None in rolling likelihoods
                    what = (
                        f"the choice {texts[1][:40]!r} has {len(tokens)} tokens, but a row takes 1 to {self.max_length}"
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
