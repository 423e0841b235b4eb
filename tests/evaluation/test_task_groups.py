"""Groups of the harness's tasks, with and without a score of their own, on definitions and rows made here."""

import json

import pytest

from salaad.common.errors import UserError
from salaad.evaluation import lm_harness, task_names
from salaad.evaluation.lm_harness import check_tasks, evaluate_tasks
from salaad.evaluation.tables import accuracy_table
from tests.evaluation.test_lm_harness import model, tokenizer  # noqa: F401

lm_eval_tasks = pytest.importorskip("lm_eval.tasks")

CHOICE = {
    "output_type": "multiple_choice",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{answers}}",
    "doc_to_target": "answer",
    "metric_list": [{"metric": "acc", "aggregation": "mean"}],
}
MEAN = {"aggregate_metric_list": [{"metric": "acc", "aggregation": "mean", "weight_by_size": True}]}
HERE = {
    "one": CHOICE,
    "two": CHOICE | {"tag": ["both"]},
    "three": CHOICE | {"tag": ["both"]},
    "written": {"test_split": "test", "doc_to_text": "question", "doc_to_target": "answer"},  # generates by default
    "pair": {"task": ["one", {"task": "two", "num_fewshot": 5}]},
    "scored": {"task": ["both"], **MEAN},
    "nested": {"task": ["scored", "one", {"group": "inner", "task": ["two"]}]},
    "with_written": {"task": ["one", {"group": "inner", "task": ["written"]}], **MEAN},
    "made_to_write": {"task": ["one"], "output_type": "generate_until"},
    "with_no_name": {"task": ["one", CHOICE]},
    "with_its_own": {"task": ["one", {"task": "unnamed", **CHOICE}]},
}
ELSEWHERE = {"mixed": {"task": ["one", "both"]}}


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """The folder of the rows of three tasks: 2, 3 and 4; the harness is given the definitions above alone."""
    known = {}
    for folder, definitions in (("here", HERE), ("elsewhere", ELSEWHERE)):
        (tmp_path / folder).mkdir()
        for name, definition in definitions.items():
            key = "group" if isinstance(definition.get("task"), list) else "task"
            (tmp_path / folder / f"{name}.yaml").write_text(json.dumps({key: name, **definition}))  # JSON is YAML
            known[name] = tmp_path / folder
    known["inner"] = tmp_path / "here"  # as a name inside another definition is found
    usual = lm_eval_tasks.TaskManager
    everything = {"include_defaults": False, "include_path": [tmp_path / "here", tmp_path / "elsewhere"]}
    monkeypatch.setattr(lm_eval_tasks, "TaskManager", lambda **options: usual(**(options or everything)))
    for module in (lm_harness, task_names):
        monkeypatch.setattr(module, "folders", lambda: known)
    lm_harness._manager.cache_clear()
    for count, name in enumerate(("one", "two", "three"), start=2):
        lines = [{"question": f"the rank {k}", "answers": ["is low", "is"], "answer": k % 2} for k in range(count)]
        (tmp_path / f"{name}.test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield tmp_path
    lm_harness._manager.cache_clear()


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("pair", {"pair": 5, "one": 2, "two": 3}),
        ("scored", {"scored": 7}),
        ("nested", {"nested": 12, "scored": 7, "one": 2, "nested::inner": 3, "two": 3}),
        ("mixed", {"mixed": 9, "one": 2, "three": 4, "two": 3}),
    ],
)
def test_a_group_gives_its_score_or_its_members(group, expected, rows, model, tokenizer):  # noqa: F811
    check_tasks([group], rows)
    found = evaluate_tasks(model, tokenizer, [group], task_data=rows)
    assert {score.task: score.samples for score in found} == expected
    assert found[0].task == group and len(found) == len(expected)
    scored = {score.task for score in found if score.acc is not None}
    assert scored == set(expected) - {"pair", "nested", "nested::inner", "mixed"}
    alone = {score.task: score for score in evaluate_tasks(model, tokenizer, ["one", "two", "three"], task_data=rows)}
    for score in found:
        if score.task in alone:
            assert score.acc == alone[score.task].acc
    if group == "scored":
        correct = sum(alone[name].acc * alone[name].samples for name in ("two", "three"))
        assert found[0].acc == pytest.approx(correct / 7)
    about = {"variant": "X", "model": "m", "dtype": "float32", "harness": "0"}
    assert f"| {group}" in accuracy_table([vars(score) | about for score in found])


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ("written", "task written is scored by what a model generates"),
        ("with_written", "task written of group with_written is scored by what a model generates"),
        ("made_to_write", "task one of group made_to_write is scored by what a model generates"),
        ("with_its_own", "task unnamed of group with_its_own is defined only inside another definition"),
        ("with_no_name", "group with_no_name defines a task without a name"),
        ("inner", "task inner is defined only inside another definition"),
    ],
)
def test_a_member_that_cannot_be_scored_is_refused_without_data_or_a_model(group, words, rows):
    with pytest.raises(UserError, match=words) as caught:
        check_tasks(["one", group], None)
    assert "; leave it out" in str(caught.value)
