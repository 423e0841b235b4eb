"""Harness tasks that our code has no special case for, on rows made by hand, against choices scored by hand."""

import copy
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from salaad.common.errors import UserError
from salaad.evaluation.lm_harness import check_tasks, evaluate_tasks
from salaad.evaluation.tables import accuracy_table
from scripts.reliability.toy_run import ROOT, WORDS
from tests.evaluation.test_lm_harness import log_likelihood, model, tokenizer  # noqa: F401
from tests.helpers import deploying

ROWS = 8
LETTERS = "ABCDE"


def listed(choices: list[str]) -> str:
    return "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False))


# Task → split, a row but for its answer, the prompt and choices of a row by the task's definition, the answer's column.
TASKS: dict[str, tuple[str, Callable, Callable, Callable]] = {
    "arc_easy": (
        "test",
        lambda text: {"question": text(6), "choices": {"text": [text(2), text(3), text(5)], "label": list("ABC")}},
        lambda row: (f"Question: {row['question']}\nAnswer:", row["choices"]["text"]),
        lambda row, k: {"answerKey": "ABC"[k]},
    ),
    "openbookqa": (
        "test",
        lambda text: {"question_stem": text(6), "choices": {"text": [text(2), text(3)], "label": list("AB")}},
        lambda row: (row["question_stem"], row["choices"]["text"]),
        lambda row, k: {"answerKey": "AB"[k]},
    ),
    "commonsense_qa": (
        "validation",
        lambda text: {"question": text(5), "choices": {"text": [text(2) for _ in LETTERS], "label": list(LETTERS)}},
        lambda row: (f"Question: {row['question']}\n{listed(row['choices']['text'])}\nAnswer:", list(LETTERS)),
        lambda row, k: {"answerKey": LETTERS[k]},
    ),
    "rte": (
        "validation",
        lambda text: {"sentence1": text(6), "sentence2": text(3)},
        lambda row: (f"{row['sentence1']}\nQuestion: {row['sentence2']} True or False?\nAnswer:", ["True", "False"]),
        lambda row, k: {"label": k},
    ),
    "cb": (
        "validation",
        lambda text: {"premise": text(6), "hypothesis": text(3)},
        lambda row: (
            f"{row['premise']}\nQuestion: {row['hypothesis']}. True, False, or Neither?\nAnswer:",
            ["True", "False", "Neither"],
        ),
        lambda row, k: {"label": k},
    ),
    "swag": (
        "validation",
        lambda text: {"startphrase": text(6), **{f"ending{k}": text(k + 1) for k in range(4)}},
        lambda row: (row["startphrase"], [row[f"ending{k}"] for k in range(4)]),
        lambda row, k: {"label": k},
    ),
    "social_iqa": (
        "validation",
        lambda text: {"context": text(6), "question": text(3), **{f"answer{x}": text(2) for x in "ABC"}},
        lambda row: (f"Q: {row['context']} {row['question']}\nA:", [row[f"answer{x}"] for x in "ABC"]),
        lambda row, k: {"label": str(k + 1)},
    ),
    "headqa_en": (
        "test",
        lambda text: {"qtext": text(6), "answers": [{"aid": k + 1, "atext": text(k + 1)} for k in range(4)]},
        lambda row: (f"Question: {row['qtext']}\nAnswer:", [answer["atext"] for answer in row["answers"]]),
        lambda row, k: {"ra": k + 1},
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, model, tokenizer):  # noqa: F811
    """A folder of task files, and {task: whether the model is right in each row}, true in two rows of three."""
    pick = random.Random(2)
    text = lambda count: " ".join(pick.choices(WORDS, k=count))  # noqa: E731
    folder, right = tmp_path_factory.mktemp("any"), {}
    for task, (split, make, show, answer) in TASKS.items():
        lines, right[task] = [], []
        for k in range(ROWS):
            row = make(text)
            prompt, choices = show(row)
            scores = [log_likelihood(model, tokenizer, prompt, choice) for choice in choices]
            best = max(range(len(choices)), key=lambda i: scores[i])
            truth = best if k % 3 else (best + 1) % len(choices)
            lines.append(json.dumps(row | answer(row, truth)))
            right[task].append(best == truth)
        (folder / f"{task}.{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder, right


@pytest.mark.parametrize("task", TASKS)
def test_accuracies_are_those_computed_by_hand(task, made, model, tokenizer):  # noqa: F811
    [score] = evaluate_tasks(model, tokenizer, [task], task_data=made[0])
    assert (score.samples, score.acc) == (ROWS, pytest.approx(sum(made[1][task]) / ROWS))


def test_further_metrics_stand_in_the_table(made, model, tokenizer):  # noqa: F811
    [score] = evaluate_tasks(model, tokenizer, ["cb"], task_data=made[0])
    assert set(score.others) == {"f1"}
    row = {**vars(score), "variant": "X", "model": "m", "dtype": "float32", "harness": "0"}
    assert f"f1 {score.others['f1']:.4g}" in accuracy_table([row])


def write(folder, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_sciq_whose_answer_is_always_the_last_choice(tmp_path, model, tokenizer):  # noqa: F811
    pick, rows, right = random.Random(3), [], []
    for _ in range(ROWS):
        texts = [" ".join(pick.choices(WORDS, k=n)) for n in (4, 5, 2, 2, 2, 2)]
        support, question, *choices = texts
        keys = ("distractor1", "distractor2", "distractor3", "correct_answer")
        rows.append({"support": f"  {support}", "question": question, **dict(zip(keys, choices, strict=True))})
        prompt = f"{support}\nQuestion: {question}\nAnswer:"
        scores = [log_likelihood(model, tokenizer, prompt, choice) for choice in choices]
        right.append(max(range(4), key=lambda i: scores[i]) == 3)
    write(tmp_path, "sciq.test.jsonl", rows)
    [score] = evaluate_tasks(model, tokenizer, ["sciq"], task_data=tmp_path)
    assert score.acc == pytest.approx(sum(right) / ROWS)


def test_winogrande_whose_choices_are_beginnings(tmp_path, model, tokenizer):  # noqa: F811
    pick, rows, right = random.Random(4), [], []
    for k in range(ROWS):
        begin, one, two, end = (" ".join(pick.choices(WORDS, k=n)) for n in (3, 1, 2, 3))
        answer = 1 + k % 2
        rows.append({"sentence": f"{begin} _ {end}", "option1": one, "option2": two, "answer": str(answer)})
        scores = [log_likelihood(model, tokenizer, f"{begin} {option}", end) for option in (one, two)]
        right.append(1 + (scores[1] > scores[0]) == answer)
    write(tmp_path, "winogrande.validation.jsonl", rows)
    [score] = evaluate_tasks(model, tokenizer, ["winogrande"], task_data=tmp_path)
    assert score.acc == pytest.approx(sum(right) / ROWS)


def test_lambada_whose_score_is_the_last_word(tmp_path, model, tokenizer):  # noqa: F811
    pick, rows, chances, greedy = random.Random(5), [], [], []
    for _ in range(ROWS):
        *start, last = pick.choices(WORDS, k=9)
        rows.append({"text": " ".join((*start, last))})
        before, whole = (tokenizer(text).input_ids for text in (" ".join(start), rows[-1]["text"]))
        with torch.no_grad():
            log_p = model(torch.tensor([whole])).logits[0, :-1].log_softmax(-1)
        positions = range(len(before) - 1, len(whole) - 1)
        chances.append(sum(log_p[i, whole[i + 1]].item() for i in positions))
        greedy.append(all(log_p[i].argmax().item() == whole[i + 1] for i in positions))
    write(tmp_path, "lambada_openai.test.jsonl", rows)
    [score] = evaluate_tasks(model, tokenizer, ["lambada_openai"], task_data=tmp_path)
    assert score.acc == pytest.approx(sum(greedy) / ROWS)
    assert score.others["perplexity"] == pytest.approx(math.exp(-sum(chances) / ROWS), rel=1e-4)


@pytest.mark.parametrize("task", ["lambada_openai", "wikitext"])
def test_nothing_is_drawn_without_a_terminal_nor_resampled_for_errors_that_no_one_sees(
    task,
    tmp_path,
    model,  # noqa: F811
    tokenizer,  # noqa: F811
    monkeypatch,
    capfd,
):
    def refuse(*args, **kwargs):
        raise AssertionError("a bootstrap whose result is dropped")

    monkeypatch.setattr("lm_eval.api.metrics.bootstrap_stderr", refuse)
    text = [" ".join(random.Random(k).choices(WORDS, k=6)) for k in range(ROWS)]
    write(tmp_path, f"{task}.test.jsonl", [{"text": line, "page": line} for line in text])
    [score] = evaluate_tasks(model, tokenizer, [task], task_data=tmp_path)
    assert capfd.readouterr() == ("", "")
    if score.acc is not None:  # of shares: the sample's standard deviation over the root of the rows
        assert score.acc_stderr == pytest.approx(math.sqrt(score.acc * (1 - score.acc) / (ROWS - 1)))


def test_the_perplexity_of_a_running_text(tmp_path, model, tokenizer):  # noqa: F811
    page = " ".join(random.Random(6).choices(WORDS, k=30))
    write(tmp_path, "wikitext.test.jsonl", [{"page": page}])
    [score] = evaluate_tasks(model, tokenizer, ["wikitext"], task_data=tmp_path)
    ids = [tokenizer.eos_token_id, *tokenizer(page).input_ids]
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    total = sum(log_p[i, ids[i + 1]].item() for i in range(len(ids) - 1))
    assert score.acc is None
    assert score.others["word_perplexity"] == pytest.approx(math.exp(-total / 30), rel=1e-4)


def test_scores_of_a_model_in_bfloat16_are_sums_in_float32(tmp_path, model, tokenizer):  # noqa: F811
    model = copy.deepcopy(model).bfloat16()
    page = " ".join(random.Random(6).choices(WORDS, k=30))
    write(tmp_path, "wikitext.test.jsonl", [{"page": page}])
    [score] = evaluate_tasks(model, tokenizer, ["wikitext"], task_data=tmp_path)
    ids = [tokenizer.eos_token_id, *tokenizer(page).input_ids]
    with torch.no_grad():
        log_p = model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
    total = sum(log_p[i, ids[i + 1]].item() for i in range(len(ids) - 1))
    # Summed in bfloat16, a total near -300 would be off by up to 1, and the perplexity by 3 %.
    assert score.others["word_perplexity"] == pytest.approx(math.exp(-total / 30), rel=1e-3)


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


@pytest.mark.parametrize(
    ("task", "change", "words"),
    [
        (
            "openbookqa",
            lambda row: {k: v for k, v in row.items() if k != "question_stem"},
            "rows without question_stem",
        ),
        ("rte", lambda row: {k: v for k, v in row.items() if k != "sentence2"}, "has rows without sentence2"),
        ("swag", lambda row: row | {"ending2": None}, "has rows without ending2"),
        ("commonsense_qa", lambda row: row | {"answerKey": "F"}, "has the answer 'F', which is none of its 5 choices"),
        ("headqa_en", lambda row: row | {"ra": 9}, "has the answer 8, which is none of its 4 choices"),
    ],
)
def test_what_the_harness_would_pass_over_in_silence_is_said(task, change, words, tmp_path, made):
    name = f"{task}.{TASKS[task][0]}.jsonl"
    rows = [json.loads(line) for line in (made[0] / name).read_text().splitlines()]
    write(tmp_path, name, [change(row) for row in rows])
    with pytest.raises(UserError) as error:
        check_tasks([task], tmp_path)
    assert words in str(error.value)
    assert name in str(error.value)


def test_a_column_that_code_of_the_task_reads_is_named(tmp_path):
    write(tmp_path, "winogrande.validation.jsonl", [{"sentence": "a _ b", "option1": "x", "answer": "1"}])
    with pytest.raises(UserError, match="option2"):
        check_tasks(["winogrande"], tmp_path)


def test_the_harness_itself_opens_a_factored_folder_through_the_documented_line(runs, tmp_path):
    deploying.compress(runs / "salaad", tmp_path / "small", budget=0.7)
    write(tmp_path, "rows.jsonl", [{"question": "the rank", "answers": ["is low", "is sparse"], "answer": 0}])
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "output_type": "multiple_choice",
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{answers}}",
        "doc_to_target": "answer",
    }
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "mine.yaml").write_text(json.dumps(task))  # JSON is YAML
    line = "import salaad; from lm_eval.__main__ import cli_evaluate; cli_evaluate()"
    options = ["--model", "hf", "--model_args", f"pretrained={tmp_path / 'small'}", "--device", "cpu"]
    options += ["--tasks", "mine", "--include_path", str(tmp_path / "tasks")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", line, "run", *options], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|mine" in done.stdout
    assert "newly initialized" not in done.stderr
