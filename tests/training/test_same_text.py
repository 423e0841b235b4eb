"""Ranks that open different text, as on machines with other files, end in a sentence before the first step."""

import json
import os
from pathlib import Path

import train
from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.run import DataConfig
from salaad.data.text import digests_of, open_text
from tests.helpers.ranks import run_ranks
from tests.helpers.training import run_training


def sentences(starts: list[list[list[str]]], output: Path) -> list[str]:
    """Return how each start ends on this rank, which gets options of its own."""
    rank = str(distributed.rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    train.leave_together = lambda accelerator: accelerator.wait_for_everyone()
    said = []
    for i, options in enumerate(starts):
        try:
            run_training(options[distributed.rank()], output / str(i))
            said.append("trained")
        except UserError as error:
            said.append(str(error))
    return said


def test_what_a_call_leaves_in_a_tokenizer_is_no_difference_and_another_padding_is(text_files, tiny_tokenizer_dir):
    files = {"files": text_files["train"], "validation_files": text_files["validation"]}
    text = open_text(DataConfig(source="files", tokenizer=tiny_tokenizer_dir, **files), vocab_size=512)
    before = digests_of(text)
    text.tokenizer(["a b c"], truncation=True, max_length=2, padding="max_length")
    assert digests_of(text) == before
    text.tokenizer.pad_token = text.tokenizer.eos_token
    after = digests_of(text)
    assert {what for what in before if before[what] != after[what]} == {"id of padding"}


def test_a_rank_with_other_files_or_another_tokenizer_is_named(toy, tmp_path, text_files, tiny_tokenizer_dir):
    elsewhere, tokenizer = tmp_path / "elsewhere", tmp_path / "tokenizer"
    elsewhere.mkdir(), tokenizer.mkdir()
    same, longer = [], []
    for path in map(Path, text_files["train"]):
        (elsewhere / path.name).write_bytes(path.read_bytes())
        same.append(str(elsewhere / path.name))
        longer.append(str(tmp_path / path.name))
        Path(longer[-1]).write_text(path.read_text() + '{"text": "one more"}\n')
    for path in Path(tiny_tokenizer_dir).iterdir():
        (tokenizer / path.name).write_bytes(path.read_bytes())
    about = json.loads((tokenizer / "tokenizer.json").read_text())
    ids = about["model"]["vocab"]  # two letters change places
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (tokenizer / "tokenizer.json").write_text(json.dumps(about))
    validation = text_files["validation"] + [longer[0]]

    plain = toy(train__steps=1)
    others = [
        toy(train__steps=1, data__files=json.dumps(same)),
        toy(train__steps=1, data__files=json.dumps(longer)),
        toy(train__steps=1, data__validation_files=json.dumps(validation)),
        toy(train__steps=1, data__tokenizer=tokenizer),
    ]
    found = run_ranks(sentences, 2, tmp_path, [[plain, other] for other in others], tmp_path / "runs")
    assert found[0] == found[1]
    assert found[0][0] == "trained"
    for what, said in zip(("training files", "validation files", "tokenizer"), found[0][1:], strict=True):
        assert said.startswith(
            f"of 2 ranks, rank 1 would not train on the text of rank 0 (the difference: {what}); give every machine"
        )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["0"]
