"""Everything of a training run that a checkpoint holds, written and taken over bit for bit."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.common.files import read_object, write_json
from salaad.methods.base import FullRank
from salaad.methods.optimizer import load_optimizer_state
from salaad.methods.salaad.storage import load_surrogates, save_surrogates
from salaad.runs.records import Recorder

# What trainer.json holds, as it is before the first step.
FRESH = {
    "step": 0,
    "tokens": 0,
    "sums": (0, 0, 0),
    "discarded": 0,
    "due": False,
    "seconds": None,
    "data": None,
    "method": None,
    "config": None,
}


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer.json of a checkpoint.

    Raises:
        UserError: it is broken, or of another version.
    """
    path = checkpoint / "state" / "trainer.json"
    state = read_object(path)
    missing = [key for key in FRESH if key not in state]
    if missing:
        raise UserError(
            f"{path} does not say {missing[0]}, so another version wrote it; go on with that one, or begin a new run "
            f"from its model with --model.path {checkpoint / 'model'}"
        )
    return state


@dataclass(frozen=True)
class TrainingParts:
    """The parts of a run that change while it trains.

    Args:
        model: its weights go into `model/`, beside the tokenizer, as a Hugging Face folder.
        tokenizer: saved, never changed.
        method: its surrogates go into `surrogate/`.
        optimizer: its moments go into `state/`.
        schedule: placed by the step.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    method: FullRank
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler

    def write(self, folder: Path, trainer: dict[str, Any], recorder: Recorder) -> None:
        """This rank's part of a checkpoint, and the records' lines up to it.

        Args:
            folder: the checkpoint's.
            trainer: the step, the data position and what else JSON can say; `read_state` reads it.
            recorder: its lines are on the disk before the checkpoint is.
        """
        save_surrogates(self.method.surrogates(), folder / "surrogate")
        torch.save(_random_state(), folder / "state" / _random_file())
        if distributed.rank() == 0:
            self.model.save_pretrained(folder / "model")
            self.tokenizer.save_pretrained(folder / "model")
            torch.save(self.optimizer.state_dict(), folder / "state" / "optimizer.pt")
            write_json(trainer, folder / "state" / "trainer.json")
            recorder.secure()

    def restore(self, checkpoint: Path, trainer: dict[str, Any]) -> None:
        """Take over what `write` wrote, at any world size. The model is built from its own folder already."""
        with _in_a_sentence(checkpoint / "state" / "optimizer.pt") as path:
            load_optimizer_state(self.optimizer, torch.load(path, map_location="cpu", weights_only=True))
        # The step alone places the schedule, so that a new folder may go on with another peak.
        self.schedule.last_epoch = trainer["step"]
        rates = [base * self.schedule.lr_lambdas[0](trainer["step"]) for base in self.schedule.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.schedule._last_lr = rates
        self.method.load_state_dict(trainer["method"])
        load_surrogates(self.method.surrogates(), checkpoint / "surrogate")
        random = checkpoint / "state" / _random_file()
        if random.exists():  # a rank that the earlier world did not have goes on with its own
            with _in_a_sentence(random):
                _restore_random_state(torch.load(random, weights_only=True))


@contextmanager
def _in_a_sentence(path: Path) -> Iterator[Path]:
    """Turn whatever is wrong with a file of tensors into one sentence.

    It is a pickle, of which only tensors and plain values are built; what else it asks for, what is missing in it and
    what does not fit the run ends in too many kinds of errors to list them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a file that is refused, the sentence says enough
            yield path
    except (UserError, MemoryError):
        raise
    except Exception as error:
        # Of a pickle with more in it torch says how to run that all the same.
        unsafe = isinstance(error, UnpicklingError)
        why = "it holds more than tensors" if unsafe else " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(f"{path} does not fit this run or is broken ({why}); give a whole checkpoint of it") from None


def _random_file() -> str:
    return f"random-{distributed.rank():05d}.pt"


def _random_state() -> dict[str, Any]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _restore_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
