"""A model that trains in bfloat16 computes its positions as the folder that it is saved to does."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.reliability.toy_run import make_documents
from tests.helpers.training import last_checkpoint, lines, run_training

LENGTH = 512


def test_the_perplexity_of_a_run_in_bfloat16_is_that_of_the_folder_that_plain_transformers_opens(toy, tmp_path):
    """The rows are long, as an error in the frequencies of rotary positions grows with the position.

    Both sides compute the same numbers in bfloat16; 1e-5 is for the order of sums in float32.
    """
    text = tmp_path / "validation.jsonl"
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in make_documents(100, seed=5)))
    options = {"data__packing": "true", "data__sequence_length": LENGTH, "data__validation_files": text}
    options |= {
        "train__precision": "bf16",
        "train__steps": 60,
        "train__batch": 2,
        "optimizer__lr": 0.01,
        "train__log_every": 60,
    }
    run_training(toy(**options, method="full_rank"), tmp_path / "run")
    folder = last_checkpoint(tmp_path / "run") / "model"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = []
    for line in text.read_text().splitlines():
        ids += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    total = count = 0
    for start in range(0, len(ids), LENGTH):
        row = torch.tensor([ids[start : start + LENGTH]])
        log_p = model(row).logits[0, :-1].detach().float().log_softmax(-1)
        total -= log_p.gather(1, row[0, 1:, None]).sum().item()
        count += len(row[0]) - 1
        if start + LENGTH >= 2000:
            break
    [found] = lines(tmp_path / "run", "evaluations.jsonl")
    assert found["tokens"] == count
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)
