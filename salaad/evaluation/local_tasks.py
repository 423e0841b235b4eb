"""The harness's own task class, zero-shot and with data from local files, whose rows are checked before any is scored.

A file TASK.SPLIT.jsonl has one JSON object a line, with the columns that the task's own file in the harness reads; the
split is the one that it scores, its test split or else its validation split. Further columns and files are ignored.
"""

import functools
import io
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.json
from jinja2 import Environment, TemplateSyntaxError, meta

from salaad.common.errors import UserError

SCORED = ("multiple_choice", "loglikelihood", "loglikelihood_rolling")
WITH_ERRORS = ("acc", "acc_norm")  # metrics whose standard errors are reported
_CURE = "write its rows as the hub has them"


def require_scored(config: Mapping[str, Any], name: str) -> None:
    """Raise a UserError with the `name` if a task's definition asks for the text that a model generates."""
    if config.get("output_type", "generate_until") not in SCORED:
        raise UserError(
            f"{name} is scored by what a model generates, and only choices and likelihoods are scored here; leave it "
            "out, or use the harness's own lm_eval"
        )


def task_class(task_data: Path | None) -> type:
    """Return the harness's task class without few-shot examples, with data from `task_data` unless that is None."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    read = functools.cache(_read)  # all subjects share one file

    class ZeroShot(ConfigurableTask):
        def __init__(self, config: dict[str, Any]) -> None:
            del config["class"]
            require_scored(config, f"task {config['task']}")
            try:
                super().__init__(config=config | {"num_fewshot": 0})
            except UserError:
                raise
            except Exception:  # of any class, from wherever the harness reads the first row
                if task_data is not None and hasattr(self, "features"):
                    _require_sound(self, self._file())
                raise
            if task_data is not None:
                _require_sound(self, self._file())

        def aggregation(self) -> dict[str, Callable[[list[Any]], float]]:
            """Return how each metric is computed from those of rows, hidden from the harness's bootstrap.

            It knows by identity the functions whose standard errors it takes 100,000 resamples for, a minute of all
            cores, such as a perplexity's. Of metrics other than accuracies these errors are not reported.
            """
            known = super().aggregation()
            return {name: how if name in WITH_ERRORS else functools.partial(how) for name, how in known.items()}

        def fewshot_docs(self) -> None:
            """Return no examples: the harness would read the training split even for zero-shot prompts."""

        def _file(self) -> Path:
            """Return the local file of the split that is scored; the subjects of MMLU may share one."""
            split = self.config.test_split or self.config.validation_split
            own = task_data / f"{self.config.task}.{split}.jsonl"
            shared = self.DATASET_PATH == "cais/mmlu" and not own.is_file()
            return task_data / f"mmlu.{split}.jsonl" if shared else own

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            """Read the rows from `task_data` if it is given, in place of a download by the harness."""
            if task_data is None:
                super().download(dataset_kwargs, **kwargs)
                return
            path = self._file()
            rows = read(path)
            if path.name.startswith("mmlu."):
                if "subject" not in rows.column_names:
                    raise UserError(f"{path} has rows without subject; {_CURE}")
                rows = rows.filter(pyarrow.compute.field("subject") == self.DATASET_NAME)
                if not rows.num_rows:
                    raise UserError(
                        f"{path.name} has no row of {self.DATASET_NAME}; add it, or give single mmlu_SUBJECTs"
                    )
            self.dataset = {self.config.test_split or self.config.validation_split: Dataset.from_list(rows.to_pylist())}

        def build_all_requests(self, **options: Any) -> None:
            with redirect_stderr(io.StringIO()):  # a progress bar of milliseconds for each of 57 subjects
                super().build_all_requests(**options)

    return ZeroShot


def _read(path: Path) -> pyarrow.Table:
    """Return the rows of a local file; a UserError if it is missing or holds no JSON lines."""
    if not path.is_file():
        raise UserError(f"--task-data {path.parent} lacks {path.name}; put it there, or leave its task out")
    try:
        # In one block, as a row must not cross the border of two.
        return pyarrow.json.read_json(path, pyarrow.json.ReadOptions(block_size=path.stat().st_size + 1))
    except pyarrow.ArrowInvalid as error:
        raise UserError(f"{path} is no file of JSON lines ({error}); download or write it again") from error


def _require_sound(task: Any, path: Path) -> None:
    """Raise a UserError for a row that the harness would score wrongly without an error.

    A template leaves a missing column empty, and an answer that is none of the choices counts as wrong.
    """
    columns = sorted(
        {name for part in ("doc_to_text", "doc_to_choice", "doc_to_target") for name in _columns(task, part)}
    )
    for name in columns:
        if name not in task.features:
            raise UserError(f"{path} has rows without {name}; {_CURE}")
    for number, doc in enumerate(task.eval_docs, start=1):
        empty = [name for name in columns if doc[name] is None]
        if empty:
            raise UserError(f"{path} has rows without {empty[0]}, such as the {number}.; {_CURE}")
        try:
            wrong = _fault(task, doc)
        except Exception as error:  # of any class, from a task's own code or template
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            raise UserError(f"row {number} of {path} cannot be read ({reason}); {_CURE}") from error
        if wrong:
            raise UserError(f"row {number} of {path} has {wrong}; {_CURE}")


def _fault(task: Any, doc: dict[str, Any]) -> str | None:
    """Return what a row has that would be scored wrongly, or None; errors are those of the task's own functions."""
    text, target = task.doc_to_text(doc), task.doc_to_target(doc)
    if task.OUTPUT_TYPE != "multiple_choice":
        return None if f"{text}{target}".strip() else "no words"
    choices = task.doc_to_choice(doc)
    among = f"none of its {len(choices)} choices"
    answer = text if task.multiple_input else target
    for one in answer if isinstance(answer, list) else [answer]:
        known = 0 <= one < len(choices) if isinstance(one, int) else one in choices
        if not known:
            return f"the answer {one!r}, which is {among}"
    label = doc.get("label")
    if _takes_any_label(task, doc, choices) and not (isinstance(label, int) and 0 <= label < len(choices)):
        return f"the label {label!r}, which is the number of {among}"
    return None


def _takes_any_label(task: Any, doc: dict[str, Any], choices: list[str]) -> bool:
    """Whether a task's function makes a choice of any label whatever, as COPA's takes all but 0 for 1."""
    if "label" not in doc or not callable(task.config.doc_to_target):
        return False
    try:
        return task.doc_to_target(doc | {"label": "no label"}) in choices
    except Exception:  # of any class: the function knows its labels
        return False


def _columns(task: Any, part: str) -> Iterator[str]:
    """Yield the columns that a part of a task's definition reads: a template's variables, or the column it names."""
    template = getattr(task.config, part)
    if not isinstance(template, str):  # a function, which fails by itself, or the same choices for every row
        return
    if re.fullmatch(r"[a-z]\w*", template):
        yield template
        return
    try:
        yield from meta.find_undeclared_variables(Environment().parse(template))
    except TemplateSyntaxError:
        return
