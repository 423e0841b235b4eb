"""The parts of a run that a checkpoint holds besides `RunState`: model, optimizer, method, random generators."""

from collections import ChainMap
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model, save_model
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from salaad.common import distributed
from salaad.common.errors import UserError, in_a_sentence
from salaad.common.files import at_home, is_file, tokenizer_errors
from salaad.config.run import RunConfig
from salaad.methods.base import Method
from salaad.methods.low_rank_layers import projections
from salaad.methods.optimizer import place_schedule
from salaad.methods.registry import method_of
from salaad.model.build import ModelFolder, NewModel, extend_positions, model_source
from salaad.model.hashed_saves import hashed_saves
from salaad.model.second_moments import Moments, save_second_moments, second_moments
from salaad.runs.checkpoints import TRAINED, Checkpoints, RunState
from salaad.runs.records import Recorder
from salaad.training.optimizer_files import load_optimizer, save_optimizer


def source_of(config: RunConfig, output: str, resume: str) -> tuple[NewModel | ModelFolder, str]:
    """Return the model that a run begins with, and a remark if any.

    Where the folder of `model.path` is gone, a run that goes on needs only what its checkpoints hold of it as well:
    sizes, tokenizer and licence.

    Args:
        config: the run's configuration.
        output: the option, the run's folder.
        resume: the option, by which a new run may begin with a checkpoint of another one.

    Raises:
        UserError: there is no such model; or it is gone, and the run's checkpoints hold another form of it.
    """
    try:
        return model_source(config.model, config.data.sequence_length), ""
    except UserError:
        path, checkpoint = config.model.path, None
        if path is None or is_file(at_home(path) / "config.json"):  # not gone, but broken
            raise
        with suppress(UserError):
            checkpoint = Checkpoints(at_home(output) / "checkpoints").latest()
        checkpoint = checkpoint or at_home(resume)
        if not is_file(checkpoint / "state" / "trainer.json"):
            raise
        if method_of(config).replaces_modules:
            raise UserError(
                f"model.path {path} is gone, and {checkpoint} holds only what {config.method} made of it, from which "
                "the run cannot go on; put the folder back"
            ) from None
        return ModelFolder(
            checkpoint / "model"
        ), f"model.path {path} is gone; what the run still needs of it is in {checkpoint}"


def model_to_train(
    source: NewModel | ModelFolder, config: RunConfig, checkpoint: Path | None, pad_id: int | None, eos_id: int | None
) -> PreTrainedModel:
    """Return the model as the run's method trains it, in float32 on the CPU, with the weights of `checkpoint` if given.

    Args:
        source: the model that a new run begins with.
        config: the run's configuration.
        checkpoint: the checkpoint that the run goes on from, if any.
        pad_id: the tokenizer's padding id.
        eos_id: the tokenizer's end-of-sequence id.

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
            for layer in projections(model).values():  # their replacements are loaded, so nothing need be computed
                layer.to("meta")
    extend_positions(model.config, config.data.sequence_length)
    method.rebuild(model, config)
    if exported:  # model/ is another form of the model; the weights as they are trained lie beside it
        for module in model.modules():
            if any(tensor.is_meta for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                module.to_empty(device="cpu", recurse=False)
        with in_a_sentence(checkpoint / TRAINED) as path:
            load_model(model, path)
    return model


@dataclass(frozen=True)
class TrainingParts:
    """The parts of a run that change while it trains.

    Args:
        terms: name → content of the files of the model that the run began with which go into `model/` too, such as its
            licence; they were read at the start, as its folder may be gone when a checkpoint is saved.
        model: its export goes into `model/`, beside the tokenizer, as a Hugging Face folder.
        tokenizer: saved, never changed.
        method: its tensors go into `surrogate/` or `state/`.
        optimizer: its moments go into `state/`.
        schedule: restored from the step alone.
        sharded: whether each rank keeps the moments of some weights only.
    """

    terms: Mapping[str, bytes]
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerFast
    method: Method
    optimizer: Optimizer
    schedule: LambdaLR
    sharded: bool = False

    def writer(self, state: RunState, recorder: Recorder) -> Callable[[Path], dict[str, str]]:
        """Return a function that writes this rank's part of a checkpoint and flushes the records' lines; collective.

        Args:
            state: the step, the data position and other state that is written as JSON.
            recorder: its lines are flushed to the disk before the checkpoint is complete.

        Returns:
            A function of the checkpoint's folder that exchanges nothing with other ranks. It returns name in the folder
            → SHA-256, of files that were hashed while they were written.

        Raises:
            NotSavedError: on every rank, if any cannot prepare the function.
        """
        kept = [{}]  # the second moments that each rank keeps
        if self.sharded and not self.method.replaces_modules:
            kept = distributed.together(lambda: second_moments(self.model, self.optimizer))
        write_method = self.method.writer()
        return lambda folder: self._write(folder, state, recorder, ChainMap(*kept), write_method)

    def _write(
        self,
        folder: Path,
        state: RunState,
        recorder: Recorder,
        kept: Moments,
        write_method: Callable[[Path], Mapping[str, str]],
    ) -> dict[str, str]:
        hashed = dict(write_method(folder))
        torch.save(_random_state(), folder / "state" / _random_file())
        copies = 2 if self.method.replaces_modules else 1
        beside = copies * sum(p.nbytes for p in self.model.parameters())
        saved = save_optimizer(self.optimizer, folder / "state", self.sharded, beside)
        hashed |= {f"state/{name}": digest for name, digest in saved.items()}
        if distributed.rank() == 0:
            with hashed_saves(folder) as weights:
                self._export(folder / "model", recorder)
                if self.method.replaces_modules:
                    save_model(self.model, str(folder / TRAINED))
            hashed |= weights
            with tokenizer_errors(folder / "model"):
                self.tokenizer.save_pretrained(folder / "model")
            for name, content in self.terms.items():
                (folder / "model" / name).write_bytes(content)
            if not self.method.replaces_modules:
                save_second_moments({**second_moments(self.model, self.optimizer), **kept}, folder / "state")
            state.write(folder)
            recorder.secure()
        return hashed

    def _export(self, folder: Path, recorder: Recorder) -> None:
        try:
            self.method.export(folder)
        except UserError as error:
            if not self.method.replaces_modules:  # then there would be no weights in the checkpoint at all
                raise
            self.model.config.save_pretrained(folder)
            recorder.say(f"{folder.name}/ of this checkpoint holds no weights ({error})")

    def restore(self, checkpoint: Path, state: RunState) -> None:
        """Load what `writer` saved, at any world size; `model_to_train` has loaded the weights already."""
        self.method.load_state_dict(state.method)
        with in_a_sentence(checkpoint):
            self.method.load(checkpoint)
        load_optimizer(self.optimizer, checkpoint / "state", self.sharded)
        # The schedule follows from the step alone, so that a new folder may go on with another peak learning rate.
        place_schedule(self.schedule, state.step)
        random = checkpoint / "state" / _random_file()
        if random.exists():  # a rank that the earlier start did not have keeps its own random state
            with in_a_sentence(random):
                _restore_random_state(torch.load(random, weights_only=True))


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
