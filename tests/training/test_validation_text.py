"""Validation text that cannot be read, or only after a long wait, costs no trained step: the run saves and goes on."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import train
from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.methods.salaad.method import SalaadMethod
from tests.helpers.ranks import run_ranks
from tests.helpers.training import assert_same_records, last_checkpoint, run_training


def with_own_validation(toy, text_files, folder: Path, **overrides) -> tuple[list[str], Path]:
    """Return options of a toy run that evaluates at its end, and its validation file, a copy in `folder`."""
    folder.mkdir(parents=True)
    own = Path(shutil.copy(text_files["validation"][0], folder))
    return toy(train__steps=3, data__validation_files=json.dumps([str(own)]), **overrides), own


def at_the_last_step(do) -> None:
    """Call `do` once, after the ADMM's turn in the third step, and put the method back."""
    original = SalaadMethod.after_step

    def after_step(self, *given):
        original(self, *given)
        if self.salaad.steps == 3:
            SalaadMethod.after_step = original
            do()

    SalaadMethod.after_step = after_step


def break_on_the_second(options: list[list[str]], files: list[Path], output: Path) -> tuple[str, str, bool]:
    """Train while the second rank loses its validation file; return how that ends on this rank, and what was saved."""
    rank = distributed.rank()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"ACCELERATE_USE_CPU": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    train.leave_together = lambda accelerator: accelerator.wait_for_everyone()
    run_training(options[rank], output / "whole")
    away = files[rank].with_suffix(".away")
    if rank == 1:
        at_the_last_step(lambda: files[rank].rename(away))
    try:
        run_training(options[rank], output / "parts")
        said = "trained"
    except UserError as error:
        said = str(error)
    distributed.barrier()
    saved = last_checkpoint(output / "parts").name
    if rank == 1:
        away.rename(files[rank])
    run_training(options[rank], output / "parts")
    return said, saved, (output / "parts" / "summary.json").exists()


def test_a_rank_that_loses_its_validation_text_costs_no_step(toy, text_files, tmp_path):
    made = [with_own_validation(toy, text_files, tmp_path / str(rank), data__retries=0) for rank in range(2)]
    options, files = zip(*made, strict=True)
    found = run_ranks(break_on_the_second, 2, tmp_path, list(options), list(files), tmp_path / "runs")
    assert found[0] == found[1]
    said, saved, finished = found[0]
    assert said.startswith(f"{files[1]} cannot be read")
    assert saved == "step-0000003"
    assert finished
    assert_same_records(tmp_path / "runs" / "whole", tmp_path / "runs" / "parts")


def test_a_signal_ends_the_wait_for_validation_text(toy, text_files, tmp_path):
    """The pauses before the last try add up to a minute, after which the run would end in an error."""
    options, file = with_own_validation(toy, text_files, tmp_path / "text")
    away = file.with_suffix(".away")
    run_training(options, tmp_path / "whole")

    def stop_in_the_first_pause() -> None:
        file.rename(away)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    at_the_last_step(stop_in_the_first_pause)
    run_training(options, tmp_path / "parts")
    assert last_checkpoint(tmp_path / "parts").name == "step-0000003"
    assert not (tmp_path / "parts" / "summary.json").exists()
    away.rename(file)
    run_training(options, tmp_path / "parts")
    assert_same_records(tmp_path / "whole", tmp_path / "parts")
