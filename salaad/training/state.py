"""The parts of a run that a checkpoint holds beside `RunState`: model, optimizer, method, random generators."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from salaad.common import distributed
from salaad.common.errors import UserError
from salaad.config.run import RunConfig
from salaad.methods.base import Method
from salaad.methods.low_rank_layers import projections
from salaad.methods.optimizer import load_optimizer_state, place_schedule
from salaad.methods.registry import method_of
from salaad.model.build import ModelFolder, NewModel
from salaad.model.folders import carry_over
from salaad.model.second_moments import save_second_moments, second_moments
from salaad.runs.checkpoints import TRAINED, RunState
from salaad.runs.records import Recorder


def model_to_train(
    source: NewModel | ModelFolder, config: RunConfig, checkpoint: Path | None, pad_id: int | None, eos_id: int | None
) -> PreTrainedModel:
    """The model in float32 on the CPU as the run's method trains it, with the weights of `checkpoint` if there is one.

    Args:
        source: what a new run begins with.
        config: the run's.
        checkpoint: what the run goes on from.
        pad_id: of the tokenizer.
        eos_id: of the tokenizer.

    Raises:
        UserError: the checkpoint cannot be opened.
    """
    method = method_of(config)
    exported = checkpoint is not None and method.replaces_modules
    if checkpoint is None:
        model = source.build(config.seed, pad_id, eos_id)
    elif not exported:
        model = ModelFolder(checkpoint / "model").build(config.seed)
    else:
        model = source.without_weights(pad_id, eos_id)
    if exported:
        with suppress(UserError):  # a model of no known family has none
            for layer in projections(model).values():  # what is made of them is loaded: nothing need be computed
                layer.to("meta")
    method.rebuild(model, config)
    if exported:  # model/ is another form of the model; the weights as they are trained lie beside it
        for module in model.modules():
            if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                module.to_empty(device="cpu", recurse=False)
        with _in_a_sentence(checkpoint / TRAINED) as path:
            load_model(model, path)
    return model


@dataclass(frozen=True)
class TrainingParts:
    """The parts of a run that change while it trains.

    Args:
        source: what the run began with; licence and card of a folder go into `model/` too.
        model: its export goes into `model/`, beside the tokenizer, as a Hugging Face folder.
        tokenizer: saved, never changed.
        method: its tensors go into `surrogate/` or `state/`.
        optimizer: its moments go into `state/`.
        schedule: placed by the step.
    """

    source: NewModel | ModelFolder
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    method: Method
    optimizer: Optimizer
    schedule: LambdaLR

    def write(self, folder: Path, state: RunState, recorder: Recorder) -> None:
        """This rank's part of a checkpoint, and the records' lines up to it.

        Args:
            folder: the checkpoint's.
            state: the step, the data position and what else JSON can say.
            recorder: its lines are on the disk before the checkpoint is.
        """
        self.method.save(folder)
        torch.save(_random_state(), folder / "state" / _random_file())
        if distributed.rank() == 0:
            self._export(folder / "model", recorder)
            if self.method.replaces_modules:
                save_model(self.model, str(folder / TRAINED))
            self.tokenizer.save_pretrained(folder / "model")
            if isinstance(self.source, ModelFolder):
                carry_over(self.source.path, folder / "model")
            torch.save(self.optimizer.state_dict(), folder / "state" / "optimizer.pt")
            if not self.method.replaces_modules:
                moments = second_moments(self.model, self.optimizer)
                save_second_moments(moments, folder / "state")
            state.write(folder)
            recorder.secure()

    def _export(self, folder: Path, recorder: Recorder) -> None:
        try:
            self.method.export(folder)
        except UserError as error:
            if not self.method.replaces_modules:  # then there would be no weights in the checkpoint at all
                raise
            self.model.config.save_pretrained(folder)
            recorder.say(f"{folder.name}/ of this checkpoint holds no weights ({error})")

    def restore(self, checkpoint: Path, state: RunState) -> None:
        """Take over what `write` wrote, at any world size. The model has its weights from `model_to_train` already."""
        self.method.load_state_dict(state.method)
        with _in_a_sentence(checkpoint):
            self.method.load(checkpoint)
        with _in_a_sentence(checkpoint / "state" / "optimizer.pt") as path:
            load_optimizer_state(self.optimizer, torch.load(path, map_location="cpu", weights_only=True))
        # The step alone places the schedule, so that a new folder may go on with another peak.
        place_schedule(self.schedule, state.step)
        random = checkpoint / "state" / _random_file()
        if random.exists():  # a rank that the earlier world did not have goes on with its own
            with _in_a_sentence(random):
                _restore_random_state(torch.load(random, weights_only=True))


@contextmanager
def _in_a_sentence(path: Path) -> Iterator[Path]:
    """Turn whatever is wrong with a file of tensors into one sentence.

    A pickle is read with `weights_only`, which builds tensors and plain values alone. What else it asks for, what is
    missing in it and what does not fit the run end in too many kinds of errors to list them.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the sentence says what is wrong with the file
            yield path
    except (UserError, MemoryError):
        raise
    except Exception as error:
        # torch's own message for a pickle with more in it explains how to load it all the same.
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
