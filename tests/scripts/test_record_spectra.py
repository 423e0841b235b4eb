"""scripts/research/record_spectra.py: what it records of a training, against the checkpoints of the same training."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file

from salaad.common.errors import UserError
from scripts import bench_admm
from scripts.research import record_spectra
from tests.helpers.training import run_training

GATE = "layers.0.mlp.gate_proj"


def test_the_recorded_spectrum_is_that_of_the_weight_and_matrices_can_be_drawn_like_it(toy, tmp_path, monkeypatch):
    words, output = toy(train__steps=4, salaad__every=1), tmp_path / "spectra.json"
    run_training([*words, "--train.save_every=1", "--train.keep_last=0"], tmp_path / "run")
    monkeypatch.setattr(record_spectra, "PHASES", {"early": 1, "late": 3})
    monkeypatch.setattr(sys, "argv", ["record_spectra.py", f"--output={output}", f"--blocks={GATE}", *words])
    record_spectra.main()
    found = json.loads(output.read_text())["blocks"][f"model.{GATE}"]
    assert set(found) == {"early", "late"}
    # Before the first update S and the dual are zero, so Z is the weight after the first step.
    weights = load_file(tmp_path / "run" / "checkpoints" / "step-0000001" / "model" / "model.safetensors")
    sigma = torch.linalg.svdvals(weights[f"model.{GATE}.weight"].double())
    torch.testing.assert_close(torch.tensor(found["early"]["sigma"]).double(), sigma / sigma[0], rtol=1e-5, atol=1e-6)
    assert found["early"]["tau"] > 0 and torch.tensor(found["early"]["drift"]).min() > 0
    Z, following, tau = bench_admm.draw(32, 48, found["late"], torch.Generator().manual_seed(0))
    assert Z.shape == following.shape == (32, 48) and tau == found["late"]["tau"]


def test_a_block_that_the_run_has_not_is_one_sentence(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(record_spectra.train, "main", lambda *_: pytest.fail("trains"))
    words = [f"--output={tmp_path / 'spectra.json'}", "--blocks=layers.9.mlp.gate_proj", *toy()]
    monkeypatch.setattr(sys, "argv", ["record_spectra.py", *words])
    with pytest.raises(UserError, match=re.escape("--blocks names layers.9.mlp.gate_proj, which is no block")):
        record_spectra.main()
