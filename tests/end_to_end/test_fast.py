"""fast.yaml laid over another file: bfloat16 products, a compiled model and an overlapped ADMM, all together."""

import os
import signal
from dataclasses import replace

import torch
import yaml

import train
from salaad.methods.salaad import round as admm_round
from salaad.methods.salaad.method import SalaadMethod
from salaad.methods.salaad.storage import read_surrogates
from salaad.spectral.cost import RATES
from tests.helpers.training import assert_same_records, last_checkpoint, lines, moments, run_training, weights

RATES_OF_A_GPU = replace(RATES["h100"], eigenvectors=1e-7)  # so low that products are chosen here too


EVALUATE = train.evaluate


def evaluate_without_compiling(*given):
    """Evaluate uncompiled: compiling the model again, without gradients, takes another quarter of this test's time."""
    with torch.compiler.set_stance("force_eager"):
        return EVALUATE(*given)


def test_dropout_draws_the_same_masks_compiled_and_not(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "evaluate", evaluate_without_compiling)
    torch._dynamo.reset()
    few = {"train__steps": 3, "train__log_every": 1, "train__save_every": 0, "model__num_hidden_layers": 1}
    arguments = ["--config=nano.yaml", *toy(method="lora", lora__dropout=0.5, **few)]
    for compiled in ("true", "false"):
        run_training([*arguments, f"--train.compile={compiled}"], tmp_path / compiled)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    losses = [[row["loss"] for row in lines(tmp_path / compiled)] for compiled in ("true", "false")]
    # Both round in float32, by about 1e-6 a step; with other masks they differ by 1e-3 from the second step on.
    torch.testing.assert_close(*losses, rtol=1e-5, atol=0)


def test_a_fast_run_trains_and_goes_on_to_the_bit(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(admm_round, "rates_of", lambda device: RATES_OF_A_GPU)
    monkeypatch.setattr(train, "evaluate", evaluate_without_compiling)
    torch._dynamo.reset()  # compilations by other tests count towards torch's limit
    # One layer, since compiling takes most of the time.
    arguments = ["--config=nano.yaml", "--config=fast.yaml", *toy(model__num_hidden_layers=1, train__batch=2)]
    run_training(arguments, tmp_path / "whole")

    after_step, pending = SalaadMethod.after_step, {6}  # when an ADMM update is under way

    def interrupted(self, *given):
        after_step(self, *given)
        if self.salaad.steps in pending:
            pending.discard(self.salaad.steps)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(SalaadMethod, "after_step", interrupted)
    for _ in range(2):
        run_training(arguments, tmp_path / "parts")
    assert not pending
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0  # something was compiled

    config = yaml.safe_load((tmp_path / "whole" / "config.yaml").read_text())
    assert (config["train"]["precision"], config["train"]["compile"]) == ("bf16-mixed", True)
    assert config["salaad"]["overlap"]
    losses = [row["loss"] for row in lines(tmp_path / "whole")]
    assert losses[-1] < losses[0] - 0.2
    assert {row["method"] for row in lines(tmp_path / "whole", "blocks.jsonl")} == {"gram", "products"}

    assert_same_records(tmp_path / "whole", tmp_path / "parts")
    whole, parts = last_checkpoint(tmp_path / "whole"), last_checkpoint(tmp_path / "parts")
    kept = [(moments(folder), read_surrogates(folder / "surrogate")) for folder in (whole, parts)]
    for first, second in ((weights(tmp_path / "whole"), weights(tmp_path / "parts")), *zip(*kept, strict=True)):
        torch.testing.assert_close(second, first, rtol=0, atol=0)
