"""The harness's scores against choices scored by hand, on task files made here; and every error message."""

import importlib.metadata
import json
import logging
import math
import random
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from salaad.common.errors import UserError
from salaad.config.commands import DEFAULT_TASKS
from salaad.evaluation import task_names
from salaad.evaluation.lm_harness import check_tasks, evaluate_tasks, harness_version
from scripts.reliability.toy_run import WORDS
from tests.helpers import deploying

lm_eval = pytest.importorskip("lm_eval")

ROWS = 12
LENGTH = 96  # tokens that the model reads: fewer than some prompts have
SUBJECTS = sorted(
    path.stem.removeprefix("mmlu_")
    for path in (Path(lm_eval.__file__).parent / "tasks/mmlu/default").glob("mmlu_*.yaml")
)
# Task → a row without its answer, and the prompt and the choices that the harness makes of a row.
TASKS = {
    "arc_challenge": (
        lambda text: {"question": text(6), "choices": {"text": [text(2), text(3), text(5)], "label": list("ABC")}},
        lambda row: (f"Question: {row['question']}\nAnswer:", row["choices"]["text"]),
    ),
    "boolq": (
        lambda text: {"passage": text(60), "question": text(5)},
        lambda row: (f"{row['passage']}\nQuestion: {row['question']}?\nAnswer:", ["no", "yes"]),
    ),
    "copa": (
        lambda text: {"premise": f"{text(4)}.", "question": "cause", "choice1": text(3), "choice2": text(4)},
        lambda row: (f"{row['premise'][:-1]} because", [f" {row['choice1']}", f" {row['choice2']}"]),
    ),
    "hellaswag": (
        lambda text: {
            "activity_label": text(2), "ctx_a": text(6), "ctx_b": text(2), "endings": [text(n) for n in (1, 3, 5, 9)],
        },
        lambda row: (f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}", row["endings"]),
    ),
    "mmlu": (
        lambda text: {"question": text(5), "choices": [text(1) for _ in range(4)]},
        lambda row: (
            "The following are multiple choice questions (with answers) about "
            f"{row['subject'].replace('_', ' ')}.\n\n{row['question']}\n"
            + "".join(f"{letter}. {choice}\n" for letter, choice in zip("ABCD", row["choices"], strict=True))
            + "Answer:",
            list("ABCD"),
        ),
    ),
    "piqa": (
        lambda text: {"goal": text(5), "sol1": text(3), "sol2": text(8)},
        lambda row: (f"Question: {row['goal']}\nAnswer:", [row["sol1"], row["sol2"]]),
    ),
}  # fmt: skip
FILES = {
    "arc_challenge": ("arc_challenge.test.jsonl", "answerKey", lambda index: "ABC"[index]),
    "boolq": ("boolq.validation.jsonl", "label", int),
    "copa": ("copa.validation.jsonl", "label", int),
    "hellaswag": ("hellaswag.validation.jsonl", "label", str),
    "mmlu": ("mmlu.test.jsonl", "answer", int),
    "piqa": ("piqa.validation.jsonl", "label", int),
}


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer_dir):
    return AutoTokenizer.from_pretrained(tiny_tokenizer_dir)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, vocab_size=512, max_position_embeddings=LENGTH, initializer_range=0.3)
    ).float()


def log_likelihood(model, tokenizer, prompt, choice):
    """Return the sum of log-probabilities of a choice's tokens; the model reads up to LENGTH tokens before the last."""
    start = tokenizer(prompt, add_special_tokens=False).input_ids
    ids = tokenizer(f"{prompt} {choice}", add_special_tokens=False).input_ids
    assert ids[: len(start)] == start
    rows = torch.tensor([ids[-LENGTH - 1 :]])
    with torch.no_grad():
        chances = model(rows[:, :-1]).logits[0].float().log_softmax(-1)
    return sum(chances[-k, rows[0, -k]].item() for k in range(1, len(ids) - len(start) + 1))


@pytest.fixture(scope="module")
def made(tmp_path_factory, model, tokenizer):
    """A folder of task files, and {task: [(right, right after dividing scores by the choice's characters)]}.

    The answers make the model right in two rows of three, so that a score agrees only if every row does.
    """
    pick = random.Random(1)
    folder, right, cut = tmp_path_factory.mktemp("tasks"), {}, 0
    for task, (make, show) in TASKS.items():
        file, column, answer = FILES[task]
        lines, right[task] = [], []
        for k in range(len(SUBJECTS) if task == "mmlu" else ROWS):
            row = make(lambda count: " ".join(pick.choices(WORDS, k=count))) | {"extra": None}
            row |= {"subject": SUBJECTS[k]} if task == "mmlu" else {}
            prompt, choices = show(row)
            cut += len(tokenizer(prompt).input_ids) > LENGTH
            scores = [log_likelihood(model, tokenizer, prompt, choice) for choice in choices]
            best = max(range(len(choices)), key=lambda i: scores[i])
            longest = max(range(len(choices)), key=lambda i: scores[i] / len(choices[i]))
            truth = best if k % 3 else (best + 1) % len(choices)
            lines.append(json.dumps(row | {column: answer(truth)}))
            right[task].append((best == truth, longest == truth))
        (folder / file).write_text("\n".join(lines) + "\n")
    assert cut > ROWS
    return folder, right


@pytest.fixture(scope="module")
def scores(made, model, tokenizer):
    return {score.task: score for score in evaluate_tasks(model, tokenizer, DEFAULT_TASKS, task_data=made[0])}


def mean_and_error(values):
    mean = sum(values) / len(values)
    return mean, math.sqrt(mean * (1 - mean) / (len(values) - 1))


@pytest.mark.parametrize("task", [task for task in TASKS if task != "mmlu"])
def test_scores_are_those_computed_by_hand(task, scores, made):
    score = scores[task]
    plain, normalized = zip(*made[1][task], strict=True)
    assert (score.samples, score.version) == (ROWS, "2.0" if task == "boolq" else "1.0")
    assert (score.acc, score.acc_stderr) == pytest.approx(mean_and_error(plain))
    assert score.acc == pytest.approx(2 / 3)
    if task in ("boolq", "copa"):
        assert (score.acc_norm, score.acc_norm_stderr) == (None, None)
    else:
        assert (score.acc_norm, score.acc_norm_stderr) == pytest.approx(mean_and_error(normalized))


def test_length_normalization_makes_a_difference(made):
    assert any(plain != normalized for task in ("piqa", "hellaswag") for plain, normalized in made[1][task])


def test_mmlu_is_one_row_over_its_57_subjects(scores, made):
    score = scores["mmlu"]
    assert (score.samples, score.version, score.acc_norm) == (57, "2", None)
    assert score.acc == pytest.approx(sum(plain for plain, _ in made[1]["mmlu"]) / 57)
    assert score.acc_stderr is None  # one row per subject has no standard error


def test_one_subject_and_the_order_asked_for(made, model, tokenizer):
    asked = ["piqa", "mmlu_stem", "mmlu_virology", "mmlu", "piqa"]
    found = evaluate_tasks(model, tokenizer, asked, task_data=made[0], limit=2)
    assert [(score.task, score.samples) for score in found] == [
        ("piqa", 2), ("mmlu_stem", 19), ("mmlu_virology", 1), ("mmlu", 57),
    ]  # fmt: skip
    assert found[2].acc == made[1]["mmlu"][SUBJECTS.index("virology")][0]


def test_limit_takes_the_first_rows(made, model, tokenizer):
    [score] = evaluate_tasks(model, tokenizer, ["copa"], task_data=made[0], limit=4)
    assert (score.samples, score.acc) == (4, 0.5)  # wrong in the first and the fourth


@pytest.mark.parametrize("batch_size", [1, 3, 50])
def test_batch_size_changes_no_score(batch_size, made, model, tokenizer, scores):
    tasks = ["hellaswag", "boolq"]
    assert evaluate_tasks(model, tokenizer, tasks, task_data=made[0], batch_size=batch_size) == [
        scores[task] for task in tasks
    ]


def test_the_end_token_of_a_tokenizer_is_no_part_of_a_choice(made, model, tiny_tokenizer_dir, scores):
    ending = AutoTokenizer.from_pretrained(tiny_tokenizer_dir)
    ending.backend_tokenizer.post_processor = TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    assert ending("a").input_ids[-1] == 1
    tasks = ["mmlu", "piqa"]
    assert evaluate_tasks(model, ending, tasks, task_data=made[0]) == [scores[task] for task in tasks]


def test_nothing_is_printed_written_loaded_or_left_changed(made, model, tokenizer, monkeypatch, capfd):
    def refuse(*args, **kwargs):
        raise AssertionError("local data needs no load_dataset")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    before = {path: path.stat().st_mtime_ns for path in made[0].rglob("*")}
    model.train()
    check_tasks(["hellaswag", "boolq"], made[0])
    evaluate_tasks(model, tokenizer, ["hellaswag", "boolq"], task_data=made[0], batch_size="auto:1", limit=2)
    assert model.training
    assert logging.root.manager.disable == logging.NOTSET
    assert {path: path.stat().st_mtime_ns for path in made[0].rglob("*")} == before
    assert capfd.readouterr() == ("", "")


def copy(made, tmp_path, task, change):
    """Write one task's file with changed rows to `tmp_path`, and return that folder."""
    name = FILES[task][0]
    rows = [json.loads(line) for line in (made[0] / name).read_text().splitlines()]
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in change(rows)))
    return tmp_path


def refused(tasks, folder):
    with pytest.raises(UserError) as caught:
        check_tasks(tasks, folder)
    sentence = str(caught.value)
    assert "\n" not in sentence and "; " in sentence
    return sentence


def test_an_unknown_name_is_told_with_the_nearest(made):
    assert "task helaswag is none of" in refused(["piqa", "helaswag"], made[0])
    assert refused(["helaswag"], None).endswith("did you mean hellaswag?")


def test_the_names_read_without_the_harness_are_those_that_it_knows():
    from lm_eval.tasks import TaskManager

    folder = Path(lm_eval.__file__).parent / "tasks"
    part = [folder / name for name in ("mmlu", "arc", "super_glue", "arabicmmlu", "glue", "truthfulqa", "bbh")]
    known = TaskManager(include_defaults=False, include_path=part)
    names = set(known.all_tasks) - {name for name, entry in known.task_index.items() if entry.cfg is None}
    assert len(names) > 300
    assert names <= set(task_names.folders())


def test_a_name_for_several_tasks_is_refused():
    assert "task ai2_arc is none of" in refused(["ai2_arc"], None)


def test_a_task_that_a_model_writes_the_answer_of_is_refused():
    assert "task gsm8k is scored by what a model generates" in refused(["gsm8k"], None)


def test_names_alone_need_no_data():
    check_tasks(DEFAULT_TASKS, None)


def test_a_missing_folder_or_file_is_named(tmp_path, made):
    assert f"{tmp_path / 'no'} is no folder" in refused(["piqa"], tmp_path / "no")
    folder = copy(made, tmp_path, "copa", lambda rows: rows)
    assert f"{folder} lacks boolq.validation.jsonl" in refused(["copa", "boolq"], folder)


def test_a_missing_subject_is_named(tmp_path, made):
    folder = copy(made, tmp_path, "mmlu", lambda rows: [row for row in rows if row["subject"] != "virology"])
    assert "mmlu.test.jsonl has no row of virology" in refused(["mmlu"], folder)
    check_tasks(["mmlu_anatomy"], folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: {key: value for key, value in row.items() if key != "goal"}, "has rows without goal"),
        (lambda row: row | {"sol2": None}, "has rows without sol2"),
        (lambda row: row | {"label": row["label"] + 2}, "which is none of its 2 choices"),
        (lambda row: row | {"label": "first"}, "has the answer 'first', which is none of its 2 choices"),
    ],
)
def test_rows_unlike_those_of_the_hub_are_refused(change, message, tmp_path, made):
    folder = copy(made, tmp_path, "piqa", lambda rows: [change(row) for row in rows])
    assert message in refused(["piqa"], folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "0"}, "has the label '0', which is the number of none of its 2 choices"),
        ({"label": 2}, "has the label 2, which is"),
        ({"question": "why"}, "cannot be read (KeyError: 'why')"),
        ({"choice1": ""}, "cannot be read (IndexError"),
    ],
)
def test_a_row_that_the_code_of_copa_cannot_tell_is_named(change, message, tmp_path, made):
    last = ROWS if "label" not in change else 1  # a file's column has one type
    folder = copy(made, tmp_path, "copa", lambda rows: [*rows[: last - 1], rows[last - 1] | change])
    assert f"row {last} of {folder / FILES['copa'][0]} {message}" in refused(["copa"], folder)


@pytest.mark.parametrize("label", [True, 1])
def test_labels_of_copa_that_are_numbers_are_taken(label, tmp_path, made):
    check_tasks(["copa"], copy(made, tmp_path, "copa", lambda rows: [row | {"label": label} for row in rows]))


@pytest.mark.parametrize(("task", "column"), [("wikitext", "page"), ("lambada_openai", "text")])
@pytest.mark.parametrize("text", ["", " \n"])
def test_a_text_without_words_is_refused(task, column, text, tmp_path):
    lines = [json.dumps({column: words}) for words in ("low rank", text)]
    (tmp_path / f"{task}.test.jsonl").write_text("\n".join(lines))
    assert f"row 2 of {tmp_path / task}.test.jsonl has no words" in refused([task], tmp_path)


def test_choices_that_the_harness_cannot_read_are_refused(tmp_path, made):
    folder = copy(made, tmp_path, "arc_challenge", lambda rows: [row | {"choices": ["one"]} for row in rows])
    assert f"row 1 of {folder / FILES['arc_challenge'][0]} cannot be read" in refused(["arc_challenge"], folder)


@pytest.mark.parametrize("text", ["", "no JSON\n", '{"label": 1}\n{"label": "1"}\n'])
def test_a_damaged_file_is_named(text, tmp_path):
    (tmp_path / "piqa.validation.jsonl").write_text(text)
    assert "piqa.validation.jsonl is no file of JSON lines" in refused(["piqa"], tmp_path)


def test_a_hub_out_of_reach_is_one_sentence(model, tokenizer, monkeypatch):
    def unreachable(path, **options):
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"of piqa cannot be read from the hub .*'baber/piqa'.*; give --task-data"):
        evaluate_tasks(model, tokenizer, ["piqa"])


def test_data_of_the_hub_scores_alike(made, model, tokenizer, scores, monkeypatch):
    """The data is as the hub gives it, with labels that have names."""
    file = made[0] / "boolq.validation.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    held = datasets.Dataset.from_list(rows).cast_column("label", datasets.ClassLabel(names=["False", "True"]))
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda **options: asked.append(options) or {"validation": held})
    assert evaluate_tasks(model, tokenizer, ["boolq"]) == [scores["boolq"]]
    assert [(options["path"], options["name"]) for options in asked] == [("aps/super_glue", "boolq")]


def test_a_limit_below_one_is_refused(model, tokenizer, made):
    with pytest.raises(UserError, match=r"limit is 0, but .* 1 row or more; give --limit 1"):
        evaluate_tasks(model, tokenizer, ["piqa"], task_data=made[0], limit=0)


def test_a_choice_too_long_for_the_model_is_named(tmp_path, made, model, tokenizer):
    folder = copy(made, tmp_path, "piqa", lambda rows: [row | {"sol1": "low rank " * LENGTH} for row in rows])
    with pytest.raises(UserError, match=f"' low rank .* tokens, but a row takes 1 to {LENGTH}; give --max"):
        evaluate_tasks(model, tokenizer, ["piqa"], task_data=folder)


def test_rows_longer_than_a_table_of_positions_are_refused(tmp_path, made, model, tokenizer):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    table = GPT2LMHeadModel(GPT2Config(**sizes, vocab_size=512, n_positions=LENGTH)).eval()
    table.save_pretrained(tmp_path / "gpt2")
    options = {"tasks": "piqa", "task-data": made[0], "max-length": LENGTH + 1}
    words = [f"--{name}={value}" for name, value in options.items()]
    said = deploying.refused("evaluate.py", "lm-eval", f"--checkpoint={tmp_path / 'gpt2'}", *words)
    assert said.endswith(f"gpt2 has {LENGTH} positions; give --max-length {LENGTH} or less")  # it has no tokenizer yet
    with pytest.raises(UserError, match=f"max_length is {LENGTH + 1}"):
        evaluate_tasks(table, tokenizer, ["piqa"], task_data=made[0], max_length=LENGTH + 1)
    assert evaluate_tasks(table, tokenizer, ["piqa"], task_data=made[0], max_length=LENGTH)[0].samples == ROWS
    assert evaluate_tasks(model, tokenizer, ["piqa"], task_data=made[0], max_length=LENGTH + 1)[0].samples == ROWS
    folder = copy(made, tmp_path, "piqa", lambda rows: [row | {"sol1": "low rank " * LENGTH} for row in rows])
    for length in (None, 8):
        with pytest.raises(UserError, match=f"tokens, but a row takes 1 to {LENGTH}; leave its task out$"):
            evaluate_tasks(table, tokenizer, ["piqa"], task_data=folder, max_length=length)
    with pytest.raises(UserError, match=r"tokens, but a row takes 1 to 2; give --max-length \d+, or"):
        evaluate_tasks(table, tokenizer, ["piqa"], task_data=made[0], max_length=2)


def test_a_machine_without_the_harness(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    assert harness_version() == importlib.metadata.version("lm_eval")
    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "lm-eval is not installed" in refused(["piqa"], None)
